"""The same call for many items, on a pool of threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Mapper(Protocol):
    """Calls for every item, in parallel or not; all calls have ended on return."""

    def __call__(
        self, call: Callable[[Item], Result], items: Sequence[Item], /
    ) -> list[Result]: ...


def in_turn(call: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
    """Call for one item after the other; a `Mapper`."""
    return list(map(call, items))


def map_all(pool: Executor, call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Call for every item, in parallel if there are several; the first error, in order, wins.

    All calls have ended on return, so nothing goes on that the caller does not know of.
    RuntimeError if the pool was shut down.
    """
    if len(items) <= 1:
        return [call(item) for item in items]
    futures = []
    try:
        for item in items:
            futures.append(pool.submit(call, item))
    except RuntimeError:
        wait(futures)
        raise
    errors = [error for error in (future.exception() for future in futures) if error]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
