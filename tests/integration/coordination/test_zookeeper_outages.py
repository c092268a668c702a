"""A real ZooKeeper that is killed, stopped or cut off for long, and what its clients make of it."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kazoo.client import KazooClient

from foundation.errors import SessionLost, Unavailable, UnknownOutcome
from locks.catalog.definitions import CatalogTable
from locks.column_locks.column_lock import ColumnLock
from locks.coordinator import Coordinator
from locks.store.base import Check, Create
from locks.store.child_process import last_lines
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from locks.store.zookeeper import ZooKeeperStore
from tests.support.coordinators import DEFINITION, ENDS, LATER, ready
from tests.support.processes import pause
from tests.support.zookeeper_proxy import Proxy
from tests.support.zookeeper_server import chroot, session, wait_until

# A server that is gone for a while


def test_clients_resume_within_their_deadline_when_the_server_comes_back(
    own_server: EmbeddedZooKeeper,
) -> None:
    with session(own_server.address, session_timeout_s=10, deadline_s=30) as store:
        coordinator = Coordinator(store)
        table = coordinator.tables.create("t", DEFINITION)
        server = coordinator.servers.register("127.0.0.1:1")
        lock = coordinator.locks.acquire(table, "a", ["orders"])
        lock.ready(ENDS, [server.name])
        own_server.kill()
        wait_until(lambda: not store.connected, "the connection to be lost")
        restart = threading.Thread(target=own_server.start)
        restart.start()
        try:
            lock.commit(0, LATER, [server.name])  # Waits, and goes on in the same session.
        except SessionLost:
            lines = last_lines(own_server.log_path)
            pytest.fail(f"the session did not outlive the restart: ZooKeeper says\n{lines}")
        finally:
            restart.join()
        assert coordinator.locks.records(table)["a"].batch == 0
        assert coordinator.servers.all() == [server]


def test_a_host_that_says_nothing_does_not_cost_the_session(
    zookeeper: EmbeddedZooKeeper,
) -> None:
    """As a ZooKeeper does that is just starting, or one behind a cable that was pulled."""
    with Proxy(zookeeper) as proxy:
        path = chroot(zookeeper).removeprefix(zookeeper.address)
        with session(proxy.address + path, session_timeout_s=5, deadline_s=30) as store:
            store.transact([Create("/here", b"", ephemeral=True)])
            proxy.ignore_next(2)
            wait_until(lambda: not store.connected, "the connection to be cut")
            store.sync()
            assert store.read("/here") is not None, "it is the same session"


@pytest.fixture
def store(own_server: EmbeddedZooKeeper) -> Iterator[ZooKeeperStore]:
    """Return a store that waits for half a second at the most."""
    with session(own_server.address, session_timeout_s=10, deadline_s=0.5) as impatient:
        yield impatient


@pytest.fixture
def coordinator(store: ZooKeeperStore) -> Coordinator:
    return Coordinator(store, deadline_s=0.5)


@pytest.fixture
def lock(coordinator: Coordinator, table: CatalogTable) -> ColumnLock:
    return ready(coordinator, table, "a", "orders")


def test_without_a_server_calls_wait_for_their_deadline_and_may_be_tried_again(
    own_server: EmbeddedZooKeeper,
    store: ZooKeeperStore,
    coordinator: Coordinator,
    table: CatalogTable,
    lock: ColumnLock,
) -> None:
    own_server.kill()
    wait_until(lambda: not store.connected, "the connection to be lost")
    calls: list[Callable[[], object]] = [
        lambda: store.read("/x"),
        lambda: store.children("/x"),
        store.sync,
        store.now_ms,
        lambda: store.transact([Check("/x")]),
        lock.renew,
        lock.check,
        lambda: lock.commit(0, LATER, []),
        lambda: coordinator.locks.acquire(table, "b", ["tags"]),
    ]
    for call in calls:
        started = time.monotonic()
        with pytest.raises(Unavailable, match=r"is away: it did not answer in time; try again"):
            call()
        assert 0.4 < time.monotonic() - started < 3
    own_server.start()
    wait_until(lambda: store.connected, "the connection to be back")
    lock.commit(0, LATER, [])
    assert coordinator.locks.records(table)["a"].batch == 0


def test_a_server_that_does_not_answer_leaves_the_outcome_unknown_until_it_does(
    own_server: EmbeddedZooKeeper, coordinator: Coordinator, table: CatalogTable, lock: ColumnLock
) -> None:
    pause(own_server.pid)
    try:
        with pytest.raises(UnknownOutcome, match="could not be read back"):
            lock.commit(0, LATER, [])
        with pytest.raises(Unavailable):
            lock.check()
    finally:
        os.kill(own_server.pid, signal.SIGCONT)

    def answers() -> bool:
        with suppress(Unavailable):
            lock.check()
            return True
        return False

    wait_until(answers, "the server to answer again")
    # It was in the socket all the time, and was carried out when the server woke up.
    assert lock.batch == 0
    assert coordinator.locks.records(table)["a"] == lock.record
    lock.commit(1, LATER, [])


def test_no_server_at_all_is_unavailable(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(Unavailable, match=rf"no ZooKeeper at {address} within 0.3 s"):
        ZooKeeperStore(address, deadline_s=0.3)


# A session that is lost


def expire(zookeeper: EmbeddedZooKeeper, store: ZooKeeperStore) -> None:
    """End a session from outside: whoever has its id and password may close it."""
    twin = KazooClient(zookeeper.address, client_id=store._client.client_id)
    twin.start()
    twin.stop()
    twin.close()


def test_a_lost_session_ends_every_handle_and_its_ephemeral_nodes(
    zookeeper: EmbeddedZooKeeper,
) -> None:
    address = chroot(zookeeper)
    with session(address) as store, session(address) as other_store:
        coordinator, other = Coordinator(store), Coordinator(other_store)
        table = coordinator.tables.create("t", DEFINITION)
        coordinator.servers.register("127.0.0.1:1")
        lock = ready(coordinator, table, "a", "orders")
        expire(zookeeper, store)
        wait_until(store._lost.is_set, "the session to be lost")
        calls: list[Callable[[], object]] = [
            lambda: lock.commit(0, LATER, []),
            lock.renew,
            lock.check,
            lock.release,
            lock.abandon,
            store.sync,
            lambda: coordinator.locks.records(table),
            lambda: coordinator.servers.register("127.0.0.1:1"),
            lambda: coordinator.locks.acquire(table, "a", ["orders"]),
            lambda: store.watch("/x", lambda: None),
        ]
        for call in calls:
            with pytest.raises(SessionLost, match="is gone; connect again"):
                call()
        assert not store.connected
        assert other.servers.all() == []
        assert other.locks.records(table)["a"] == lock.record
        successor = other.locks.acquire(table, "a", ["orders"], only_epoch=lock.epoch)
        assert successor.batch == -1


def test_a_session_is_lost_when_its_client_is_not_heard_of_for_too_long(
    zookeeper: EmbeddedZooKeeper,
) -> None:
    with Proxy(zookeeper) as proxy:
        root = chroot(zookeeper)
        path = root.removeprefix(zookeeper.address)
        with (
            session(proxy.address + path, session_timeout_s=1, deadline_s=10) as store,
            session(root) as other,
        ):
            store.transact([Create("/here", b"", ephemeral=True)])
            proxy.refuse()
            wait_until(lambda: other.read("/here") is None, "the session to expire")
            proxy.accept()
            with pytest.raises(SessionLost):
                store.sync()
            other.sync()
            assert other.children("/") == ["clock"]
