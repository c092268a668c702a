"""Servers are asked for their status side by side, and nobody waits for one that says nothing."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from foundation.errors import AccessRefused
from server.page.status_requests import StatusRequests
from tests.support.zookeeper_server import wait_until


class Servers:
    """Servers that answer, but for those that say nothing until they are let go."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.go_on = threading.Event()
        self.asked: list[str] = []
        self.now = 100.0

    def ask(self, address: str) -> dict[str, Any]:
        self.asked.append(address)
        if address in self.silent:
            assert self.go_on.wait(180)
        return {"address": address, "times": self.asked.count(address)}

    def clock(self) -> float:
        return self.now


@contextmanager
def asking(servers: Servers, **settings: float) -> Iterator[StatusRequests]:
    requests = StatusRequests(servers.ask, clock=servers.clock, **{"wait_s": 0.1, **settings})
    try:
        yield requests
    finally:
        servers.go_on.set()
        requests.close()


def test_all_are_asked_before_any_has_to_answer() -> None:
    together = threading.Barrier(20)

    def ask(address: str) -> dict[str, Any]:
        together.wait(180)  # Broken, unless all are there.
        return {"address": address}

    names = [f"s{number}" for number in range(20)]
    requests = StatusRequests(ask, wait_s=60)
    assert requests.of(names) == [{"address": name} for name in names]
    requests.close()


def test_one_that_says_nothing_is_told_of_and_asked_once() -> None:
    servers = Servers()
    servers.silent = {"b"}
    with asking(servers) as requests:
        for waited in (0, 3, 6):
            servers.now = 100.0 + waited
            first, second = requests.of(["a", "b"])
            assert first["address"] == "a"
            assert second == {"address": "b", "error": f"no answer within {waited} s"}
        assert servers.asked.count("b") == 1


def test_the_last_answer_stands_in_for_one_that_is_late_while_it_is_young() -> None:
    servers = Servers()
    with asking(servers, kept_s=15.0) as requests:
        [before] = requests.of(["a"])
        servers.silent = {"a"}
        servers.now += 14
        assert requests.of(["a"]) == [before]
        servers.now += 2
        [after] = requests.of(["a"])
        assert after["error"] == "no answer within 2 s"
        servers.go_on.set()
        wait_until(lambda: requests.of(["a"])[0].get("times") == 2, "it has answered")


def test_what_all_of_them_refuse_is_raised() -> None:
    def ask(address: str) -> dict[str, Any]:
        raise AccessRefused(f"{address} wants a token")

    requests = StatusRequests(ask, wait_s=60)
    for _ in range(2):
        with pytest.raises(AccessRefused):
            requests.of(["a"])
    requests.close()
