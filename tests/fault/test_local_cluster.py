"""The local cluster: restarted on its directory, its parent killed, and told wrong things."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from foundation.errors import AccessDenied, ServerNotStarted
from server.client.cluster import connect
from server.launch.local_cluster import LocalCluster
from tests.fault.cluster_load import (
    BUCKETS,
    REPOSITORY,
    SCHEMA,
    Batch,
    Ledger,
    check_exact,
    client_of,
    local_cluster,
)
from tests.support.zookeeper_server import needs_java, wait_until

_PARENT = """
import json, sys, threading
from server.launch.local_cluster import LocalCluster

with LocalCluster(sys.argv[1], servers=2, session_timeout_s=2) as cluster:
    pids = [cluster.zookeeper.pid, *(server.pid for server in cluster.servers)]
    print(json.dumps({"pids": pids, "address": cluster.address}), flush=True)
    threading.Event().wait()
"""


def _runs(pid: int) -> bool:
    """Whether the process is there and not only waiting for its parent to take note of its end."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_a_cluster_started_again_on_its_directory_has_its_data_and_addresses(
    tmp_path: Path,
) -> None:
    ledger, addresses = Ledger(), []
    for number in range(2):
        with local_cluster(tmp_path) as cluster, client_of(cluster) as client:
            addresses.append([cluster.address, *(server.address for server in cluster.servers)])
            if number == 0:
                client.create_table("sums", SCHEMA, buckets=BUCKETS, column_locks=False)
            table = client.table("sums")
            check_exact(table, ledger)
            batch = Batch.of(1, number, 0)
            batch.send(table)
            ledger.acknowledged.append(batch)
            check_exact(table, ledger)
            pids = [cluster.zookeeper.pid, *(server.pid for server in cluster.servers)]
        assert not any(map(_runs, pids))
    assert addresses[0] == addresses[1]


def test_nothing_is_left_behind_by_a_parent_that_was_killed_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    needs_java()
    ledger = Ledger()
    for number in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", _PARENT, str(tmp_path)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        ) as parent:
            try:
                assert parent.stdout is not None
                told = json.loads(parent.stdout.readline())
                assert all(map(_runs, told["pids"]))
                _write_and_check(told["address"], number, ledger)
            finally:
                parent.kill()
        wait_until(lambda told=told: not any(map(_runs, told["pids"])), "all have ended")  # type: ignore[misc]


def _write_and_check(address: str, number: int, ledger: Ledger) -> None:
    with connect(address) as client:
        if number == 0:
            client.create_table("sums", SCHEMA, buckets=BUCKETS, column_locks=False)
        table = client.table("sums")
        batch = Batch.of(2, number, 0)
        batch.send(table)
        ledger.acknowledged.append(batch)
        check_exact(table, ledger)


def test_logs_are_in_the_directory_and_a_server_whose_port_was_taken_gets_another(
    tmp_path: Path,
) -> None:
    with local_cluster(tmp_path, servers=1) as cluster:
        [server] = cluster.servers
        assert cluster.zookeeper.log_path.is_relative_to(tmp_path)
        assert server.log_path.is_relative_to(tmp_path)
        lines = [json.loads(line) for line in server.log_path.read_text().splitlines()]
        assert any(f"on {server.address}" in line["message"] for line in lines)
        before = len(lines)
        server.kill()
        server.start()
        cluster.wait_until_joined()
        assert len(server.log_path.read_text().splitlines()) > before, "a restart appends"

        assert server.address is not None
        host, _, port = server.address.rpartition(":")
        server.stop()
        with closing(socket.create_server((host, int(port)))):
            server.start()
            cluster.wait_until_joined()
            assert server.address != f"{host}:{port}"


def test_a_server_that_cannot_write_logs_says_so_and_nothing_is_left_running(
    tmp_path: Path,
) -> None:
    needs_java()
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a directory should be")
    cluster = LocalCluster(tmp_path / "cluster", servers=2, logs=str(blocked / "logs"))
    with pytest.raises(ServerNotStarted, match=r"server [01] did not start") as caught:
        cluster.start()
    assert str(blocked) in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert not any(server.alive for server in cluster.servers)
    assert cluster.zookeeper.pid == 0


def test_a_server_that_died_of_an_error_says_of_which(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerNotStarted) as caught,
        local_cluster(tmp_path, servers=1, options=["--log-level", "nonsense"]),
    ):
        pass
    [line] = str(caught.value).splitlines()
    assert line.endswith("server-0.log: ValueError: Unknown level: 'NONSENSE'")


def test_a_cluster_whose_logs_are_elsewhere_says_where(tmp_path: Path) -> None:
    with local_cluster(tmp_path, servers=1):
        pass
    elsewhere = tmp_path / "elsewhere"
    with (
        pytest.raises(ServerNotStarted) as caught,
        local_cluster(tmp_path, servers=1, logs=str(elsewhere)),
    ):
        pass
    message = str(caught.value)
    assert str(tmp_path / "logs") in message
    assert str(elsewhere) in message
    assert "give all servers the same" in message


def test_credentials_in_the_environment_are_those_of_the_servers_and_of_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TALLYBOOK_ZOOKEEPER_CREDENTIALS", "tallybook:secret")
    with local_cluster(tmp_path, servers=1) as cluster:
        with cluster.connect() as client:
            table = client.create_table("sums", SCHEMA, buckets=1, column_locks=False)
            batch = Batch.of(4, 0, 0)
            batch.send(table)
            check_exact(table, Ledger(acknowledged=[batch]))
        with pytest.raises(AccessDenied, match="without credentials"):
            connect(cluster.address)


def test_a_second_server_on_the_views_of_a_running_one_does_not_join(tmp_path: Path) -> None:
    with local_cluster(tmp_path, servers=1) as cluster, client_of(cluster) as client:
        [server] = cluster.servers
        table = client.create_table("sums", SCHEMA, buckets=BUCKETS, column_locks=False)
        views = tmp_path / "views-0"
        places = ("--logs", str(tmp_path / "logs"), "--views", str(views))
        second = subprocess.run(
            [sys.executable, "-m", "server", "--zookeeper", cluster.address, *places],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert second.returncode == 1
        last = second.stderr.splitlines()[-1]
        assert f"did not start: {views} is in use by another server (process {server.pid} " in last
        assert [status["pid"] for status in client.status()] == [server.pid]
        batch = Batch.of(5, 0, 0)
        batch.send(table)

        for _ in range(2):  # However its former self has ended.
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda: not server.alive, "it is gone")
            server.start()
            cluster.wait_until_joined()
        server.stop()
        server.start()
        cluster.wait_until_joined()
        check_exact(table, Ledger(acknowledged=[batch]))


def test_two_clusters_on_one_directory_are_refused(tmp_path: Path) -> None:
    with (
        local_cluster(tmp_path, servers=1) as first,
        client_of(first) as client,
    ):
        table = client.create_table("sums", SCHEMA, buckets=BUCKETS, column_locks=False)
        with pytest.raises(ServerNotStarted), local_cluster(tmp_path, servers=1):
            pass
        assert first.servers[0].alive
        batch = Batch.of(3, 0, 0)
        batch.send(table)
        check_exact(table, Ledger(acknowledged=[batch]))
