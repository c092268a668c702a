"""Starts again what has ended by itself: each process of a cluster on one machine.

The first time at once; one that ends again and again, after longer and longer pauses, for ever.
"""

import time
from collections.abc import Callable
from typing import Protocol

from foundation.errors import TallybookError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# One that has run for so long has started well: what ends it then is something new.
_STEADY_S = 60.0


class Revivable(Protocol):
    """A process that may end, and can be started again."""

    @property
    def ended(self) -> str | None:
        """Why it has ended; None if it runs, or was told to stop."""

    def start(self) -> object:
        """Start it again; TallybookError if that fails."""


class Revival:
    """Looks after one process. For one thread at a time."""

    def __init__(
        self, name: str, process: Revivable, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._process = process
        self._clock = clock
        self._pause_s = 0.0
        self._started_at = clock()
        self._due_at: float | None = None  # None: nothing is to be started.

    def look(self) -> list[str]:
        """Start the process again, if it has ended and it is time to; return what to tell people.

        A process whose end is new is started at once, unless it had been started again lately.
        """
        told, due_at = [], self._due_at
        if due_at is None:
            why = self._process.ended
            if why is None:
                return []
            if self._clock() - self._started_at >= _STEADY_S:
                self._pause_s = 0.0
            due_at = self._put_off()
            told.append(f"{self._name} has ended: {why}; {self._soon(due_at)}")
        if self._clock() >= due_at:
            try:
                self._process.start()
                self._started_at, self._due_at = self._clock(), None
                told.append(f"{self._name} is started again")
            except (TallybookError, OSError) as exc:
                told.append(f"{self._name} did not start: {exc}; {self._soon(self._put_off())}")
        return told

    def _put_off(self) -> float:
        """Set when the process is started again, later each time; return that."""
        due_at = self._due_at = self._clock() + self._pause_s
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        return due_at

    def _soon(self, due_at: float) -> str:
        pause_s = due_at - self._clock()
        return f"starting it again in {pause_s:.0f} s" if pause_s > 0 else "starting it again"
