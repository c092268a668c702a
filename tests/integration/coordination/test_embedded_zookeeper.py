"""The embedded server: its start, its end, and what it says where it cannot run."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from foundation.errors import ServerNotStarted
from locks.store.base import Create
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from tests.support.zookeeper_server import needs_java, session, wait_until


def is_alive(pid: int) -> bool:
    """Whether there is a process of this id that is not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_server_restarts_with_its_data_on_the_same_address(own_server: EmbeddedZooKeeper) -> None:
    address = own_server.address
    for number, end in enumerate([own_server.stop, own_server.kill]):
        with session(address) as store:
            store.transact([Create(f"/{number}", b"kept")])
        pid = own_server.pid
        end()
        assert not is_alive(pid)
        own_server.start()
        assert own_server.address == address
        with session(address) as store:
            node = store.read(f"/{number}")
            assert node is not None
            assert node.data == b"kept"
    with pytest.raises(ServerNotStarted, match="runs already"):
        own_server.start()


def test_a_server_has_no_address_before_its_first_start_and_may_be_stopped_twice(
    tmp_path: Path,
) -> None:
    server = EmbeddedZooKeeper(tmp_path)
    with pytest.raises(ServerNotStarted, match="no address before its first start"):
        _ = server.address
    server.stop()
    server.kill()


def test_a_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    needs_java()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerNotStarted, match=f"somebody else listens on 127.0.0.1:{port}"):
            EmbeddedZooKeeper(tmp_path, port=port).start()


@pytest.mark.parametrize("how", ["no java on the path", "a wrong JAVA_HOME"])
def test_without_java_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    reason = "there is none on the PATH"
    if how == "a wrong JAVA_HOME":
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        reason = f"JAVA_HOME is {tmp_path}, where there is no bin/java"
    with pytest.raises(ServerNotStarted) as missing:
        EmbeddedZooKeeper(tmp_path / "data").start()
    assert f"needs Java 17 or newer, and {reason}: install it" in str(missing.value)


def test_a_java_that_does_not_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("not a program")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ServerNotStarted, match=f"JAVA_HOME is {tmp_path}, whose bin/java is no"):
        EmbeddedZooKeeper(tmp_path / "data").start()
    java.chmod(0o755)
    with pytest.raises(ServerNotStarted, match=f"cannot run .*, the Java of JAVA_HOME, {java};"):
        EmbeddedZooKeeper(tmp_path / "data").start()
    java.write_text("#!/bin/sh\necho a broken Java >&2\nexit 1\n")
    with pytest.raises(ServerNotStarted, match=f"of JAVA_HOME, {java}; see .*\n?a broken Java"):
        EmbeddedZooKeeper(tmp_path / "data").start()


def test_a_server_that_has_ended_by_itself_is_started_again_where_it_was(tmp_path: Path) -> None:
    needs_java()
    with EmbeddedZooKeeper(tmp_path) as server:
        address = server.address
        assert server.ended is None
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: server.ended is not None, "it has ended")
        assert server.ended == "it was killed (SIGKILL)"
        assert server.start().address == address
        assert server.ended is None


STARTER = """
import sys
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
server = EmbeddedZooKeeper(sys.argv[1]).start()
print(server.pid, server._process._guardian.pid, flush=True)
sys.stdin.read()
"""


def test_no_process_is_left_behind_when_the_starter_is_killed(tmp_path: Path) -> None:
    needs_java()
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as starter:
        assert starter.stdout is not None
        pids = [int(pid) for pid in starter.stdout.readline().split()]
        assert [is_alive(pid) for pid in pids] == [True, True]
        starter.kill()
        starter.wait()
        wait_until(lambda: not any(map(is_alive, pids)), "server and guardian to end")
