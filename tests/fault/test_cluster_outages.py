"""ZooKeeper restarted, clients killed, servers that come and go: acknowledged = stored, exactly.

`TALLYBOOK_EXAMPLES` makes a longer run; a failure prints its seed.
"""

import random
import time
from itertools import count
from pathlib import Path

import pytest

from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from tests.fault.cluster_load import (
    BUCKETS,
    DEADLINE_S,
    LONGER,
    SCHEMA,
    SESSION_TIMEOUT_S,
    Batch,
    Ledger,
    Load,
    another_server,
    check_exact,
    client_process,
    leaders,
    noted,
    rounds,
    wait_until_led,
)
from tests.support.zookeeper_server import wait_until

_numbers = count()


@pytest.fixture
def table(client: Cluster) -> RemoteTable:
    """Create a table that nobody else writes to."""
    return client.create_table(
        f"sums_{next(_numbers)}", SCHEMA, buckets=BUCKETS, column_locks=False
    )


# --- ZooKeeper ----------------------------------------------------------------------------------


def test_a_restart_of_zookeeper_is_a_pause(
    cluster: LocalCluster, client: Cluster, table: RemoteTable
) -> None:
    with noted(4), Load(client, table.name, 4) as load:
        load.go_on()
        cluster.zookeeper.kill()
        cluster.zookeeper.start()
        load.go_on(30, "after ZooKeeper's restart")
    check_exact(table, load.ledger)


def test_servers_come_back_by_themselves_when_zookeeper_was_away_longer_than_a_session_lasts(
    cluster: LocalCluster, client: Cluster, table: RemoteTable
) -> None:
    with noted(5), Load(client, table.name, 5) as load:
        load.go_on()
        cluster.zookeeper.kill()
        # Nothing tells when a session would have ended: there is nobody to end it.
        away_until = time.monotonic() + 2 * SESSION_TIMEOUT_S
        wait_until(lambda: time.monotonic() > away_until, "some time passes")
        cluster.zookeeper.start()
        load.go_on(30, "after ZooKeeper came back")
    wait_until_led(client, table, cluster.servers)
    check_exact(table, load.ledger)


# --- Clients ------------------------------------------------------------------------------------


def test_of_a_put_whose_client_was_killed_half_way_nothing_is_stored(
    cluster: LocalCluster, client: Cluster, table: RemoteTable
) -> None:
    wait_until_led(client, table, cluster.servers)
    ends = table.end_offsets()
    with client_process(cluster, table, 7, 0, "--half") as child:
        assert child.stdout is not None
        for _ in cluster.servers:
            assert child.stdout.readline() == "half\n"
        wait_until(lambda: _puts_in_flight(client) == 2, "both servers have begun the put")
        child.kill()
        child.wait()
    wait_until(lambda: _puts_in_flight(client) == 0, "both servers have given the put up")
    assert table.end_offsets() == ends
    check_exact(table, Ledger())


def _puts_in_flight(client: Cluster) -> int:
    return sum(int(status["metrics"]["tallybook_puts_in_flight"]) for status in client.status())


@pytest.mark.parametrize("seed", range(rounds(2)))
def test_of_a_client_that_was_killed_any_time_the_last_batch_alone_is_in_doubt(
    seed: int, cluster: LocalCluster, client: Cluster, table: RemoteTable
) -> None:
    chance = random.Random(seed)
    wanted, delay_s = chance.randrange(1, 30), chance.random() * 0.02
    with noted(seed) as note, client_process(cluster, table, seed, 0) as child:
        note(f"killed {delay_s} s after {wanted} batches")
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(wanted)]
        kill_at = time.monotonic() + delay_s
        wait_until(lambda: time.monotonic() >= kill_at, "some time passes")
        child.kill()
        lines += [line for line in child.stdout if line.endswith("\n")]
        done = [Batch.of(seed, 0, int(line)) for line in lines]
        ledger = Ledger(acknowledged=done, doubtful=[Batch.of(seed, 0, len(done))])
        wait_until(lambda: _puts_in_flight(client) == 0, "the servers are done with it")
        check_exact(table, ledger)


# --- Servers that come and go -------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [False, True] if LONGER else [False])
def test_a_server_that_joins_and_leaves_is_a_pause_for_clients(
    tokens: bool, cluster: LocalCluster, client: Cluster, patient: Cluster, tmp_path: Path
) -> None:
    """Not even a put without a token, which cannot be sent twice, is in doubt."""
    # Six buckets, so that the third server has its share wherever it listens.
    table = client.create_table(f"six_{next(_numbers)}", SCHEMA, buckets=6, column_locks=False)
    with noted(8), Load(patient, table.name, 8, tokens=tokens) as load:
        with another_server(cluster, tmp_path) as third:
            load.go_on()
            third.start()
            wait_until(
                lambda: third.address in leaders(client, table).values(), "it leads", DEADLINE_S
            )
            load.go_on(30, "with the third server")
            third.stop()
            load.go_on(30, "without the third server")
        cluster.servers[0].stop()
        load.go_on(30, "without server 0")
        cluster.servers[0].start()
        load.go_on(30, "with server 0")
    assert load.retries == []
    assert load.ledger.doubtful == []
    wait_until_led(client, table, cluster.servers)
    check_exact(table, load.ledger)
