"""What was dropped is remembered until its files are gone: tables and partitions."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from foundation.errors import CorruptRecord, UnknownTable
from foundation.ids import BucketId, LeadKey
from locks.catalog.definitions import CatalogTable
from locks.catalog.dropped_tables import DroppedTable
from locks.coordinator import Coordinator
from locks.encoding.framing import Reader
from locks.snapshots.list_records import ListedSnapshot
from locks.store.base import ANY_VERSION, DELETED_AT_ONCE, Create, Write
from locks.store.memory import MemoryCoordination
from locks.store.paths import (
    DROPPED,
    LEASES,
    SNAPSHOTS,
    dropped_path,
    leases_path,
    partitions_path,
    snapshots_path,
)
from tests.support.coordinators import COLUMNS, DEFINITION, just_before_the_next_transaction
from tests.support.lossy import LossyStore


@pytest.fixture
def memory() -> MemoryCoordination:
    return MemoryCoordination()


@pytest.fixture
def coordinator(memory: MemoryCoordination) -> Coordinator:
    return Coordinator(memory.connect())


@pytest.fixture
def table(coordinator: Coordinator) -> CatalogTable:
    return coordinator.tables.create("customers", DEFINITION)


def take(coordinator: Coordinator, table: CatalogTable, key: BucketId) -> None:
    listed = coordinator.snapshots.claim(LeadKey(table.table_id, key), 1)
    snapshot = ListedSnapshot(
        snapshot_id=listed.next_id, term=1, applied=1, stable=1, created_ms=1, bytes=1
    )
    coordinator.snapshots.add(listed, snapshot, 2)


def test_a_dropped_table_is_remembered_as_it_was_with_all_its_partitions(
    memory: MemoryCoordination, coordinator: Coordinator, table: CatalogTable
) -> None:
    assert coordinator.dropped.all() == []
    for key in (b"a", b"b", b"c"):
        coordinator.partitions.create(table, key)
    coordinator.partitions.drop(table, b"a")
    coordinator.partitions.drop(table, b"b")
    coordinator.partitions.forget(table, 1)
    wider = replace(DEFINITION, columns={**COLUMNS, "visits": 15})
    altered = coordinator.alter_table(table, wider)
    second = coordinator.tables.create("second", DEFINITION)
    coordinator.drop_table(second)
    coordinator.drop_table(table)  # By whoever has not seen the alteration.
    assert Coordinator(memory.connect()).dropped.all() == [
        DroppedTable(table=replace(altered, version=0), partitions=(2, 3)),
        DroppedTable(table=second, partitions=()),
    ]


def test_a_table_of_the_same_name_has_nothing_to_do_with_the_dropped_one(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    coordinator.drop_table(table)
    again = coordinator.tables.create("customers", DEFINITION)
    coordinator.dropped.forget(again.table_id)
    coordinator.drop_table(again)
    assert [one.table.table_id for one in coordinator.dropped.all()] == [
        table.table_id,
        again.table_id,
    ]


@pytest.mark.parametrize("what", ["partition", "column"])
def test_a_partition_or_a_column_that_comes_while_a_table_is_dropped_is_remembered(
    memory: MemoryCoordination,
    coordinator: Coordinator,
    table: CatalogTable,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    other = Coordinator(memory.connect())
    wider = replace(DEFINITION, columns={**COLUMNS, "visits": 15})

    def intrude() -> None:
        if what == "partition":
            other.partitions.create(table, b"late")
        else:
            other.alter_table(table, wider)

    just_before_the_next_transaction(coordinator, intrude, monkeypatch)
    coordinator.drop_table(table)
    (dropped,) = coordinator.dropped.all()
    expected = ((1,), DEFINITION) if what == "partition" else ((), wider)
    assert (dropped.partitions, dropped.table.definition) == expected


def test_a_table_is_forgotten_with_its_lists_and_leases(
    memory: MemoryCoordination, coordinator: Coordinator, table: CatalogTable
) -> None:
    other = coordinator.tables.create("other", DEFINITION)
    for one in (table, other):
        take(coordinator, one, BucketId(0, 0))
        coordinator.leases.acquire(one.table_id, "l", {BucketId(0, 0): 1}, 3_600_000)
    parent = snapshots_path(table.table_id)
    many = [Create(f"{parent}/0-{number}", b"") for number in range(1, 2 * DELETED_AT_ONCE + 2)]
    coordinator.store.transact(many)
    coordinator.dropped.forget(table.table_id)  # It is not dropped: nothing happens.
    assert coordinator.leases.pinned(table.table_id) == {BucketId(0, 0): {1}}
    coordinator.drop_table(table)
    coordinator.dropped.forget(table.table_id)
    coordinator.dropped.forget(table.table_id)
    assert coordinator.dropped.all() == []
    left = {path for path in memory.nodes if path.startswith((SNAPSHOTS, LEASES, DROPPED))}
    theirs = {snapshots_path(other.table_id), leases_path(other.table_id)}
    theirs |= {f"{snapshots_path(other.table_id)}/0-0", f"{leases_path(other.table_id)}/l"}
    assert left == {SNAPSHOTS, LEASES, DROPPED} | theirs


def test_who_dies_while_forgetting_is_followed_by_another(
    memory: MemoryCoordination, coordinator: Coordinator, table: CatalogTable
) -> None:
    take(coordinator, table, BucketId(0, 0))
    coordinator.leases.acquire(table.table_id, "l", {BucketId(0, 0): 1}, 3_600_000)
    coordinator.drop_table(table)
    for _ in range(5):  # Two nodes, the two above them, and the table's own.
        assert len(coordinator.dropped.all()) == 1
        dying = Coordinator(store := LossyStore(memory))
        store.after_a_loss = die
        store.lose("answer")
        with pytest.raises(KeyboardInterrupt):
            dying.dropped.forget(table.table_id)
    assert coordinator.dropped.all() == []


def die() -> None:
    raise KeyboardInterrupt


def test_a_dropped_partition_is_remembered_until_it_is_forgotten(
    memory: MemoryCoordination, coordinator: Coordinator, table: CatalogTable
) -> None:
    for key in (b"a", b"b", b"c"):
        partition = coordinator.partitions.create(table, key)
        take(coordinator, table, BucketId(partition, 0))
        take(coordinator, table, BucketId(partition, 11))
    assert coordinator.partitions.dropped(table) == []
    coordinator.partitions.drop(table, b"b")
    coordinator.partitions.drop(table, b"a")
    assert coordinator.partitions.create(table, b"a") == 4
    assert Coordinator(memory.connect()).partitions.dropped(table) == [2, 1]
    for partition in (1, 1, 3, 99):
        coordinator.partitions.forget(table, partition)
    assert coordinator.partitions.dropped(table) == [2]
    assert coordinator.store.children(snapshots_path(table.table_id)) == [
        f"{partition}-{number}" for partition in (2, 3) for number in (0, 11)
    ]
    coordinator.drop_table(table)
    for call in (
        lambda: coordinator.partitions.dropped(table),
        lambda: coordinator.partitions.forget(table, 2),
    ):
        with pytest.raises(UnknownTable):
            call()


def test_the_partitions_node_has_the_dropped_ones_only_if_there_are_any(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    def fields() -> dict[str, object]:
        node = coordinator.store.read(partitions_path(table.table_id))
        assert node is not None
        return Reader(node.data, "the partitions").document()

    coordinator.partitions.create(table, b"\x01")
    before_any = fields()
    coordinator.partitions.drop(table, b"\x01")
    assert fields() == {"next": 2, "partitions": {}, "dropped": [1]}
    coordinator.partitions.forget(table, 1)
    assert fields() == {"next": 2, "partitions": {}}
    assert before_any == {"next": 2, "partitions": {"01": 1}}


@pytest.mark.parametrize("loss", ["request", "answer", "late"])
def test_whatever_is_lost_is_dropped_and_forgotten_once(loss: str) -> None:
    memory = MemoryCoordination()
    store = LossyStore(memory)
    coordinator = Coordinator(store)
    table = coordinator.tables.create("t", DEFINITION)
    coordinator.partitions.create(table, b"a")
    take(coordinator, table, BucketId(1, 0))

    def losing(call: Callable[[], object]) -> None:
        store.lose(loss)
        call()
        assert store.lost == [loss]

    losing(lambda: coordinator.partitions.drop(table, b"a"))
    assert coordinator.partitions.dropped(table) == [1]
    losing(lambda: coordinator.partitions.forget(table, 1))
    assert coordinator.partitions.dropped(table) == []
    losing(lambda: coordinator.drop_table(table))
    assert [one.partitions for one in coordinator.dropped.all()] == [()]
    losing(lambda: coordinator.dropped.forget(table.table_id))
    assert coordinator.dropped.all() == []


def test_a_damaged_node_is_told_by_its_path(coordinator: Coordinator, table: CatalogTable) -> None:
    coordinator.drop_table(table)
    path = dropped_path(table.table_id)
    node = coordinator.store.read(path)
    assert node is not None
    for data in (b"", b"\x01nonsense", node.data[:-1], node.data + b"x"):
        coordinator.store.transact([Write(path, data, ANY_VERSION)])
        with pytest.raises(CorruptRecord, match=f"{path}: a dropped table"):
            coordinator.dropped.all()
