"""What a successor takes over, on both stores: the tail, the prepared batch and the debts."""

from dataclasses import replace

import pytest

from foundation.errors import HandoverNeeded, LockHeld, RecordTooLarge, RewoundBatch
from foundation.ids import BucketId, Token
from locks.catalog.definitions import CatalogTable
from locks.column_locks.locks import SHORTEST_TTL_MS
from locks.column_locks.records import DebtKind, Prepared
from locks.coordinator import Coordinator
from locks.encoding.offsets import Offsets
from tests.support.coordinators import (
    DEFINITION,
    ENDS,
    LATER,
    Cluster,
    expired_lock_that_commits_in_between,
    just_before_the_next_transaction,
    ready,
)
from tests.support.zookeeper_server import wait_until


def test_an_owner_may_acquire_again_at_any_time_and_its_tail_becomes_its_debt(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "etl-1", "orders").commit(0, LATER, [])
    lock = cluster.coordinator().locks.acquire(table, "etl-1", ["tags"])
    (debt,) = lock.debts
    assert (debt.kind, debt.owner, debt.columns) == (DebtKind.UNDO, "etl-1", (11,))
    assert debt.offsets == LATER
    assert (lock.columns, lock.batch) == ((14,), 0)


def test_an_expired_owner_is_taken_over_with_what_it_had_not_committed(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "etl-1", "orders", "tags").commit(4, LATER, [])
    cluster.expire(table, "etl-1")
    lock = cluster.coordinator().locks.acquire(table, "etl-2", ["orders", "revenue"], handover=True)
    (debt,) = lock.debts
    assert (debt.kind, debt.owner, debt.columns) == (DebtKind.UNDO, "etl-1", (11, 14))
    assert (debt.offsets, debt.prepared) == (LATER, None)
    assert lock.batch == -1
    theirs = coordinator.locks.records(table)["etl-1"]
    assert (theirs.held, theirs.ready, theirs.batch) == (False, False, 4)


def test_expiry_is_by_the_ttl_and_by_zookeeper_s_clock(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    lock = coordinator.locks.acquire(table, "etl-1", ["orders"], ttl_ms=SHORTEST_TTL_MS)
    if cluster.memory is not None:
        cluster.memory.advance(SHORTEST_TTL_MS - 1)
        lock.renew()
        cluster.memory.advance(SHORTEST_TTL_MS - 1)
        with pytest.raises(LockHeld):
            coordinator.locks.acquire(table, "etl-2", ["orders"])
        cluster.memory.advance(1)
        assert coordinator.locks.acquire(table, "etl-2", ["orders"]).epoch > lock.epoch
        return
    renewed_ms = coordinator.store.now_ms()
    taken: list[int] = []

    def take() -> bool:
        try:
            taken.append(coordinator.locks.acquire(table, "etl-2", ["orders"]).epoch)
        except LockHeld:
            return False
        return True

    wait_until(take, "the shortest TTL to pass")
    assert coordinator.store.now_ms() - renewed_ms >= SHORTEST_TTL_MS - 1_000
    assert taken[0] > lock.epoch


def test_a_prepared_batch_counts_as_committed_when_its_owner_is_succeeded(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders")
    lock.prepare(0, "redo/0")
    cluster.expire(table, "etl-1")
    with pytest.raises(HandoverNeeded, match="last committed by `etl-1`"):
        coordinator.locks.acquire(table, "etl-2", ["orders"])
    successor = cluster.coordinator().locks.acquire(table, "etl-2", ["orders"], handover=True)
    (debt,) = successor.debts
    assert (debt.kind, debt.owner, debt.columns) == (DebtKind.REDO, "etl-1", (11,))
    assert (debt.prepared, debt.offsets) == (Prepared(Token(lock.epoch, 0), "redo/0"), ENDS)
    assert coordinator.locks.records(table)["etl-1"].batch == 0


def test_a_prepared_batch_counts_as_committed_when_its_owner_succeeds_itself(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    first = ready(coordinator, table, "etl-1", "orders")
    first.prepare(0, "redo/0")
    second = coordinator.locks.acquire(table, "etl-1", ["orders"])
    assert second.batch == 0
    assert [debt.kind for debt in second.debts] == [DebtKind.REDO]
    second.ready(LATER, [])
    with pytest.raises(
        RewoundBatch, match="batch 0 of `etl-1` is committed already: a replay; skip"
    ):
        second.commit(0, LATER, [])


def test_the_debts_of_a_holder_that_never_got_ready_move_on(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "etl-1", "orders")
    cluster.expire(table, "etl-1")
    second = coordinator.locks.acquire(table, "etl-2", ["orders", "tags"])
    cluster.expire(table, "etl-2")
    third = coordinator.locks.acquire(table, "etl-3", ["tags"])
    assert third.debts == second.debts
    assert [debt.owner for debt in third.debts] == ["etl-1"]
    assert coordinator.locks.records(table)["etl-2"].debts == ()
    again = coordinator.locks.acquire(table, "etl-3", ["tags"])
    assert again.debts == third.debts
    again.ready(LATER, [])
    assert coordinator.locks.records(table)["etl-3"].debts == ()


def test_the_columns_of_a_debt_are_pinned_until_it_is_paid(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "etl-1", "orders", "tags")
    cluster.expire(table, "etl-1")
    payer = coordinator.locks.acquire(table, "etl-2", ["orders"])
    with pytest.raises(LockHeld, match="with a debt of `etl-1` on orders, tags to pay"):
        coordinator.locks.acquire(table, "etl-3", ["tags"])
    payer.ready(ENDS, [])
    assert coordinator.locks.acquire(table, "etl-3", ["tags"]).debts == ()


def test_an_owner_waits_while_another_has_a_debt_of_its_to_pay(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "etl-1", "orders")
    cluster.expire(table, "etl-1")
    payer = coordinator.locks.acquire(table, "etl-2", ["orders"])
    with pytest.raises(LockHeld, match="with a debt of `etl-1` on orders to pay"):
        coordinator.locks.acquire(table, "etl-1", ["revenue"])
    payer.ready(ENDS, [])
    coordinator.locks.acquire(table, "etl-1", ["revenue"])


def test_an_owner_takes_over_an_expired_payer_of_its_own_debt(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "etl-1", "orders")
    cluster.expire(table, "etl-1")
    coordinator.locks.acquire(table, "etl-2", ["orders"])
    cluster.expire(table, "etl-2")
    lock = coordinator.locks.acquire(table, "etl-1", ["revenue"])
    assert [(debt.owner, debt.columns) for debt in lock.debts] == [("etl-1", (11,))]
    assert not coordinator.locks.records(table)["etl-2"].held


def test_several_expired_owners_are_taken_over_at_once(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    ready(coordinator, table, "etl-1", "orders")
    ready(coordinator, table, "etl-2", "tags").prepare(0, "redo/2")
    ready(coordinator, table, "etl-3", "status")
    cluster.expire(table, "etl-1")
    if cluster.memory is None:
        cluster.expire(table, "etl-2")
    lock = coordinator.locks.acquire(table, "etl-4", ["orders", "tags"], handover=True)
    assert {debt.owner: debt.kind for debt in lock.debts} == {
        "etl-1": DebtKind.UNDO,
        "etl-2": DebtKind.REDO,
    }
    assert coordinator.locks.records(table)["etl-3"].held


def test_what_an_owner_commits_while_it_is_succeeded_is_not_lost(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = ready(cluster.coordinator(), table, "etl-1", "orders")
    just_before_the_next_transaction(coordinator, lambda: lock.commit(0, LATER, []), monkeypatch)
    successor = coordinator.locks.acquire(table, "etl-1", ["orders"])
    assert successor.batch == 0
    assert [debt.offsets for debt in successor.debts] == [LATER]


def test_what_an_expired_owner_commits_while_it_is_taken_over_is_not_lost(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired_lock_that_commits_in_between(cluster, coordinator, table, monkeypatch)
    if cluster.memory is not None:
        with pytest.raises(LockHeld, match="held by `etl-1`"):
            coordinator.locks.acquire(table, "etl-2", ["orders"], handover=True)
        cluster.memory.advance(SHORTEST_TTL_MS)
    # (In ZooKeeper its TTL is a millisecond here, so it is found expired again.)
    successor = coordinator.locks.acquire(table, "etl-2", ["orders"], handover=True)
    assert [debt.offsets for debt in successor.debts] == [LATER]
    assert coordinator.locks.records(table)["etl-1"].batch == 0


def test_more_debts_than_a_transaction_holds_are_refused_with_the_way_out(
    coordinator: Coordinator,
) -> None:
    names = {f"c{number}": number for number in range(40)}
    table = coordinator.tables.create("wide", replace(DEFINITION, columns=names))
    offsets = Offsets({BucketId(0, n): (n * 7919) % 10**9 for n in range(10_000)})
    for name in names:
        lock = coordinator.locks.acquire(table, f"owner-{name}", [name])
        lock.ready(offsets, [])
        lock.abandon()
    with pytest.raises(RecordTooLarge, match=r"40 debts to pay.*acquire fewer columns at a time"):
        coordinator.locks.acquire(table, "all", list(names))
    some = coordinator.locks.acquire(table, "all", list(names)[:10])
    assert len(some.debts) == 10
    assert all(debt.offsets == offsets for debt in some.debts)
