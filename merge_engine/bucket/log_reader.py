"""Reading a bucket's log: its segments in their order, whichever objects they are in.

A segment is an object of its own or, once it was rolled up, within a larger one. Whoever reads
looks at the names once, and again when an object is gone: then it was cleaned or rolled up
meanwhile, by this process or another, and what tells which was there before it went.

Which objects are the log's is decided here, and nowhere else. A name that was freed can be taken
again by somebody who believes that the log ends there: what stands at a name when it is listed, or
read, may be such a stray. So no segment leaves this module unless a look that began after it was
read shows that its offset was neither cleaned nor rolled up: then its name had never been free.
"""

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import NamedTuple

from foundation.errors import (
    CorruptSegment,
    LogGap,
    MissingObject,
    OffsetOutOfRange,
    StorageUnavailable,
    TallybookError,
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
# So many segments, or bytes, are read before a look says whether they are the log's: few at first,
# for whoever stops soon.
_FIRST_BATCH = 8
_LARGEST_BATCH = 256
_BATCH_BYTES = 16 << 20
_LOOKS = 100


class _Object(NamedTuple):
    """An object that has segments, or one, and an offset that is wanted of it."""

    offset: int
    name: str
    is_rolled: bool


class LogReader:
    """The segments of one bucket, as last seen by this process. Safe for threads, but for `refresh`
    and `newer`.

    `end` is where the log ended when one of these looked. `cleaned` is what is known of the log
    before `start`, at least; None: nothing. `reads_at_once`: how many objects are read ahead at a
    time.
    """

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage
        self.reads_at_once = AT_ONCE
        # Of the segments that are objects of their own, sorted. Some may be rolled up by now, and
        # what was listed may be a stray.
        self._bases: list[int] = []
        # By base offset, of those that were written here, or read and found to be the log's: a
        # segment never changes.
        self._headers: dict[int, SegmentHeader] = {}
        self._rolled = RolledRanges()
        self._indexes: dict[RolledRange, RolledIndex] = {}
        self._starting = threading.Lock()
        self.cleaned: CleanedOwners | None = {}
        self.start = 0
        self.end = 0
        self.refresh()

    def refresh(self) -> None:
        """Look again where the log starts and ends.

        A listing is not of one moment: of what is cleaned or rolled up while it is made, it may
        have neither the segments nor what has taken their place. So it is made again, after the
        last segment was read, until nothing has changed in between.
        """
        names = self._look()
        for _ in range(_LOOKS):
            covered = self._covered
            self._bases = [base for base in names.bases if not self._is_spent(base)]
            last = self._bases[-1] if self._bases else -1
            segment = self._standing_at(last) if last >= covered else None
            names = self._look()
            if self._covered == covered and (segment is not None or last < covered):
                self.end = covered
                if segment is not None:
                    self._headers[last] = segment.header
                    self.end = segment.header.end_offset
                return
        raise StorageUnavailable(
            f"{self._storage} has changed {_LOOKS} times while it was looked at; try again"
        )

    def newer(self) -> Iterator[Segment]:
        """Yield what was appended at the end by now, and go behind each.

        For whoever follows. Where the next one was cleaned or rolled up meanwhile, this ends:
        `has_gone_on` tells.
        """
        is_all = False
        while not is_all:
            found, is_all = self._read_on()
            own = self._own(found)
            for base, segment in found.items():
                if base not in own:
                    return
                self._advance(segment.header)
                yield segment

    def has_gone_on(self) -> bool:
        """Whether others have cleaned or rolled up what comes next; if so, look where it ends."""
        self._look()
        if not self._is_spent(self.end):
            return False
        self.refresh()
        return True

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
        with self._reading(self._objects(expected, stop)) as read:
            while expected < stop:
                segment = read.segment_at(expected)
                if segment.header.end_offset > start:
                    yield segment
                expected = segment.header.end_offset

    def read(self, bases: Iterable[int]) -> Iterator[Segment]:
        """Yield the segments with these base offsets; OffsetOutOfRange if one was cleaned."""
        wanted = list(bases)
        objects = {one.name: one for one in map(self._object_at, wanted)}
        with self._reading(objects.values()) as read:
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
        with self._reading(self._unknown(expected, stop)) as read:
            while (expected := max(expected, self.start)) < stop:
                try:
                    found = read.headers_at(expected)
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
        unknown = self._unknown(self._begin(start))
        with self._reading(unknown, go_on) as read:
            for number, one in enumerate(unknown):
                if number and not go_on():
                    return False
                with suppress(OffsetOutOfRange):  # Cleaned just now.
                    read.segment_at(one.offset)
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
                        cleaned = decode_start(mark, self._storage.read(mark))
                except MissingObject:  # Another mark has taken its place.
                    continue
                self._start_at(start, cleaned)
            self._rolled.learn(names.rolled, self.start)
            return names

    def _start_at(self, start: int, cleaned: CleanedOwners | None) -> None:
        """Know that the log starts here; it never starts earlier again."""
        with self._starting:
            if start > self.start:
                # First what is known of it: who reads meanwhile knows rather too much.
                self.cleaned = cleaned
                self.start = start

    @property
    def _covered(self) -> int:
        """The offset before which names may have been freed, as far as is known."""
        return max(self.start, self._rolled.end)

    def _is_spent(self, offset: int) -> bool:
        """Whether the offset is known to be cleaned or rolled up, so that its name is free, or was.

        To be asked after a look that began after what stands there was created or read.
        """
        return offset < self.start or self._rolled.at(offset) is not None

    def _standing_at(self, base: int) -> Segment | None:
        """Return what stands at the name of this offset by now, be it the log's or a stray."""
        try:
            return self._decode(base, self._storage.read(segment_name(base)))
        except MissingObject:
            return None

    def _read_on(self) -> tuple[dict[int, Segment], bool]:
        """Return what stands at the end, and behind it, by base; and whether that is all."""
        found: dict[int, Segment] = {}
        base, size = self.end, 0
        while len(found) < _LARGEST_BATCH and size < _BATCH_BYTES:
            try:
                data = self._storage.read(segment_name(base))
                segment = self._decode(base, data)
            except MissingObject:
                return found, True
            except (CorruptSegment, UnknownFormat):
                if found:
                    break  # It is the first of the next ones.
                self._look()
                if not self._is_spent(base):
                    raise
                return found, True
            found[base] = segment
            base = segment.header.end_offset
            size += len(data)
        return found, False

    def _read_batch(
        self, bases: Iterable[int], read: Read, go_on: Callable[[], bool]
    ) -> dict[int, Segment]:
        """Return those of these segments that are the log's, by base.

        Of the first, what is wrong is raised; before another that is gone or damaged, it ends, and
        when `go_on` says no.
        """
        found: dict[int, Segment] = {}
        size = 0
        for base in bases:
            try:
                data = read(segment_name(base))
                found[base] = self._decode(base, data)
            except (MissingObject, CorruptSegment, UnknownFormat):
                if not found:
                    raise
                break
            size += len(data)
            if size >= _BATCH_BYTES or not go_on():
                break
        return self._own(found)

    def _own(self, found: Mapping[int, Segment]) -> dict[int, Segment]:
        """Return those that are the log's, of segments that were read before this call, by base.

        It looks, unless all are known already.
        """
        if all(self._headers.get(base) == one.header for base, one in found.items()):
            return dict(found)
        self._look()
        own = {base: one for base, one in found.items() if not self._is_spent(base)}
        self._headers.update((base, one.header) for base, one in own.items())
        return own

    def _advance(self, header: SegmentHeader) -> None:
        """Go behind a segment that is the log's, and stands at its end."""
        self._headers[header.base_offset] = header
        insort(self._bases, header.base_offset)
        self.end = header.end_offset

    def _begin(self, offset: int) -> int:
        """Return the base of the segment that holds an offset, or the offset if it is rolled up;
        the start if it was cleaned."""
        if self._rolled.at(offset) is not None:
            return max(self.start, offset)
        bases = self._bases  # Once: `clean` puts another list in its place.
        at = bisect_right(bases, offset) - 1
        return max(self.start, bases[at]) if at >= 0 else self.start

    def _object_at(self, base: int) -> _Object:
        """Return the object that has the segment with this base, as far as is known."""
        rolled = self._rolled.at(base)
        name = segment_name(base) if rolled is None else rolled.name
        return _Object(base, name, rolled is not None)

    def _objects(self, start: int, stop: int) -> list[_Object]:
        """Return the objects that have the offsets [start, stop), in the order of these."""
        rolled = [_Object(one.first, one.name, True) for one in self._rolled.between(start, stop)]
        return sorted(rolled + self._loose(start, stop))

    def _unknown(self, start: int, stop: int | None = None) -> list[_Object]:
        """Return the segments from `start` on whose headers are in no rolled object, nor here."""
        return [one for one in self._loose(start, stop) if one.offset not in self._headers]

    def _loose(self, start: int, stop: int | None) -> list[_Object]:
        bases = self._bases
        end = len(bases) if stop is None else bisect_left(bases, stop)
        objects = map(self._object_at, bases[bisect_left(bases, start) : end])
        return [one for one in objects if not one.is_rolled]

    @contextmanager
    def _reading(
        self, objects: Iterable[_Object] = (), go_on: Callable[[], bool] = lambda: True
    ) -> Iterator["_Pass"]:
        """Begin to read segments, mostly of these objects, in this order; nothing is read before it
        is asked for once `go_on` says no."""
        coming = list(objects)
        names = [one.name for one in coming]
        with reading_ahead(self._storage, names, at_once=self.reads_at_once) as read:
            yield _Pass(self, read, coming, go_on)

    def _header_at(self, offset: int) -> SegmentHeader:
        """Return the header of the segment that has the offset; one begins there, if it is not
        rolled up."""
        with self._reading() as read:
            return read.headers_at(offset)[0]

    def _look_again(self, offset: int, missed: RolledRange | None, exc: TallybookError) -> None:
        """Return if the offset is in another object than the one that is gone, or is damaged.

        OffsetOutOfRange: it was cleaned. LogGap: an object is lost. Else it is the damage.
        """
        self._look()
        self._check_not_cleaned(offset, exc)
        if self._rolled.at(offset) != missed:
            return
        if not isinstance(exc, MissingObject):
            raise exc
        name = segment_name(offset) if missed is None else missed.name
        raise LogGap(
            f"segment {name} is missing from {self._storage}, which has [{self.start}, "
            f"{self.end}); restore it from a copy of the log"
        ) from exc

    def _check_not_cleaned(self, offset: int, cause: Exception | None = None) -> None:
        if offset < self.start:
            raise OffsetOutOfRange(
                f"offset {offset} was cleaned meanwhile; the log starts at {self.start}"
            ) from cause

    def _index(self, rolled: RolledRange) -> RolledIndex:
        known = self._indexes
        index = known.get(rolled)
        if index is None:
            with self._located(), self._storage.open(rolled.name) as file:
                index = read_index(rolled.name, file)
            latest = {rolled: index, **known}
            self._indexes = dict(list(latest.items())[:_INDEXES])
        return index

    def _decode(self, base: int, data: bytes) -> Segment:
        with self._located():
            return decode_segment(segment_name(base), data)

    @contextmanager
    def _located(self) -> Iterator[None]:
        """What is wrong with an object is said together with where it is."""
        try:
            yield
        except (CorruptSegment, UnknownFormat) as exc:
            raise type(exc)(f"{exc} (in {self._storage})") from exc


class _Pass:
    """One reading of segments, mostly in their order. For one thread."""

    def __init__(
        self,
        log: LogReader,
        read: Read,
        coming: Sequence[_Object],
        go_on: Callable[[], bool],
    ) -> None:
        self._log = log
        self._read = read
        self._go_on = go_on
        self._coming = coming
        self._positions = {one.offset: number for number, one in enumerate(coming)}
        self._most = _FIRST_BATCH
        # What was read, and found to be the log's, before it was asked for.
        self._batch: dict[int, Segment] = {}
        self._last: tuple[RolledRange, RolledSegments] | None = None

    def segment_at(self, offset: int) -> Segment:
        """Return the segment that begins here; if it is rolled up, the one that has the offset."""
        log = self._log
        while True:
            rolled = log._rolled.at(offset)
            try:
                if rolled is not None:
                    with log._located():
                        return self._object(rolled).segment_at(offset)
                segment = self._batch.pop(offset, None) or self._loose(offset)
                if segment is not None:
                    return segment
            except (MissingObject, CorruptSegment, UnknownFormat) as exc:
                log._look_again(offset, rolled, exc)
            else:  # A stray stood there.
                log._check_not_cleaned(offset)

    def headers_at(self, offset: int) -> Sequence[SegmentHeader]:
        """Return the header of the segment that begins here; and those that follow it, if it, and
        so these, are in one object with it. If it is rolled up, it need only hold the offset."""
        log = self._log
        while True:
            rolled = log._rolled.at(offset)
            if rolled is None:
                return [log._headers.get(offset) or self.segment_at(offset).header]
            try:
                index = log._index(rolled)
            except MissingObject as exc:
                log._look_again(offset, rolled, exc)
            else:
                return index.headers[index.at(offset) :]

    def _loose(self, offset: int) -> Segment | None:
        """Return the segment that is an object of its own; None if what stands there is a stray.

        Those that come next are read with it: to look whether they are the log's costs no more.
        """
        at = self._positions.get(offset)
        bases = [offset]
        if at is not None and offset not in self._log._headers:
            coming = self._coming[at + 1 : at + self._most]
            bases += [one.offset for one in takewhile(lambda one: not one.is_rolled, coming)]
            self._most = min(2 * self._most, _LARGEST_BATCH)
        self._batch = self._log._read_batch(bases, self._read, self._go_on)
        return self._batch.pop(offset, None)

    def _object(self, rolled: RolledRange) -> RolledSegments:
        if self._last is None or self._last[0] != rolled:
            self._last = rolled, decode_rolled(rolled.name, self._read(rolled.name))
        return self._last[1]
