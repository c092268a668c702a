"""A server that is out of touch with ZooKeeper: what it answers, and what it says."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from foundation.errors import Retryable, ServerUnavailable
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from server.client.cluster import Cluster, connect
from server.client.remote_table import RemoteTable
from server.tablet.config import ServerConfig
from server.tablet.tablet_server import TabletServer
from tests.conftest import SUMS
from tests.support.zookeeper_proxy import Proxy
from tests.support.zookeeper_server import wait_until, zookeeper_server

SESSION_TIMEOUT_S = 4.0
ROWS = 60_000  # More than a scan has in one batch.


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("liveness")) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(zookeeper: EmbeddedZooKeeper) -> Iterator[Proxy]:
    with Proxy(zookeeper) as running:
        yield running


@pytest.fixture(scope="module")
def server(proxy: Proxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TabletServer]:
    directory: Path = tmp_path_factory.mktemp("server")
    config = ServerConfig(
        zookeeper=proxy.address,
        logs=str(directory / "logs"),
        views=directory / "views",
        session_timeout_s=SESSION_TIMEOUT_S,
    )
    with TabletServer(config) as running:
        yield running


@pytest.fixture
def client(zookeeper: EmbeddedZooKeeper, server: TabletServer) -> Iterator[Cluster]:
    """Connect past the proxy: ZooKeeper is there for everybody but the server."""
    with connect(zookeeper.address, deadline_s=0.5) as connected:
        yield connected


@pytest.fixture
def patient(zookeeper: EmbeddedZooKeeper, server: TabletServer) -> Iterator[Cluster]:
    with connect(zookeeper.address) as connected:
        yield connected


@pytest.fixture
def table(client: Cluster, request: pytest.FixtureRequest) -> Iterator[RemoteTable]:
    created = client.create_table(request.node.name[:60], SUMS, buckets=1, column_locks=False)
    wait_until(lambda: _answers(created), "the table is served")
    yield created
    client.drop_table(created.name)


def _answers(table: RemoteTable) -> bool:
    try:
        table.lookup({"k": [1]})
    except Retryable:
        return False
    return True


def test_look_ups_go_on_while_the_session_is_certain_and_end_before_it_does(
    client: Cluster, table: RemoteTable, server: TabletServer, proxy: Proxy
) -> None:
    table.put({"k": [1], "a": [5]})
    proxy.hold()
    try:
        assert table.lookup({"k": [1]}).column("a").to_pylist() == [5]
        wait_until(lambda: not _answers(table), "it stops answering", SESSION_TIMEOUT_S)
        # Nobody else can have taken the bucket yet: so no answer was out of date.
        there = client.coordinator.servers.all()
        assert [one.address for one in there] == [server.address]
        with pytest.raises(ServerUnavailable, match=r"ZooKeeper at .* is away from server"):
            table.lookup({"k": [1]})
    finally:
        proxy.pass_on()
    wait_until(lambda: _answers(table), "it answers again")
    assert table.lookup({"k": [1]}).column("a").to_pylist() == [5]


def test_a_running_scan_comes_to_its_end_without_zookeeper(
    table: RemoteTable, proxy: Proxy, patient: Cluster
) -> None:
    patient.table(table.name).put({"k": list(range(ROWS)), "a": [1] * ROWS})
    scan = iter(patient.table(table.name).scan(isolation="latest"))
    found = next(scan).num_rows
    assert found < ROWS
    proxy.hold()
    try:
        wait_until(lambda: not _answers(table), "it stops answering", SESSION_TIMEOUT_S)
        found += sum(batch.num_rows for batch in scan)
    finally:
        proxy.pass_on()
    assert found == ROWS
    wait_until(lambda: _answers(table), "it answers again")
