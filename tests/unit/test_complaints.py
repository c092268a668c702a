"""What is wrong is said when it begins, when it changes, now and then, and when it is over."""

import logging

import pytest

from server.tablet.complaints import Complaints

logger = logging.getLogger("test.complaints")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def complaints(clock: Clock) -> Complaints:
    return Complaints(logger, clock_s=clock)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_the_same_is_said_once_and_once_a_minute(
    complaints: Complaints, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(130):
        complaints.complain("disk full", "no room in /logs")
        clock.now_s += 0.5
    assert said(caplog) == [
        ("ERROR", "disk full: no room in /logs"),
        ("ERROR", "disk full: no room in /logs (121 times in 60 s)"),
    ]


def test_another_reason_is_said_at_once(
    complaints: Complaints, caplog: pytest.LogCaptureFixture
) -> None:
    complaints.complain("bucket 1", "disk full")
    complaints.complain("bucket 1", "damaged")
    complaints.complain("bucket 2", "damaged")
    assert [text for _, text in said(caplog)] == [
        "bucket 1: disk full",
        "bucket 1: damaged (2 times in 0 s)",
        "bucket 2: damaged",
    ]
    assert complaints.all() == {"bucket 1": "damaged", "bucket 2": "damaged"}


def test_what_is_over_is_said_once_and_begins_anew(
    complaints: Complaints, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    complaints.over("disk full")
    complaints.complain("disk full", "no room")
    clock.now_s += 42
    complaints.over("disk full")
    complaints.over("disk full")
    complaints.complain("disk full", "no room")
    assert said(caplog) == [
        ("ERROR", "disk full: no room"),
        ("WARNING", "disk full: over, after 42 s"),
        ("ERROR", "disk full: no room"),
    ]
