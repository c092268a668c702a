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
    with pytest.raises(type(error)), health.asking():
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
    with health.asking():
        clock.now_s += 4
        assert health.failing_s() == 4
        with health.asking():
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


def test_a_store_is_silent_while_somebody_waits_and_nobody_is_answered(
    clock: Clock, health: StoreHealth
) -> None:
    storage = WatchedStorage(MemoryStorage(), StoreHealth(clock_s=clock), health)
    assert not storage.is_silent()
    with health.asking():
        clock.now_s += 0.9
        assert not storage.is_silent()
        clock.now_s += 0.1
        assert storage.child("below").is_silent()
        with pytest.raises(MissingObject):
            storage.read("nothing")  # Which is an answer.
        assert not storage.is_silent()
        clock.now_s += 1
        assert storage.is_silent()
    fail(health, StorageUnavailable("away"))
    clock.now_s += 5
    assert not storage.is_silent(), "nobody waits: so the next one tries"
