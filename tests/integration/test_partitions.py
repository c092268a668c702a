"""The partitions of a table, on both stores: ids that are never given twice."""

import threading

import pytest

from foundation.errors import CorruptRecord, RecordTooLarge, UnknownTable
from locks.catalog.definitions import CatalogTable
from locks.catalog.partitions import FORMATS
from locks.coordinator import Coordinator
from locks.encoding.framing import Reader, frame, frame_document
from locks.store.base import ANY_VERSION, Write
from locks.store.memory import MemoryCoordination
from locks.store.paths import partitions_path
from tests.integration.coordination.conftest import cluster, coordinator, table, zookeeper
from tests.support.coordinators import DEFINITION, Cluster, just_before_the_next_transaction, ready
from tests.support.lossy import LOSSES, Lossy, LossyStore, lossy

__all__ = ["cluster", "coordinator", "lossy", "table", "zookeeper"]  # Fixtures, used by name.

KEYS = [b"2026-01-01", b"", b"\x00\xff", "ü/..".encode(), b"x" * 1_000]


def test_partitions_are_numbered_from_one_and_seen_by_everybody(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    assert coordinator.partitions.ids(table) == {}
    assert [coordinator.partitions.create(table, key) for key in KEYS] == [1, 2, 3, 4, 5]
    other = cluster.coordinator()
    assert other.partitions.ids(table) == dict(zip(KEYS, range(1, 6), strict=True))
    assert [other.partitions.create(table, key) for key in KEYS] == [1, 2, 3, 4, 5]
    second = coordinator.tables.create("second", DEFINITION)
    assert coordinator.partitions.create(second, b"x") == 1


def test_the_id_of_a_dropped_partition_is_never_given_again(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    for key in (b"a", b"b"):
        coordinator.partitions.create(table, key)
    other = cluster.coordinator()
    assert other.partitions.drop(table, b"b") == 2
    assert coordinator.partitions.ids(table) == {b"a": 1}
    assert coordinator.partitions.drop(table, b"b") is None
    assert coordinator.partitions.create(table, b"b") == 3
    assert coordinator.partitions.drop(table, b"a") == 1
    assert coordinator.partitions.drop(table, b"b") == 3
    assert other.partitions.ids(table) == {}
    assert other.partitions.create(table, b"a") == 4


def test_the_node_is_as_documented(coordinator: Coordinator, table: CatalogTable) -> None:
    coordinator.partitions.create(table, b"\x01\xfe")
    node = coordinator.store.read(partitions_path(table.table_id))
    assert node is not None
    document = Reader(node.data, "the partitions").document()
    assert document == {"next": 2, "partitions": {"01fe": 1}}


def test_a_table_is_dropped_with_its_partitions(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    coordinator.partitions.create(table, b"a")
    ready(coordinator, table, "etl-1", "orders").release()
    coordinator.drop_table(table)
    again = coordinator.tables.create("customers", DEFINITION)
    assert coordinator.partitions.ids(again) == {}
    for call in (
        lambda: coordinator.partitions.ids(table),
        lambda: coordinator.partitions.create(table, b"a"),
        lambda: coordinator.partitions.drop(table, b"a"),
    ):
        with pytest.raises(UnknownTable, match=f"customers .id {table.table_id}. was dropped"):
            call()


def test_a_partition_that_is_created_meanwhile_does_not_keep_a_table_from_being_dropped(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = cluster.coordinator()
    just_before_the_next_transaction(
        coordinator, lambda: void(other.partitions.create(table, b"a")), monkeypatch
    )
    coordinator.drop_table(table)
    assert coordinator.tables.all() == []


def test_too_many_partitions_are_refused_with_the_way_out(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    keys = [bytes([number]) * 100_000 for number in range(5)]
    for key in keys[:4]:
        coordinator.partitions.create(table, key)
    with pytest.raises(RecordTooLarge) as refused:
        coordinator.partitions.create(table, keys[4])
    assert "customers would have 5 partitions, which are too many" in str(refused.value)
    assert str(refused.value).endswith("drop old partitions")
    assert coordinator.partitions.drop(table, keys[0]) == 1
    assert coordinator.partitions.create(table, keys[4]) == 5


def test_a_damaged_node_is_told_from_one_of_a_later_release(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    path, current = partitions_path(table.table_id), FORMATS.current
    for data, message in (
        (b"", "partitions of table 1 is damaged: it ends 1 bytes early"),
        (frame(current, [b"[]"]), "is damaged: it is no JSON object"),
        (frame_document(current, {"next": 2, "partitions": {"x": 1}}), "are damaged"),
        (frame_document(current, {"next": 2, "partitions": {}})[:-1] + b" ", "its checksum"),
        (frame_document(9, {}), f"of format 9, this release reads {current}"),
    ):
        coordinator.store.transact([Write(path, data, ANY_VERSION)])
        with pytest.raises(CorruptRecord, match=message):
            coordinator.partitions.create(table, b"a")


# Others at the same time


def test_of_racing_creators_all_get_the_same_ids(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    keys = [b"%d" % number for number in range(20)]
    got: list[dict[bytes, int]] = [{}, {}, {}]

    def create(number: int, racer: Coordinator) -> None:
        for key in keys[number:] + keys[:number]:
            got[number][key] = racer.partitions.create(table, key)

    threads = [
        threading.Thread(target=create, args=(number, cluster.coordinator())) for number in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [coordinator.partitions.ids(table)] * 3
    assert sorted(got[0].values()) == list(range(1, 21))


def test_a_partition_that_another_dropped_first_was_not_dropped_here(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = cluster.coordinator()
    coordinator.partitions.create(table, b"a")
    just_before_the_next_transaction(
        coordinator, lambda: void(other.partitions.drop(table, b"a")), monkeypatch
    )
    assert coordinator.partitions.drop(table, b"a") is None


# Answers that are lost


@pytest.mark.parametrize("losses", LOSSES, ids=" then ".join)
def test_a_partition_is_created_and_dropped_once_whatever_is_lost(
    lossy: Lossy, losses: list[str]
) -> None:
    ours, other = lossy.coordinator, lossy.other
    table = ours.tables.create("t", DEFINITION)
    got: list[int | None] = []
    lossy.without_answers(losses, lambda: got.append(ours.partitions.create(table, b"a")))
    assert other.partitions.ids(table) == {b"a": 1}
    lossy.without_answers(losses, lambda: got.append(ours.partitions.create(table, b"b")))
    assert other.partitions.ids(table) == {b"a": 1, b"b": 2}
    lossy.without_answers(losses, lambda: got.append(ours.partitions.drop(table, b"a")))
    assert other.partitions.ids(table) == {b"b": 2}
    assert got == [1, 2, 1]
    assert ours.partitions.drop(table, b"a") is None


@pytest.mark.parametrize("loss", ["answer", "late"])
def test_a_drop_without_an_answer_does_not_drop_what_was_created_after_it(loss: str) -> None:
    memory = MemoryCoordination()
    store = LossyStore(memory)
    coordinator, other = Coordinator(store), Coordinator(memory.connect())
    table = coordinator.tables.create("t", DEFINITION)
    coordinator.partitions.create(table, b"a")
    store.lose(loss)
    store.after_a_loss = lambda: other.partitions.create(table, b"a")
    assert coordinator.partitions.drop(table, b"a") == 1
    assert other.partitions.ids(table) == ({b"a": 2} if loss == "answer" else {})


@pytest.mark.parametrize("loss", ["request", "answer"])
def test_a_drop_without_an_answer_is_done_when_the_table_is_dropped_after_it(loss: str) -> None:
    memory = MemoryCoordination()
    store = LossyStore(memory)
    coordinator, other = Coordinator(store), Coordinator(memory.connect())
    table = coordinator.tables.create("t", DEFINITION)
    coordinator.partitions.create(table, b"a")
    store.lose(loss)
    store.after_a_loss = lambda: other.drop_table(table)
    assert coordinator.partitions.drop(table, b"a") == 1
    with pytest.raises(UnknownTable):
        coordinator.partitions.drop(table, b"a")


def void(_: object) -> None:
    """Forget a result, for whoever wants none."""
