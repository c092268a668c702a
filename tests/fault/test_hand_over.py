"""Buckets that move between live servers under load, with either side killed at each step.

What is counted is who led what and how, not how long it took.
"""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count

import pytest

from foundation.failpoints import ENVIRONMENT_VARIABLE
from foundation.ids import LeadKey
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster, LocalServer
from tests.fault.cluster_load import (
    BUCKETS,
    DEADLINE_S,
    REPOSITORY,
    SCHEMA,
    Load,
    check_exact,
    leaders,
    local_cluster,
    noted,
    wait_until_led,
)
from tests.fault.moving_writer import KEYS, TOTAL, moving, table_schema
from tests.support.zookeeper_server import wait_until

_HANDED = re.compile(r"handed bucket (\d+/\d+ of table \d+) over")
_numbers = count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with local_cluster(tmp_path_factory.mktemp("cluster"), servers=3) as running:
        yield running


@pytest.fixture
def table(client: Cluster) -> RemoteTable:
    """Create a table that nobody else writes to."""
    return client.create_table(
        f"sums_{next(_numbers)}", SCHEMA, buckets=BUCKETS, column_locks=False
    )


def handed_over(server: LocalServer) -> list[str]:
    """Return the buckets that a server has said it handed over, in all its runs."""
    return _HANDED.findall(server.log_path.read_text())


def keys_at(client: Cluster, table: RemoteTable, server: LocalServer) -> set[str]:
    """Return the buckets of the table that a server leads, as its log calls them."""
    return {
        str(LeadKey(table.table_id, key))
        for key, address in leaders(client, table).items()
        if address == server.address
    }


def wait_for_keys_at(client: Cluster, table: RemoteTable, server: LocalServer) -> set[str]:
    """Return the buckets that a server leads, once there are any."""
    led: set[str] = set()

    def has_some() -> bool:
        led.update(keys_at(client, table, server))
        return bool(led)

    wait_until(has_some, f"server {server.number} leads some", DEADLINE_S)
    return led


def test_a_rolling_restart_hands_every_bucket_over_while_writers_and_readers_go_on(
    cluster: LocalCluster, client: Cluster, table: RemoteTable
) -> None:
    sums = client.create_table("moves", table_schema(), buckets=BUCKETS)
    wrong: list[int] = []
    over = threading.Event()

    def read_on() -> None:
        reader = client.table("moves")
        while not over.is_set():
            found = reader.lookup({"k": list(range(KEYS))}, ["a"], isolation="committed")
            total = sum(value or 0 for value in found.column("a").to_pylist())
            if total not in (0, TOTAL):
                wrong.append(total)

    reading = threading.Thread(target=read_on)
    with (
        noted(1),
        moving(cluster.address, sums.name, "a", 1) as writer,
        Load(client, table.name, 1) as load,
    ):
        assert writer.stdout.readline().strip() == "0"
        reading.start()
        try:
            for server in cluster.servers:
                load.go_on(20)
                wait_until_led(client, table, cluster.servers)
                before = len(handed_over(server))
                led = wait_for_keys_at(client, table, server)
                table.end_offsets()  # It has opened what it leads.
                server.stop()
                assert led <= set(handed_over(server)[before:]), "none was just dropped"
                load.go_on(20, f"without server {server.number}")
                server.start()
                cluster.wait_until_joined()
            batch = int(writer.stdout.readline())
            wait_until(lambda: int(writer.stdout.readline()) > batch, "the writer goes on")
        finally:
            over.set()
            reading.join(DEADLINE_S)
    assert not reading.is_alive()
    assert not wrong
    check_exact(table, load.ledger)


@pytest.mark.parametrize("failpoint", ["handover.warmed", "handover.taken"])
def test_nothing_is_lost_when_the_next_leader_is_killed_at(
    failpoint: str,
    cluster: LocalCluster,
    client: Cluster,
    table: RemoteTable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = cluster.servers[0]
    with noted(2), Load(client, table.name, 2) as load:
        load.go_on()
        server.stop()
        with monkeypatch.context() as patched:
            patched.setenv(ENVIRONMENT_VARIABLE, failpoint)
            server.start()
        wait_until(lambda: not server.alive, f"it was killed at {failpoint}", DEADLINE_S)
        load.go_on(30, f"after the kill at {failpoint}")
        server.start()
        cluster.wait_until_joined()
        wait_until_led(client, table, cluster.servers)
    check_exact(table, load.ledger)


@pytest.mark.parametrize("failpoint", ["leadership.closed", "handover.given_up"])
def test_nothing_is_lost_when_the_leader_is_killed_at(
    failpoint: str,
    cluster: LocalCluster,
    client: Cluster,
    table: RemoteTable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, *others = cluster.servers
    with noted(3), Load(client, table.name, 3) as load:
        load.go_on()
        server.stop()
        with monkeypatch.context() as patched:
            patched.setenv(ENVIRONMENT_VARIABLE, failpoint)
            server.start()
        cluster.wait_until_joined()
        wait_until_led(client, table, cluster.servers)
        server._process.ask_to_end()  # type: ignore[union-attr]
        wait_until(lambda: not server.alive, f"it was killed at {failpoint}", DEADLINE_S)
        load.go_on(30, f"after the kill at {failpoint}")
        wait_until_led(client, table, others)
        server.start()
        cluster.wait_until_joined()
        wait_until_led(client, table, cluster.servers)
    check_exact(table, load.ledger)


def test_a_server_is_drained_by_a_command(
    cluster: LocalCluster, client: Cluster, table: RemoteTable
) -> None:
    server, *others = cluster.servers
    with noted(4), Load(client, table.name, 4) as load:
        load.go_on()
        wait_until_led(client, table, cluster.servers)
        led, before = keys_at(client, table, server), len(handed_over(server))
        command = [sys.executable, "-m", "tallybook", "drain", str(server.address)]
        said = subprocess.run(
            command, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=DEADLINE_S
        ).stdout
        assert "has handed over and ended" in said
        wait_until(lambda: not server.alive, "its process has ended", DEADLINE_S)
        assert led <= set(handed_over(server)[before:])
        wait_until_led(client, table, others)
        load.go_on()
    again = subprocess.run(
        command, cwd=REPOSITORY, check=False, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert again.returncode == 1
    assert "is it one of `tallybook status`?" in again.stderr
    check_exact(table, load.ledger)
