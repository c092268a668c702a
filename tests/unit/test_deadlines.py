"""A call that gives itself a deadline gives it to all that it calls."""

import threading
import time

import pytest

from foundation.deadlines import deadline_in, remaining, within
from foundation.errors import Unavailable
from locks.store.base import Conflict
from locks.store.memory import MemoryCoordination
from locks.store.retrying import retried


def test_the_earlier_of_two_deadlines_counts() -> None:
    with within(100) as outer:
        assert deadline_in(1000) == outer
        assert deadline_in(1) < outer
        with within(1000) as inner:
            assert inner == outer
        with within(10) as inner:
            assert inner < outer
        assert deadline_in(1000) == outer
    assert deadline_in(1000) > outer


def test_it_is_the_deadline_of_one_thread_only() -> None:
    found = []
    with within(1) as deadline:
        thread = threading.Thread(target=lambda: found.append(deadline_in(1000)))
        thread.start()
        thread.join()
    assert found[0] > deadline


def test_what_is_left_is_never_nothing() -> None:
    with within(-5) as deadline:
        assert remaining(deadline) == 0.001


def test_a_conflict_is_not_tried_again_beyond_the_callers_deadline() -> None:
    store = MemoryCoordination().connect()
    began = time.monotonic()

    def attempt() -> None:
        raise Conflict("/somewhere")

    with within(0.2), pytest.raises(Unavailable):
        retried(store, 30.0, attempt)
    assert time.monotonic() - began < 5
