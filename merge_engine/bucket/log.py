"""The log of a bucket: immutable segments, one after the other, and the leader that appends.

Anybody reads; only a leader appends. A leader is made by a `leader` segment: its offset is the
leader's *term*, and whoever led before collides with it on the next create. Two kinds of objects
live in the log's storage: segments (`<base offset>.seg`) and, once the log was cleaned, a mark of
where it starts (`<offset>.start`, see `log_start`). The mark is set before anything is deleted:
from it on the segments follow each other without a gap, and what is left below it means nothing,
except that `leader` segments stay for ever, so that their names are never free again.
"""

import time
import uuid
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace

from foundation.errors import (
    AlreadyExists,
    CorruptSegment,
    Deposed,
    LogGap,
    MissingObject,
    OffsetOutOfRange,
    StorageUnavailable,
    TallybookError,
    UnknownFormat,
    UnknownOutcome,
)
from foundation.failpoints import hit
from merge_engine.bucket.log_start import (
    START_SUFFIX,
    CleanedOwners,
    decode_start,
    encode_start,
    start_name,
    with_cleaned,
)
from merge_engine.bucket.segment import (
    SUFFIX,
    Segment,
    SegmentHeader,
    SegmentKind,
    decode_segment,
    encode_segment,
    segment_name,
)
from merge_engine.storage.objects import ObjectStorage
from merge_engine.storage.read_ahead import Read, reading_ahead

_LEAD_ATTEMPTS = 100


def wall_clock_ms() -> int:
    """Milliseconds since the epoch: for people and retention, never for a decision."""
    return time.time_ns() // 1_000_000


class Log:
    """The segments of one bucket, as last seen by this process.

    Not safe for concurrent use: the bucket serialises its calls, except those that only read
    (`segments`, `read`, `headers`, `learn_headers`, `confirm_at`). `end` is right for the leader;
    for others it is where the log ended when `refresh` looked. `cleaned` is what is known of the
    log before `start`, at least; None: nothing.
    """

    def __init__(
        self, storage: ObjectStorage, *, clock_ms: Callable[[], int] = wall_clock_ms
    ) -> None:
        self._storage = storage
        self._clock_ms = clock_ms
        self._bases: list[int] = []
        # By base offset, of every segment that was written or read here: a segment never changes.
        self._headers: dict[int, SegmentHeader] = {}
        # The nonce of a create whose outcome is not known.
        self._in_doubt: str | None = None
        self.cleaned: CleanedOwners | None = {}
        self.start = 0
        self.end = 0
        self.term: int | None = None
        self.deposed = False
        self.refresh()

    def refresh(self) -> None:
        """Look again where the log starts and ends."""
        names = self._take_marked_start()
        self._bases = [_offset_of(name) for name in names if name.endswith(SUFFIX)]
        # What stands below the start means nothing, whatever it says about its own end: a create of
        # unknown outcome may still arrive at an offset that was occupied and then cleaned.
        has_segments = bool(self._bases) and self._bases[-1] >= self.start
        self.end = self._read(self._bases[-1]).header.end_offset if has_segments else self.start

    def lead(self) -> int:
        """Append a leader segment and return its offset, the term.

        The former leader may still be appending: chase the end until the segment fits. LogGap: it
        has cleaned the log beyond what was known here, and the name was free for that reason only.
        """
        for _ in range(_LEAD_ATTEMPTS):
            header = self._header(SegmentKind.LEADER, self.end)
            name = segment_name(self.end)
            try:
                self._storage.create(name, encode_segment(Segment(header, {}, {})))
            except (AlreadyExists, UnknownOutcome):
                found = self._find(self.end)
                if found is None or found.header.nonce != header.nonce:
                    self.refresh()
                    continue
            self._check_kept(header.base_offset)
            self._advance(header)
            self.term = header.base_offset
            return self.term
        raise StorageUnavailable(
            f"{self._storage}: could not take the lead after {_LEAD_ATTEMPTS} attempts; try again"
        )

    def _check_kept(self, base: int) -> None:
        """Raise LogGap if the name at this offset was freed before we took it.

        The mark is set before anything is deleted: if there is none beyond it by now, the name was
        free because nobody had ever taken it. What was created below the mark means nothing.
        """
        self._take_marked_start()
        if base < self.start:
            raise LogGap(
                f"{self._storage} was cleaned up to offset {self.start} meanwhile, beyond offset "
                f"{base}, up to which it is known here; restore the view from a snapshot"
            )

    def next(self) -> Segment | None:
        """Return the segment at the end, if somebody has created one by now, and go behind it.

        For whoever follows. If the log was cleaned beyond its end, there is none: `lead` tells.
        """
        found = self._find(self.end)
        if found is not None:
            self._advance(found.header)
        return found

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
        try:
            self._storage.create(segment_name(self.end), encode_segment(Segment(header, {}, {})))
        except AlreadyExists:
            header = self._read(self.end).header
            ours = header.kind is SegmentKind.EMPTY or header.nonce == self._in_doubt
            if header.term != term or not ours:
                self.deposed = True
                self.check_leading()
        self._in_doubt = None
        self._advance(header)
        return header.kind is not SegmentKind.EMPTY

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

    def segments(self, start: int, stop: int | None = None) -> Iterator[Segment]:
        """Yield the segments that hold the offsets [start, stop), whole, without a gap."""
        stop = self.end if stop is None else min(stop, self.end)
        if start < self.start or start > self.end:
            raise OffsetOutOfRange(
                f"offset {start} is not in the log, which has [{self.start}, {self.end})"
            )
        if start >= stop:
            return
        expected = self._base_at(start)
        bases = self._bases
        known = bases[bisect_left(bases, expected) : bisect_left(bases, stop)]
        with self._reading(known) as read:
            while expected < stop:
                segment = self._read(expected, read)
                if segment.header.end_offset > start:
                    yield segment
                expected = segment.header.end_offset

    def read(self, bases: Iterable[int]) -> Iterator[Segment]:
        """Yield the segments with these base offsets; OffsetOutOfRange if one was cleaned."""
        wanted = list(bases)
        with self._reading(wanted) as read:
            for base in wanted:
                yield self._read(base, read)

    def headers(self, start: int, stop: int | None = None) -> Iterator[SegmentHeader]:
        """Yield the headers of the segments that hold the offsets [start, stop), without a gap.

        From memory, as far as they were written or read here; else from the store, once. What was
        cleaned, before or meanwhile, is left out.
        """
        stop = self.end if stop is None else min(stop, self.end)
        if start >= stop:
            return
        expected = self._base_at(start)
        while (expected := max(expected, self.start)) < stop:
            header = self._headers.get(expected)
            if header is None:
                try:
                    header = self._read(expected).header
                except OffsetOutOfRange:  # Cleaned just now, so that the start is further on.
                    continue
            if header.end_offset > start:
                yield header
            expected = header.end_offset

    def learn_headers(self, start: int, go_on: Callable[[], bool]) -> bool:
        """Have the headers from `start` on in memory; False if `go_on` said no before all are.

        One at least is read, so that whoever calls again and again gets there.
        """
        first = self._base_at(start)
        unknown = [base for base in self._bases if base >= first and base not in self._headers]
        with self._reading(unknown) as read:
            for number, base in enumerate(unknown):
                if number and not go_on():
                    return False
                with suppress(OffsetOutOfRange):  # Cleaned just now.
                    self._read(base, read)
        return True

    def _reading(self, bases: Iterable[int]) -> AbstractContextManager[Read]:
        """Begin to read the segments with these base offsets, in this order."""
        return reading_ahead(self._storage, map(segment_name, bases))

    def _base_at(self, offset: int) -> int:
        """Return the base of the segment that holds an offset; the start if it was cleaned."""
        bases = self._bases  # Once: `clean` puts another list in its place.
        at = bisect_right(bases, offset) - 1
        return max(self.start, bases[at]) if at >= 0 else self.start

    def clean(self, before: int, *, older_than_ms: int | None = None) -> int:
        """Drop the segments that end at or below `before`; return the log's new start.

        With `older_than_ms`, those written since that time stay, and all after them. First the
        start is marked, then segments go: killed in between, the next call finishes. A former
        leader that does not know of us may be cleaning, too: its mark counts as ours, and what it
        has deleted is gone. Deposed: that is us.
        """
        self.confirm()
        self._take_marked_start()
        start, spent = self.start, []
        for header in self.headers(self.start, before):
            too_young = older_than_ms is not None and header.timestamp_ms >= older_than_ms
            if header.end_offset > before or too_young:
                break
            start = header.end_offset
            spent.append(header)
        if start > self.start:
            cleaned = self.cleaned
            if cleaned is not None:
                cleaned = with_cleaned(cleaned, (one for one in spent if one.is_change))
            hit("clean.before_mark")
            with suppress(AlreadyExists):  # Whoever has marked it: it says the same.
                self._storage.create(start_name(start), encode_start(cleaned))
            self.cleaned, self.start = cleaned, start
            hit("clean.marked")
        self._delete_below(self.start)
        return self.start

    def _take_marked_start(self) -> Sequence[str]:
        """Look where the log starts by now: somebody else may have cleaned it. Return all names."""
        while True:
            names = self._storage.names()
            start = _marked_start(names)
            if start <= self.start:
                return names
            name = start_name(start)
            try:
                with self._located():
                    # First what is known of it: who reads meanwhile knows rather too much of it.
                    self.cleaned = decode_start(name, self._storage.read(name))
            except MissingObject:  # Another mark has taken its place.
                continue
            self.start = start
            return names

    def _delete_below(self, start: int) -> None:
        spent = set()
        for base in [base for base in self._bases if base < start]:
            header = self._headers.get(base) or self._found_header(base)
            if header is None or header.kind is not SegmentKind.LEADER:
                spent.add(base)
                self._storage.delete([segment_name(base)])
                hit("clean.deleted")
        self._bases = [base for base in self._bases if base not in spent]
        marks = [name for name in self._storage.names() if name.endswith(START_SUFFIX)]
        self._storage.delete([name for name in marks if _offset_of(name) < start])
        for base in list(self._headers):  # A copy: readers may add to it meanwhile.
            if base < start:
                self._headers.pop(base, None)

    def _header(self, kind: SegmentKind, term: int) -> SegmentHeader:
        return SegmentHeader(
            kind=kind,
            base_offset=self.end,
            term=term,
            nonce=uuid.uuid4().hex,
            timestamp_ms=self._clock_ms(),
        )

    def _read(self, base: int, read: Read | None = None) -> Segment:
        name = segment_name(base)
        try:
            return self._decode(name, read)
        except MissingObject as exc:
            self._take_marked_start()
            if base < self.start:
                raise OffsetOutOfRange(
                    f"offset {base} was cleaned meanwhile; the log starts at {self.start}"
                ) from exc
            raise LogGap(
                f"segment {name} is missing from {self._storage}, which has [{self.start}, "
                f"{self.end}); restore it from a copy of the log"
            ) from exc

    def _found_header(self, base: int) -> SegmentHeader | None:
        found = self._find(base)
        return None if found is None else found.header

    def _find(self, base: int) -> Segment | None:
        """Return the segment at this offset, if there is one by now."""
        try:
            return self._decode(segment_name(base))
        except MissingObject:
            return None

    def _decode(self, name: str, read: Read | None = None) -> Segment:
        with self._located():
            segment = decode_segment(name, (read or self._storage.read)(name))
        self._headers[segment.header.base_offset] = segment.header
        return segment

    @contextmanager
    def _located(self) -> Iterator[None]:
        """What is wrong with an object is said together with where it is."""
        try:
            yield
        except (CorruptSegment, UnknownFormat) as exc:
            raise type(exc)(f"{exc} (in {self._storage})") from exc

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
        if self._find(self.end) is not None:
            self.deposed = True
            self.check_leading()

    def confirm_at(self, end: int) -> None:
        """Raise Deposed if another leader had come when the log ended here; safe for threads.

        What stands at `end` by now is nobody's, or ours: then we led when it was created; or that
        of the leader that came.
        """
        found = self._find(end)
        if found is not None and found.header.term != self.term:
            self.deposed = True
        self.check_leading()

    def _advance(self, header: SegmentHeader) -> None:
        self._headers[header.base_offset] = header
        insort(self._bases, header.base_offset)
        self.end = header.end_offset


def _marked_start(names: Sequence[str]) -> int:
    """Return where the marks among these names say that the log starts."""
    return max((_offset_of(name) for name in names if name.endswith(START_SUFFIX)), default=0)


def _offset_of(name: str) -> int:
    try:
        return int(name.partition(".")[0])
    except ValueError:
        raise CorruptSegment(f"{name!r} is not an object of a log; move it away") from None
