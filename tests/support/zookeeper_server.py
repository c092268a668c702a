"""A real ZooKeeper for tests: servers, chroots, sessions."""

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from locks.store.zookeeper import ZooKeeperStore

_numbers = itertools.count()


def needs_java() -> None:
    """Skip the test where there is no Java to run ZooKeeper with."""
    if not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        pytest.skip("ZooKeeper needs Java, and there is none on the PATH or in JAVA_HOME")


@contextmanager
def zookeeper_server(directory: Path) -> Iterator[EmbeddedZooKeeper]:
    """Run a server on 127.0.0.1 and a free port for the duration of the block."""
    needs_java()
    with EmbeddedZooKeeper(directory / "zookeeper") as server:
        yield server


def chroot(server: EmbeddedZooKeeper) -> str:
    """Return an address below which nobody has written yet."""
    return f"{server.address}/test-{next(_numbers)}"


@contextmanager
def session(
    address: str, *, session_timeout_s: float = 5, deadline_s: float = 30
) -> Iterator[ZooKeeperStore]:
    """Keep a session with the server for the duration of the block."""
    store = ZooKeeperStore(address, session_timeout_s=session_timeout_s, deadline_s=deadline_s)
    with closing(store):
        yield store


def wait_until(
    condition: Callable[[], bool], what: str, deadline_s: float = 120.0, *, every_s: float = 0.005
) -> None:
    """Wait for a condition; fail, saying what did not happen, when the deadline passes.

    Deadlines hold on a machine with a load of 60 beside the tests: what hangs is found a minute
    later than it might be, and what is slow fails no test.
    """
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {deadline_s:g} s"
        time.sleep(every_s)
