"""Acquiring a lock, on both stores: what is refused, and whom a new epoch fences."""

import re

import pytest

from foundation.errors import (
    Fenced,
    InvalidColumns,
    InvalidOwner,
    InvalidTtl,
    LockHeld,
    UnknownColumn,
)
from locks.catalog.definitions import CatalogTable
from locks.column_locks.column_lock import LockState
from locks.column_locks.locks import DEFAULT_TTL_MS, LONGEST_TTL_MS, SHORTEST_TTL_MS
from locks.coordinator import Coordinator
from locks.store.memory import MemoryCoordination
from tests.support.coordinators import CALLS, DEFINITION, ENDS, LATER, Cluster, ready

# What cannot be asked for


@pytest.mark.parametrize("ttl_ms", [-1, 0, SHORTEST_TTL_MS - 1, LONGEST_TTL_MS + 1])
def test_a_ttl_out_of_range_is_refused(
    coordinator: Coordinator, table: CatalogTable, ttl_ms: int
) -> None:
    with pytest.raises(InvalidTtl, match=f"a TTL of {ttl_ms} ms; it ranges from 2000 to"):
        coordinator.locks.acquire(table, "etl-1", ["orders"], ttl_ms=ttl_ms)


def test_columns_that_cannot_be_locked_are_refused(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    with pytest.raises(
        UnknownColumn, match="no column 'visits'; it has orders, revenue, status, t"
    ):
        coordinator.locks.acquire(table, "etl-1", ["orders", "visits"])
    with pytest.raises(InvalidColumns, match="at least one column"):
        coordinator.locks.acquire(table, "etl-1", [])
    with pytest.raises(InvalidColumns, match="'customer_id' is part of the primary key"):
        coordinator.locks.acquire(table, "etl-1", ["orders", "customer_id"])
    assert coordinator.locks.all(table) == []


@pytest.mark.parametrize(
    ("owner", "reason"),
    [
        ("", "it is empty"),
        (".", "relative path"),
        ("..", "relative path"),
        ("a/b", "it has a '/'"),
        ("a\0b", "cannot be printed"),
        ("a\nb", "cannot be printed"),
        ("a\x7f", "cannot be printed"),
        (chr(0xD800), "cannot be printed"),
        ("\ue000", "cannot be printed"),
        ("\N{REPLACEMENT CHARACTER}", "cannot be printed"),
        ("\N{GRINNING FACE}", "beyond 16 bits"),
        ("x" * 201, "longer than 200 bytes"),
        ("ü" * 101, "longer than 200 bytes"),
    ],
)
def test_an_owner_id_that_zookeeper_cannot_hold_is_refused(
    coordinator: Coordinator, table: CatalogTable, owner: str, reason: str
) -> None:
    with pytest.raises(InvalidOwner, match=reason):
        coordinator.locks.acquire(table, owner, ["orders"])
    with pytest.raises(InvalidOwner, match=reason):
        coordinator.locks.forget(table, owner)


@pytest.mark.parametrize(
    "owner", ["x", "a b", "...", "zookeeper", "ü" * 100, "\uffee", "`$(id)`", "-"]
)
def test_any_other_owner_id_is_taken(
    coordinator: Coordinator, table: CatalogTable, owner: str
) -> None:
    coordinator.locks.acquire(table, owner, ["orders"])
    assert [info.owner for info in coordinator.locks.all(table)] == [owner]


# Epochs and refusals


def test_a_lock_has_an_epoch_columns_and_nothing_to_pay(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    lock = coordinator.locks.acquire(table, "etl-1", ["revenue", "orders", "orders"], query_id="q")
    assert (lock.owner, lock.columns, lock.batch, lock.debts) == ("etl-1", (11, 12), -1, ())
    assert lock.state is LockState.ACQUIRED
    assert lock.record == coordinator.locks.records(table)["etl-1"]
    assert (lock.record.query_id, lock.record.ttl_ms) == ("q", DEFAULT_TTL_MS)
    lock.check()


def test_a_live_lock_is_refused_with_owner_columns_epoch_expiry_and_the_way_out(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    lock = ready(coordinator, table, "etl-1", "orders", "revenue", ttl_ms=600_000)
    with pytest.raises(LockHeld) as refused:
        cluster.coordinator().locks.acquire(table, "etl-2", ["revenue", "tags"])
    assert re.fullmatch(
        r"columns orders, revenue of table customers \(epoch 1; times in UTC\) are held by `etl-1` "
        r"until (\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d, and longer if its job renews the lock; wait or, "
        r"if that job is gone, `tallybook locks release customers etl-1 --force`",
        str(refused.value),
    )
    lock.commit(0, LATER, [])
    assert set(coordinator.locks.records(table)) == {"etl-1"}


def test_the_expiry_in_a_refusal_is_by_the_store_s_clock_and_has_a_day_if_not_today() -> None:
    memory = MemoryCoordination(clock_ms=1_754_049_600_000)  # 2025-08-01 12:00:00 UTC
    coordinator = Coordinator(memory.connect())
    table = coordinator.tables.create("customers", DEFINITION)
    coordinator.locks.acquire(table, "etl-1", ["orders"], ttl_ms=190_000)
    coordinator.locks.acquire(table, "my etl", ["tags"], ttl_ms=86_400_000)
    with pytest.raises(
        LockHeld,
        match=r"held by `etl-1` until 12:03:10, .* locks release customers etl-1 --force`",
    ):
        coordinator.locks.acquire(table, "etl-2", ["orders"])
    with pytest.raises(
        LockHeld,
        match=r"until 2025-08-02 12:00:00, .* locks release customers 'my etl' --force`",
    ):
        coordinator.locks.acquire(table, "etl-2", ["tags"])


def test_locks_on_disjoint_columns_do_not_block_each_other(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    first = ready(coordinator, table, "etl-1", "orders", "tags")
    second = ready(cluster.coordinator(), table, "etl-2", "revenue")
    for batch in range(3):
        first.commit(batch, LATER, [])
        second.commit(batch, LATER, [])
    assert second.epoch > first.epoch


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("by", ["itself", "another", "forget"])
def test_a_fenced_holder_fails_on_its_next_call_whatever_it_is(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, call: str, by: str
) -> None:
    lock = coordinator.locks.acquire(table, "etl-1", ["orders"])
    if call != "ready":
        lock.ready(ENDS, [])
    other = cluster.coordinator()
    if by == "itself":
        other.locks.acquire(table, "etl-1", ["tags"])
        now = "was acquired again, with epoch 2"
    else:
        cluster.expire(table, "etl-1")
        other.locks.acquire(table, "etl-2", ["orders"])
        now = "was taken over or released"
        if by == "forget":
            other.locks.forget(table, "etl-1")
            now = "is gone: forgotten, or its table was dropped"
    before = other.locks.records(table)
    for again in (call, *CALLS):
        message = rf"^the lock of `etl-1` \(epoch 1\) {now}; stop for good$"
        with pytest.raises(Fenced, match=message):
            CALLS[again](lock)
        assert lock.state is LockState.FENCED
    assert other.locks.records(table) == before


def test_only_the_epoch_that_was_asked_for_is_succeeded(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    first = ready(coordinator, table, "etl-1", "orders")
    second = coordinator.locks.acquire(table, "etl-1", ["orders"], only_epoch=first.epoch)
    with pytest.raises(Fenced, match="was at epoch 1 and is at epoch 2; stop for good"):
        coordinator.locks.acquire(table, "etl-1", ["orders"], only_epoch=first.epoch)
    second.ready(ENDS, [])
    second.release()
    with pytest.raises(Fenced, match="was at epoch 2 and is no longer held; stop for good"):
        coordinator.locks.acquire(table, "etl-1", ["orders"], only_epoch=second.epoch)
    with pytest.raises(Fenced, match="was at epoch 7 and is gone; stop for good"):
        coordinator.locks.acquire(table, "etl-9", ["orders"], only_epoch=7)


def test_epochs_rise_over_all_owners_and_outlive_them(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    epochs = []
    for owner in ("etl-1", "etl-2", "etl-1", "etl-3"):
        lock = ready(coordinator, table, owner, "orders")
        epochs.append(lock.epoch)
        lock.release()
        coordinator.locks.forget(table, owner)
    assert epochs == [1, 2, 3, 4]
