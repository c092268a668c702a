"""A server whose session was lost joins again when it can work, says once why not, and goes on."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from foundation.errors import StorageUnavailable
from locks.encoding.framing import frame_text
from locks.store.base import ANY_VERSION, Write
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from locks.store.paths import STORAGE
from locks.store.zookeeper import ZooKeeperStore
from server.client.cluster import Cluster
from server.tablet.tablet_server import TabletServer
from tests.support.raw_flight import SCHEMA, JsonLog, client_of, json_log, running
from tests.support.zookeeper_server import chroot, session, wait_until, zookeeper_server


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("joining_again")) as server:
        yield server


def expire_session(zookeeper: EmbeddedZooKeeper, server: TabletServer) -> None:
    """End the server's session as its expiry would: a twin of its client closes it."""
    store = server.coordinator.store
    assert isinstance(store, ZooKeeperStore)
    twin = KazooClient(zookeeper.address, client_id=store._client.client_id)
    twin.start()
    twin.stop()
    twin.close()


def serves(cluster: Cluster) -> bool:
    return [len(status.get("buckets", ())) for status in cluster.status()] == [1]


def complaints_of(log: JsonLog) -> list[str]:
    """Return what was logged about joining: a moment after the status has it."""
    errors = [line["message"] for line in log.lines if line["level"] == "error"]
    return [message for message in errors if message.startswith("joining the cluster: ")]


def test_it_stays_away_while_the_log_store_is_out_of_reach_and_says_so_once(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path
) -> None:
    address, logs, away = chroot(zookeeper), tmp_path / "logs", tmp_path / "away"
    with (
        json_log() as log,
        running(address, tmp_path) as server,
        client_of(address) as cluster,
    ):
        table = cluster.create_table("t", SCHEMA, buckets=1, column_locks=False)
        table.put({"k": [1], "a": [1]})
        logs.rename(away)
        logs.write_text("a file where a directory was")
        expire_session(zookeeper, server)
        wait_until(lambda: bool(complaints_of(log)), "it complains")
        assert "joining the cluster" in server.status()["problems"]
        with session(address) as store:
            mark = store.now_ms()
            wait_until(lambda: store.now_ms() > mark + 3000, "some attempts have passed")
            assert store.children("/servers") == []
        [said] = complaints_of(log)
        assert f"the log store at {logs} cannot be used: creating an object failed" in said

        logs.unlink()
        away.rename(logs)
        wait_until(lambda: serves(cluster), "it is back")
        assert table.lookup({"k": [1]}, ["a"]).to_pylist() == [{"k": 1, "a": 1}]
        assert server.status()["problems"] == {}
    assert any("joining the cluster: over" in line["message"] for line in log.lines)


def test_what_is_wrong_with_the_cluster_does_not_end_it_either(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path
) -> None:
    """It would be there for its supervisor, and for nobody else, for ever."""
    address = chroot(zookeeper)
    with (
        json_log() as log,
        running(address, tmp_path) as server,
        client_of(address) as cluster,
        session(address) as store,
    ):
        cluster.create_table("t", SCHEMA, buckets=1, column_locks=False)
        wait_until(lambda: serves(cluster), "it serves")
        known = store.read(STORAGE)
        assert known is not None
        store.transact([Write(STORAGE, frame_text("/elsewhere"), ANY_VERSION)])
        expire_session(zookeeper, server)
        wait_until(lambda: bool(complaints_of(log)), "it complains")
        assert "joining the cluster" in server.status()["problems"]
        [said] = complaints_of(log)
        assert "the logs of this cluster are in /elsewhere" in said
        store.transact([Write(STORAGE, known.data, ANY_VERSION)])
        wait_until(lambda: serves(cluster), "it is back")


def test_the_first_time_it_does_not_start(zookeeper: EmbeddedZooKeeper, tmp_path: Path) -> None:
    address, logs = chroot(zookeeper), tmp_path / "logs"
    server = running(address, tmp_path)
    shutil.rmtree(logs)
    logs.write_text("a file where a directory was")
    with pytest.raises(StorageUnavailable, match=f"the log store at {logs} cannot be used"):
        server.start()
    with session(address) as store:
        assert store.children("/") == ["clock"], "it has not even looked"


def test_a_server_that_is_stopped_while_it_joins_again_ends(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = running(chroot(zookeeper), tmp_path).start()
    joins, goes_on = threading.Event(), threading.Event()

    def slow_store(*_: object) -> None:
        joins.set()
        goes_on.wait(180)

    monkeypatch.setattr("server.tablet.tablet_server.check_log_store", slow_store)
    expire_session(zookeeper, server)
    assert joins.wait(180)
    stopping = threading.Thread(target=server.stop, daemon=True)
    stopping.start()
    wait_until(server._stopping.is_set, "it is being stopped")
    goes_on.set()
    stopping.join(180)
    assert not stopping.is_alive()
