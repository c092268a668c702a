"""Servers killed under load: acknowledged = stored, exactly.

`TALLYBOOK_EXAMPLES` makes a longer run; a failure prints its seed.
"""

import os
import random
import signal
from itertools import count

import pytest

from foundation.failpoints import ENVIRONMENT_VARIABLE
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from tests.fault.cluster_load import (
    BUCKETS,
    DEADLINE_S,
    LONGER,
    SCHEMA,
    Load,
    check_exact,
    end_session,
    noted,
    rounds,
    wait_until_led,
)
from tests.support.zookeeper_server import wait_until

# Where a server is killed; all of the engine's own failpoints are in test_kill.
FAILPOINTS = ["leadership.taken", "put.logged:20"]
if LONGER:
    FAILPOINTS += ["log.encoded:20", "storage.linked:20", "put.applied:20", "view.before_write"]
_numbers = count()


@pytest.fixture
def table(client: Cluster) -> RemoteTable:
    """Create a table that nobody else writes to."""
    return client.create_table(
        f"sums_{next(_numbers)}", SCHEMA, buckets=BUCKETS, column_locks=False
    )


@pytest.mark.parametrize("seed", range(rounds(1)))
def test_nothing_is_lost_or_doubled_when_leaders_are_killed(
    seed: int, cluster: LocalCluster, client: Cluster, table: RemoteTable
) -> None:
    chance = random.Random(seed)
    with noted(seed) as note, Load(client, table.name, seed) as load:
        for _ in range(2 + rounds(0)):
            load.go_on(chance.randrange(10, 60))
            server = chance.choice(cluster.servers)
            note(f"after {len(load.ledger.acknowledged)} batches kills server {server.number}")
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda server=server: not server.alive, "it is dead")  # type: ignore[misc]
            if chance.random() < 0.5:  # Else it is back before anybody has missed it.
                load.go_on(20, "without the server that was killed")
            server.start()
            load.go_on(20, "with the server that was started again")
        cluster.wait_until_joined()
    wait_until_led(client, table, cluster.servers)
    check_exact(table, load.ledger)


def test_nothing_is_lost_when_all_servers_are_killed_and_the_clients_session_has_ended(
    cluster: LocalCluster, client: Cluster, table: RemoteTable
) -> None:
    """The client has to ask ZooKeeper where the buckets are, and needs another session for it."""
    with noted(1), Load(client, table.name, 1) as load:
        load.go_on(30)
        end_session(cluster, client)
        for server in cluster.servers:
            os.kill(server.pid, signal.SIGKILL)
        for server in cluster.servers:
            wait_until(lambda server=server: not server.alive, "it is dead")  # type: ignore[misc]
            server.start()
        load.go_on(30, "after all servers were killed")
    check_exact(table, load.ledger)


@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_nothing_is_lost_when_a_server_is_killed_at(
    failpoint: str,
    cluster: LocalCluster,
    client: Cluster,
    table: RemoteTable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = cluster.servers[0]
    with noted(2), Load(client, table.name, 2) as load:
        load.go_on()
        server.kill()
        with monkeypatch.context() as patched:
            patched.setenv(ENVIRONMENT_VARIABLE, failpoint)
            server.start()
        wait_until(lambda: not server.alive, f"it was killed at {failpoint}", DEADLINE_S)
        server.start()
        load.go_on(30, f"after the kill at {failpoint}")
    check_exact(table, load.ledger)


def test_a_put_without_a_token_is_in_doubt_at_most_once_and_never_torn_within_a_bucket(
    cluster: LocalCluster, client: Cluster, table: RemoteTable
) -> None:
    with noted(3), Load(client, table.name, 3, tokens=False) as load:
        load.go_on(30)
        cluster.servers[1].kill()
        load.go_on(30, "without server 1")
        cluster.servers[1].start()
        load.go_on(30, "with server 1")
    check_exact(table, load.ledger)
