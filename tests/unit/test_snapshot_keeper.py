"""The keeper of a bucket's snapshots: when it takes one, what it keeps, and what failures leave."""

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from foundation.errors import (
    Closed,
    Deposed,
    StorageUnavailable,
    Superseded,
    UnknownFormat,
    UnknownOutcome,
    UnknownTable,
)
from foundation.failpoints import arm
from foundation.ids import BucketId, LeadKey, Token
from locks.catalog.definitions import CatalogTable
from locks.column_locks.records import LockRecord
from locks.coordinator import Coordinator
from locks.encoding.offsets import Offsets
from locks.snapshots.list_records import ListedSnapshot, SnapshotList
from locks.store.memory import MemoryCoordination
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log import Log
from merge_engine.bucket.log_names import LogNames
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.snapshot_manifest import FORMATS, Manifest, is_manifest
from merge_engine.bucket.snapshot_storage import SnapshotStorage, restore_latest
from recovery.leader.snapshot_keeper import SnapshotKeeper
from tests.conftest import SUMS, BucketFactory, rows_of
from tests.support.buckets import add
from tests.support.coordinators import DEFINITION
from tests.support.snapshot_world import FAILPOINTS, Crash, MemoryStorage, interrupted

HERE = BucketId(0, 0)
LEASE_MS = 10_000
EVERYTHING = 1 << 62


class World:
    """A bucket, its coordination, and a keeper for whoever leads."""

    def __init__(self, factory: BucketFactory, directory: Path) -> None:
        self.factory, self.directory = factory, directory
        self.memory = MemoryCoordination()
        self.coordinator = Coordinator(self.memory.connect())
        self.table: CatalogTable = self.coordinator.tables.create("t", DEFINITION)
        self.key = LeadKey(self.table.table_id, HERE)
        self.log = MemoryStorage()
        self.objects = self.log.child("snapshots")
        self.storage = SnapshotStorage(self.objects)
        self.records: dict[str, LockRecord] = {}
        self.views = 0

    def lead(self, retained: int = 2) -> tuple[Bucket, SnapshotKeeper]:
        """Lead from another directory."""
        self.views += 1
        options = BucketOptions(roll_up_segments=3)
        bucket = self.factory(storage=self.log, view=f"view-{self.views}", options=options)
        keeper = SnapshotKeeper(
            bucket,
            self.key,
            self.storage,
            lists=lambda: self.coordinator.snapshots,
            leases=lambda: self.coordinator.leases,
            read_records=self.read_records,
            directory=self.directory / "checkpoints",
            retained=retained,
            clock_ms=lambda: 77,
        )
        return bucket, keeper

    def read_records(self) -> Mapping[str, LockRecord]:
        return dict(self.records)

    @property
    def listing(self) -> SnapshotList:
        return self.coordinator.snapshots.read(self.key)

    def ids(self) -> list[int]:
        return [one.snapshot_id for one in self.listing.kept]

    def uncommitted(self, owner: str, since: int) -> None:
        """Let the owner's work since an offset be uncommitted."""
        columns = tuple(column.id for column in SUMS.value_columns)
        self.records[owner] = LockRecord(
            columns=columns, epoch=1, held=True, ready=True, offsets=Offsets({HERE: since})
        )

    def lease(self, lease_id: str, snapshot_id: int) -> bool:
        acquired = self.coordinator.leases.acquire(
            self.table.table_id, lease_id, {HERE: snapshot_id}, LEASE_MS
        )
        return HERE in acquired.held

    def needed(self) -> set[str]:
        manifests = [self.manifest(one) for one in self.listing.kept]
        files = {file.object_name for manifest in manifests for file in manifest.files}
        return files | {manifest.object_name for manifest in manifests}

    def manifest(self, one: ListedSnapshot) -> Manifest:
        return self.storage.manifest(one.snapshot_id, one.term)


@pytest.fixture
def world(bucket_factory: BucketFactory, tmp_path: Path) -> World:
    return World(bucket_factory, tmp_path)


def test_a_snapshot_has_all_there_is_and_says_where_it_stands(world: World) -> None:
    bucket, keeper = world.lead()
    add(bucket, [1, 2], [1, 2])
    taken = keeper.take()
    assert world.listing.listed == (taken,)
    assert (taken.snapshot_id, taken.term, taken.created_ms) == (1, bucket.term, 77)
    assert taken.applied == taken.stable == bucket.end_offset
    assert taken.bytes == sum(file.size for file in world.manifest(taken).files)
    assert set(world.objects.names()) == world.needed()
    assert not list((world.directory / "checkpoints").iterdir())


def test_a_snapshot_of_an_empty_bucket_is_one(world: World) -> None:
    bucket, keeper = world.lead()
    assert keeper.take().applied == bucket.end_offset
    assert keeper.take().snapshot_id == 1


def test_without_anything_new_there_is_no_new_one(world: World) -> None:
    bucket, keeper = world.lead()
    add(bucket, [1], [1])
    taken = keeper.take()
    assert keeper.take() == taken
    bucket.close()
    # Another leader is nothing new, either.
    _, successor = world.lead()
    assert successor.take() == taken
    assert world.ids() == [1]


def test_what_is_committed_without_a_write_is_something_new(world: World) -> None:
    bucket, keeper = world.lead()
    add(bucket, [1], [1])
    since = bucket.end_offset
    world.uncommitted("x", since)
    add(bucket, [1], [1], owner="x", token=Token(1, 1))
    taken = keeper.take()
    assert (taken.stable, taken.applied) == (since, bucket.end_offset)
    # It stays uncommitted: the same snapshot again would be of no use.
    assert keeper.take() == taken
    world.uncommitted("x", bucket.end_offset)
    again = keeper.take()
    assert again.snapshot_id == 2
    assert again.stable == again.applied == taken.applied
    assert keeper.take() == again


def test_a_snapshot_without_its_manifest_is_taken_again(world: World) -> None:
    bucket, keeper = world.lead()
    add(bucket, [1], [1])
    taken = keeper.take()
    world.objects.delete([name for name in world.objects.names() if is_manifest(name)])
    assert keeper.take().snapshot_id == taken.snapshot_id + 1


def test_a_snapshot_of_a_newer_release_does_not_keep_this_one_from_taking_its_own(
    world: World,
) -> None:
    bucket, keeper = world.lead(retained=1)
    add(bucket, [1], [1])
    taken = keeper.take()
    [name] = [name for name in world.objects.names() if is_manifest(name)]
    later = bytearray(world.objects.read(name)[:-8])
    later[8] = FORMATS.current + 1
    world.objects.delete([name])
    body = bytes(later)
    world.objects.create(name, body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)))
    with pytest.raises(UnknownFormat):
        world.manifest(taken)
    own = keeper.take()
    assert own.snapshot_id == taken.snapshot_id + 1
    assert world.ids() == [own.snapshot_id]
    assert set(world.objects.names()) == world.needed()


def test_as_many_are_kept_as_was_said_and_the_others_leave_nothing(world: World) -> None:
    bucket, keeper = world.lead(retained=3)
    for number in range(6):
        add(bucket, [number], [1])
        keeper.take()
    assert world.ids() == [4, 5, 6]
    assert set(world.objects.names()) == world.needed()
    assert not keeper.has_surplus


def test_what_is_leased_is_kept_until_the_lease_ends_and_no_other_for_it(world: World) -> None:
    bucket, keeper = world.lead()
    for number in range(5):
        add(bucket, [number], [1])
        keeper.take()
        if number == 0:
            assert world.lease("a", 1)
            assert world.lease("b", 1)
    assert world.ids() == [1, 4, 5]
    assert set(world.objects.names()) == world.needed()
    world.coordinator.leases.drop(world.table.table_id, "a")
    keeper.free()
    assert world.ids() == [1, 4, 5]
    assert keeper.has_surplus
    world.memory.advance(LEASE_MS)
    keeper.free()
    assert world.ids() == [4, 5]
    assert set(world.objects.names()) == world.needed()
    assert not keeper.has_surplus


def test_a_bucket_that_never_had_a_snapshot_has_nothing_to_free(world: World) -> None:
    _, keeper = world.lead()
    assert keeper.has_surplus  # Nobody has looked.
    keeper.free()
    assert not keeper.has_surplus
    assert world.listing.version is None


def test_the_log_is_cleaned_up_to_the_oldest_that_is_kept(world: World) -> None:
    bucket, keeper = world.lead()
    add(bucket, [1], [1])
    assert keeper.clean_log(older_than_ms=EVERYTHING) == 0, "without a snapshot all of it is needed"
    first = keeper.take()
    assert world.lease("a", first.snapshot_id)
    for number in range(3):
        add(bucket, [number], [1])
        keeper.take()
    assert keeper.clean_log(older_than_ms=EVERYTHING) == first.stable
    assert keeper.clean_log(older_than_ms=0) == first.stable
    world.memory.advance(LEASE_MS)
    keeper.free()
    oldest = world.listing.kept[0]
    assert oldest.snapshot_id == 3
    assert keeper.clean_log(older_than_ms=0) == first.stable, "it is too young"
    assert keeper.clean_log(older_than_ms=EVERYTHING) == oldest.stable
    assert Log(world.log).start == oldest.stable


def test_the_log_is_rolled_up_below_the_stable_offset_of_the_latest(world: World) -> None:
    bucket, keeper = world.lead()
    assert keeper.roll_up_log() is False, "without a snapshot nothing is"
    for number in range(4):
        add(bucket, [number], [1])
    stable = bucket.end_offset
    world.uncommitted("x", stable)
    for number in range(6):
        add(bucket, [number], [1], owner="x", token=Token(1, number), locked=True)
    assert keeper.take().stable == stable
    assert keeper.roll_up_log() is False
    rolled = LogNames.of(world.log.names()).rolled
    assert [one.end for one in rolled] == [3]
    world.records.clear()
    keeper.take()
    keeper.roll_up_log()
    assert [one.end for one in LogNames.of(world.log.names()).rolled] == [3, 6, 9]
    assert [one.base_offset for one in Log(world.log).headers(0)] == [*range(11)]


def test_the_log_is_kept_from_the_stable_offset_on_not_from_where_it_was_taken(
    world: World,
) -> None:
    bucket, keeper = world.lead(retained=1)
    world.uncommitted("x", bucket.end_offset)
    since = bucket.end_offset
    add(bucket, [1], [1], owner="x", token=Token(1, 1))
    assert keeper.take().stable == since
    assert keeper.clean_log(older_than_ms=EVERYTHING) == since


@pytest.mark.parametrize("failpoint", FAILPOINTS)
@pytest.mark.parametrize("same", [True, False], ids=["the same goes on", "a successor goes on"])
def test_after_a_crash_the_next_one_works_and_nothing_is_left(
    world: World, failpoint: str, same: bool
) -> None:
    bucket, keeper = world.lead()
    for number in range(2):
        add(bucket, [number], [1])
        keeper.take()
    add(bucket, [2], [1])

    def crash() -> None:
        raise Crash

    with pytest.raises(Crash), interrupted(failpoint, 1, crash):
        keeper.take()
    for one in world.listing.listed:
        assert restore_latest(
            world.storage, [(one.snapshot_id, one.term)], world.directory / f"r{one.snapshot_id}"
        )
    if not same:
        bucket.close()
        bucket, keeper = world.lead()
    assert keeper.has_surplus
    keeper.free()
    assert set(world.objects.names()) == world.needed()
    add(bucket, [3], [1])
    assert keeper.take().applied == bucket.end_offset
    assert len(world.ids()) == 2
    assert set(world.objects.names()) == world.needed()


def test_a_snapshot_that_failed_to_be_listed_does_not_stand_for_what_was_put_since(
    world: World,
) -> None:
    """Its manifest is there, and stands for the id; the next one has what came later."""
    bucket, keeper = world.lead()
    add(bucket, [1], [1])

    def crash() -> None:
        raise Crash

    with pytest.raises(Crash), arm("snapshot.manifest_created", crash):
        keeper.take()
    add(bucket, [2], [2])
    assert keeper.take().applied == bucket.end_offset
    assert set(world.objects.names()) == world.needed()


def test_a_list_that_cannot_be_written_leaves_what_the_next_free_deletes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, keeper = world.lead()
    add(bucket, [1], [1])

    def no_answer(*_: object) -> SnapshotList:
        raise UnknownOutcome("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(type(world.coordinator.snapshots), "add", no_answer)
        with pytest.raises(UnknownOutcome):
            keeper.take()
    assert world.objects.names()
    keeper.free()
    assert not world.objects.names()
    assert keeper.take().snapshot_id == 1


def test_a_storage_that_fails_leaves_the_snapshots_there_are(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, keeper = world.lead()
    add(bucket, [1], [1])
    taken = keeper.take()
    add(bucket, [2], [2])

    def unreachable(*_: object) -> None:
        raise StorageUnavailable("unreachable")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryStorage, "create", unreachable)
        with pytest.raises(StorageUnavailable):
            keeper.take()
    assert world.listing.listed == (taken,)
    assert not list((world.directory / "checkpoints").iterdir())
    assert keeper.take().snapshot_id == 2


def test_a_deposed_leader_takes_nothing_even_if_there_is_nothing_new(world: World) -> None:
    bucket, keeper = world.lead()
    add(bucket, [1], [1])
    keeper.take()
    world.lead()
    with pytest.raises(Deposed):
        keeper.take()
    assert world.ids() == [1]


def test_once_its_successor_has_claimed_the_list_it_does_nothing_at_all(world: World) -> None:
    bucket, keeper = world.lead()
    for number in range(2):
        add(bucket, [number], [1])
        keeper.take()
    _, successor = world.lead()
    successor.clean_log(older_than_ms=0)
    names, start = world.objects.names(), Log(world.log).start
    for call in (keeper.take, lambda: keeper.clean_log(older_than_ms=EVERYTHING)):
        with pytest.raises(Superseded):
            call()
    assert (world.objects.names(), Log(world.log).start) == (names, start)


@pytest.mark.parametrize("failpoint", ["snapshot.listed", "snapshot.before_delete"])
def test_a_sweep_that_is_late_harms_nothing_of_the_successor(world: World, failpoint: str) -> None:
    bucket, keeper = world.lead()
    for number in range(2):
        add(bucket, [number], [1])
        keeper.take()
    add(bucket, [2], [1])

    def succeed() -> None:
        after, successor = world.lead()
        add(after, [3], [1])
        successor.take()

    with pytest.raises(Superseded), interrupted(failpoint, 1, succeed):
        keeper.take()
    for one in world.listing.listed:
        assert restore_latest(
            world.storage, [(one.snapshot_id, one.term)], world.directory / f"r{one.snapshot_id}"
        )


def test_files_of_retired_snapshots_are_not_used_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever led before may be deleting them."""
    bucket, keeper = world.lead(retained=1)
    add(bucket, [1], [1])
    keeper.take()
    assert world.lease("a", 1)
    add(bucket, [2], [1])
    keeper.take()
    used: list[list[int]] = []
    real = SnapshotStorage.upload

    def upload(storage: SnapshotStorage, *arguments: object, **settings: object) -> object:
        reuse = settings["reuse"]
        assert isinstance(reuse, list)
        used.append([manifest.snapshot_id for manifest in reuse])
        return real(storage, *arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(SnapshotStorage, "upload", upload)
    add(bucket, [3], [1])
    keeper.take()
    assert used == [[2]]


def test_a_successor_cleans_a_log_that_its_predecessor_has_cleaned_meanwhile(
    world: World,
) -> None:
    """It has seen nothing of it, and finds the mark; its own snapshots bound the next cleaning."""
    bucket, keeper = world.lead(retained=1)
    for number in range(3):
        add(bucket, [number], [1])
    taken = keeper.take()
    restore_latest(
        world.storage,
        [(taken.snapshot_id, taken.term)],
        world.factory.view_path(view=f"view-{world.views + 1}"),
    )
    led: list[tuple[Bucket, SnapshotKeeper]] = []
    with arm("clean.before_mark", lambda: led.append(world.lead(retained=1))):
        assert keeper.clean_log(older_than_ms=EVERYTHING) == taken.stable
    [(after, successor)] = led
    add(after, [3], [1])
    latest = successor.take()
    assert successor.clean_log(older_than_ms=EVERYTHING) == latest.stable
    assert rows_of(after) == dict.fromkeys(range(4), (1, None))


def test_a_bucket_that_is_closed_meanwhile_ends_it_and_leaves_no_checkpoint(world: World) -> None:
    bucket, keeper = world.lead()
    add(bucket, [1], [1])
    with pytest.raises(Closed), interrupted("snapshot.checkpointed", 1, bucket.close):
        keeper.take()
    assert not list((world.directory / "checkpoints").iterdir())
    assert not world.objects.names()


def test_a_table_that_is_dropped_meanwhile_gets_no_snapshot(world: World) -> None:
    bucket, keeper = world.lead()
    add(bucket, [1], [1])

    def drop() -> None:
        world.coordinator.drop_table(world.table)

    with (
        pytest.raises(UnknownTable),
        interrupted("snapshot.manifest_created", 1, drop),
    ):
        keeper.take()
    assert world.listing.kept == ()


def test_a_lease_that_comes_while_a_snapshot_is_retired_holds_it_or_not_at_all(
    world: World,
) -> None:
    for failpoint in ("snapshot.files_uploaded", "snapshot.manifest_created", "snapshot.listed"):
        bucket, keeper = world.lead(retained=1)
        add(bucket, [world.views], [1])
        keeper.take()
        add(bucket, [world.views], [2])
        latest = world.listing.latest
        assert latest is not None
        got: list[bool] = []
        wanted = latest.snapshot_id
        with interrupted(failpoint, 1, lambda: got.append(world.lease("a", wanted))):  # noqa: B023
            keeper.take()
        assert got == [failpoint != "snapshot.listed"]
        assert (wanted in world.ids()) == got[0]
        assert set(world.objects.names()) == world.needed()
        world.coordinator.leases.drop(world.table.table_id, "a")
        keeper.free()
        bucket.close()


def test_ids_are_never_given_again(world: World) -> None:
    bucket, keeper = world.lead(retained=1)
    for number in range(3):
        add(bucket, [number], [1])
        assert keeper.take().snapshot_id == number + 1
    assert world.listing == replace(world.listing, next_id=4)
