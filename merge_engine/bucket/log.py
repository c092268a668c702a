"""The log of a bucket: immutable segments, one after the other, and the leader that appends.

Anybody reads; only a leader appends. A leader is made by a `leader` segment: its offset is the
leader's *term*, and whoever led before collides with it on the next create. Once the log was
cleaned, there is a mark of where it starts (see `log_start`), which is set before anything is
deleted: from it on the segments follow each other without a gap, and what is left below it means
nothing. Old segments are rolled up into larger objects (see `roll_up`).

Names that cleaning and rolling up have freed could be taken again. `leader` segments stay for ever,
so whoever led collides with its successor's, if it knows where its own segments end. Who does not,
for the outcome of its last create is unknown, and who is only about to lead, looks after its create
whether the offset was cleaned or rolled up before: then it is a stray, which means nothing and is
deleted. Readers take no stray for the log's, whoever has created it, and when (see `log_reader`).
"""

import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from foundation.errors import (
    AlreadyExists,
    Deposed,
    OffsetOutOfRange,
    StorageUnavailable,
    TallybookError,
    UnknownOutcome,
)
from foundation.failpoints import hit
from merge_engine.bucket.log_names import LogNames
from merge_engine.bucket.log_reader import LogReader
from merge_engine.bucket.log_start import encode_start, start_name, with_cleaned
from merge_engine.bucket.rolled import RolledRange
from merge_engine.bucket.segment import (
    Segment,
    SegmentHeader,
    SegmentKind,
    encode_segment,
    segment_name,
)
from merge_engine.storage.objects import ObjectStorage

_LEAD_ATTEMPTS = 100
_DELETED_AT_ONCE = 100


def wall_clock_ms() -> int:
    """Milliseconds since the epoch: for people and retention, never for a decision."""
    return time.time_ns() // 1_000_000


class Log(LogReader):
    """The segments of one bucket, and what a leader does with them.

    Not safe for concurrent use: the bucket serialises its calls, except those that only read
    (`segments`, `read`, `headers`, `learn_headers`, `confirm_at`). `end` is right for the leader;
    for others it is where the log ended when `refresh` looked.
    """

    def __init__(
        self, storage: ObjectStorage, *, clock_ms: Callable[[], int] = wall_clock_ms
    ) -> None:
        self._clock_ms = clock_ms
        # The nonce of a create whose outcome is not known.
        self._in_doubt: str | None = None
        # The bases of segments of leaders that are kept although they were cleaned.
        self._leaders: set[int] = set()
        self.term: int | None = None
        self.deposed = False
        super().__init__(storage)

    def lead(self, check: Callable[[], None] = lambda: None) -> int:
        """Append a leader segment and return its offset, the term.

        The former leader may still be appending: chase the end until the segment fits. If it has
        rolled the end up that we saw, or cleaned it, our segment fits there, too, and is in vain.
        `check`: raises if nobody should lead, as far as is known of the log by then.
        """
        for _ in range(_LEAD_ATTEMPTS):
            check()
            header = self._header(SegmentKind.LEADER, self.end)
            name = segment_name(self.end)
            try:
                self._storage.create(name, encode_segment(Segment(header, {}, {})))
            except (AlreadyExists, UnknownOutcome):
                found = self._standing_at(self.end)
                if found is None or found.header.nonce != header.nonce:
                    self.refresh()
                    continue
            self._look()
            if self._is_spent(self.end):
                self._delete_stray(header)
                self.refresh()
                continue
            self._advance(header)
            self.term = header.base_offset
            return self.term
        raise StorageUnavailable(
            f"{self._storage}: could not take the lead after {_LEAD_ATTEMPTS} attempts; try again"
        )

    def append(self, segment: Segment) -> SegmentHeader:
        """Create the segment at the end of the log, stamped with term, nonce and time.

        On return it is there, durable, exactly once. StorageFull and StorageUnavailable: it is not
        there and never will be. UnknownOutcome: the next call finds out first.
        """
        self.settle()
        header = replace(
            segment.header,
            base_offset=self.end,
            term=self.check_leading(),
            nonce=uuid.uuid4().hex,
            timestamp_ms=self._clock_ms(),
        )
        data = encode_segment(replace(segment, header=header))
        hit("log.encoded")
        try:
            self._storage.create(segment_name(self.end), data)
        except (AlreadyExists, UnknownOutcome) as exc:
            # Taken: by our own request that was sent twice underneath us, or by a new leader.
            self._in_doubt = header.nonce
            if not self._settle_now(exc):
                raise StorageUnavailable(
                    f"offset {header.base_offset}: nothing was written; try again ({exc})"
                ) from exc
        else:
            self._advance(header)
        hit("log.created")
        return header

    def settle(self) -> bool:
        """End the doubt about a create of unknown outcome; True if its segment is there after all.

        Reading is not enough, for the create may still happen: this occupies the offset with an
        empty segment, and learns by that which of the two is there. Deposed if it is neither:
        another leader's, or that of a process which was forked from this one and writes as it.
        """
        term = self.check_leading()
        if self._in_doubt is None:
            return False
        header = self._header(SegmentKind.EMPTY, term)
        taken = False
        try:
            self._storage.create(segment_name(self.end), encode_segment(Segment(header, {}, {})))
        except AlreadyExists:
            taken = True
        self._look()
        if self._is_spent(self.end):
            # Not by us: what we wanted to write was there, and a leader has come after it.
            self.deposed = True
            found = self._standing_at(self.end)
            if found is not None and found.header.term == term:
                self._delete_stray(found.header)
            self.check_leading()
        if taken:
            header = self._header_at(self.end)
            ours = header.kind is SegmentKind.EMPTY or header.nonce == self._in_doubt
            if header.term != term or not ours:
                self.deposed = True
                self.check_leading()
        self._in_doubt = None
        self._advance(header)
        return header.kind is not SegmentKind.EMPTY

    def _delete_stray(self, ours: SegmentHeader) -> None:
        """Delete what we have created at an offset that is spent, unless it is a leader's.

        Ours may be the log's all the same, and rolled up since we created it. A leader's name must
        never be free then; where the log was cleaned, nobody can tell, and it stays.
        """
        base = ours.base_offset
        with suppress(TallybookError):  # Nobody takes it for the log's, and roll-ups delete it.
            is_leader = ours.kind is SegmentKind.LEADER
            if not is_leader or self._header_at(base).nonce != ours.nonce:
                self._storage.delete([segment_name(base)])

    def _settle_now(self, cause: Exception) -> bool:
        """Settle a create of this very call: to fail now, for whatever reason, is not to know."""
        try:
            return self.settle()
        except (Deposed, UnknownOutcome):  # Deposed: what stands there is another's.
            raise
        except TallybookError as exc:
            raise UnknownOutcome(
                f"offset {self.end}: {cause}; and then {exc}; the next call finds out first"
            ) from exc

    def clean(self, before: int, *, older_than_ms: int | None = None) -> int:
        """Drop the segments that end at or below `before`; return the log's new start.

        With `older_than_ms`, those written since that time stay, and all after them. First the
        start is marked, then segments go: killed in between, the next call finishes. A former
        leader that does not know of us may be cleaning, too: its mark counts as ours, and what it
        has deleted is gone. Deposed: that is us.
        """
        self.confirm()
        self._look()
        start = self.start

        def spent() -> Iterator[SegmentHeader]:
            nonlocal start
            for header in self.headers(self.start, before):
                too_young = older_than_ms is not None and header.timestamp_ms >= older_than_ms
                if header.end_offset > before or too_young:
                    return
                start = header.end_offset
                yield header

        known = with_cleaned(self.cleaned or {}, list(spent()))
        cleaned = None if self.cleaned is None else known
        if start > self.start:
            hit("clean.before_mark")
            with suppress(AlreadyExists):  # Whoever has marked it: it says the same.
                self._storage.create(start_name(start), encode_start(cleaned))
            self._start_at(start, cleaned)
            hit("clean.marked")
        self._delete_below(self.start)
        return self.start

    def _delete_below(self, start: int) -> None:
        names = LogNames.of(self._storage.names())
        spent = [one.name for one in names.rolled if one.end <= start]
        for base in names.bases[: bisect_left(names.bases, start)]:
            if base not in self._leaders:
                header = self._headers.get(base) or self._found_header(base)
                if header is not None and header.kind is SegmentKind.LEADER:
                    self._leaders.add(base)
                else:
                    spent.append(segment_name(base))
        for _ in self.delete([*spent, *names.marks_below(start)]):
            hit("clean.deleted")
        self._bases = self._bases[bisect_left(self._bases, start) :]
        for base in list(self._headers):  # A copy: readers may add to it meanwhile.
            if base < start:
                self._headers.pop(base, None)

    def rolled_up(self, rolled: RolledRange) -> None:
        """Know that the segments of a range are in one object by now, also where they are not."""
        self._rolled.learn([rolled], self.start)
        first, end = (bisect_left(self._bases, offset) for offset in rolled)
        for base in self._bases[first:end]:
            self._headers.pop(base, None)
        self._bases = self._bases[:first] + self._bases[end:]

    def loose_before(self, offset: int) -> int:
        """Return how many segments before an offset are known that are objects of their own."""
        return bisect_left(self._bases, offset)

    def delete(self, names: Sequence[str]) -> Iterator[None]:
        """Delete objects, many at a time: each time the store is asked, or the directory synced."""
        for first in range(0, len(names), _DELETED_AT_ONCE):
            self._storage.delete(names[first : first + _DELETED_AT_ONCE])
            yield

    def _header(self, kind: SegmentKind, term: int) -> SegmentHeader:
        return SegmentHeader(
            kind=kind,
            base_offset=self.end,
            term=term,
            nonce=uuid.uuid4().hex,
            timestamp_ms=self._clock_ms(),
        )

    def _found_header(self, base: int) -> SegmentHeader | None:
        found = self._standing_at(base)
        return None if found is None else found.header

    def check_leading(self) -> int:
        """Return the term; Deposed if another leader is known to have come since."""
        if self.deposed or self.term is None:
            raise Deposed(
                f"{self._storage}: another leader has taken this bucket since term {self.term}; "
                "open it again"
            )
        return self.term

    def confirm(self) -> None:
        """Raise Deposed if another leader has come, known here or not: for answers without append.

        Whoever it is began at the end of the log, and its segment is still there.
        """
        self.settle()
        if self._standing_at(self.end) is not None:
            self.deposed = True
            self.check_leading()

    def confirm_at(self, end: int) -> None:
        """Raise Deposed if another leader had come when the log ended here; safe for threads.

        What stands at `end` by now is nobody's, or ours: then we led when it was created; or that
        of the leader that came. If it was cleaned since, nobody can tell any more.
        """
        found = self._standing_at(end)
        if found is not None and found.header.term != self.term:
            try:
                # Not what stands there, which may be a stray, if we have rolled it up since.
                is_ours = self._header_at(end).term == self.term
            except OffsetOutOfRange:
                is_ours = False
            if not is_ours:
                self.deposed = True
        self.check_leading()
