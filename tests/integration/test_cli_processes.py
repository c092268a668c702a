"""Commands that run until they are told to end: real processes, and real signals."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from locks.store.embedded_zookeeper import MAIN_CLASS
from server.client.cluster import connect
from tests.conftest import SUMS
from tests.support.zookeeper_server import wait_until


@contextmanager
def running(
    *words: str, stderr: IO[str] | None = None, **variables: str
) -> Iterator["subprocess.Popen[str]"]:
    """Run a command for the duration of the block."""
    command = [sys.executable, "-m", "tallybook", *words]
    environment = {**os.environ, **variables}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: "subprocess.Popen[str]", beginning: str) -> str:
    """Return the rest of the next line that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip().startswith(beginning):
            return line.strip().removeprefix(beginning).strip()
    raise AssertionError(f"it never said {beginning!r}")


def test_a_local_cluster_goes_on_when_one_of_its_processes_is_killed(tmp_path: Path) -> None:
    with (
        open(tmp_path / "said", "w+") as complaints,
        running("local", str(tmp_path / "data"), stderr=complaints) as local,
    ):
        address = said(local, "in a shell      export TALLYBOOK_ZOOKEEPER=")
        with connect(address) as cluster:
            table = cluster.create_table("t", SUMS, buckets=2, column_locks=False)
            table.put({"k": [1, 2], "a": [3, 4], "b": [5, 6]})

            def first_pid() -> int | None:
                return next((one["pid"] for one in cluster.status() if "pid" in one), None)

            killed = first_pid()
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            wait_until(lambda: first_pid() not in (killed, None), "a server is there again")
            table.put({"k": [1], "a": [1], "b": [1]})
            assert table.lookup({"k": [1]}, ["a"]).to_pylist() == [{"k": 1, "a": 4}]
            words = (tmp_path / "said").read_text()
            assert "server 0 has ended: it was killed (SIGKILL)" in words
            assert "server 0 is started again" in words
            os.kill(_zookeeper_of(local.pid), signal.SIGKILL)
            wait_until(
                lambda: "ZooKeeper is started again" in (tmp_path / "said").read_text(),
                "ZooKeeper is there again",
            )
        with connect(address) as cluster:
            found = cluster.table("t").lookup({"k": [1, 2]}, ["a"]).to_pylist()
            assert [row["a"] for row in found] == [4, 4]
        assert local.poll() is None
        local.send_signal(signal.SIGINT)
        said(local, "the cluster has stopped; its data stay")
        assert local.wait(180) == 0


def _zookeeper_of(pid: int) -> int:
    """Return the ZooKeeper of a local cluster: a child of one of its children."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            after = status.read_text().rpartition(")")[2].split()
            found[int(status.parent.name)] = int(after[1])
    guardians = {child for child, parent in found.items() if parent == pid}
    [zookeeper] = [
        child
        for child, parent in found.items()
        if parent in guardians and MAIN_CLASS in Path(f"/proc/{child}/cmdline").read_text()
    ]
    return zookeeper


def test_a_local_cluster_says_how_to_connect_shows_its_page_and_ends_with_ctrl_c(
    tmp_path: Path,
) -> None:
    with running("local", str(tmp_path / "data")) as local:
        address = said(local, "in a shell      export TALLYBOOK_ZOOKEEPER=")
        url = said(local, "status page")
        with connect(address) as cluster:
            assert [server["pid"] for server in cluster.status()]
        with urllib.request.urlopen(f"{url}overview.json", timeout=180) as answer:
            assert json.load(answer)["cluster"] == address
        second = subprocess.run(
            [sys.executable, "-m", "tallybook", "local", str(tmp_path / "data")],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert second.returncode == 1
        assert second.stderr.startswith("tallybook local: another cluster runs in ")
        taken = subprocess.run(
            [
                *(sys.executable, "-m", "tallybook", "local", str(tmp_path / "other")),
                *("--port", address.partition(":")[2]),
            ],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert taken.returncode == 1
        assert f"somebody else listens on {address}: stop that" in taken.stderr
        with running("page", "--port", "0", TALLYBOOK_ZOOKEEPER=address) as page:
            other = said(page, f"the status page of {address} is at").partition(",")[0]
            with urllib.request.urlopen(other, timeout=180) as answer:
                assert b"<html" in answer.read()
            page.send_signal(signal.SIGINT)
            assert page.wait(180) == 0
        local.send_signal(signal.SIGINT)
        said(local, "the cluster has stopped; its data stay")
        assert local.wait(180) == 0
