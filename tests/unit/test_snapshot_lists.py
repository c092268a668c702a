"""The lists of snapshots: claimed by a leader, changed by no other, and what they tell."""

from collections.abc import Callable
from typing import Any

import pytest

from foundation.errors import CorruptRecord, InvalidInput, Superseded, UnknownTable
from foundation.ids import BucketId, LeadKey
from locks.catalog.definitions import CatalogTable
from locks.coordinator import Coordinator
from locks.snapshots.list_records import ListedSnapshot, SnapshotList, SnapshotState
from locks.store.base import ANY_VERSION, Write
from locks.store.memory import MemoryCoordination
from locks.store.paths import snapshot_list_path
from tests.support.coordinators import DEFINITION, just_before_the_next_transaction
from tests.support.lossy import LossyStore


def snapshot(snapshot_id: int, term: int = 5, **changes: Any) -> ListedSnapshot:
    known: dict[str, Any] = {
        "applied": 100 * snapshot_id,
        "stable": 100 * snapshot_id - 7,
        "created_ms": 1_000,
        "bytes": 4_096,
    }
    return ListedSnapshot(snapshot_id=snapshot_id, term=term, **known | changes)


def ids(snapshots: tuple[ListedSnapshot, ...]) -> list[int]:
    return [one.snapshot_id for one in snapshots]


@pytest.fixture
def memory() -> MemoryCoordination:
    return MemoryCoordination()


@pytest.fixture
def coordinator(memory: MemoryCoordination) -> Coordinator:
    return Coordinator(memory.connect())


@pytest.fixture
def table(coordinator: Coordinator) -> CatalogTable:
    return coordinator.tables.create("customers", DEFINITION)


@pytest.fixture
def key(table: CatalogTable) -> LeadKey:
    return LeadKey(table.table_id, BucketId(0, 2))


def test_a_list_that_nobody_claimed_is_empty(coordinator: Coordinator, key: LeadKey) -> None:
    found = coordinator.snapshots.read(key)
    assert found == SnapshotList(key=key, term=0, next_id=1, snapshots=(), version=None)
    assert (found.latest, found.oldest_stable, found.kept) == (None, None, ())


def test_all_but_the_newest_are_retired_with_the_write_that_lists_another(
    memory: MemoryCoordination, coordinator: Coordinator, key: LeadKey
) -> None:
    lists = coordinator.snapshots
    listed = lists.claim(key, 5)
    for number in (1, 2, 3, 4):
        listed = lists.add(listed, snapshot(number), retained=2)
    assert (ids(listed.listed), ids(listed.retired)) == ([3, 4], [1, 2])
    assert ids(listed.kept) == [1, 2, 3, 4]
    assert listed.latest == snapshot(4)
    assert (listed.next_id, listed.oldest_stable) == (5, 93)
    listed = lists.remove(listed, [1, 3, 99])
    assert (ids(listed.listed), ids(listed.retired)) == ([3, 4], [2])
    assert listed.oldest_stable == 193
    listed = lists.remove(listed, [2])
    assert (listed.oldest_stable, listed.next_id) == (293, 5)
    assert Coordinator(memory.connect()).snapshots.read(key) == listed


def test_many_lists_are_read_at_once(coordinator: Coordinator, key: LeadKey) -> None:
    claimed = coordinator.snapshots.claim(key, 1)
    other = BucketId(0, 3)
    found = coordinator.snapshots.read_many(key.table_id, [key.bucket, other])
    assert found == {
        key.bucket: claimed,
        other: SnapshotList(key=LeadKey(key.table_id, other)),
    }


def test_a_claim_is_written_once_and_never_lowered(coordinator: Coordinator, key: LeadKey) -> None:
    lists = coordinator.snapshots
    assert lists.claim(key, 5) == lists.claim(key, 5) == lists.read(key)
    assert lists.claim(key, 8).version == 1
    with pytest.raises(Superseded, match="claimed by the leader of term 8; the leader of term 5"):
        lists.claim(key, 5)


def test_a_deposed_leader_neither_lists_nor_removes(
    memory: MemoryCoordination, coordinator: Coordinator, key: LeadKey
) -> None:
    lists = coordinator.snapshots
    ours = lists.claim(key, 5)
    for number in (1, 2):
        ours = lists.add(ours, snapshot(number), retained=1)
    theirs = Coordinator(memory.connect()).snapshots.claim(key, 6)
    assert theirs.kept == ours.kept
    with pytest.raises(InvalidInput, match="by the leader of term 6 that made it"):
        lists.add(lists.read(key), snapshot(3), retained=1)
    with pytest.raises(Superseded, match="claimed by the leader of term 6"):
        lists.add(ours, snapshot(3), retained=1)
    with pytest.raises(Superseded, match="claimed by the leader of term 6"):
        lists.remove(ours, [1])
    assert lists.read(key) == theirs


def test_a_leader_that_is_deposed_just_before_it_writes_changes_nothing(
    memory: MemoryCoordination,
    coordinator: Coordinator,
    key: LeadKey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Coordinator(memory.connect()).snapshots
    ours = coordinator.snapshots.claim(key, 5)
    just_before_the_next_transaction(coordinator, lambda: void(other.claim(key, 7)), monkeypatch)
    with pytest.raises(Superseded):
        coordinator.snapshots.add(ours, snapshot(1), retained=2)
    just_before_the_next_transaction(coordinator, lambda: void(other.claim(key, 9)), monkeypatch)
    with pytest.raises(Superseded):
        coordinator.snapshots.claim(key, 8)
    assert other.read(key).kept == ()


def test_a_change_is_made_to_the_list_as_it_is(coordinator: Coordinator, key: LeadKey) -> None:
    lists = coordinator.snapshots
    before = lists.claim(key, 5)
    lists.add(before, snapshot(1), retained=2)
    both = lists.add(before, snapshot(2), retained=2)
    assert ids(both.listed) == [1, 2]
    assert lists.add(before, snapshot(2), retained=2) == both
    assert lists.add(both, snapshot(9), retained=2).next_id == 10


def test_what_cannot_be_added_is_refused(coordinator: Coordinator, key: LeadKey) -> None:
    lists = coordinator.snapshots
    with pytest.raises(
        InvalidInput, match=r"nobody has claimed .* bucket 0/2 of table 1; claim them"
    ):
        lists.remove(lists.read(key), [1])
    listed = lists.add(lists.claim(key, 5), snapshot(1), retained=2)
    for wrong, retained, why in (
        (snapshot(1, applied=7), 2, "had a snapshot 1 already; the next is 2"),
        (snapshot(2, term=4), 2, "of term 5 that made it"),
        (snapshot(2, state=SnapshotState.RETIRED), 2, "is retired; a new one is listed"),
        (snapshot(2), 0, "at least one"),
    ):
        with pytest.raises(InvalidInput, match=why):
            lists.add(listed, wrong, retained=retained)
    with pytest.raises(CorruptRecord, match="negative"):
        lists.add(listed, snapshot(2, bytes=-1), retained=2)
    assert lists.read(key) == listed


def test_a_dropped_table_gets_neither_lists_nor_snapshots_but_loses_them(
    coordinator: Coordinator, table: CatalogTable, key: LeadKey
) -> None:
    lists = coordinator.snapshots
    listed = lists.claim(key, 5)
    for number in (1, 2):
        listed = lists.add(listed, snapshot(number), retained=1)
    coordinator.drop_table(table)
    with pytest.raises(UnknownTable, match=f"no table with id {table.table_id}; it was dropped"):
        lists.add(listed, snapshot(3), retained=1)
    with pytest.raises(UnknownTable):
        lists.claim(LeadKey(table.table_id, BucketId(0, 3)), 5)
    with pytest.raises(UnknownTable):
        lists.claim(LeadKey(table.table_id, BucketId(1, 3)), 5)
    assert ids(lists.remove(lists.claim(key, 6), [1]).kept) == [2]
    coordinator.dropped.forget(table.table_id)
    with pytest.raises(Superseded, match="is gone: its table or partition was dropped"):
        lists.remove(listed, [1])


def test_a_list_is_not_created_for_a_partition_that_was_dropped(
    memory: MemoryCoordination,
    coordinator: Coordinator,
    table: CatalogTable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Coordinator(memory.connect())
    partition = coordinator.partitions.create(table, b"a")
    key = LeadKey(table.table_id, BucketId(partition, 0))
    just_before_the_next_transaction(
        coordinator, lambda: void(other.partitions.drop(table, b"a")), monkeypatch
    )
    with pytest.raises(Superseded, match="its table or partition was dropped"):
        coordinator.snapshots.claim(key, 1)
    assert coordinator.snapshots.read(key).version is None


def test_a_damaged_list_is_told_with_its_bucket(coordinator: Coordinator, key: LeadKey) -> None:
    coordinator.snapshots.claim(key, 1)
    path = snapshot_list_path(key.table_id, *key.bucket)
    coordinator.store.transact([Write(path, b"\x01nonsense", ANY_VERSION)])
    with pytest.raises(CorruptRecord, match=f"bucket {key}, is damaged"):
        coordinator.snapshots.read(key)


@pytest.mark.parametrize("loss", ["request", "answer", "late"])
@pytest.mark.parametrize("call", ["claim", "claim again", "add", "remove"])
def test_each_change_is_made_once_whatever_is_lost(loss: str, call: str) -> None:
    memory = MemoryCoordination()
    store = LossyStore(memory)
    coordinator = Coordinator(store)
    lists = coordinator.snapshots
    key = LeadKey(coordinator.tables.create("t", DEFINITION).table_id, BucketId(0, 0))
    listed = SnapshotList(key=key)
    if call != "claim":
        listed = lists.claim(key, 5)
        for number in (1, 2):
            listed = lists.add(listed, snapshot(number), retained=1)
    calls: dict[str, Callable[[], SnapshotList]] = {
        "claim": lambda: lists.claim(key, 5),
        "claim again": lambda: lists.claim(key, 6),
        "add": lambda: lists.add(listed, snapshot(3), retained=1),
        "remove": lambda: lists.remove(listed, [1]),
    }
    store.lose(loss)
    changed = calls[call]()
    assert store.lost == [loss]
    assert changed.version == (0 if listed.version is None else listed.version + 1)
    assert Coordinator(memory.connect()).snapshots.read(key) == changed


def void(_: object) -> None:
    """Forget a result, for whoever wants none."""
