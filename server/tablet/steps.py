"""Calls that have much to do in many buckets: each goes on for about a second, and is made again.

So none is given up by a client that waits no longer for an answer, and none does in vain what its
repetition has to do again. The client asks until nothing is left; see `server.client.steps`.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from foundation.parallel import map_all

Item = TypeVar("Item")
Result = TypeVar("Result")
GoOn = Callable[[], bool]

CALL_S = 1.0
"""About how long a call goes on."""


class Steps:
    """Carries out calls for many items, a few side by side. Safe for threads."""

    def __init__(self, name: str, *, threads: int, call_s: float = CALL_S) -> None:
        """`name`: of the threads. They are its own: what it waits for may need those of puts."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"tallybook-{name}")
        self._call_s = call_s

    def run(
        self,
        items: Sequence[Item],
        carry_out: Callable[[Item, GoOn], Result],
        leave: Callable[[Item], Result],
    ) -> list[Result]:
        """Return a result for each item: of `carry_out`, or of `leave` when the time is over.

        The first item is carried out in any case: so each call gets further. What takes long by
        itself asks now and then whether to go on.
        """
        deadline = time.monotonic() + self._call_s

        def go_on() -> bool:
            return time.monotonic() < deadline

        def step(at: int) -> Result:
            return carry_out(items[at], go_on) if not at or go_on() else leave(items[at])

        return map_all(self._pool, step, range(len(items)))

    def shutdown(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False)
