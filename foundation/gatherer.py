"""Calls that come while one is under way wait for it, and then go together, as one.

Nobody waits where nothing is under way: the call is made at once, by whoever asks, in its own
thread. The busier it is, the more calls one makes good for. What gathers meanwhile is made by a
thread that is there while there is something to do, and a while longer.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from foundation.background import surviving
from foundation.deadlines import remaining

Item = TypeVar("Item")
Result = TypeVar("Result")
Result_contra = TypeVar("Result_contra", contravariant=True)

_LINGER_S = 1.0
_PAUSE_S, _MOST_PAUSES = 0.0001, 10
_MOST_IN_A_ROW = 16
_JOIN_S = 5.0


class Tell(Protocol[Result_contra]):
    """Takes what became of a call: its result, or its error. Must not wait, and not raise."""

    def __call__(self, result: Result_contra | None, error: Exception | None, /) -> None: ...


class _Asked(Generic[Item, Result]):
    """A question, whoever is told its answer if nobody waits for it, and the answer."""

    __slots__ = ("item", "result", "tell")

    def __init__(self, item: Item, tell: Tell[Result] | None) -> None:
        self.item = item
        self.tell = tell
        self.result: Result | None = None


class _Group(Generic[Item, Result]):
    """Some who go into the same call. Its end wakes one of them, and each wakes the next.

    All at once would fight for the interpreter, and most of them would lose, and sleep again. In
    one long row, on the other hand, the last would wait for each of the others where a thread that
    computes lets go of the interpreter only every few milliseconds: so a row is short.
    """

    __slots__ = ("_turn", "asked", "error", "is_done", "weight")

    def __init__(self) -> None:
        self.asked: list[_Asked[Item, Result]] = []
        self.weight = 0
        self.error: Exception | None = None
        self.is_done = False
        self._turn = threading.Lock()  # A lock is the cheapest thing there is to wait for.
        self._turn.acquire()

    def wait(self, deadline: float) -> bool:
        """Return whether the call has ended before the deadline."""
        try:
            self._turn.acquire(timeout=min(remaining(deadline), threading.TIMEOUT_MAX))
        finally:  # Also if this was interrupted, perhaps just when it was our turn.
            if self.is_done:
                self._wake_next()
        return self.is_done

    def end(self, error: Exception | None = None) -> None:
        """Tell all of them; before that, those who have no error get their results."""
        self.error = error
        self.is_done = True
        self._wake_next()
        for one in self.asked:
            if one.tell is not None:
                # In the thread of all: what one of them does with it must not end that.
                with surviving("telling a result"):
                    one.tell(one.result, error)

    def _wake_next(self) -> None:
        with suppress(RuntimeError):  # Another one has done so.
            self._turn.release()


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
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._groups: deque[_Group[Item, Result]] = deque()
        self._expected = 0
        self._under_way = False
        self._thread: threading.Thread | None = None
        self._threads_turn = False
        self._closed: Exception | None = None

    @property
    def waiting(self) -> int:
        """How many wait for the next calls."""
        return sum(len(group.asked) for group in self._groups)

    def ask(self, item: Item, deadline: float) -> Result:
        """Return the result of a call; TimeoutError if it is not there by the deadline."""
        with self._lock:
            self._check_open()
            if alone := not self._under_way:
                self._under_way = True
            else:
                asked: _Asked[Item, Result] = _Asked(item, None)
                group = self._gather(asked)
        if alone:
            try:
                [result] = self._call([item])
            finally:
                self._pass_on()
            return result
        if not group.wait(deadline):
            self._forget(asked, group)
            raise TimeoutError
        if group.error is not None:
            raise group.error
        return asked.result  # type: ignore[return-value]

    def submit(self, item: Item, tell: Tell[Result]) -> None:
        """Have `tell` told, by another thread, what becomes of a call. Waits for nothing."""
        with self._lock:
            self._check_open()
            self._gather(_Asked(item, tell))
            if not self._under_way:
                self._under_way = True
                self._call_thread()

    def close(self, error: Exception) -> None:
        """Raise this to all who wait, and to whoever asks from now on. Closing twice is fine.

        A call that is under way ends first, for a while at least.
        """
        with self._lock:
            self._closed = error
            left, self._groups = self._groups, deque()
            thread = self._thread
            self._changed.notify_all()
        for group in left:
            group.end(error)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def _gather(self, asked: _Asked[Item, Result]) -> _Group[Item, Result]:
        """Have this one wait for a call, together with those who came just before it."""
        groups, weight = self._groups, self._weigh(asked.item)
        group = groups[-1] if groups else None
        if (
            group is None
            or len(group.asked) >= _MOST_IN_A_ROW
            or group.weight + weight > self._most
        ):
            group = _Group()
            groups.append(group)
        group.asked.append(asked)
        group.weight += weight
        if self._expected and self.waiting >= self._expected:
            self._expected = 0
            self._changed.notify_all()
        return group

    def _forget(self, asked: _Asked[Item, Result], group: _Group[Item, Result]) -> None:
        """Call for this one no more, if that is not under way already."""
        with self._lock:
            if group in self._groups:
                group.asked.remove(asked)
                group.weight -= self._weigh(asked.item)
                if not group.asked:
                    self._groups.remove(group)

    def _pass_on(self) -> None:
        """End a call: the next is the thread's, if anybody waits."""
        with self._lock:
            if self._groups:
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
        expected = 0
        while groups := self._take(expected):
            together = [one for group in groups for one in group.asked]
            error: Exception | None = None
            try:
                results = self._call([one.item for one in together])
                for one, result in zip(together, results, strict=True):
                    one.result = result
            except Exception as exc:
                error = exc
            with self._lock:  # Those who were just answered often ask again at once.
                expected = len(together) + self.waiting if len(together) > 1 else 0
            for group in groups:
                group.end(error)

    def _take(self, expected: int) -> list[_Group[Item, Result]]:
        """Return what goes into the next call; nothing if the thread is to end.

        `expected`: how many may be there soon; 0 if there is no rush.
        """
        with self._lock:
            if expected:
                self._wait_for(expected)
            if self._threads_turn and not self._groups:
                self._threads_turn = self._under_way = False
            self._changed.wait_for(lambda: self._threads_turn or self._closed, self._linger_s)
            taken: list[_Group[Item, Result]] = []
            weight = 0
            while self._threads_turn and self._groups:
                weight += self._groups[0].weight
                if taken and weight > self._most:
                    break
                taken.append(self._groups.popleft())
            if not taken:
                self._thread = None
                if self._threads_turn:  # Those who waited have gone meanwhile.
                    self._threads_turn = self._under_way = False
            return taken

    def _wait_for(self, expected: int) -> None:
        """Let so many come, for as long as some do."""
        for _ in range(_MOST_PAUSES):
            before = self.waiting
            if before >= expected or self._closed:
                break
            self._expected = expected
            self._changed.wait(_PAUSE_S)
            if self.waiting == before:
                break
        self._expected = 0
