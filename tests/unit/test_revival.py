"""Processes of a local cluster that have ended by themselves are started again."""

from dataclasses import dataclass

from foundation.errors import ServerNotStarted
from server.launch.revival import Revival


@dataclass
class Process:
    """A process whose end is told, and a clock."""

    ended: str | None = None
    refuses: bool = False
    starts: int = 0
    now: float = 0.0

    def start(self) -> None:
        self.starts += 1
        if self.refuses:
            raise ServerNotStarted("no memory")
        self.ended = None

    def clock(self) -> float:
        return self.now


def test_what_has_ended_is_started_again_at_once() -> None:
    process = Process()
    revival = Revival("server 0", process, process.clock)
    assert revival.look() == []
    process.ended = "it was killed (SIGKILL)"
    assert revival.look() == [
        "server 0 has ended: it was killed (SIGKILL); starting it again",
        "server 0 is started again",
    ]
    assert (process.starts, revival.look()) == (1, [])


def test_what_ends_again_and_again_is_started_after_longer_and_longer_pauses_for_ever() -> None:
    process = Process()
    revival = Revival("server 0", process, process.clock)
    pauses = []
    for _ in range(9):
        process.ended, began, starts = "it broke", process.now, process.starts
        assert revival.look()[0].startswith("server 0 has ended: it broke; starting it again")
        while process.starts == starts:
            process.now += 0.5
            assert process.now - began <= 60, "it was given up"
            revival.look()
        pauses.append(process.now - began)
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30, 30]


def test_what_has_run_for_long_is_started_at_once_again() -> None:
    process = Process()
    revival = Revival("server 0", process, process.clock)
    for _ in range(3):
        process.ended = "it broke"
        assert revival.look()[-1] == "server 0 is started again"
        process.now += 60


def test_what_cannot_be_started_is_tried_again() -> None:
    process = Process(ended="it broke", refuses=True)
    revival = Revival("ZooKeeper", process, process.clock)
    assert revival.look() == [
        "ZooKeeper has ended: it broke; starting it again",
        "ZooKeeper did not start: no memory; starting it again in 1 s",
    ]
    process.now, process.refuses = 0.9, False
    assert revival.look() == []
    process.now = 1.0
    assert revival.look() == ["ZooKeeper is started again"]
