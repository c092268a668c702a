"""What the names in a log's storage say: where the log starts, and in which form its parts are.

A log has three kinds of objects: segments (`<base offset>.seg`), rolled objects that have many of
them (`<first>-<end>.rolled`), and marks of where it starts (`<offset>.start`). What a rolled object
has, it has for good: a segment that stands within its range as an object of its own, too, means
nothing. It was left when the range was rolled up; or it came too late, from somebody who believed
that the log ended there.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foundation.errors import CorruptSegment
from merge_engine.bucket.log_start import START_SUFFIX
from merge_engine.bucket.rolled import ROLLED_SUFFIX, RolledRange
from merge_engine.bucket.segment import SUFFIX


@dataclass(frozen=True)
class LogNames:
    """The objects of a log: the bases of segments, what was rolled up, and the marks."""

    bases: Sequence[int]
    rolled: Sequence[RolledRange]
    marks: Sequence[str]

    @classmethod
    def of(cls, names: Iterable[str]) -> "LogNames":
        """Read the names of a storage; others than those of a log are passed over."""
        found = list(names)
        return cls(
            sorted(_offset_of(name) for name in found if name.endswith(SUFFIX)),
            [RolledRange.of(name) for name in found if name.endswith(ROLLED_SUFFIX)],
            [name for name in found if name.endswith(START_SUFFIX)],
        )

    @property
    def start(self) -> int:
        """Where the log starts."""
        return max(map(_offset_of, self.marks), default=0)

    def to_ranges(self) -> "RolledRanges":
        """Return what is rolled up, and not before the start."""
        ranges = RolledRanges()
        ranges.learn(self.rolled, self.start)
        return ranges

    def frees(self, name: str) -> bool:
        """Whether this is the name of a segment that was cleaned or rolled up."""
        if not name.endswith(SUFFIX):
            return False
        offset = _offset_of(name)
        return offset < self.start or self.to_ranges().at(offset) is not None

    def marks_below(self, start: int) -> list[str]:
        """Return the marks that another one has taken the place of."""
        return [name for name in self.marks if _offset_of(name) < start]


class RolledRanges:
    """The ranges of a log that are known to be rolled up. Safe for threads.

    Two leaders, of which one does not know of the other, may have rolled up ranges that overlap:
    they have the same segments, and either will do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Sorted by where they begin, and so by where they end: none is within another.
        self._ranges: list[RolledRange] = []

    def learn(self, ranges: Iterable[RolledRange], start: int) -> None:
        """Know of these, too; and not of those before the start of the log any more."""
        with self._lock:
            known: list[RolledRange] = []
            for one in sorted({*self._ranges, *ranges}, key=lambda one: (one.first, -one.end)):
                if one.end > max(start, known[-1].end if known else 0):
                    known.append(one)
            self._ranges = known

    def at(self, offset: int) -> RolledRange | None:
        """Return a range that has the offset; None: it is not rolled up, as far as is known."""
        ranges = self._ranges  # Once: another list is put in its place.
        number = bisect_right(ranges, offset, key=lambda one: one.first) - 1
        return ranges[number] if number >= 0 and offset < ranges[number].end else None

    def between(self, start: int, stop: int) -> list[RolledRange]:
        """Return those that have any of the offsets [start, stop)."""
        return [one for one in self._ranges if one.first < stop and one.end > start]

    @property
    def end(self) -> int:
        """Where the last one ends; 0 if there is none."""
        ranges = self._ranges
        return ranges[-1].end if ranges else 0


def _offset_of(name: str) -> int:
    try:
        return int(name.partition(".")[0])
    except ValueError:
        raise CorruptSegment(f"{name!r} is not an object of a log; move it away") from None
