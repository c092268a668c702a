"""One put to several buckets: all of them try the merge before the first one writes."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol, TypeVar

from merge_engine.bucket import Bucket, PutResult
from merge_engine.fold import Update
from merge_engine.segment import Token

Item = TypeVar("Item")
Result = TypeVar("Result")


class Mapper(Protocol):
    """Calls for every item, in parallel or not; all calls have ended on return."""

    def __call__(
        self, call: Callable[[Item], Result], items: Sequence[Item], /
    ) -> list[Result]: ...


def put_together(
    buckets: Sequence[Bucket],
    updates: Sequence[Update],
    mapper: Mapper,
    *,
    owner: str,
    token: Token | None,
    check: Callable[[int], None] | None = None,
    try_only: bool = False,
) -> list[PutResult]:
    """Put one update to each bucket; an error of any of them before the writing changes nothing.

    Give the buckets in the same order as everybody else, so that two puts never wait crosswise.
    `check` is called with each position while its bucket is held, before anything is tried.
    `try_only`: write nothing, but raise what a put would raise now.
    """
    at_all = range(len(buckets))
    with ExitStack() as stack:
        for bucket in buckets:
            stack.enter_context(bucket.exclusive())
        if check is not None:
            for at in at_all:
                check(at)
        plans = mapper(lambda at: buckets[at].plan(updates[at], owner=owner, token=token), at_all)
        if try_only:
            return [_untouched(bucket) for bucket in buckets]
        return mapper(lambda at: buckets[at].commit(plans[at]), at_all)


def _untouched(bucket: Bucket) -> PutResult:
    return PutResult(base_offset=bucket.end_offset, end_offset=bucket.end_offset)
