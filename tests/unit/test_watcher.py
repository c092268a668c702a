"""Whoever asks what is going on is answered soon, also when the cluster is not."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from foundation.errors import Unavailable
from server.page import watcher
from server.page.watcher import Watcher
from tests.support.zookeeper_server import wait_until


class World:
    """A cluster that answers, hangs, or fails, as it is told."""

    def __init__(self) -> None:
        self.connected = True
        self.hangs = False
        self.fails = False
        self.go_on = threading.Event()
        self.looks = 0

    def look(self) -> dict[str, Any]:
        self.looks += 1
        if self.hangs:
            assert self.go_on.wait(180)
        if self.fails:
            raise Unavailable("ZooKeeper is away")
        return {"at_ms": self.looks, "servers": [], "tables": []}

    def connect(self) -> Any:
        return SimpleNamespace(
            address="zk:2181", connected=self.connected, status_of=None, close=lambda: None
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Return a world whose overviews are what it says."""
    there = World()
    monkeypatch.setattr(watcher, "Overview", lambda *_: there)
    yield there
    there.go_on.set()


@contextmanager
def watching(world: World, **settings: float) -> Iterator[Watcher]:
    running = Watcher(world.connect, **{"look_s": 0.0, "wait_s": 0.2, **settings})
    try:
        yield running
    finally:
        world.go_on.set()
        running.close()


def threads() -> int:
    return sum(one.name == "tallybook-page" for one in threading.enumerate())


def test_a_cluster_that_never_answers_is_told_of_and_one_thread_waits_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watching(world) as watched:
        world.hangs = True
        for _ in range(5):
            assert watched.now() == {"error": "the cluster has not answered yet"}
            assert watched.seen() == {"error": "the cluster has not answered yet"}
        assert (world.looks, threads()) == (1, 1)
        monkeypatch.setattr(watcher, "_LATE_S", 0.0)
        assert "has not answered for" in watched.now()["error"]
        assert "has not answered for" in watched.seen()["error"]


def test_what_was_seen_before_is_told_while_a_look_takes_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watching(world) as watched:
        before = watched.now()
        assert before["at_ms"] == 1
        world.hangs = True
        assert watched.now() == before
        monkeypatch.setattr(watcher, "_LATE_S", 0.0)
        assert watched.now()["error"]
        world.go_on.set()
        wait_until(lambda: watched.now().get("at_ms", 0) > 1, "the look has ended")


def test_what_was_seen_long_ago_is_not_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with watching(world) as watched:
        assert watched.now()["at_ms"] == 1
        world.hangs = True
        monkeypatch.setattr(watcher, "_OLD_S", 0.0)
        assert watched.now() == {"error": "the cluster has not answered yet"}


def test_why_a_look_failed_is_told_until_one_succeeds(world: World) -> None:
    with watching(world) as watched:
        world.fails = True
        assert watched.now() == {"error": "ZooKeeper is away"}
        world.hangs = True
        assert watched.now() == {"error": "ZooKeeper is away"}, "also while the next one runs"
        world.fails = False
        world.go_on.set()
        wait_until(lambda: "error" not in watched.now(), "it is there again")


def test_nobody_waits_where_zookeeper_is_known_to_be_away(world: World) -> None:
    with watching(world, wait_s=3600.0) as watched:
        world.connected = False
        wait_until(lambda: "away" in watched.now().get("error", ""), "its absence is known")
        world.hangs = True
        assert watched.now() == {"error": "ZooKeeper at zk:2181 is away"}


def test_a_program_that_asks_once_has_nobody_look_again(world: World) -> None:
    with watching(world) as watched:
        watched.now()
        wait_until(lambda: threads() == 0, "nobody looks any more")
        assert world.looks == 1
        assert watched.now()["at_ms"] == 2, "and whoever comes next has somebody look"
