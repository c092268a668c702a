"""The same call for many items, on a pool of threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
# For calls that mostly wait, for a disk or for a store: more of them than there are cores.
WAITING_THREADS = 16


class Mapper(Protocol):
    """Calls for every item, in parallel or not; all calls have ended on return."""

    def __call__(
        self, call: Callable[[Item], Result], items: Sequence[Item], /
    ) -> list[Result]: ...


def in_turn(call: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
    """Call for one item after the other; a `Mapper`."""
    return list(map(call, items))


def at_once(call: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
    """Call for all items on threads of their own, for calls that wait and do little; a `Mapper`."""
    with ThreadPoolExecutor(min(len(items), WAITING_THREADS) or 1) as pool:
        return map_all(pool, call, items)


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
