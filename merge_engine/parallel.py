"""The same call for many items, on a pool of threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_all(pool: Executor, call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Call for every item, in parallel if there are several; the first error, in order, wins.

    All calls have ended on return, so nothing goes on behind the caller's back. RuntimeError if
    the pool was shut down.
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
