"""A lock that goes to those who wait in the order in which they came."""

import signal
import threading
import time

import pytest

from merge_engine.bucket.fair_lock import FairLock
from tests.support.zookeeper_server import wait_until


def test_who_has_it_may_take_it_again() -> None:
    lock, taken = FairLock(), threading.Event()

    def take() -> None:
        with lock:
            taken.set()

    with lock, lock:
        thread = threading.Thread(target=take)
        thread.start()
        wait_until(lambda: len(lock._waiting) == 1, "the other waits")
    thread.join(180)
    assert taken.is_set()
    with lock:
        pass


def test_it_goes_round_in_the_order_of_arrival_and_not_back_to_who_was_faster() -> None:
    lock, order = FairLock(), []

    def take(number: int) -> None:
        with lock:
            order.append(number)

    with lock:
        threads = []
        for number in range(5):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            wait_until(lambda: len(lock._waiting) == len(threads), "it waits")
    with lock:  # At once again: all others come first.
        order.append(-1)
    for thread in threads:
        thread.join(180)
    assert order == [0, 1, 2, 3, 4, -1]


def test_only_one_has_it_at_a_time() -> None:
    lock, inside, most = FairLock(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(300):
            with lock:
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert (inside, most) == (0, 1)


def test_who_is_interrupted_while_waiting_is_not_given_it() -> None:
    lock, holding, let_go = FairLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holding.set()
            let_go.wait(180)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    holder = threading.Thread(target=hold)
    holder.start()
    assert holding.wait(180)
    before = signal.signal(signal.SIGALRM, interrupted)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt), lock:
            time.sleep(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    let_go.set()
    holder.join(180)
    with lock:
        pass
