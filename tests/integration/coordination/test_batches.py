"""The batches of a lock, on both stores: prepared, committed, and never twice."""

import logging
from collections.abc import Callable

import pytest

from foundation.errors import Fenced, InvalidInput, RewoundBatch, StaleLeaders
from locks.catalog.definitions import CatalogTable
from locks.column_locks.column_lock import LockState
from locks.coordinator import Coordinator
from tests.support.coordinators import CALLS, ENDS, LATER, Cluster, ready


def test_a_batch_is_committed_with_its_offsets_and_the_next_may_follow(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    assert lock.state is LockState.READY
    lock.commit(0, ENDS, [])
    lock.commit(1, LATER, [])
    record = coordinator.locks.records(table)["etl-1"]
    assert (record.batch, record.offsets) == (1, LATER)
    assert record == lock.record


def test_batches_never_go_back(coordinator: Coordinator, table: CatalogTable) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    lock.commit(3, ENDS, [])
    calls: list[Callable[[int], None]] = [
        lambda batch: lock.commit(batch, LATER, []),
        lambda batch: lock.prepare(batch, "there"),
    ]
    for call in calls:
        with pytest.raises(RewoundBatch, match="batch 3 of `etl-1` is committed already"):
            call(3)
        with pytest.raises(RewoundBatch, match=r"batch 2 .* after batch 3 was committed"):
            call(2)
    assert coordinator.locks.records(table)["etl-1"].offsets == ENDS
    again = ready(coordinator, table, "etl-1", "orders")
    with pytest.raises(RewoundBatch):
        again.commit(3, ENDS, [])


def test_batches_may_leave_numbers_out_which_is_logged(
    coordinator: Coordinator, table: CatalogTable, caplog: pytest.LogCaptureFixture
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    with caplog.at_level(logging.WARNING, "locks.column_locks.column_lock"):
        lock.commit(0, ENDS, [])
        assert caplog.messages == []
        lock.commit(5, ENDS, [])
        lock.prepare(9, "there")
        lock.commit(9, ENDS, [])
    assert [message[:30] for message in caplog.messages] == [
        "batch 5 of etl-1 follows batch",
        "batch 9 of etl-1 follows batch",
    ]


def test_a_prepared_batch_is_committed_before_any_other(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    lock.prepare(0, "redo/0")
    with pytest.raises(InvalidInput, match="batch 0 of `etl-1` is prepared and has to be commit"):
        lock.commit(1, LATER, [])
    with pytest.raises(InvalidInput, match="batch 0 of `etl-1` is prepared and has to be commit"):
        lock.prepare(1, "redo/1")
    lock.commit(0, LATER, [])
    assert coordinator.locks.records(table)["etl-1"].prepared is None


def test_ready_and_commit_count_for_nothing_when_a_server_that_answered_is_gone(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    hosting, other = cluster.coordinator(), cluster.coordinator()
    stays = coordinator.servers.register("127.0.0.1:1").name
    goes = hosting.servers.register("127.0.0.1:2").name
    goes_too = other.servers.register("127.0.0.1:3").name
    lock = coordinator.locks.acquire(table, "etl-1", ["orders"])
    other.store.close()
    with pytest.raises(StaleLeaders, match=f"server {goes_too} is gone"):
        lock.ready(ENDS, [stays, goes_too])
    assert not coordinator.locks.records(table)["etl-1"].ready
    assert lock.state is LockState.ACQUIRED
    lock.ready(ENDS, [stays, goes, stays])
    lock.commit(0, ENDS, [stays, goes])
    hosting.store.close()
    with pytest.raises(StaleLeaders, match=f"server {goes} is gone, .* start over"):
        lock.commit(1, LATER, [stays, goes])
    assert coordinator.locks.records(table)["etl-1"].batch == 0
    lock.commit(1, LATER, [stays])


def test_a_holder_that_is_fenced_hears_that_rather_than_of_stale_leaders(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    coordinator.locks.acquire(table, "etl-1", ["orders"])
    with pytest.raises(Fenced):
        lock.commit(0, LATER, ["gone"])


def test_only_a_ready_lock_writes(coordinator: Coordinator, table: CatalogTable) -> None:
    lock = coordinator.locks.acquire(table, "etl-1", ["orders"])
    message = r"the lock of `etl-1` \(epoch 1\) is acquired, not ready"
    for call in ("prepare", "commit", "release"):
        with pytest.raises(InvalidInput, match=message):
            CALLS[call](lock)
    lock.ready(ENDS, [])
    with pytest.raises(InvalidInput, match="is ready, not acquired"):
        lock.ready(LATER, [])
    assert coordinator.locks.records(table)["etl-1"].offsets == ENDS
