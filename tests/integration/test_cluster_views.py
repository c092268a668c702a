"""What a tablet server sees of its cluster, on both stores, and when it is told to look again."""

import threading
from dataclasses import replace
from functools import partial

import pytest

from foundation.errors import SessionLost
from locks.catalog.definitions import FORMATS, CatalogTable
from locks.cluster.picture import ClusterPicture
from locks.coordinator import Coordinator
from locks.encoding.framing import Reader, frame_document
from locks.store.base import ANY_VERSION, Create, Write
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from locks.store.paths import table_path
from locks.store.zookeeper import READS_AT_ONCE
from tests.integration.coordination.conftest import cluster, coordinator, table, zookeeper
from tests.support.coordinators import DEFINITION, LATER, Cluster, ready
from tests.support.zookeeper_proxy import Proxy
from tests.support.zookeeper_server import chroot, session, wait_until

__all__ = ["cluster", "coordinator", "table", "zookeeper"]  # Fixtures, used by name.


def test_former_schemas_are_kept_oldest_first(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    assert table.definition.former == ()
    for version in ("1", "2"):
        definition = table.definition
        former = (*definition.former, definition.schema)
        table = coordinator.alter_table(table, replace(definition, schema=version, former=former))
    found = cluster.coordinator().tables.get("customers")
    assert found == table
    assert (found.definition.former, found.definition.schema) == (("{}", "1"), "2")


def test_a_definition_without_former_schemas_has_none(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    path = table_path(table.table_id)
    node = coordinator.store.read(path)
    assert node is not None
    fields = Reader(node.data, "the definition").document()
    assert fields.pop("former") == []
    coordinator.store.transact([Write(path, frame_document(FORMATS.current, fields), ANY_VERSION)])
    assert coordinator.tables.get("customers").definition == DEFINITION


def test_tables_are_listed_in_the_order_of_their_ids(
    cluster: Cluster, coordinator: Coordinator
) -> None:
    assert coordinator.tables.all() == []
    tables = [coordinator.tables.create(f"t{20 - number}", DEFINITION) for number in range(12)]
    tables[3] = coordinator.alter_table(tables[3], replace(DEFINITION, buckets=9))
    coordinator.drop_table(tables.pop(5))
    assert cluster.coordinator().tables.all() == tables


def test_one_record_is_read_as_it_is_now(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    other = cluster.coordinator()
    assert other.locks.record(table, "etl-1") is None
    lock = ready(coordinator, table, "etl-1", "orders")
    for batch in range(3):
        lock.commit(batch, LATER, [])
        assert other.locks.record(table, "etl-1") == lock.record
    assert other.locks.record(table, "etl-2") is None
    coordinator.drop_table(table, force=True)
    assert other.locks.record(table, "etl-1") is None


# Many reads at once


def test_many_nodes_are_read_in_their_order_and_missing_ones_are_none(
    coordinator: Coordinator,
) -> None:
    store, numbers = coordinator.store, range(READS_AT_ONCE + 20)
    store.transact([Create("/p", b"")])
    store.transact([Create(f"/p/{number}", b"%d" % number) for number in numbers if number % 3])
    nodes = store.read_many([f"/p/{number}" for number in numbers])
    assert [None if node is None else int(node.data) for node in nodes] == [
        number if number % 3 else None for number in numbers
    ]
    assert store.read_many([]) == []
    assert store.read_many(["/p/1", "/p/1"]) == [store.read("/p/1")] * 2
    store.close()
    with pytest.raises(SessionLost):
        store.read_many(["/p/1"])


def test_reads_that_are_cut_off_are_sent_again(zookeeper: EmbeddedZooKeeper) -> None:
    root = chroot(zookeeper)
    paths = [f"/p/{number}" for number in range(READS_AT_ONCE)]
    with (
        Proxy(zookeeper) as proxy,
        session(proxy.address + root.removeprefix(zookeeper.address)) as store,
    ):
        store.transact([Create("/p", b""), *(Create(path, path.encode()) for path in paths)])
        rounds, ended = 0, threading.Event()

        def read() -> None:
            nonlocal rounds
            while not ended.is_set():
                nodes = store.read_many(paths)
                assert [node and node.data.decode() for node in nodes] == paths
                rounds += 1

        def is_ahead(of: int) -> bool:
            return rounds > of or not reader.is_alive()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            for cuts in range(1, 6):
                wait_until(partial(is_ahead, cuts), "a round of reads")
                proxy.refuse()
                proxy.accept()
        finally:
            ended.set()
            reader.join()
        assert rounds > 5


# Watching


class Follower:
    """Looks at the cluster when it is told to, and never otherwise."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._told = threading.Event()
        # Its clock stands still: it never reads all again of itself.
        self._picture = ClusterPicture(
            coordinator.store, coordinator.servers, self._told.set, clock_s=lambda: 0.0
        )

    def follow(self, truth: Coordinator) -> None:
        """Wait until it has been told to look at what there is."""
        expected = state_of(truth)
        wait_until(lambda: self._look_if_told() == expected, "the follower to be told")

    def _look_if_told(self) -> object:
        if self._told.is_set():
            self._told.clear()
            self._picture.look()
        picture = self._picture
        return picture.members, sorted(picture.tables.items()), picture.partitions


def state_of(coordinator: Coordinator) -> object:
    tables = [(one.table_id, one) for one in coordinator.tables.all()]
    partitions = {
        number: frozenset(coordinator.partitions.ids(one).values()) for number, one in tables
    }
    return coordinator.servers.members(), tables, partitions


def test_who_looks_again_when_told_sees_all_that_matters(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    follower = Follower(cluster.coordinator())

    def follows() -> None:
        follower.follow(coordinator)

    follows()
    acting = cluster.coordinator()
    server = acting.servers.register("127.0.0.1:1")
    follows()
    acting.servers.stand_aside(server, "it is leaving")
    follows()
    acting.servers.come_back(server)
    follows()
    late = acting.tables.create("late", DEFINITION)
    follows()
    for one in (table, late):
        for number in range(3):
            acting.partitions.create(one, b"%d" % number)
            follows()
        acting.partitions.drop(one, b"0")
        follows()
        for buckets in (5, 6):
            altered = acting.tables.get_by_id(one.table_id)
            acting.alter_table(altered, replace(DEFINITION, buckets=buckets))
            follows()
    acting.drop_table(late)
    follows()
    again = acting.tables.create("late", DEFINITION)
    follows()
    acting.partitions.create(again, b"x")
    follows()
    acting.store.close()
    follows()


def test_nobody_is_told_of_what_a_writer_does(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    """A commit is no change of the cluster: it would wake every server, many times a second."""
    calls: list[None] = []
    watching = cluster.coordinator()
    picture = ClusterPicture(watching.store, watching.servers, lambda: calls.append(None))
    picture.look()
    # At once for servers, those that stand aside and tables, then for the table's definition and
    # partitions.
    assert len(calls) == 5
    lock = ready(coordinator, table, "etl-1", "orders")
    for batch in range(3):
        lock.commit(batch, LATER, [])
    lock.release()
    watching.store.sync()
    assert len(calls) == 5


def test_tables_that_appear_all_at_once_are_all_watched(
    cluster: Cluster, coordinator: Coordinator
) -> None:
    follower = Follower(cluster.coordinator())
    tables = [coordinator.tables.create(f"t{number}", DEFINITION) for number in range(20)]
    for one in tables:
        coordinator.partitions.create(one, b"a")
    follower.follow(coordinator)
    coordinator.partitions.create(tables[-1], b"b")
    follower.follow(coordinator)


def test_a_watch_survives_a_connection_that_is_cut(zookeeper: EmbeddedZooKeeper) -> None:
    root = chroot(zookeeper)
    with (
        Proxy(zookeeper) as proxy,
        session(proxy.address + root.removeprefix(zookeeper.address)) as ours,
        session(root) as theirs,
    ):
        follower, acting = Follower(Coordinator(ours)), Coordinator(theirs)
        for number in range(3):
            proxy.refuse()
            table = acting.tables.create(f"t{number}", DEFINITION)
            proxy.accept()
            for key in (b"a", b"b"):
                acting.partitions.create(table, key)
                follower.follow(acting)
