"""Until when a call may take, however many others it makes on its way.

A call that gives itself 30 seconds must not wait another 30 for ZooKeeper in the last of them. So
it says `within`, and whatever it calls in the same thread asks `deadline_in` and gets the earlier
of the two: its own, and the caller's.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_latest: ContextVar[float] = ContextVar("latest", default=float("inf"))


@contextmanager
def within(seconds: float) -> Iterator[float]:
    """Let nothing in the block wait longer than this; yields the deadline."""
    deadline = deadline_in(seconds)
    token = _latest.set(deadline)
    try:
        yield deadline
    finally:
        _latest.reset(token)


def deadline_in(seconds: float) -> float:
    """Return when to give up, by the monotonic clock: after so long, or when a caller has to."""
    return min(time.monotonic() + seconds, _latest.get())


def remaining(deadline: float) -> float:
    """Return the seconds that are left, at least a moment: for waits that take no less."""
    return max(deadline - time.monotonic(), 0.001)
