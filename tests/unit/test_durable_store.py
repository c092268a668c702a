"""Coordination that survives its process: what is kept, what goes wrong, and who else is there."""

import os
from pathlib import Path

import pytest

from foundation.errors import (
    CorruptRecord,
    InUse,
    Unavailable,
    UnknownFormat,
    UnknownOutcome,
    UsedAfterFork,
)
from locks.catalog.definitions import TableDefinition
from locks.column_locks.locks import ColumnLocks
from locks.coordinator import Coordinator
from locks.store.base import Conflict, Create, Delete, Write
from locks.store.durable import DurableCoordination, encode_nodes
from locks.store.memory import MemoryStore, Stored
from merge_engine.storage.objects import LocalStorage
from tests.support.memory_log import MemoryLog

DEFINITION = TableDefinition(schema="{}", columns={"x": 2}, key_columns=("k",), buckets=1)


def opened(objects: MemoryLog) -> MemoryStore:
    return DurableCoordination(objects).connect()


def data_of(store: MemoryStore, path: str) -> bytes | None:
    node = store.read(path)
    return None if node is None else node.data


def test_nodes_with_versions_and_times_survive_and_ephemeral_ones_do_not() -> None:
    objects = MemoryLog()
    store = opened(objects)
    store.transact([Create("/a", b"0"), Create("/a/b", bytes(1000)), Create("/c", b"")])
    store.transact([Write("/a", b"1", 0), Create("/c/session", b"", ephemeral=True)])
    store.transact([Delete("/a/b")])
    node, again = store.read("/a"), opened(objects)
    assert again.read("/a") == node
    assert again.children("/a") == []
    assert again.children("/c") == []
    assert store.children("/c") == ["session"]


def test_an_ephemeral_node_and_a_check_write_no_object() -> None:
    objects = MemoryLog()
    store = opened(objects)
    store.transact([Create("/s", b"", ephemeral=True)])
    store.close()
    assert objects.names() == []


def test_nodes_that_there_are_from_the_beginning_are_kept_with_the_first_change() -> None:
    objects = MemoryLog()
    shared = DurableCoordination(objects, {"/a": b"first"})
    assert objects.names() == []
    shared.connect().transact([Create("/a/b", b"")])
    assert data_of(opened(objects), "/a") == b"first"


def test_old_objects_go_and_some_stay() -> None:
    objects = MemoryLog()
    store = opened(objects)
    store.transact([Create("/a", b"")])
    for version in range(100):
        store.transact([Write("/a", str(version).encode(), version)])
        assert len(objects.names()) <= 16
    assert data_of(opened(objects), "/a") == b"99"
    assert len(objects.names()) >= 8


@pytest.mark.parametrize("fault", ["answer", "request", "late"])
def test_a_change_of_unknown_outcome_has_happened_after_a_sync(fault: str) -> None:
    objects = MemoryLog()
    store = opened(objects)
    store.transact([Create("/a", b"0")])
    objects.faults.append(fault)
    with pytest.raises(UnknownOutcome):
        store.transact([Write("/a", b"1", 0)])
    store.sync()
    assert data_of(store, "/a") == b"1"
    store.transact([Write("/a", b"2", 1)])
    objects.deliver_late()
    assert data_of(opened(objects), "/a") == b"2"


def test_a_change_behind_one_of_unknown_outcome_is_judged_anew() -> None:
    objects = MemoryLog()
    store = opened(objects)
    store.transact([Create("/a", b"0")])
    objects.faults.append("request")
    with pytest.raises(UnknownOutcome):
        store.transact([Write("/a", b"1", 0)])
    with pytest.raises(Conflict):
        store.transact([Write("/a", b"2", 0)])
    assert data_of(store, "/a") == b"1"


def test_a_doubt_stays_one_while_the_storage_refuses() -> None:
    objects = MemoryLog()
    store = opened(objects)
    objects.faults += ["late", "refused"]
    with pytest.raises(UnknownOutcome):
        store.transact([Create("/a", b"0")])
    with pytest.raises(Unavailable):
        store.sync()
    objects.deliver_late()
    store.sync()
    assert data_of(store, "/a") == b"0"


def test_what_the_storage_refused_did_not_happen() -> None:
    objects = MemoryLog()
    store = opened(objects)
    objects.faults.append("refused")
    with pytest.raises(Unavailable, match="unreachable"):
        store.transact([Create("/a", b"0")])
    assert store.read("/a") is None
    store.transact([Create("/a", b"1")])
    assert data_of(opened(objects), "/a") == b"1"


def test_of_two_that_write_the_one_that_comes_last_goes_on() -> None:
    objects = MemoryLog()
    first = opened(objects)
    first.transact([Create("/a", b"0")])
    second = opened(objects)
    first.transact([Write("/a", b"1", 0)])
    second.sync()  # It has written nothing, and reads again.
    assert data_of(second, "/a") == b"1"
    second.transact([Write("/a", b"2", 1)])
    for _ in range(2):
        with pytest.raises(InUse, match="another process has written"):
            first.transact([Write("/a", b"3", 1)])
    assert data_of(opened(objects), "/a") == b"2"


def test_who_has_not_written_yet_looks_again_when_it_was_overtaken() -> None:
    objects = MemoryLog()
    first, second = opened(objects), opened(objects)
    first.transact([Create("/a", b"0")])
    with pytest.raises(Conflict):
        second.transact([Create("/a", b"9")])
    second.transact([Write("/a", b"1", 0)])
    assert data_of(opened(objects), "/a") == b"1"


def test_who_slept_while_its_next_number_was_written_and_deleted_has_lost() -> None:
    objects = MemoryLog()
    sleeper = opened(objects)
    sleeper.transact([Create("/a", b"0")])
    other = opened(objects)
    for version in range(40):
        other.transact([Write("/a", str(version).encode(), version)])
    assert f"{2:020}" not in objects.names()
    with pytest.raises(InUse):
        sleeper.transact([Write("/a", b"lost", 0)])
    assert data_of(opened(objects), "/a") == b"39"


def test_a_forked_child_takes_nothing_from_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = MemoryLog()
    store = opened(objects)
    store.transact([Create("/a", b"0")])
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(UsedAfterFork):
            store.transact([Write("/a", b"1", 0)])
    store.transact([Write("/a", b"2", 0)])
    assert data_of(opened(objects), "/a") == b"2"


def test_locks_are_acquired_by_the_same_owner_at_once_and_their_epochs_rise() -> None:
    objects = MemoryLog()
    coordinator = Coordinator(opened(objects))
    table = coordinator.tables.create("t", DEFINITION)
    lock = coordinator.locks.acquire(table, "etl", ["x"])
    lock.ready({}, [])
    lock.commit(0, {}, [])
    again = ColumnLocks(opened(objects), 1.0).acquire(table, "etl", ["x"])
    assert (again.epoch, again.batch, len(again.debts)) == (lock.epoch + 1, 0, 1)


@pytest.mark.parametrize("at", [1, 9, 40, -1])
def test_a_damaged_object_is_an_error_that_says_which_and_what_to_do(
    at: int, tmp_path: Path
) -> None:
    DurableCoordination(LocalStorage(tmp_path)).connect().transact([Create("/a", bytes(20))])
    [path] = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptRecord, match=r"00001 in .*damaged.*restore the object"):
        DurableCoordination(LocalStorage(tmp_path))


@pytest.mark.parametrize("size", [0, 1, 5, 30])
def test_a_torn_object_is_an_error(size: int, tmp_path: Path) -> None:
    whole = encode_nodes({"/a": Stored(bytes(20), 0, 7)}, "stamp")
    (tmp_path / f"{1:020}").write_bytes(whole[:size])
    with pytest.raises(CorruptRecord, match="damaged"):
        DurableCoordination(LocalStorage(tmp_path))


def test_an_object_of_a_later_release_is_an_error(tmp_path: Path) -> None:
    (tmp_path / f"{1:020}").write_bytes(b"\x07 and more")
    with pytest.raises(UnknownFormat, match="of format 7, this release reads 1"):
        DurableCoordination(LocalStorage(tmp_path))
