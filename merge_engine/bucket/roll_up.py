"""Rolling a log up: old neighbours among its segments become one larger object.

A job with a batch a second leaves 86,400 small segments a day, and a leader has something in memory
for each. Rolled up by the thousand, there is an object in the store and a pair of numbers in memory
for a thousand of them. What is read stays the same, byte for byte. Steps, and what is left if the
process dies after each:

1. look at names and sizes, and choose runs of small neighbours: nothing;
2. read them: nothing;
3. look again whether somebody else has rolled them up, and then whether we still lead: nothing. So
   what was read is what was appended there, and not what came late to a name that was free again;
4. create the rolled objects: from now on they count, and their segments mean nothing any more;
5. delete the segments, except those of leaders, whose names stay taken for ever. What is left is
   deleted the next time, by this leader or another.

A former leader that does not know of its successor yet may be doing this, too: both have the same
segments to roll up, and a range that is in two objects is the same in both.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import groupby, pairwise
from typing import NamedTuple

from foundation.errors import AlreadyExists, CorruptSegment, LogGap, MissingObject, UnknownOutcome
from foundation.failpoints import hit
from merge_engine.bucket.fair_lock import FairLock
from merge_engine.bucket.log import Log
from merge_engine.bucket.log_names import LogNames
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.rolled import (
    RolledRange,
    SegmentBytes,
    decode_rolled,
    encode_rolled,
    read_index,
)
from merge_engine.bucket.segment import SegmentKind, decode_segment, segment_name
from merge_engine.storage.objects import ObjectStorage
from merge_engine.storage.read_ahead import reading_ahead

logger = logging.getLogger(__name__)

# So many objects are made in one step.
_AT_ONCE = 4
_CREATE_ATTEMPTS = 4
# A segment of more than this share of a rolled object is worth a request of its own.
_LARGE_SHARE = 32
# Between larger ones, fewer than this are left as they are.
_FEWEST = 16


class Run(NamedTuple):
    """Segments that follow each other, by their bases, and where the last one ends."""

    bases: Sequence[int]
    end: int

    @property
    def range(self) -> RolledRange:
        """The offsets that they have."""
        return RolledRange(self.bases[0], self.end)


class RollUp:
    """Rolls up the log of a bucket that this process leads. Safe for threads."""

    def __init__(
        self,
        log: Log,
        storage: ObjectStorage,
        exclusive: Callable[[], AbstractContextManager[None]],
        confirm: Callable[[], object],
        options: BucketOptions,
    ) -> None:
        """`exclusive`: keeps others from changing the log, for a block. `confirm`: raises Deposed
        if another leader has come."""
        self._log = log
        self._storage = storage
        self._exclusive = exclusive
        self._confirm = confirm
        self._options = options
        self._lock = FairLock()
        # Whether what others have left was looked for; and the leaders' segments that it was not.
        self._looked = False
        self._leaders: set[int] = set()

    def step(self, before: int) -> bool:
        """Roll up some of the segments that end at or below `before`; True if there may be more.

        If there are few, nothing is asked of the store.
        """
        most, most_bytes = self._options.roll_up_segments, self._options.roll_up_bytes
        with self._lock:
            if self._looked and self._log.loose_before(before) < most:
                return False
            sizes = self._storage.sizes()
            names = LogNames.of(sizes)
            self._delete_leftovers(names)
            self._looked = True
            runs = find_runs(names, sizes, before, most_segments=most, most_bytes=most_bytes)
            self._roll_up(runs[:_AT_ONCE])
            return len(runs) > _AT_ONCE

    def _delete_leftovers(self, names: LogNames) -> None:
        """Delete segments that are in a rolled object already: whoever made it was killed then."""
        unknown = [base for base in names.bases if base not in self._leaders]
        for rolled, bases in groupby(unknown, names.to_ranges().at):
            if rolled is not None:
                with suppress(MissingObject):  # Cleaned just now.
                    self._finish(rolled, list(bases))

    def _finish(self, rolled: RolledRange, bases: Sequence[int]) -> None:
        """Know of a rolled object, and delete these of its segments, but not those of leaders."""
        with self._storage.open(rolled.name) as file:
            headers = read_index(rolled.name, file).headers
        with self._exclusive():
            self._log.rolled_up(rolled)
        leaders = {one.base_offset for one in headers if one.kind is SegmentKind.LEADER}
        self._leaders |= leaders.intersection(bases)
        spent = [segment_name(base) for base in bases if base not in leaders]
        for _ in self._log.delete(spent):
            hit("roll_up.deleted")

    def _roll_up(self, runs: Sequence[Run]) -> None:
        try:
            read = [(run, self._read(run)) for run in runs]
        except MissingObject:  # Cleaned, or rolled up by a former leader: next time.
            return
        hit("roll_up.read")
        if not read:
            return
        names = LogNames.of(self._storage.names())
        taken = names.to_ranges()
        self._confirm()
        for run, segments in read:
            rolled = run.range
            if rolled.first < names.start or taken.between(*rolled):
                continue
            self._check_no_gap(run, segments)
            with suppress(MissingObject):  # Cleaned just now.
                self._create(rolled, encode_rolled(segments))
                hit("roll_up.created")
                self._finish(rolled, run.bases)
                logger.info(
                    "%d segments of %s are in %s", len(run.bases), self._storage, rolled.name
                )

    def _read(self, run: Run) -> list[SegmentBytes]:
        """Read what stands at the names of a run."""
        found = []
        names = [segment_name(base) for base in run.bases]
        with reading_ahead(self._storage, names) as read:
            for name in names:
                data = read(name)
                found.append(SegmentBytes(decode_segment(name, data).header, data))
        return found

    def _check_no_gap(self, run: Run, segments: Sequence[SegmentBytes]) -> None:
        """Raise LogGap unless the segments of a run follow each other."""
        ends = [*run.bases[1:], run.end]
        for one, end in zip(segments, ends, strict=True):
            if one.header.end_offset != end:
                raise LogGap(
                    f"segment {segment_name(one.header.end_offset)} is missing from "
                    f"{self._storage}; restore it from a copy of the log"
                )

    def _create(self, rolled: RolledRange, data: bytes) -> None:
        """Create the object, and see that it is there, whole, before anything is deleted."""
        for attempt in range(1, _CREATE_ATTEMPTS + 1):
            try:
                self._storage.create(rolled.name, data)
            except AlreadyExists:
                break
            except UnknownOutcome:
                if attempt == _CREATE_ATTEMPTS:
                    raise
            else:
                break
        stored = self._storage.read(rolled.name)
        if stored != data and not _same_segments(rolled.name, stored, data):
            raise CorruptSegment(
                f"{rolled.name} is there, with other segments; restore it from a copy of the log "
                f"(in {self._storage})"
            )


def find_runs(
    names: LogNames,
    sizes: Mapping[str, int],
    before: int,
    *,
    most_segments: int,
    most_bytes: int,
) -> list[Run]:
    """Return what can be rolled up of a log: runs of small segments that end at or below `before`.

    A run is full or, between others that are large or rolled up, not too short; what is at the end
    waits for more. The last segment of all is in none: where it ends is not known.
    """
    ranges = names.to_ranges()
    loose = [base for base in names.bases if base >= names.start and ranges.at(base) is None]
    pieces = [(base, sizes[segment_name(base)]) for base in loose]
    pieces += [(one.first, most_bytes) for one in names.rolled]
    runs: list[Run] = []
    run: list[int] = []
    total = 0
    for (base, size), (end, _) in pairwise(sorted(pieces)):
        if size > most_bytes // _LARGE_SHARE:
            if len(run) >= min(_FEWEST, most_segments):
                runs.append(Run(run, base))
            run, total = [], 0
            continue
        if end > before:
            break
        run.append(base)
        total += size
        if len(run) >= most_segments or total >= most_bytes:
            runs.append(Run(run, end))
            run, total = [], 0
    return runs


def _same_segments(name: str, stored: bytes, data: bytes) -> bool:
    """Whether two objects have the same segments: another release may compress them otherwise."""
    one, other = decode_rolled(name, stored), decode_rolled(name, data)
    count = len(one.index.headers)
    return one.index.headers == other.index.headers and all(
        one.data(number) == other.data(number) for number in range(count)
    )
