"""One put to several buckets: all of them try the merge before the first one writes.

with held(buckets):
    plans = plan_held(buckets, updates, mapper, owner=owner, token=token)
    results = commit_held(buckets, plans, mapper)
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from foundation.errors import ColumnTooLarge, InvalidValue
from foundation.ids import Token
from foundation.parallel import Mapper
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log_and_view import Found, Plan
from merge_engine.bucket.results import BucketResult
from merge_engine.encoding.stored_rows import concatenated
from merge_engine.merging.fold import Update, joined
from merge_engine.merging.merge import merge

# Of so many rows of all buckets together, threads that merge each bucket's wait for each other.
_FEW = 20_000


@contextmanager
def held(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Keep everybody else from changing something in these buckets.

    Give them in the same order as everybody else, so that two puts never wait crosswise.
    """
    with ExitStack() as stack:
        for bucket in buckets:
            stack.enter_context(bucket.exclusive())
        yield


def plan_held(
    buckets: Sequence[Bucket],
    updates: Sequence[Update],
    mapper: Mapper,
    *,
    owner: str,
    token: Token | None,
    locked: bool = False,
) -> list[Plan | BucketResult]:
    """Try one update in each bucket: write nothing, but raise what a put would raise now.

    `locked`: for the holder of a column lock.
    """

    if len(buckets) > 1 and sum(map(len, updates)) <= _FEW and _same_columns(updates):
        with suppress(ColumnTooLarge):  # Each of them may still fit.
            return _plan_as_one(buckets, updates, owner=owner, token=token, locked=locked)

    def plan(at: int) -> Plan | BucketResult | InvalidValue:
        try:
            return buckets[at].plan(updates[at], owner=owner, token=token, locked=locked)
        except InvalidValue as exc:
            return exc

    planned = mapper(plan, range(len(buckets)))
    refused = [one for one in planned if isinstance(one, InvalidValue)]
    if refused:
        raise InvalidValue.together(refused)
    return [one for one in planned if not isinstance(one, InvalidValue)]


def _same_columns(updates: Sequence[Update]) -> bool:
    kinds = {(update.mode, *(column.id for column in update.columns)) for update in updates}
    return len(kinds) == 1


def _plan_as_one(
    buckets: Sequence[Bucket],
    updates: Sequence[Update],
    *,
    owner: str,
    token: Token | None,
    locked: bool,
) -> list[Plan | BucketResult]:
    """Merge all updates at once: of few rows, a merge takes about as long for all as for a part."""
    found = [
        bucket.find(update, owner=owner, token=token)
        for bucket, update in zip(buckets, updates, strict=True)
    ]
    left = [
        (update, one) for update, one in zip(updates, found, strict=True) if isinstance(one, Found)
    ]
    if not left:
        return [one for one in found if isinstance(one, BucketResult)]
    stored = concatenated([one.stored for _, one in left])
    merged = merge(joined([update for update, _ in left]), stored)
    parts = iter(merged.split([len(update) for update, _ in left]))
    return [
        one
        if isinstance(one, BucketResult)
        else Plan.of(update, one, owner=owner, token=token, locked=locked, merged=next(parts))
        for update, one in zip(updates, found, strict=True)
    ]


def commit_held(
    buckets: Sequence[Bucket], plans: Sequence[Plan | BucketResult], mapper: Mapper
) -> list[BucketResult]:
    """Write what was planned in each bucket, while they are still held."""
    return mapper(lambda at: buckets[at].commit(plans[at]), range(len(buckets)))
