"""One put to several buckets: all of them try the merge before the first one writes.

with held(buckets):
    results = put_held(buckets, updates, mapper, owner=owner, token=token)
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


def put_held(
    buckets: Sequence[Bucket],
    updates: Sequence[Update],
    mapper: Mapper,
    *,
    owner: str,
    token: Token | None,
    locked: bool = False,
) -> list[BucketResult]:
    """Put one update to each bucket; an error of any of them before the writing changes nothing.

    `locked`: for the holder of a column lock.
    """
    plans = try_held(buckets, updates, mapper, owner=owner, token=token, locked=locked)
    return mapper(lambda at: buckets[at].commit(plans[at]), range(len(buckets)))


def try_held(
    buckets: Sequence[Bucket],
    updates: Sequence[Update],
    mapper: Mapper,
    *,
    owner: str,
    token: Token | None,
    locked: bool = False,
) -> list[Plan | BucketResult]:
    """Write nothing, but raise what a put would raise now."""

    def plan(at: int) -> Plan | BucketResult:
        return buckets[at].plan(updates[at], owner=owner, token=token, locked=locked)

    return mapper(plan, range(len(buckets)))
