"""Whether segments reach the log store, by what becomes of them."""

import pytest

from foundation.errors import AlreadyExists, MissingObject, StorageUnavailable, UnknownOutcome
from server.tablet.store_health import StoreHealth, WatchedStorage
from tests.support.snapshot_world import MemoryStorage


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> StoreHealth:
    return StoreHealth(clock_s=clock)


def fail(health: StoreHealth, error: Exception) -> None:
    with pytest.raises(type(error)), health.creating():
        raise error


@pytest.mark.parametrize("error", [StorageUnavailable("away"), UnknownOutcome("who knows")])
def test_it_fails_from_the_first_create_that_failed_until_one_is_answered(
    clock: Clock, health: StoreHealth, error: Exception
) -> None:
    clock.now_s += 50  # Nobody wanted anything.
    assert health.failing_s() == 0
    fail(health, error)
    clock.now_s += 3
    fail(health, error)
    clock.now_s += 2
    assert health.failing_s() == 5
    fail(health, AlreadyExists("taken"))  # Which is an answer.
    assert health.failing_s() == 0
    assert health.answered_since(104)
    assert not health.answered_since(155)


def test_a_create_that_is_not_answered_counts_as_long_as_it_waits(
    clock: Clock, health: StoreHealth
) -> None:
    with health.creating():
        clock.now_s += 4
        assert health.failing_s() == 4
        with health.creating():
            clock.now_s += 1
        assert health.failing_s() == 0, "another one was answered meanwhile"
        clock.now_s += 2
        assert health.failing_s() == 2
    clock.now_s += 2
    assert health.failing_s() == 0


def test_only_segments_count(clock: Clock, health: StoreHealth) -> None:
    class Stuck(MemoryStorage):
        def create(self, name: str, data: bytes) -> None:
            clock.now_s += 10
            seen.append(health.failing_s())
            super().create(name, data)

    seen: list[float] = []
    storage = WatchedStorage(Stuck(), health)
    storage.create("large.data", b"")
    storage.create("00000000000000000000.seg", b"")
    assert seen == [0, 10]


def test_it_waits_while_somebody_does_and_nobody_is_answered(
    clock: Clock, health: StoreHealth
) -> None:
    storage = WatchedStorage(MemoryStorage(), health).child("below")
    with health.reading():
        clock.now_s += 2
        assert health.waiting_s() == 2
        with pytest.raises(MissingObject):
            storage.read("nothing")  # Which is an answer.
        assert health.waiting_s() == 0
        clock.now_s += 1
        with health.creating():
            assert health.waiting_s() == 1
        assert health.waiting_s() == 0
    with pytest.raises(StorageUnavailable), health.reading():
        raise StorageUnavailable("away")
    clock.now_s += 1
    assert health.waiting_s() == 0, "nobody waits: so the next one tries"


def test_a_store_that_answers_reads_is_slow_and_not_out_of_reach(
    clock: Clock, health: StoreHealth
) -> None:
    """Others open buckets, and it has much to do. One that refuses to create is out of reach."""
    with health.creating():
        clock.now_s += 4
        assert health.failing_s() == 4
        with health.reading():
            pass
        assert health.failing_s() == 0
    fail(health, StorageUnavailable("read-only"))
    clock.now_s += 3
    with health.reading():
        pass
    assert health.failing_s() == 3
