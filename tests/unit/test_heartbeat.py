"""Until when a session is certainly alive, by a clock and a ZooKeeper that do as they are told."""

import time
from collections.abc import Callable

import pytest

from foundation.errors import SessionLost, Unavailable
from locks.cluster.heartbeat import Heartbeat, boot_s

TIMEOUT_S = 10.0
HOUR_S = 3600.0


class Scripted:
    """A session whose answers take time, or do not come."""

    session_timeout_s = TIMEOUT_S

    def __init__(self) -> None:
        self.time_s = 100.0
        self.ahead_s = 0.0
        self.before_answer: Callable[[], None] = lambda: None

    def clock_s(self) -> float:
        return self.time_s

    def sync(self) -> None:
        self.before_answer()

    def now_ms(self) -> int:
        return int((self.time_s + self.ahead_s) * 1000)


@pytest.fixture
def session() -> Scripted:
    return Scripted()


@pytest.fixture
def heartbeat(session: Scripted) -> Heartbeat:
    return Heartbeat(session, clock_s=session.clock_s)


def test_nothing_is_certain_before_the_first_answer(heartbeat: Heartbeat) -> None:
    assert not heartbeat.alive


def test_an_answer_is_good_for_less_than_a_session_lasts(
    heartbeat: Heartbeat, session: Scripted
) -> None:
    heartbeat.beat()
    session.time_s += 0.5 * TIMEOUT_S
    assert heartbeat.alive
    session.time_s += 0.4 * TIMEOUT_S
    assert not heartbeat.alive


def test_what_counts_is_when_the_question_was_sent_not_when_the_answer_came(
    heartbeat: Heartbeat, session: Scripted
) -> None:
    """A process that was paused in between wakes up to an answer that is as old as its pause."""

    def pause() -> None:
        session.time_s += TIMEOUT_S

    session.before_answer = pause
    heartbeat.beat()
    assert not heartbeat.alive


def test_a_question_without_an_answer_takes_nothing_away_and_adds_nothing(
    heartbeat: Heartbeat, session: Scripted
) -> None:
    heartbeat.beat()

    def no_answer() -> None:
        raise Unavailable("no answer")

    session.before_answer = no_answer
    session.time_s += 0.3 * TIMEOUT_S
    with pytest.raises(Unavailable):
        heartbeat.beat()
    assert heartbeat.alive
    session.time_s += 0.5 * TIMEOUT_S
    assert not heartbeat.alive


def test_once_stopped_it_is_not_revived_by_an_answer_that_was_on_its_way(
    heartbeat: Heartbeat, session: Scripted
) -> None:
    heartbeat.beat()
    session.before_answer = heartbeat.stop
    heartbeat.beat()
    assert not heartbeat.alive


def test_a_lost_session_ends_it(session: Scripted) -> None:
    session.session_timeout_s = 0.05
    heartbeat = Heartbeat(session, clock_s=session.clock_s).start()
    assert heartbeat.alive

    def lost() -> None:
        raise SessionLost("gone")

    session.before_answer = lost
    heartbeat._thread.join(180)
    assert not heartbeat._thread.is_alive()
    assert not heartbeat.alive


def test_the_time_is_zookeepers_whatever_this_machine_believes(
    heartbeat: Heartbeat, session: Scripted
) -> None:
    session.ahead_s = -HOUR_S  # This machine's clock is an hour ahead.
    heartbeat.beat()
    session.time_s += 5
    assert heartbeat.now_ms() == session.now_ms()


def test_a_clock_of_zookeepers_that_was_set_is_followed(
    heartbeat: Heartbeat, session: Scripted
) -> None:
    heartbeat.beat()
    session.ahead_s = HOUR_S
    session.time_s += 61
    heartbeat.beat()
    assert heartbeat.now_ms() == session.now_ms()


def test_time_counts_while_the_machine_is_suspended() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= boot_s() <= time.clock_gettime(time.CLOCK_BOOTTIME)
