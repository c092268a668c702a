"""One put to several buckets: all of them try the merge before the first one writes.

with held(buckets):
    plans = plan_held(buckets, updates, mapper, owner=owner, token=token)
    results = commit_held(buckets, plans, mapper)
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from foundation.ids import Token
from foundation.parallel import Mapper
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log_and_view import Plan
from merge_engine.bucket.results import BucketResult
from merge_engine.merging.fold import Update


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

    def plan(at: int) -> Plan | BucketResult:
        return buckets[at].plan(updates[at], owner=owner, token=token, locked=locked)

    return mapper(plan, range(len(buckets)))


def commit_held(
    buckets: Sequence[Bucket], plans: Sequence[Plan | BucketResult], mapper: Mapper
) -> list[BucketResult]:
    """Write what was planned in each bucket, while they are still held."""
    return mapper(lambda at: buckets[at].commit(plans[at]), range(len(buckets)))
