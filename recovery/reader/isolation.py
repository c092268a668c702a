"""Committed reads of a bucket's log: where they stand, and what they leave out.

Work that no commit has covered is not read: the tail of a lock that is ready, and the debts of one
that is not. It may yet be undone or, if it was promised (`redo`), be written in part only. Who
leads a bucket knows its log, and ZooKeeper knows the records; neither alone knows what is
committed. Hence the order of every committed read:

1. pin the end of the log: what is written later is not looked at;
2. read the records, in sync with ZooKeeper: what was written below the pin and is not unresolved
   there has been committed or undone by now;
3. confirm the leadership: so the log has every undo that was paid before the records were read;
4. leave out what is unresolved, and what an undo up to *now*, not just up to the pin, takes back.

Only undos that pay a debt are left out, with what they take back. What was put without a lock has
been committed, and perhaps read, by then: an undo of that is a change like any other.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from foundation.errors import InvalidInput, OffsetOutOfRange
from foundation.ids import BucketId
from locks.column_locks.acquisition import unpaid
from locks.column_locks.records import LockRecord
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.segment import Segment, SegmentHeader
from merge_engine.bucket.undone_work import undo_start, undone_columns, undone_of

ReadRecords = Callable[[], Mapping[str, LockRecord]]
"""Reads all lock records of the table, in sync with ZooKeeper: not from watches."""


class Isolation(StrEnum):
    """What readers see of work that a column lock's holder has not committed: all, or nothing."""

    LATEST = "latest"
    COMMITTED = "committed"

    @classmethod
    def of(cls, name: str) -> "Isolation":
        """Return the one that a caller named."""
        try:
            return cls(name)
        except ValueError:
            raise InvalidInput(f"isolation is 'committed' or 'latest', not {name!r}") from None


@dataclass(frozen=True, kw_only=True)
class Unresolved:
    """Changes of these columns, by this owner, from this offset of the bucket on."""

    owner: str
    columns: tuple[int, ...]
    offset: int


def unresolved(records: Mapping[str, LockRecord], key: BucketId) -> list[Unresolved]:
    """Return all work in this bucket that no commit covers; there need not be any in its log."""
    return [
        Unresolved(owner=debt.owner, columns=debt.columns, offset=debt.offsets.get(key, 0))
        for owner, record in records.items()
        for debt in unpaid(owner, record)
    ]


def last_stable_offset(
    bucket: Bucket, key: BucketId, read_records: ReadRecords, pinned: int | None = None
) -> int:
    """Return where a committed scan, snapshot or stream of the bucket stands.

    It is before any work that no commit covers, and not between a write and its undo. It never
    falls. `pinned`: the end of the log as it was pinned already; it is not beyond that. Deposed:
    another leader has come, and knows more.
    """
    if pinned is None:
        pinned = bucket.end_offset
    work = unresolved(read_records(), key)
    return _lowered(_Tail(bucket, bucket.confirm()), pinned, work)


@dataclass(frozen=True)
class CommittedChanges:
    """The committed changes of the offsets [start, end), in log order.

    `end` is where to go on: nothing below it is left to come, and a committed scan may be handed
    over there. Iterating reads the log, each time anew.
    """

    start: int
    end: int
    _bucket: Bucket
    _undone: Mapping[int, frozenset[int]]

    def __iter__(self) -> Iterator[Segment]:
        for segment in self._bucket.read_log(self.start, self.end):
            undone = undone_of(self._undone, segment.header)
            if not undone:
                yield segment
            elif not undone.issuperset(segment.changes):
                yield segment.without(undone)


def committed_changes(
    bucket: Bucket,
    key: BucketId,
    read_records: ReadRecords,
    from_offset: int,
    to_offset: int | None = None,
) -> CommittedChanges:
    """Return the changes in [from, to) below the last stable offset, as `Bucket.read_log` has them.

    Writes that were undone as a debt are left out together with their undo, in the columns that
    this was about. If nothing is stable beyond `from_offset` yet, there are none, and its `end` is
    where it starts.
    """
    stable = last_stable_offset(bucket, key, read_records)
    if not bucket.start_offset <= from_offset <= bucket.end_offset:
        raise OffsetOutOfRange(
            f"offset {from_offset} is not in the log, which has [{bucket.start_offset}, "
            f"{bucket.end_offset})"
        )
    end = stable if to_offset is None else min(to_offset, stable)
    # Undos after the last stable offset take nothing back before it; those after `to` may.
    undone = undone_columns(list(bucket.headers(from_offset, stable)))
    return CommittedChanges(from_offset, max(from_offset, end), bucket, undone)


def _lowered(tail: "_Tail", pinned: int, work: list[Unresolved]) -> int:
    """Lower the pinned end of the log to the last stable offset.

    Each undo is looked at once, from the end of the log backwards, when it is known to be at or
    beyond the result; whatever it takes back brings the result to the debtor's first change.
    """
    stable = pinned
    for part in work:
        stable = min(stable, tail.first_change(part.owner, part.offset, stable))
    tail.reach(stable)
    looked_at = 0
    while looked_at < len(tail.undos) and tail.undos[looked_at].base_offset >= stable:
        undo = tail.undos[looked_at]
        looked_at += 1
        stable = min(stable, tail.first_change(undo.owner, undo_start(undo), stable))
    return stable


class _Tail:
    """What is known of the end of the log: headers, from as far back as anybody has asked for."""

    def __init__(self, bucket: Bucket, end: int) -> None:
        self._bucket = bucket
        self._floor = end
        self.undos: list[SegmentHeader] = []  # From the last one backwards.
        # By owner, backwards too: where its changes begin, and where they end, negated for bisect.
        self._bases: dict[str, list[int]] = {}
        self._ends: dict[str, list[int]] = {}

    def reach(self, offset: int) -> None:
        """Know the log from this offset on."""
        if offset >= self._floor:
            return
        headers = list(self._bucket.headers(offset, self._floor))
        self._floor = min(offset, headers[0].base_offset) if headers else offset
        for header in reversed(headers):
            if header.is_change:
                self._bases.setdefault(header.owner, []).append(header.base_offset)
                self._ends.setdefault(header.owner, []).append(-header.end_offset)
            if header.is_payment:
                self.undos.append(header)

    def first_change(self, owner: str, offset: int, before: int) -> int:
        """Return where the owner's first change from this offset on begins; `before` if none."""
        if offset >= before:
            return before
        self.reach(offset)
        count = bisect_left(self._ends.get(owner, []), -offset)
        return self._bases[owner][count - 1] if count else before
