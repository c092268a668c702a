"""Leases on snapshots, on both stores: what they keep, for how long, and whom they meet."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from foundation.errors import (
    CorruptRecord,
    InvalidInput,
    InvalidLease,
    InvalidTtl,
    UnknownLease,
    UnknownTable,
)
from foundation.ids import BucketId, LeadKey
from locks.catalog.definitions import CatalogTable
from locks.coordinator import Coordinator
from locks.encoding.offsets import Offsets
from locks.snapshots.lease_records import LeaseInfo, decode_lease
from locks.snapshots.leases import LONGEST_LEASE_MS, SHORTEST_LEASE_MS, Acquired
from locks.snapshots.list_records import ListedSnapshot, SnapshotList
from locks.store.base import ANY_VERSION, Operation, Write
from locks.store.paths import lease_path
from tests.integration.coordination.conftest import cluster, coordinator, table, zookeeper
from tests.support.coordinators import DEFINITION, Cluster
from tests.support.lossy import LOSSES, Lossy, lossy
from tests.support.zookeeper_server import wait_until

__all__ = ["cluster", "coordinator", "lossy", "table", "zookeeper"]  # Fixtures, used by name.

A, B, C = (BucketId(0, number) for number in range(3))
HOUR = 3_600_000
TERM = 5


def snapshot_of(listed: SnapshotList) -> ListedSnapshot:
    return ListedSnapshot(
        snapshot_id=listed.next_id, term=TERM, applied=9, stable=9, created_ms=1, bytes=1
    )


def take(
    coordinator: Coordinator, table: CatalogTable, *keys: BucketId, retained: int = 2
) -> Mapping[BucketId, int]:
    """Take a snapshot of each bucket, as its leader does; return their ids."""
    taken = {}
    for key in keys:
        listed = coordinator.snapshots.claim(LeadKey(table.table_id, key), TERM)
        taken[key] = listed.next_id
        coordinator.snapshots.add(listed, snapshot_of(listed), retained)
    return taken


def delete_needless(coordinator: Coordinator, table: CatalogTable, key: BucketId) -> list[int]:
    """Remove a bucket's retired snapshots that no lease has, as its leader does; return these."""
    listed = coordinator.snapshots.claim(LeadKey(table.table_id, key), TERM)
    pinned = coordinator.leases.pinned(table.table_id).get(key, frozenset())
    gone = [one.snapshot_id for one in listed.retired if one.snapshot_id not in pinned]
    coordinator.snapshots.remove(listed, gone)
    return gone


def held(snapshots: Mapping[BucketId, int]) -> Acquired:
    return Acquired(held=snapshots, unavailable={})


def kept(coordinator: Coordinator, table: CatalogTable, key: BucketId) -> list[int]:
    listed = coordinator.snapshots.read(LeadKey(table.table_id, key))
    return [one.snapshot_id for one in listed.kept]


def snapshots_by_lease(coordinator: Coordinator, table: CatalogTable) -> dict[str, Offsets]:
    return {one.lease_id: one.snapshots for one in coordinator.leases.all(table.table_id)}


def expire(cluster: Cluster) -> None:
    """Let leases of the shortest duration pass, by the store's own clock."""
    if cluster.memory is not None:
        cluster.memory.advance(SHORTEST_LEASE_MS)
        return
    store = cluster.coordinators[0].store
    end = store.now_ms() + SHORTEST_LEASE_MS
    wait_until(lambda: store.now_ms() >= end, "ZooKeeper's clock to pass a lease")


# One lease


def test_a_lease_keeps_its_snapshots_from_being_deleted_and_not_the_others(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    leases, first = coordinator.leases, take(coordinator, table, A, B)
    assert leases.acquire(table.table_id, "tiering", {A: first[A]}, HOUR) == held({A: first[A]})
    for _ in range(3):
        take(coordinator, table, A, B)
    assert delete_needless(coordinator, table, A) == [2]
    assert delete_needless(coordinator, table, B) == [1, 2]
    assert kept(coordinator, table, A) == [1, 3, 4]
    other = cluster.coordinator()
    assert other.leases.pinned(table.table_id) == {A: {1}}
    (info,) = other.leases.all(table.table_id)
    now_ms = coordinator.store.now_ms()
    assert info == LeaseInfo(
        lease_id="tiering", snapshots=Offsets({A: 1}), expires_ms=info.expires_ms, live=True
    )
    assert 0 < info.expires_ms - now_ms <= HOUR
    other.leases.drop(table.table_id, "tiering")
    assert delete_needless(coordinator, table, A) == [1]


def test_what_is_acquired_later_is_held_beside_and_replaces_what_its_bucket_had(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    leases, table_id = coordinator.leases, table.table_id
    take(coordinator, table, A, B, C)
    take(coordinator, table, A, B, C)
    assert leases.acquire(table_id, "l", {A: 1, B: 1}, HOUR) == held({A: 1, B: 1})
    assert leases.acquire(table_id, "l", {B: 2, C: 2}, 2 * HOUR) == held({B: 2, C: 2})
    assert leases.pinned(table_id) == {A: {1}, B: {2}, C: {2}}
    (info,) = leases.all(table_id)
    assert info.expires_ms > coordinator.store.now_ms() + HOUR


def test_what_is_not_listed_is_unavailable_and_a_lease_of_nothing_is_none(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    leases, table_id = coordinator.leases, table.table_id
    for _ in range(3):
        take(coordinator, table, A)
    take(coordinator, table, B)
    nothing = Acquired(held={}, unavailable={A: 1, C: 1})
    assert leases.acquire(table_id, "l", {A: 1, C: 1}, HOUR) == nothing
    assert leases.all(table_id) == []
    assert leases.acquire(table_id, "l", {}, HOUR) == held({})
    assert leases.acquire(table_id, "l", {A: 2, B: 1}, HOUR) == held({A: 2, B: 1})
    assert leases.acquire(table_id, "l", {A: 99}, HOUR).unavailable == {A: 99}
    assert snapshots_by_lease(coordinator, table) == {"l": {A: 2, B: 1}}
    some = leases.acquire(table_id, "l", {A: 1, B: 1, C: 1}, HOUR)
    assert some == Acquired(held={B: 1}, unavailable={A: 1, C: 1})
    assert leases.pinned(table_id) == {A: {2}, B: {1}}


def test_what_a_lease_holds_it_can_acquire_again_though_it_was_retired(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    """A job that is started anew goes on with the snapshots that it had; no other can have them."""
    leases, table_id = coordinator.leases, table.table_id
    take(coordinator, table, A)
    leases.acquire(table_id, "l", {A: 1}, HOUR)
    for _ in range(2):
        take(coordinator, table, A)
    again = cluster.coordinator().leases
    assert again.acquire(table_id, "l", {A: 1}, HOUR) == held({A: 1})
    assert again.acquire(table_id, "other", {A: 1}, HOUR).unavailable == {A: 1}
    assert delete_needless(coordinator, table, A) == []


def test_a_lease_is_released_in_parts_and_goes_with_the_last(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    leases, table_id = coordinator.leases, table.table_id
    leases.acquire(table_id, "l", take(coordinator, table, A, B, C), HOUR)
    (before,) = leases.all(table_id)
    leases.release(table_id, "l", [A, BucketId(9, 9)])
    leases.release(table_id, "l", [A])
    (after,) = leases.all(table_id)
    assert after.snapshots == {B: 1, C: 1}
    assert after.expires_ms == before.expires_ms
    leases.release(table_id, "l", [C, B])
    leases.release(table_id, "l", [C, B])
    assert leases.all(table_id) == []
    assert leases.pinned(table_id) == {}
    with pytest.raises(UnknownLease):
        leases.renew(table_id, "l")


def test_to_drop_what_is_not_there_is_fine_and_to_renew_it_an_error(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    leases, table_id = coordinator.leases, table.table_id
    why = f"no lease `l` on table {table_id}: it was dropped, or expired, or never was; acquire"
    with pytest.raises(UnknownLease, match=why):
        leases.renew(table_id, "l", HOUR)
    assert leases.all(table_id) == []
    leases.drop(table_id, "l")
    leases.acquire(table_id, "l", take(coordinator, table, A), HOUR)
    leases.drop(table_id, "l")
    leases.drop(table_id, "l")
    with pytest.raises(UnknownLease, match=why):
        leases.renew(table_id, "l")
    assert leases.pinned(table_id) == {}


def test_two_leases_on_one_snapshot_keep_it_until_both_are_gone(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    leases, table_id = coordinator.leases, table.table_id
    take(coordinator, table, A)
    for lease_id in ("one", "two"):
        assert leases.acquire(table_id, lease_id, {A: 1}, HOUR) == held({A: 1})
    for _ in range(2):
        take(coordinator, table, A)
    leases.drop(table_id, "one")
    assert delete_needless(coordinator, table, A) == []
    leases.release(table_id, "two", [A])
    assert delete_needless(coordinator, table, A) == [1]


def test_everything_is_there_after_all_sessions_are_gone(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    coordinator.leases.acquire(table.table_id, "l", take(coordinator, table, A, B), HOUR)
    coordinator.store.close()
    later = cluster.coordinator()
    assert later.leases.pinned(table.table_id) == {A: {1}, B: {1}}
    assert later.snapshots.read(LeadKey(table.table_id, A)).next_id == 2
    later.leases.renew(table.table_id, "l")


# Time


def test_an_expired_lease_is_unknown_and_no_longer_keeps_anything(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    leases, table_id = coordinator.leases, table.table_id
    leases.acquire(table_id, "short", take(coordinator, table, A, B), SHORTEST_LEASE_MS)
    leases.acquire(table_id, "long", {B: 1}, HOUR)
    expire(cluster)
    assert [one.live for one in leases.all(table_id)] == [True, False]
    with pytest.raises(UnknownLease, match=r"`short` on table \d+: it expired \d+\.\d s ago"):
        leases.renew(table_id, "short", HOUR)
    leases.release(table_id, "short", [B])  # Which does not bring it back to life.
    assert [one.live for one in leases.all(table_id)] == [True, False]
    assert leases.pinned(table_id) == {B: {1}}
    assert [one.lease_id for one in leases.all(table_id)] == ["long"]


def test_an_expired_lease_that_is_still_there_counts_as_none_when_it_is_acquired_again(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    leases, table_id = coordinator.leases, table.table_id
    leases.acquire(table_id, "l", take(coordinator, table, A, B), SHORTEST_LEASE_MS)
    for _ in range(2):
        take(coordinator, table, A)
    expire(cluster)
    again = leases.acquire(table_id, "l", {A: 1, B: 1}, HOUR)
    assert again == Acquired(held={B: 1}, unavailable={A: 1})
    assert leases.pinned(table_id) == {B: {1}}


def test_a_renewed_lease_lasts_from_then_on(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable
) -> None:
    leases, table_id = coordinator.leases, table.table_id
    leases.acquire(table_id, "l", take(coordinator, table, A), SHORTEST_LEASE_MS)
    (before,) = leases.all(table_id)
    if cluster.memory is not None:
        cluster.memory.advance(SHORTEST_LEASE_MS - 1)
    leases.renew(table_id, "l")
    (after,) = leases.all(table_id)
    assert after.expires_ms > before.expires_ms
    leases.renew(table_id, "l", HOUR)
    expire(cluster)
    assert leases.pinned(table_id) == {A: {1}}


def test_ids_and_durations_are_judged_before_anything_else(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    leases, table_id = coordinator.leases, table.table_id
    for wrong in ("", "a/b", "..", "x" * 201, "a\0b"):
        for call in (
            lambda wrong=wrong: leases.acquire(table_id, wrong, {A: 1}, HOUR),
            lambda wrong=wrong: leases.renew(table_id, wrong),
            lambda wrong=wrong: leases.release(table_id, wrong, [A]),
            lambda wrong=wrong: leases.drop(table_id, wrong),
        ):
            with pytest.raises(InvalidLease, match="cannot be a lease id: it "):
                call()
    for duration_ms in (0, SHORTEST_LEASE_MS - 1, LONGEST_LEASE_MS + 1):
        with pytest.raises(InvalidTtl, match=f"a lease of {duration_ms} ms; it lasts from 2000 "):
            leases.acquire(table_id, "l", {A: 1}, duration_ms)
        with pytest.raises(InvalidTtl):
            leases.renew(table_id, "l", duration_ms)
    with pytest.raises(InvalidInput):
        leases.acquire(table_id, "l", {A: -1}, HOUR)


def test_a_damaged_lease_keeps_the_cleaner_from_deleting_anything(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    leases, table_id = coordinator.leases, table.table_id
    leases.acquire(table_id, "l", take(coordinator, table, A), HOUR)
    path = lease_path(table_id, "l")
    coordinator.store.transact([Write(path, b"\x01nonsense", ANY_VERSION)])
    with pytest.raises(CorruptRecord, match=f"{path}: a lease is damaged"):
        leases.pinned(table_id)


# Leases and cleaners at the same time


def around_the_transaction(
    coordinator: Coordinator,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Let somebody else act just before or after the so-manieth transaction from here on."""
    real, count = coordinator.store.transact, 0

    def transact(operations: Sequence[Operation]) -> None:
        nonlocal count
        count += 1
        if count == number:
            before()
        real(operations)
        if count == number:
            after()

    monkeypatch.setattr(coordinator.store, "transact", transact)


def test_what_is_retired_and_deleted_before_it_is_asked_for_is_unavailable(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cleaner comes between the first look at the lists and the write."""
    cleaner, table_id, deleted = cluster.coordinator(), table.table_id, []
    take(cleaner, table, A, B)

    def clean() -> None:
        take(cleaner, table, A, retained=1)
        deleted.extend(delete_needless(cleaner, table, A))

    around_the_transaction(coordinator, 1, monkeypatch, before=clean)
    acquired = coordinator.leases.acquire(table_id, "l", {A: 1, B: 1}, HOUR)
    assert deleted == [1]
    assert acquired == Acquired(held={B: 1}, unavailable={A: 1})
    assert cleaner.leases.pinned(table_id) == {B: {1}}


def test_what_is_asked_for_before_it_is_retired_is_kept_and_held_or_freed(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cleaner comes between the write and the look at the lists: both see the other."""
    cleaner, table_id = cluster.coordinator(), table.table_id
    take(cleaner, table, A)
    deleted: list[list[int]] = []

    def clean() -> None:
        take(cleaner, table, A, retained=1)
        deleted.append(delete_needless(cleaner, table, A))

    around_the_transaction(coordinator, 1, monkeypatch, after=clean)
    assert coordinator.leases.acquire(table_id, "l", {A: 1}, HOUR).unavailable == {A: 1}
    assert deleted == [[]]
    assert coordinator.leases.all(table_id) == []
    assert delete_needless(cleaner, table, A) == [1]


def test_what_is_retired_after_the_look_is_held(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaner, table_id = cluster.coordinator(), table.table_id
    take(cleaner, table, A)

    def clean() -> None:
        take(cleaner, table, A, retained=1)
        assert delete_needless(cleaner, table, A) == []

    around_the_transaction(coordinator, 2, monkeypatch, before=clean)
    assert coordinator.leases.acquire(table_id, "l", {A: 1}, HOUR) == held({A: 1})
    assert delete_needless(cleaner, table, A) == []


def test_a_snapshot_that_another_cannot_take_the_place_of_stays_held_all_the_time(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaner, table_id = cluster.coordinator(), table.table_id
    take(cleaner, table, A)
    coordinator.leases.acquire(table_id, "l", {A: 1}, HOUR)
    take(cleaner, table, A, retained=1)
    seen = []

    def clean() -> None:
        take(cleaner, table, A, retained=1)
        seen.append(cleaner.leases.pinned(table_id))

    around_the_transaction(coordinator, 1, monkeypatch, after=clean)
    assert coordinator.leases.acquire(table_id, "l", {A: 2}, HOUR).unavailable == {A: 2}
    assert seen == [{A: {1, 2}}]
    assert cleaner.leases.pinned(table_id) == {A: {1}}


def test_what_was_asked_for_by_a_job_that_died_is_not_held_by_its_successor(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asked after the snapshot was deleted, and never looked: its lease proves nothing."""
    cleaner, table_id = cluster.coordinator(), table.table_id
    take(cleaner, table, A, B)

    def clean() -> None:
        take(cleaner, table, A, retained=1)
        assert delete_needless(cleaner, table, A) == [1]

    def die() -> None:
        raise KeyboardInterrupt

    around_the_transaction(coordinator, 1, monkeypatch, before=clean, after=die)
    with pytest.raises(KeyboardInterrupt):
        coordinator.leases.acquire(table_id, "l", {A: 1, B: 1}, HOUR)
    assert cleaner.leases.pinned(table_id) == {A: {1}, B: {1}}
    with pytest.raises(UnknownLease):
        cleaner.leases.renew(table_id, "l")
    again = cleaner.leases.acquire(table_id, "l", {A: 1, B: 1}, HOUR)
    assert again == Acquired(held={B: 1}, unavailable={A: 1})
    assert cleaner.leases.pinned(table_id) == {B: {1}}


def test_what_was_asked_for_and_left_behind_goes_with_the_next_renewal(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table_id, other = table.table_id, cluster.coordinator()
    take(other, table, A, B)
    other.leases.acquire(table_id, "l", {A: 1}, HOUR)

    def die() -> None:
        raise KeyboardInterrupt

    around_the_transaction(coordinator, 1, monkeypatch, after=die)
    with pytest.raises(KeyboardInterrupt):
        coordinator.leases.acquire(table_id, "l", {B: 1}, HOUR)
    assert other.leases.pinned(table_id) == {A: {1}, B: {1}}
    assert snapshots_by_lease(other, table) == {"l": {A: 1}}
    other.leases.renew(table_id, "l")
    assert other.leases.pinned(table_id) == {A: {1}}


@pytest.mark.parametrize("number", [1, 2])
def test_a_renewal_in_the_middle_of_an_acquisition_hurts_neither(
    cluster: Cluster,
    coordinator: Coordinator,
    table: CatalogTable,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    table_id, other = table.table_id, cluster.coordinator()
    take(other, table, A, B)
    other.leases.acquire(table_id, "l", {A: 1}, HOUR)
    around_the_transaction(
        coordinator, number, monkeypatch, before=lambda: other.leases.renew(table_id, "l", HOUR)
    )
    assert coordinator.leases.acquire(table_id, "l", {B: 1}, HOUR) == held({B: 1})
    assert snapshots_by_lease(other, table) == {"l": {A: 1, B: 1}}


def test_a_lease_that_is_renewed_while_a_cleaner_finds_it_expired_still_counts(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table_id, other = table.table_id, cluster.coordinator()
    take(other, table, A)
    other.leases.acquire(table_id, "l", {A: 1}, SHORTEST_LEASE_MS)
    expire(cluster)
    around_the_transaction(
        coordinator,
        1,
        monkeypatch,
        before=lambda: other.leases.acquire(table_id, "l", {A: 1}, HOUR),
    )
    assert coordinator.leases.pinned(table_id) == {A: {1}}
    assert snapshots_by_lease(other, table) == {"l": {A: 1}}


def test_a_cleaner_that_comes_late_does_not_delete_the_lease_that_came_after(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cleaners find it expired; after the first has deleted it, it is acquired anew."""
    table_id, other = table.table_id, cluster.coordinator()
    take(other, table, A)
    other.leases.acquire(table_id, "l", {A: 1}, SHORTEST_LEASE_MS)
    expire(cluster)

    def delete_and_acquire() -> None:
        assert other.leases.pinned(table_id) == {}
        other.leases.acquire(table_id, "l", {A: 1}, HOUR)

    around_the_transaction(coordinator, 1, monkeypatch, before=delete_and_acquire)
    assert coordinator.leases.pinned(table_id) == {A: {1}}
    assert snapshots_by_lease(other, table) == {"l": {A: 1}}


def test_a_renewal_that_comes_late_does_not_write_over_the_lease_that_came_after(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table_id, other = table.table_id, cluster.coordinator()
    take(other, table, A, B)
    other.leases.acquire(table_id, "l", {A: 1}, HOUR)

    def drop_and_acquire() -> None:
        other.leases.drop(table_id, "l")
        other.leases.acquire(table_id, "l", {B: 1}, HOUR)

    around_the_transaction(coordinator, 1, monkeypatch, before=drop_and_acquire)
    coordinator.leases.renew(table_id, "l")
    assert snapshots_by_lease(other, table) == {"l": {B: 1}}


def test_of_two_that_acquire_one_lease_both_get_what_they_asked_for(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table_id, other = table.table_id, cluster.coordinator()
    take(other, table, A, B, C)
    around_the_transaction(
        coordinator,
        1,
        monkeypatch,
        before=lambda: other.leases.acquire(table_id, "l", {A: 1}, HOUR),
        after=lambda: other.leases.acquire(table_id, "l", {C: 1}, HOUR),
    )
    assert coordinator.leases.acquire(table_id, "l", {B: 1}, HOUR) == held({B: 1})
    assert snapshots_by_lease(other, table)["l"].keys() >= {B, A}


# Dropped tables and partitions


def test_leases_outlive_their_table_and_a_dropped_one_gets_no_new_ones(
    coordinator: Coordinator, table: CatalogTable
) -> None:
    leases, table_id = coordinator.leases, table.table_id
    leases.acquire(table_id, "l", take(coordinator, table, A, B), HOUR)
    coordinator.drop_table(table)
    for lease_id in ("l", "new"):
        with pytest.raises(UnknownTable, match=f"no table with id {table_id}; it was dropped"):
            leases.acquire(table_id, lease_id, {A: 1}, HOUR)
    leases.renew(table_id, "l", 2 * HOUR)
    leases.release(table_id, "l", [A])
    assert leases.pinned(table_id) == {B: {1}}
    leases.drop(table_id, "l")
    assert leases.all(table_id) == []


def test_a_lease_on_a_table_that_is_dropped_meanwhile_is_refused(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = cluster.coordinator()
    take(other, table, A)
    around_the_transaction(coordinator, 1, monkeypatch, before=lambda: other.drop_table(table))
    with pytest.raises(UnknownTable):
        coordinator.leases.acquire(table.table_id, "l", {A: 1}, HOUR)
    assert other.leases.all(table.table_id) == []


def test_a_lease_on_a_partition_that_is_dropped_meanwhile_is_unavailable(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who deletes it read the leases before, and what it deletes is never retired."""
    other = cluster.coordinator()
    key = BucketId(other.partitions.create(table, b"a"), 0)
    take(other, table, key)
    around_the_transaction(
        coordinator, 1, monkeypatch, before=lambda: other.partitions.drop(table, b"a")
    )
    acquired = coordinator.leases.acquire(table.table_id, "l", {key: 1}, HOUR)
    assert acquired.unavailable == {key: 1}


# Answers that are lost


@pytest.mark.parametrize("losses", LOSSES, ids=" then ".join)
def test_every_change_of_a_lease_is_made_once_whatever_is_lost(
    lossy: Lossy, losses: list[str]
) -> None:
    ours, other = lossy.coordinator, lossy.other
    table = ours.tables.create("t", DEFINITION)
    table_id = table.table_id
    take(other, table, A, B, C)
    take(other, table, A, B, C)
    other.leases.acquire(table_id, "l", {A: 1, B: 1}, HOUR)
    lossy.without_answers(losses, lambda: ours.leases.renew(table_id, "l", 2 * HOUR))
    assert record(other, table).duration_ms == 2 * HOUR
    lossy.without_answers(losses, lambda: ours.leases.acquire(table_id, "l", {A: 1}, HOUR))
    assert record(other, table).duration_ms == HOUR
    lossy.without_answers(losses, lambda: ours.leases.release(table_id, "l", [B]))
    assert snapshots_by_lease(other, table) == {"l": {A: 1}}
    lossy.without_answers(losses, lambda: ours.leases.drop(table_id, "l"))
    assert other.leases.all(table_id) == []


@pytest.mark.parametrize(
    "losses", [["request", "answer", "request", "answer"], ["answer", "answer"], ["request"] * 3]
)
def test_a_lease_is_acquired_whatever_is_lost(lossy: Lossy, losses: list[str]) -> None:
    ours, other = lossy.coordinator, lossy.other
    table = ours.tables.create("t", DEFINITION)
    take(other, table, A, B)
    got: list[Any] = []
    lossy.losing.lose(*losses)
    got.append(ours.leases.acquire(table.table_id, "l", {A: 1, B: 7}, HOUR))
    assert lossy.losing.lost == losses
    assert got == [Acquired(held={A: 1}, unavailable={B: 7})]
    assert other.leases.pinned(table.table_id) == {A: {1}}
    assert not record(other, table).asked


def record(coordinator: Coordinator, table: CatalogTable) -> Any:
    node = coordinator.store.read(lease_path(table.table_id, "l"))
    assert node is not None
    return decode_lease(node.data)
