"""Calls that come while one is under way wait for it, and then go together, as one.

Nobody waits where nothing is under way: the call is made at once, by whoever asks, in its own
thread. The busier it is, the more calls one makes good for. What gathers meanwhile is made by a
thread that is there while there is something to do, and a while longer.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from foundation.deadlines import remaining

Item = TypeVar("Item")
Result = TypeVar("Result")
Result_contra = TypeVar("Result_contra", contravariant=True)

_LINGER_S = 1.0
_PAUSE_S, _MOST_PAUSES = 0.0001, 10
_JOIN_S = 5.0


class Tell(Protocol[Result_contra]):
    """Takes what became of a call: its result, or its error. Must not wait, and not raise."""

    def __call__(self, result: Result_contra | None, error: Exception | None, /) -> None: ...


class _Waiting(Generic[Result]):
    """A thread that waits for its result. A lock is the cheapest thing there is to wait for."""

    __slots__ = ("_ready", "error", "result")

    def __init__(self) -> None:
        self.result: Result | None = None
        self.error: Exception | None = None
        self._ready = threading.Lock()
        self._ready.acquire()

    def tell(self, result: Result | None, error: Exception | None, /) -> None:
        self.result, self.error = result, error
        self._ready.release()

    def wait(self, deadline: float) -> bool:
        """Return whether there is something to tell before the deadline."""
        return self._ready.acquire(timeout=min(remaining(deadline), threading.TIMEOUT_MAX))


class Gatherer(Generic[Item, Result]):
    """Makes one call at a time, for all who have asked meanwhile. Safe for threads.

    `call` gets the items in the order in which they came, and returns a result for each; what it
    raises is raised to all of them. So whatever one item alone can be wrong in is found out before.
    It begins after all of its items came. `most`: how many items go into one call, each counted as
    `weigh` says; one alone may weigh more.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Item]], Sequence[Result]],
        *,
        name: str,
        most: int,
        weigh: Callable[[Item], int] = lambda _: 1,
        linger_s: float = _LINGER_S,
    ) -> None:
        self._call = call
        self._name = name
        self._most = most
        self._weigh = weigh
        self._linger_s = linger_s
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[tuple[Item, Tell[Result]]] = deque()
        self._under_way = False
        self._thread: threading.Thread | None = None
        self._threads_turn = False
        self._is_rush = False
        self._closed: Exception | None = None

    def ask(self, item: Item, deadline: float) -> Result:
        """Return the result of a call; TimeoutError if it is not there by the deadline."""
        with self._changed:
            self._check_open()
            waiting: _Waiting[Result] | None = None
            if self._under_way:
                waiting = _Waiting()
                self._waiting.append((item, waiting.tell))
            self._under_way = True
        if waiting is None:
            try:
                [result] = self._call([item])
            finally:
                self._pass_on()
            return result
        if not waiting.wait(deadline):
            self._forget(waiting.tell)
            raise TimeoutError
        if waiting.error is not None:
            raise waiting.error
        return waiting.result  # type: ignore[return-value]

    def submit(self, item: Item, tell: Tell[Result]) -> None:
        """Have `tell` told, by another thread, what becomes of a call. Waits for nothing."""
        with self._changed:
            self._check_open()
            self._waiting.append((item, tell))
            if not self._under_way:
                self._under_way = True
                self._call_thread()

    def close(self, error: Exception) -> None:
        """Raise this to all who wait, and to whoever asks from now on. Closing twice is fine.

        A call that is under way ends first, for a while at least.
        """
        with self._changed:
            self._closed = error
            left, self._waiting = self._waiting, deque()
            thread = self._thread
            self._changed.notify_all()
        for _, tell in left:
            tell(None, error)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def _forget(self, tell: Tell[Result]) -> None:
        with self._changed:
            self._waiting = deque(one for one in self._waiting if one[1] != tell)

    def _pass_on(self) -> None:
        """End a call: the next is the thread's, if anybody waits."""
        with self._changed:
            if self._waiting:
                self._call_thread()
            else:
                self._under_way = False

    def _call_thread(self) -> None:
        self._threads_turn = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        else:
            self._changed.notify_all()

    def _work(self) -> None:
        while batch := self._take():
            items = [item for item, _ in batch]
            try:
                told = list(zip(batch, self._call(items), strict=True))
            except Exception as exc:
                for _, tell in batch:
                    tell(None, exc)
            else:
                for (_, tell), result in told:
                    tell(result, None)

    def _take(self) -> list[tuple[Item, Tell[Result]]]:
        """Return what goes into the next call; nothing if the thread is to end."""
        with self._changed:
            if self._is_rush:
                self._wait_for_more()
            if self._threads_turn and not self._waiting:
                self._threads_turn = self._under_way = False
            self._changed.wait_for(lambda: self._threads_turn or self._closed, self._linger_s)
            batch: list[tuple[Item, Tell[Result]]] = []
            weight = 0
            while self._threads_turn and self._waiting:
                weight += self._weigh(self._waiting[0][0])
                if batch and weight > self._most:
                    break
                batch.append(self._waiting.popleft())
            if not batch:
                self._thread = None
                if self._threads_turn:  # Those who waited have gone meanwhile.
                    self._threads_turn = self._under_way = False
            self._is_rush = len(batch) > 1
            return batch

    def _wait_for_more(self) -> None:
        """Those who were just answered often ask again at once: let them, while they do so."""
        for _ in range(_MOST_PAUSES):
            before = len(self._waiting)
            self._changed.wait(_PAUSE_S)
            if len(self._waiting) == before or self._closed:
                return
