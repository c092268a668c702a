"""The batches of a lock, on both stores: prepared, committed, and never twice."""

import logging
from collections.abc import Callable

import pytest

from locks import Coordinator, Fenced, InvalidRequest, LockState, RewoundBatch, StaleLeaders, Table
from tests.coordinators import CALLS, ENDS, LATER, Cluster, ready


def test_a_batch_is_committed_with_its_offsets_and_the_next_may_follow(
    coordinator: Coordinator, table: Table
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    assert lock.state is LockState.READY
    lock.commit(0, ENDS, [])
    lock.commit(1, LATER, [])
    record = coordinator.records(table)["etl-1"]
    assert (record.batch, record.offsets) == (1, LATER)
    assert record == lock.record


def test_batches_never_go_back(coordinator: Coordinator, table: Table) -> None:
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
    assert coordinator.records(table)["etl-1"].offsets == ENDS
    again = ready(coordinator, table, "etl-1", "orders")
    with pytest.raises(RewoundBatch):
        again.commit(3, ENDS, [])


def test_batches_may_leave_numbers_out_which_is_logged(
    coordinator: Coordinator, table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    with caplog.at_level(logging.WARNING, "locks.column_lock"):
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
    coordinator: Coordinator, table: Table
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    lock.prepare(0, "redo/0")
    with pytest.raises(InvalidRequest, match="batch 0 of `etl-1` is prepared and has to be commit"):
        lock.commit(1, LATER, [])
    with pytest.raises(InvalidRequest, match="batch 0 of `etl-1` is prepared and has to be commit"):
        lock.prepare(1, "redo/1")
    lock.commit(0, LATER, [])
    assert coordinator.records(table)["etl-1"].prepared is None


def test_ready_and_commit_count_for_nothing_when_a_server_that_answered_is_gone(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    hosting, other = cluster.coordinator(), cluster.coordinator()
    stays = coordinator.register_server("127.0.0.1:1").name
    goes = hosting.register_server("127.0.0.1:2").name
    goes_too = other.register_server("127.0.0.1:3").name
    lock = coordinator.acquire(table, "etl-1", ["orders"])
    other.store.close()
    with pytest.raises(StaleLeaders, match=f"server {goes_too} is gone"):
        lock.ready(ENDS, [stays, goes_too])
    assert not coordinator.records(table)["etl-1"].ready
    assert lock.state is LockState.ACQUIRED
    lock.ready(ENDS, [stays, goes, stays])
    lock.commit(0, ENDS, [stays, goes])
    hosting.store.close()
    with pytest.raises(StaleLeaders, match=f"server {goes} is gone, .* start over"):
        lock.commit(1, LATER, [stays, goes])
    assert coordinator.records(table)["etl-1"].batch == 0
    lock.commit(1, LATER, [stays])


def test_a_holder_that_is_fenced_hears_that_rather_than_of_stale_leaders(
    coordinator: Coordinator, table: Table
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    coordinator.acquire(table, "etl-1", ["orders"])
    with pytest.raises(Fenced):
        lock.commit(0, LATER, ["gone"])


def test_only_a_ready_lock_writes(coordinator: Coordinator, table: Table) -> None:
    lock = coordinator.acquire(table, "etl-1", ["orders"])
    message = r"the lock of `etl-1` \(epoch 1\) is acquired, not ready"
    for call in ("prepare", "commit", "release"):
        with pytest.raises(InvalidRequest, match=message):
            CALLS[call](lock)
    lock.ready(ENDS, [])
    with pytest.raises(InvalidRequest, match="is ready, not acquired"):
        lock.ready(LATER, [])
    assert coordinator.records(table)["etl-1"].offsets == ENDS
