"""How a lock ends, on both stores: released, abandoned, forgotten, and handed over."""

import pytest

from foundation.errors import HandoverNeeded, InvalidInput, LockHeld
from locks.catalog.definitions import CatalogTable
from locks.column_locks.column_lock import LockState
from locks.coordinator import Coordinator
from tests.support.coordinators import CALLS, LATER, Cluster, ready

# Release, abandon, forget


def test_release_frees_the_columns_and_keeps_the_batch_number(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    lock.commit(6, LATER, [])
    lock.release()
    assert lock.state is LockState.ENDED
    for call in CALLS.values():
        with pytest.raises(InvalidInput, match="is ended, not"):
            call(lock)
    assert coordinator.locks.acquire(table, "etl-2", ["orders"], handover=True).debts == ()
    again = coordinator.locks.acquire(table, "etl-1", ["tags"])
    assert (again.batch, again.debts) == (6, ())


def test_a_lock_with_a_prepared_batch_is_not_released(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    lock.prepare(0, "redo/0")
    with pytest.raises(InvalidInput, match="is prepared and not committed: commit it, or abandon"):
        lock.release()
    lock.commit(0, LATER, [])
    lock.release()


def test_an_abandoned_lock_is_taken_over_at_once(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    first = ready(coordinator, table, "etl-1", "orders")
    first.abandon()
    assert first.state is LockState.ENDED
    (info,) = coordinator.locks.all(table)
    assert info.record.held
    assert not info.live
    second = coordinator.locks.acquire(table, "etl-2", ["orders"])
    assert [debt.owner for debt in second.debts] == ["etl-1"]
    second.abandon()
    assert coordinator.locks.acquire(table, "etl-3", ["orders"]).debts == second.debts


def test_an_owner_is_forgotten_only_when_it_holds_nothing(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    lock.commit(0, LATER, [])
    with pytest.raises(LockHeld, match="held by `etl-1` until"):
        coordinator.locks.forget(table, "etl-1")
    cluster.expire(table, "etl-1")
    with pytest.raises(
        LockHeld, match=r"lock expired at .*; `tallybook locks release customers etl-1` settles"
    ):
        coordinator.locks.forget(table, "etl-1")
    coordinator.locks.acquire(table, "etl-1", ["orders"]).abandon()
    with pytest.raises(LockHeld, match="whose lock was abandoned"):
        coordinator.locks.forget(table, "etl-1")
    ready(coordinator, table, "etl-1", "orders").release()
    coordinator.locks.forget(table, "etl-1")
    assert coordinator.locks.records(table) == {}
    coordinator.locks.forget(table, "etl-1")
    assert coordinator.locks.acquire(table, "etl-1", ["orders"]).batch == -1


# Handover


def test_columns_last_committed_by_another_are_handed_over_only_when_that_is_said(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    first = ready(coordinator, table, "etl-1", "orders", "tags")
    first.commit(8, LATER, [])
    first.release()
    with pytest.raises(HandoverNeeded) as refused:
        coordinator.locks.acquire(table, "etl-2", ["orders"])
    assert str(refused.value) == (
        "column orders of table customers was last committed by `etl-1` (batch 8), not by `etl-2`: "
        "a new checkpoint or a new job would count its whole history again. Go on as `etl-1`, or "
        "pass handover=True if `etl-2` begins where `etl-1` ended"
    )
    assert set(coordinator.locks.records(table)) == {"etl-1"}
    ready(coordinator, table, "etl-2", "revenue").commit(0, LATER, [])

    second = ready(coordinator, table, "etl-2", "orders", handover=True)
    second.release()
    # Until it commits, the columns are still the first owner's.
    again = ready(coordinator, table, "etl-1", "orders")
    again.release()
    second = ready(coordinator, table, "etl-2", "orders", handover=True)
    second.commit(1, LATER, [])
    second.release()
    ready(coordinator, table, "etl-2", "orders").release()
    ready(coordinator, table, "etl-1", "tags").release()
    with pytest.raises(HandoverNeeded, match="last committed by `etl-2`"):
        coordinator.locks.acquire(table, "etl-1", ["orders"])
    back = ready(coordinator, table, "etl-1", "orders", handover=True)
    back.commit(9, LATER, [])
    with pytest.raises(LockHeld):
        coordinator.locks.acquire(table, "etl-2", ["orders"], handover=True)
    back.release()
    with pytest.raises(HandoverNeeded, match="last committed by `etl-1`"):
        coordinator.locks.acquire(table, "etl-2", ["orders"])
