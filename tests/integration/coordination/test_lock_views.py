"""The locks as others see them, on both stores: listed, and followed by a watch."""

import pytest

from locks import BucketKey, Coordinator, FreshRecords, SessionLost, Table
from locks.paths import owner_path
from locks.store import Node
from tests.coordinators import ENDS, LATER, Cluster, ready
from tests.zookeeper_server import wait_until


def test_locks_are_listed_with_what_they_hold_and_until_when(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    assert coordinator.list_locks(table) == []
    ready(coordinator, table, "etl-2", "tags").release()
    lock = ready(coordinator, table, "etl-1", "orders", ttl_ms=60_000)
    now_ms = coordinator.store.now_ms()
    first, second = cluster.coordinator().list_locks(table)
    assert (first.owner, first.record, first.live) == ("etl-1", lock.record, True)
    assert now_ms + 50_000 < first.expires_ms <= now_ms + 60_000
    assert (second.owner, second.live, second.record.held) == ("etl-2", False, False)


def test_a_fresh_view_follows_owners_commits_takeovers_and_forgetting(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    fresh = FreshRecords(cluster.coordinator(), table)

    def follows() -> None:
        wait_until(lambda: fresh.records() == coordinator.records(table), "the view to be fresh")

    assert fresh.records() == {}
    lock = ready(coordinator, table, "etl-1", "orders")
    follows()
    for batch in range(3):
        lock.commit(batch, {BucketKey(0, 0): batch}, [])
        follows()
    other = ready(coordinator, table, "etl-2", "tags")
    follows()
    other.commit(0, LATER, [])
    lock.abandon()
    follows()
    payer = coordinator.acquire(table, "etl-2", ["orders"], handover=True)
    follows()
    payer.ready(ENDS, [])
    coordinator.forget(table, "etl-1")
    follows()
    assert set(fresh.records()) == {"etl-2"}
    ready(coordinator, table, "etl-1", "revenue")
    follows()
    coordinator.drop_table(coordinator.table("customers"), force=True)
    wait_until(lambda: fresh.records() == {}, "the view of a dropped table to be empty")


def test_a_fresh_view_reads_nothing_while_nothing_changes(
    cluster: Cluster, coordinator: Coordinator, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = cluster.coordinator()
    ready(coordinator, table, "etl-1", "orders")
    other = ready(coordinator, table, "etl-2", "tags")
    fresh = FreshRecords(watching, table)
    expected = coordinator.records(table)
    wait_until(lambda: fresh.records() == expected, "the view to be fresh")
    watching.store.sync()
    fresh.records()
    reads: list[str] = []
    real = watching.store.read

    def read(path: str) -> Node | None:
        reads.append(path)
        return real(path)

    monkeypatch.setattr(watching.store, "read", read)
    for _ in range(10):
        assert fresh.records() == expected
    assert reads == []
    other.renew()
    wait_until(lambda: fresh.records() == coordinator.records(table), "the view to be fresh")
    assert set(reads) == {owner_path(table.table_id, "etl-2")}


def test_a_fresh_view_of_a_lost_session_says_so(
    cluster: Cluster, coordinator: Coordinator, table: Table
) -> None:
    watching = cluster.coordinator()
    fresh = FreshRecords(watching, table)
    watching.store.close()
    ready(coordinator, table, "etl-1", "orders")
    with pytest.raises(SessionLost):
        fresh.records()
