"""The hosts of a bed are apart from each other, are cut as told, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.multihost.hosts import Host, Lab, Program, needs_namespaces
from tests.multihost.network import Network
from tests.support.processes import is_running
from tests.support.zookeeper_server import wait_until

# Says what it gets, and sends it back.
_MAILBOX = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mailbox:
    mailbox.bind(("0.0.0.0", 5000))
    print("open", flush=True)
    while True:
        text, sender = mailbox.recvfrom(100)
        print(text.decode(), flush=True)
        mailbox.sendto(text, sender)
"""
_SEND = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    sender.sendto(sys.argv[2].encode(), (sys.argv[1], 5000))
    if sys.argv[3:]:
        sender.settimeout(120)
        sender.recv(100)
"""
_letters = count()


class Ends:
    """Two hosts, and what comes from one to the other."""

    def __init__(self, lab: Lab) -> None:
        self.network = Network(lab)
        self.one, self.other = lab.hosts["one"], lab.hosts["other"]
        self._boxes: dict[Host, Program] = {}
        for host in (self.one, self.other):
            box = host.program("mailbox", [sys.executable, "-S", "-E", "-c", _MAILBOX])
            self._boxes[host] = box
            wait_until(lambda box=box: box.last_words() == "open", "it listens")  # type: ignore[misc]

    def send(self, source: Host, target: Host, *, wait: bool = False) -> str:
        """Send a letter; `wait` until it is back."""
        letter = f"letter {next(_letters)}"
        python = (sys.executable, "-S", "-E", "-c", _SEND)
        source.run(*python, target.address, letter, *(["wait"] if wait else []))
        return letter

    def check_arrives(self, source: Host, target: Host) -> None:
        """Send letters until one of them is there: on a busy machine the kernel drops some."""
        letters: set[str] = set()

        def has_come() -> bool:
            letters.add(self.send(source, target))
            return bool(letters & {*self.got(target)})

        wait_until(has_come, f"{target.name} has a letter", every_s=0.1)

    def got(self, host: Host) -> list[str]:
        """Return what has come to a host."""
        return self._boxes[host].last_words(1000).splitlines()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    needs_namespaces()
    made = Lab(tmp_path_factory.mktemp("lab") / "lab", ["one", "other"])
    yield made
    made.close()


@pytest.fixture(scope="module")
def ends(lab: Lab) -> Ends:
    return Ends(lab)


def test_what_is_cut_one_way_comes_the_other_way(ends: Ends) -> None:
    with ends.network.lost(ends.one, ends.other):
        lost = ends.send(ends.one, ends.other)
        ends.check_arrives(ends.other, ends.one)
    ends.check_arrives(ends.one, ends.other)
    assert lost not in ends.got(ends.other)


def test_what_two_faults_have_cut_is_whole_after_both(ends: Ends) -> None:
    with ends.network.apart([ends.one], [ends.other]):
        with ends.network.lost(ends.other, ends.one):
            lost = [ends.send(ends.other, ends.one)]
        lost.append(ends.send(ends.other, ends.one))
    ends.check_arrives(ends.other, ends.one)
    assert not {*lost} & {*ends.got(ends.one)}


def test_nothing_comes_through_a_cable_that_is_pulled(ends: Ends) -> None:
    with ends.network.pulled(ends.one):
        lost = ends.send(ends.other, ends.one)
    ends.check_arrives(ends.other, ends.one)
    assert lost not in ends.got(ends.one)


def test_a_long_cable_takes_its_time(ends: Ends) -> None:
    ends.check_arrives(ends.one, ends.other)  # They know each other's hardware address now.
    with ends.network.long_cable(ends.one, round_trip_ms=200):
        began = time.monotonic()
        ends.send(ends.one, ends.other, wait=True)
        assert time.monotonic() - began >= 0.2
    ends.check_arrives(ends.one, ends.other)


def test_a_long_cable_loses_what_it_is_told_to_lose(ends: Ends) -> None:
    with ends.network.long_cable(ends.one, round_trip_ms=0, loss_percent=100):
        lost = ends.send(ends.other, ends.one)
    ends.check_arrives(ends.other, ends.one)
    assert lost not in ends.got(ends.one)


def test_a_host_that_is_paused_gets_its_letters_when_it_wakes_up(ends: Ends) -> None:
    ends.one.pause()
    [pid] = ends.one.processes()
    wait_until(lambda: _state(pid) == "T", "it sleeps")
    letter = ends.send(ends.other, ends.one)
    assert letter not in ends.got(ends.one)
    ends.one.resume()
    wait_until(lambda: letter in ends.got(ends.one), "it is awake")


def test_hosts_have_names_and_disks_of_their_own(lab: Lab) -> None:
    for host in lab.hosts.values():
        host.run("sh", "-c", f"hostname > {host.inside('name')}")
    for host in lab.hosts.values():
        assert (host.disk / "name").read_text() == f"{host.name}\n"


@pytest.mark.parametrize(
    ("kill", "number"), [(os.kill, signal.SIGKILL), (os.killpg, signal.SIGTERM)]
)
def test_nothing_is_left_of_a_lab_whose_maker_was_killed_not_even_what_sleeps(
    kill: Callable[[int, int], None], number: int, tmp_path: Path
) -> None:
    needs_namespaces()
    command = [sys.executable, "-c", _MAKER, str(tmp_path / "lab")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as maker:
        assert maker.stdout is not None
        pids = [int(pid) for pid in maker.stdout.readline().split()]
        assert len(pids) == 5  # Keeper, holder, and a program with its two children.
        assert all(map(is_running, pids))
        kill(maker.pid, number)
    wait_until(lambda: not any(map(is_running, pids)), "all of them have ended")


_MAKER = """
import sys, time
from pathlib import Path
from tests.multihost.hosts import Lab
lab = Lab(Path(sys.argv[1]), ["one"])
host = lab.hosts["one"]
host.program("family", ["sh", "-c", "sleep 1000 & sleep 1000 & wait"])
while len(host.processes()) < 3:
    time.sleep(0.01)
host.pause()
print(lab.pid, *lab.processes(), flush=True)
time.sleep(1000)
"""


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
