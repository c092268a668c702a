"""A cut between two others that is no more than so many rows away from the first of them.

Each owner's batches stay whole and in order. Where one owner has had columns of another, all that
the first wrote comes before what the second did: epochs tell who came first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from foundation.ids import BucketId, Token
from locks.encoding.offsets import Offsets
from merge_engine.bucket.segment import SegmentHeader
from recovery.reader.cut import Cut, OwnerCut
from recovery.reader.isolation import undone_columns, undone_of


class BatchSize(NamedTuple):
    """What a batch has changed between two cuts: so many keys, in these columns."""

    owner: str
    token: Token
    keys: int
    time_ms: int
    columns: frozenset[int]

    def with_more(self, other: "BatchSize") -> "BatchSize":
        """Return it together with the same batch in another bucket."""
        return self._replace(
            keys=self.keys + other.keys,
            time_ms=min(self.time_ms, other.time_ms),
            columns=self.columns | other.columns,
        )


@dataclass(frozen=True, kw_only=True)
class BucketSize:
    """The changes of a bucket between two cuts.

    `batches`: of owners with locks. `stop`: where so many keys as were asked for have changed, by
    whomever; the last offset of them.
    """

    keys: int
    batches: Sequence[BatchSize]
    stop: int


def bucket_size(headers: Sequence[SegmentHeader], most_keys: int | None) -> BucketSize:
    """Return the size of changes that are between two cuts; what was undone counts nothing."""
    undone = undone_columns(headers)
    batches: dict[tuple[str, Token], BatchSize] = {}
    keys, stop = 0, None
    for header in headers:
        columns = frozenset(header.column_ids) - undone_of(undone, header)
        if not columns:
            continue
        if stop is None and most_keys is not None and keys and keys + header.rows > most_keys:
            stop = header.base_offset
        keys += header.rows
        if header.lock_token is not None:
            size = BatchSize(
                header.owner, header.lock_token, header.rows, header.timestamp_ms, columns
            )
            known = batches.get(size[:2])
            batches[size[:2]] = size if known is None else known.with_more(size)
    end = headers[-1].end_offset if headers else 0
    return BucketSize(
        keys=keys, batches=tuple(batches.values()), stop=end if stop is None else stop
    )


def cut_between(
    since: Cut, until: Cut, sizes: Mapping[BucketId, BucketSize], most_keys: int
) -> Cut:
    """Return the later cut, or one before it with at most so many changed keys since the first.

    One batch at least is in it, however large; or, without locks, one put of each bucket.
    """
    if sum(size.keys for size in sizes.values()) <= most_keys:
        return until
    if until.epoch is None:
        assert until.ends is not None
        stops = {bucket: size.stop for bucket, size in sizes.items() if size.keys}
        return replace(until, ends=Offsets({**until.ends, **stops}))
    chosen = _chosen(_merged(sizes.values()), most_keys)
    if chosen is None:
        return until
    owners = {
        owner: replace(
            since.owners.get(owner, OwnerCut(batch=-1)), batch=last.token.batch, through=last.token
        )
        for owner, last in chosen.items()
    }
    time_ms = max(last.time_ms for last in chosen.values())
    return replace(
        since,
        epoch=since.epoch if since.epoch is not None else 0,
        owners={**since.owners, **owners},
        time_ms=max(since.time_ms, time_ms),
    )


def _merged(sizes: Iterable[BucketSize]) -> list[BatchSize]:
    batches: dict[tuple[str, Token], BatchSize] = {}
    for one in (batch for size in sizes for batch in size.batches):
        known = batches.get(one[:2])
        batches[one[:2]] = one if known is None else known.with_more(one)
    return sorted(batches.values(), key=lambda one: (one.time_ms, one.token))


def _chosen(batches: Sequence[BatchSize], most_keys: int) -> dict[str, BatchSize] | None:
    """Return the last batch of each owner that is taken; None if all of them are.

    By the time when they were written; a batch waits for those of its owner that come before it,
    and for all of an earlier epoch that have a column with it in common.
    """
    waiting = list(batches)
    chosen: dict[str, BatchSize] = {}
    keys = 0
    while waiting:
        following = next(one for one in waiting if not any(_waits(one, o) for o in waiting))
        if chosen and keys + following.keys > most_keys:
            return chosen
        waiting.remove(following)
        chosen[following.owner] = following
        keys += following.keys
    return None


def _waits(one: BatchSize, other: BatchSize) -> bool:
    """Whether a batch comes after another one that is still waiting."""
    if one is other:
        return False
    if one.owner == other.owner:
        return other.token < one.token
    return other.token.epoch < one.token.epoch and not one.columns.isdisjoint(other.columns)
