"""A lock that is given to those who wait for it in the order in which they came.

Python's own goes to whoever is running when it is free: a thread that takes it again and again, as
a large put does with its bucket, would keep everybody else waiting to its end.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class FairLock:
    """Reentrant: who has it may take it again, and gives it back as often."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._holder: int | None = None
        self._times = 0
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        # How often somebody has got it: who remembers it knows whether others came since.
        self.turns = 0

    def __enter__(self) -> "FairLock":
        thread = threading.get_ident()
        with self._mutex:
            if self._holder == thread or (self._holder is None and not self._waiting):
                self._holder = thread
                self._times += 1
                self.turns += self._times == 1
                return self
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((thread, turn))
        try:
            turn.acquire()
        except BaseException:  # Interrupted; perhaps just when it was given to us.
            with self._mutex:
                came = (thread, turn) not in self._waiting
                if not came:
                    self._waiting.remove((thread, turn))
            if came:
                self._give_back()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._give_back()

    @contextmanager
    def if_free(self) -> Iterator[bool]:
        """Take it if nobody has it, not even this thread, or waits for it; yield whether it was."""
        with self._mutex:
            taken = self._holder is None and not self._waiting
            if taken:
                self._holder = threading.get_ident()
                self._times = 1
                self.turns += 1
        try:
            yield taken
        finally:
            if taken:
                self._give_back()

    def _give_back(self) -> None:
        with self._mutex:
            self._times -= 1
            if self._times:
                return
            self._holder = None
            if self._waiting:
                self._holder, turn = self._waiting.popleft()
                self._times = 1
                self.turns += 1
                turn.release()
