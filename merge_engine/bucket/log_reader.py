"""Reading a bucket's log: its segments in their order, whichever objects they are in.

A segment is an object of its own or, once it was rolled up, within a larger one. Whoever reads
looks at the names once, and again when an object is gone: then it was cleaned or rolled up
meanwhile, by this process or another, and what tells which was there before it went.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from foundation.errors import (
    CorruptSegment,
    LogGap,
    MissingObject,
    OffsetOutOfRange,
    UnknownFormat,
)
from merge_engine.bucket.log_names import LogNames, RolledRanges
from merge_engine.bucket.log_start import CleanedOwners, decode_start, start_name
from merge_engine.bucket.rolled import (
    RolledIndex,
    RolledRange,
    RolledSegments,
    decode_rolled,
    read_index,
)
from merge_engine.bucket.segment import Segment, SegmentHeader, decode_segment, segment_name
from merge_engine.storage.objects import ObjectStorage
from merge_engine.storage.read_ahead import AT_ONCE, Read, reading_ahead

# So many indexes of rolled objects stay in memory, for whoever looks again at the same part.
_INDEXES = 2


class LogReader:
    """The segments of one bucket, as last seen by this process. Safe for threads, but `refresh`.

    `end` is where the log ended when `refresh` looked. `cleaned` is what is known of the log before
    `start`, at least; None: nothing. `reads_at_once`: how many objects are read ahead at a time.
    """

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage
        self.reads_at_once = AT_ONCE
        # Of the segments that are objects of their own, sorted. Some may be rolled up by now.
        self._bases: list[int] = []
        # By base offset, of those of them that were written or read here: a segment never changes.
        self._headers: dict[int, SegmentHeader] = {}
        self._rolled = RolledRanges()
        self._indexes: dict[RolledRange, RolledIndex] = {}
        self.cleaned: CleanedOwners | None = {}
        self.start = 0
        self.end = 0
        self.refresh()

    def refresh(self) -> None:
        """Look again where the log starts and ends."""
        found = self._look().bases
        # What stands below the start, or where something was rolled up, means nothing, whatever it
        # says about its own end: a create may arrive at an offset after it was cleaned.
        first = bisect_left(found, self.start)
        self._bases = [base for base in found[first:] if self._rolled.at(base) is None]
        end = max(self.start, self._rolled.end)
        is_last = bool(self._bases) and self._bases[-1] >= end
        self.end = self._headers_at(self._bases[-1])[0].end_offset if is_last else end

    def segments(self, start: int, stop: int | None = None) -> Iterator[Segment]:
        """Yield the segments that hold the offsets [start, stop), whole, without a gap."""
        stop = self.end if stop is None else min(stop, self.end)
        if start < self.start or start > self.end:
            raise OffsetOutOfRange(
                f"offset {start} is not in the log, which has [{self.start}, {self.end})"
            )
        if start >= stop:
            return
        expected = self._begin(start)
        with self._reading(self._names(expected, stop)) as read:
            while expected < stop:
                segment = read.segment_at(expected)
                if segment.header.end_offset > start:
                    yield segment
                expected = segment.header.end_offset

    def read(self, bases: Iterable[int]) -> Iterator[Segment]:
        """Yield the segments with these base offsets; OffsetOutOfRange if one was cleaned."""
        wanted = list(bases)
        names = dict.fromkeys(map(self._name_at, wanted))
        with self._reading(names) as read:
            for base in wanted:
                yield read.segment_at(base)

    def headers(self, start: int, stop: int | None = None) -> Iterator[SegmentHeader]:
        """Yield the headers of the segments that hold the offsets [start, stop), without a gap.

        From memory, as far as they were written or read here and are not rolled up; else from the
        store. What was cleaned, before or meanwhile, is left out.
        """
        stop = self.end if stop is None else min(stop, self.end)
        if start >= stop:
            return
        expected = self._begin(start)
        while (expected := max(expected, self.start)) < stop:
            try:
                found = self._headers_at(expected)
            except OffsetOutOfRange:  # Cleaned just now, so that the start is further on.
                continue
            for header in found:
                if header.base_offset >= stop:
                    return
                if header.base_offset >= self.start and header.end_offset > start:
                    yield header
                expected = header.end_offset

    def learn_headers(self, start: int, go_on: Callable[[], bool]) -> bool:
        """Have the headers from `start` on in memory, except of what is rolled up; False if `go_on`
        said no before all are.

        One at least is read, so that whoever calls again and again gets there.
        """
        first = self._begin(start)
        unknown = [
            base
            for base in self._bases
            if base >= first and base not in self._headers and self._rolled.at(base) is None
        ]
        with self._reading(map(segment_name, unknown)) as read:
            for number, base in enumerate(unknown):
                if number and not go_on():
                    return False
                with suppress(OffsetOutOfRange):  # Cleaned just now.
                    read.segment_at(base)
        return True

    def _look(self) -> LogNames:
        """Look where the log starts by now, and what is rolled up: others may have done either."""
        while True:
            names = LogNames.of(self._storage.names())
            start = names.start
            if start > self.start:
                mark = start_name(start)
                try:
                    with self._located():
                        # First what is known of it: who reads meanwhile knows rather too much.
                        self.cleaned = decode_start(mark, self._storage.read(mark))
                except MissingObject:  # Another mark has taken its place.
                    continue
                self.start = start
            self._rolled.learn(names.rolled, self.start)
            return names

    def _begin(self, offset: int) -> int:
        """Return the base of the segment that holds an offset, or the offset if it is rolled up;
        the start if it was cleaned."""
        if self._rolled.at(offset) is not None:
            return max(self.start, offset)
        bases = self._bases  # Once: `clean` puts another list in its place.
        at = bisect_right(bases, offset) - 1
        return max(self.start, bases[at]) if at >= 0 else self.start

    def _name_at(self, base: int) -> str:
        """Return the object that has the segment with this base, as far as is known."""
        rolled = self._rolled.at(base)
        return segment_name(base) if rolled is None else rolled.name

    def _names(self, start: int, stop: int) -> list[str]:
        """Return the objects that have the offsets [start, stop), in the order of these."""
        bases = self._bases
        known = bases[bisect_left(bases, start) : bisect_left(bases, stop)]
        segments = [(base, segment_name(base)) for base in known if self._rolled.at(base) is None]
        rolled = [(one.first, one.name) for one in self._rolled.between(start, stop)]
        return [name for _, name in sorted(segments + rolled)]

    @contextmanager
    def _reading(self, names: Iterable[str]) -> Iterator["_Pass"]:
        """Begin to read these objects, in this order."""
        with reading_ahead(self._storage, names, at_once=self.reads_at_once) as read:
            yield _Pass(self, read)

    def _headers_at(self, offset: int) -> Sequence[SegmentHeader]:
        """Return the header of the segment that begins here; and those that follow it, if it, and
        so these, are in one object with it. If it is rolled up, it need only hold the offset."""
        while True:
            rolled = self._rolled.at(offset)
            try:
                if rolled is None:
                    return [self._headers.get(offset) or self._decode(segment_name(offset)).header]
                index = self._index(rolled)
                return index.headers[index.at(offset) :]
            except MissingObject as exc:
                self._look_again(offset, rolled, exc)

    def _look_again(self, offset: int, missed: RolledRange | None, exc: MissingObject) -> None:
        """Return if the offset is in another object than the one that was missed.

        OffsetOutOfRange: it was cleaned. LogGap: an object is lost.
        """
        self._look()
        if offset < self.start:
            raise OffsetOutOfRange(
                f"offset {offset} was cleaned meanwhile; the log starts at {self.start}"
            ) from exc
        if self._rolled.at(offset) == missed:
            name = segment_name(offset) if missed is None else missed.name
            raise LogGap(
                f"segment {name} is missing from {self._storage}, which has [{self.start}, "
                f"{self.end}); restore it from a copy of the log"
            ) from exc

    def _index(self, rolled: RolledRange) -> RolledIndex:
        known = self._indexes
        index = known.get(rolled)
        if index is None:
            with self._located(), self._storage.open(rolled.name) as file:
                index = read_index(rolled.name, file)
            latest = {rolled: index, **known}
            self._indexes = dict(list(latest.items())[:_INDEXES])
        return index

    def _find(self, base: int) -> Segment | None:
        """Return the segment at this offset, if there is one by now as an object of its own."""
        name = segment_name(base)
        try:
            data = self._storage.read(name)
        except MissingObject:
            return None
        return self._decode(name, lambda _: data)

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


class _Pass:
    """One reading of segments, mostly in their order. For one thread."""

    def __init__(self, log: LogReader, read: Read) -> None:
        self._log = log
        self._read = read
        self._last: tuple[RolledRange, RolledSegments] | None = None

    def segment_at(self, offset: int) -> Segment:
        """Return the segment that begins here; if it is rolled up, the one that has the offset."""
        log = self._log
        while True:
            rolled = log._rolled.at(offset)
            try:
                if rolled is None:
                    return log._decode(segment_name(offset), self._read)
                with log._located():
                    return self._object(rolled).segment_at(offset)
            except MissingObject as exc:
                log._look_again(offset, rolled, exc)

    def _object(self, rolled: RolledRange) -> RolledSegments:
        if self._last is None or self._last[0] != rolled:
            self._last = rolled, decode_rolled(rolled.name, self._read(rolled.name))
        return self._last[1]
