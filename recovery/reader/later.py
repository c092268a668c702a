"""What a bucket's log has that came after a cut.

A reader pins the rows, confirms the leadership, and leaves out what came later: so it does not
matter when it comes, or in which order it goes through the buckets. What was cleaned is gone: the
log's mark tells whether that was something that came later, and then the cut is too old.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from foundation.errors import CutTooOld, OffsetOutOfRange
from merge_engine.bucket.log_start import Cleaned, CleanedOwners
from merge_engine.bucket.owner_work import OwnerWork
from merge_engine.bucket.segment import Segment, SegmentHeader
from recovery.reader.cut import LAST_BATCH, Bound, BucketCut


class LogSource(Protocol):
    """A bucket, or a copy of one, as far as its log is to be looked through."""

    @property
    def start_offset(self) -> int:
        """The first offset that the log still has."""

    @property
    def cleaned(self) -> CleanedOwners | None:
        """What is known of the changes before it."""

    @property
    def works(self) -> Mapping[str, OwnerWork]:
        """What is known of the puts of all owners."""

    def headers(self, from_offset: int, to_offset: int | None = None) -> Iterator[SegmentHeader]:
        """Yield the headers of the segments that hold the offsets [from, to)."""

    def read_segments(self, bases: Iterable[int]) -> Iterator[Segment]:
        """Yield the segments with these base offsets; OffsetOutOfRange if one was cleaned."""


class Sieve:
    """Tells the changes that came after a cut from those that are in it.

    It is shown an owner's changes in the order of the log, from the first that came later on, or
    from any before that.
    """

    def __init__(self, cut: BucketCut) -> None:
        self._cut = cut
        self._passed: set[str] = set()

    def is_later(self, header: SegmentHeader) -> bool:
        """Whether a change came after the cut."""
        if header.owner not in self._passed:
            bound = self._cut.bound(header.owner)
            if not _ends(bound, header):
                return False
            self._passed.add(header.owner)
        return True


def _ends(bound: Bound, header: SegmentHeader) -> bool:
    """Whether a change is the first of its owner that is not in the cut."""
    if bound.end is not None and header.base_offset >= bound.end:
        return True
    if bound.offset is not None and header.base_offset < bound.offset:
        return False
    if bound.through is None:
        return bound.offset is not None
    return header.lock_token is not None and header.lock_token > bound.through


def later_headers(source: LogSource, cut: BucketCut, end: int) -> list[SegmentHeader]:
    """Return the headers of all changes below `end` that came after the cut, in log order.

    CutTooOld: some of them were cleaned. Unless there are any, none is looked for.
    """
    begin = _begin(source, cut, end)
    if begin >= end:
        return []
    sieve = Sieve(cut)
    headers = source.headers(begin, end)
    found = [one for one in headers if one.is_change and sieve.is_later(one)]
    # Now, for the log may have been cleaned meanwhile: what is gone is known before it goes.
    _check_age(source, cut, begin, end)
    return found


def _begin(source: LogSource, cut: BucketCut, end: int) -> int:
    """Return an offset before which nothing came after the cut; `end` if there is nothing."""
    begins = [end]
    for owner, work in source.works.items():
        bound = cut.bound(owner)
        if bound.end is not None and work.end_offset > bound.end:
            begins.append(bound.end)
        if bound.offset is not None and work.end_offset <= bound.offset:
            continue
        begin = bound.offset
        if bound.through is not None:
            epoch, batch = bound.through
            later = work.begin_of(epoch if batch < LAST_BATCH else epoch + 1)
            begin = None if later is None else max(later, begin or 0)
        begins += [] if begin is None else [begin]
    return min(begins)


def _check_age(source: LogSource, cut: BucketCut, begin: int, end: int) -> None:
    """Raise CutTooOld if changes in [begin, end), that came after the cut, were cleaned."""
    start, cleaned = source.start_offset, source.cleaned
    if begin >= start:
        return
    # Of undone work that was cleaned nothing is known: rows of `end` may have it, but not its undo.
    if (
        cleaned is None
        or end < start
        or any(_was_later(cut.bound(owner), one) for owner, one in cleaned.items())
    ):
        raise _too_old(start)


def _too_old(start: int) -> CutTooOld:
    return CutTooOld(
        f"the log of the bucket starts at offset {start}, and changes that came after the cut "
        "were before it: take another cut; to read from one for longer than the log is kept, "
        "hold a lease while you do"
    )


def _was_later(bound: Bound, cleaned: Cleaned) -> bool:
    """Whether one of an owner's changes that were cleaned came after the cut."""
    if bound.end is not None and cleaned.end_offset > bound.end:
        return True
    if bound.offset is not None and cleaned.end_offset <= bound.offset:
        return False
    if bound.through is None:
        return bound.offset is not None
    return cleaned.token is not None and cleaned.token > bound.through


def read_later(
    source: LogSource, cut: BucketCut | None, headers: Iterable[SegmentHeader]
) -> Iterator[Segment]:
    """Yield the segments of changes that came after the cut; CutTooOld if one was just cleaned."""
    try:
        yield from source.read_segments(one.base_offset for one in headers)
    except OffsetOutOfRange as exc:
        if cut is None:
            raise
        raise _too_old(source.start_offset) from exc
