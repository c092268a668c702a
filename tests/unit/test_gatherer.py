"""Gathering: calls that come while one is under way go together in the next."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from foundation import gatherer
from foundation.gatherer import Gatherer, _Group
from tests.support.zookeeper_server import wait_until

DEADLINE_S = 30.0


def soon() -> float:
    return time.monotonic() + DEADLINE_S


class Calls:
    """Calls that a test lets go one by one; each answers ten times what it was asked."""

    def __init__(self) -> None:
        self.made: list[list[int]] = []
        self.threads: list[threading.Thread] = []
        self._begun = threading.Semaphore(0)
        self._may_end = threading.Semaphore(0)
        self.failing: Exception | None = None

    def __call__(self, items: Sequence[int]) -> list[int]:
        self.made.append(list(items))
        self.threads.append(threading.current_thread())
        self._begun.release()
        assert self._may_end.acquire(timeout=DEADLINE_S)
        if self.failing is not None:
            raise self.failing
        return [10 * item for item in items]

    def wait_for_next(self) -> None:
        assert self._begun.acquire(timeout=DEADLINE_S)

    def let_go(self, count: int = 1) -> None:
        self._may_end.release(count)


class Scene:
    """A gatherer, its calls, and threads that ask."""

    def __init__(self, **settings: object) -> None:
        self.calls = Calls()
        self.gatherer: Gatherer[int, int] = Gatherer(
            self.calls,
            name="test-gatherer",
            **{"most": 100, "linger_s": 0.2, **settings},  # type: ignore[arg-type]
        )
        self._pool = ThreadPoolExecutor(48)

    def ask(self, item: int, deadline: float | None = None) -> "Future[int]":
        return self._pool.submit(self.gatherer.ask, item, deadline or soon())

    def gathered(self, *items: int) -> "list[Future[int]]":
        """Ask for all of these while a call is under way, one after the other."""
        futures = []
        for item in items:
            futures.append(self.ask(item))
            wait_until(lambda: self.gatherer.waiting >= len(futures), "waits")
        return futures

    def end(self) -> None:
        self.calls.let_go(1000)
        self._pool.shutdown()
        self.gatherer.close(ValueError("closed"))


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.end()


def test_where_nothing_is_under_way_the_call_is_made_at_once_and_by_who_asks(scene: Scene) -> None:
    scene.calls.let_go(3)
    assert [scene.gatherer.ask(item, soon()) for item in (1, 2, 3)] == [10, 20, 30]
    assert scene.calls.made == [[1], [2], [3]]
    assert set(scene.calls.threads) == {threading.current_thread()}


def test_what_comes_meanwhile_goes_together_in_the_next_call_and_in_its_order(
    scene: Scene,
) -> None:
    first = scene.ask(1)
    scene.calls.wait_for_next()
    others = scene.gathered(5, 3, 4)
    scene.calls.let_go()
    assert first.result(DEADLINE_S) == 10
    scene.calls.wait_for_next()
    last = scene.gathered(6)
    scene.calls.let_go(2)
    assert [one.result(DEADLINE_S) for one in [*others, *last]] == [50, 30, 40, 60]
    assert scene.calls.made == [[1], [5, 3, 4], [6]]


def test_after_a_rush_the_next_call_is_made_by_who_asks_again(scene: Scene) -> None:
    first = scene.ask(1)
    scene.calls.wait_for_next()
    second = scene.gathered(2)[0]
    scene.calls.let_go(3)
    assert (first.result(DEADLINE_S), second.result(DEADLINE_S)) == (10, 20)
    wait_until(lambda: not scene.gatherer._under_way, "the end of the rush")
    assert scene.gatherer.ask(3, soon()) == 30
    assert scene.calls.threads[-1] is threading.current_thread()


def test_a_call_takes_no_more_than_it_may(scene: Scene) -> None:
    small = Scene(most=5, weigh=lambda item: item)
    first = small.ask(1)
    small.calls.wait_for_next()
    others = small.gathered(2, 3, 1, 9, 4)
    small.calls.let_go(10)
    assert first.result(DEADLINE_S) == 10
    assert [one.result(DEADLINE_S) for one in others] == [20, 30, 10, 90, 40]
    assert small.calls.made == [[1], [2, 3], [1], [9], [4]]
    small.end()


def test_an_error_reaches_all_who_went_together_and_nobody_else(scene: Scene) -> None:
    first = scene.ask(1)
    scene.calls.wait_for_next()
    others = scene.gathered(2, 3)
    scene.calls.let_go()
    assert first.result(DEADLINE_S) == 10
    scene.calls.wait_for_next()
    scene.calls.failing = ValueError("no")
    scene.calls.let_go()
    for one in others:
        with pytest.raises(ValueError, match="no"):
            one.result(DEADLINE_S)
    scene.calls.failing = None
    scene.calls.let_go()
    assert scene.gatherer.ask(4, soon()) == 40


def test_an_error_of_a_call_that_was_alone_is_its_own(scene: Scene) -> None:
    scene.calls.failing = ValueError("no")
    scene.calls.let_go(1)
    with pytest.raises(ValueError, match="no"):
        scene.gatherer.ask(1, soon())
    scene.calls.failing = None
    scene.calls.let_go(1)
    assert scene.gatherer.ask(2, soon()) == 20


def test_a_call_that_answers_too_few_is_an_error_for_all() -> None:
    scene = Scene()
    first = scene.ask(1)
    scene.calls.wait_for_next()
    others = scene.gathered(2, 3)
    scene.gatherer._call = lambda _: [1]
    scene.calls.let_go()
    assert first.result(DEADLINE_S) == 10
    for one in others:
        with pytest.raises(ValueError, match="shorter"):
            one.result(DEADLINE_S)
    scene.end()


def test_who_waits_past_its_deadline_is_told_so_and_not_called_for(scene: Scene) -> None:
    first = scene.ask(1)
    scene.calls.wait_for_next()
    late = scene.ask(2, time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        late.result(DEADLINE_S)
    other = scene.gathered(3)[0]
    scene.calls.let_go(2)
    assert (first.result(DEADLINE_S), other.result(DEADLINE_S)) == (10, 30)
    assert scene.calls.made == [[1], [3]]


def test_all_of_several_rows_get_their_own_results(scene: Scene) -> None:
    first = scene.ask(0)
    scene.calls.wait_for_next()
    others = scene.gathered(*range(1, 41))
    scene.calls.let_go(2)
    assert first.result(DEADLINE_S) == 0
    assert [one.result(DEADLINE_S) for one in others] == [10 * item for item in range(1, 41)]
    assert scene.calls.made == [[0], [*range(1, 41)]]


def test_who_goes_during_the_call_does_not_hold_up_those_in_its_row(scene: Scene) -> None:
    first = scene.ask(1)
    scene.calls.wait_for_next()
    before = scene.gathered(2)[0]
    late = scene.ask(3, time.monotonic() + 0.2)
    wait_until(lambda: scene.gatherer.waiting == 2, "both wait")
    after = scene.ask(4)
    wait_until(lambda: scene.gatherer.waiting == 3, "all wait")
    scene.calls.let_go()
    assert first.result(DEADLINE_S) == 10
    scene.calls.wait_for_next()
    with pytest.raises(TimeoutError):
        late.result(DEADLINE_S)
    scene.calls.let_go()
    assert (before.result(DEADLINE_S), after.result(DEADLINE_S)) == (20, 40)
    assert scene.calls.made == [[1], [2, 3, 4]]


def test_who_is_interrupted_when_it_is_its_turn_still_wakes_the_next() -> None:
    row: _Group[int, int] = _Group()
    turn = row._turn

    class Interrupted:
        release = turn.release

        def acquire(self, timeout: float) -> bool:
            assert turn.acquire(timeout=timeout)
            raise KeyboardInterrupt

    row.end()
    row._turn = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        row.wait(soon())
    row._turn = turn
    assert row.wait(soon())
    assert turn.acquire(blocking=False)


def test_in_a_rush_a_call_begins_as_soon_as_all_who_were_answered_are_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gatherer, "_PAUSE_S", 10 * DEADLINE_S)
    first = scene.ask(1)
    scene.calls.wait_for_next()
    others = scene.gathered(2, 3)
    scene.calls.let_go(2)
    assert [one.result(DEADLINE_S) for one in [first, *others]] == [10, 20, 30]
    scene.calls.wait_for_next()
    again = [scene.ask(4), scene.ask(5)]
    scene.calls.wait_for_next()
    scene.calls.let_go(10)
    assert [one.result(DEADLINE_S) for one in again] == [40, 50]


def test_where_all_who_waited_have_gone_nothing_is_called(scene: Scene) -> None:
    first = scene.ask(1)
    scene.calls.wait_for_next()
    with pytest.raises(TimeoutError):
        scene.ask(2, time.monotonic() + 0.05).result(DEADLINE_S)
    scene.calls.let_go()
    assert first.result(DEADLINE_S) == 10
    scene.calls.let_go()
    assert scene.gatherer.ask(3, soon()) == 30
    assert scene.calls.made == [[1], [3]]


def test_closing_wakes_who_waits_with_the_error_and_refuses_who_comes(scene: Scene) -> None:
    first = scene.ask(1)
    scene.calls.wait_for_next()
    others = scene.gathered(2, 3)
    scene.gatherer.close(ConnectionError("closed"))
    for one in others:
        with pytest.raises(ConnectionError, match="closed"):
            one.result(DEADLINE_S)
    with pytest.raises(ConnectionError, match="closed"):
        scene.gatherer.ask(4, soon())
    with pytest.raises(ConnectionError, match="closed"):
        scene.gatherer.submit(4, lambda *_: None)
    scene.calls.let_go()
    assert first.result(DEADLINE_S) == 10
    assert scene.calls.made == [[1]]


def test_who_does_not_wait_is_told_by_another_thread(scene: Scene) -> None:
    told: list[tuple[int | None, Exception | None, str]] = []
    done = threading.Semaphore(0)

    def tell(result: int | None, error: Exception | None, /) -> None:
        told.append((result, error, threading.current_thread().name))
        done.release()

    scene.gatherer.submit(1, tell)
    scene.calls.wait_for_next()
    scene.gatherer.submit(2, tell)
    waiting = scene.ask(3)
    wait_until(lambda: scene.gatherer.waiting == 2, "both wait")
    scene.calls.let_go(2)
    for _ in range(2):
        assert done.acquire(timeout=DEADLINE_S)
    assert waiting.result(DEADLINE_S) == 30
    assert told == [(10, None, "test-gatherer"), (20, None, "test-gatherer")]
    assert scene.calls.made == [[1], [2, 3]]


def test_the_thread_ends_when_there_is_nothing_to_do_and_comes_again(scene: Scene) -> None:
    for item in (1, 2):
        done = threading.Event()
        scene.calls.let_go()
        scene.gatherer.submit(item, lambda *_, done=done: done.set())
        assert done.wait(DEADLINE_S)
        wait_until(lambda: scene.gatherer._thread is None, "the thread has ended")
    assert scene.calls.made == [[1], [2]]


def test_many_threads_get_their_own_results_and_far_fewer_calls_are_made() -> None:
    sizes: list[int] = []
    gathered = threading.Event()

    def call(items: Sequence[int]) -> list[int]:
        sizes.append(len(items))
        gathered.wait(0.001)  # Something to gather behind.
        return [10 * item for item in items]

    asked: Gatherer[int, int] = Gatherer(call, name="test-gatherer", most=8)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda item: asked.ask(item, soon()), range(500)))
    asked.close(ValueError("closed"))
    assert answers == [10 * item for item in range(500)]
    assert sum(sizes) == 500
    assert max(sizes) <= 8
    assert len(sizes) < 250
