"""What a server does by itself: snapshots in their time and on demand, and what was dropped."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import NotLeader, ServerUnavailable, StorageUnavailable
from foundation.failpoints import arm
from foundation.ids import BucketId, LeadKey
from locks.catalog.definitions import CatalogTable
from locks.coordinator import Coordinator
from locks.snapshots.leases import SHORTEST_LEASE_MS
from locks.snapshots.list_records import ListedSnapshot
from locks.store.memory import MemoryCoordination
from merge_engine.bucket.log import wall_clock_ms
from merge_engine.bucket.log_names import LogNames
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.snapshot_storage import SnapshotStorage
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.storage.objects import LocalStorage
from recovery.leader.snapshot_keeper import SnapshotKeeper
from server.client.snapshot_lease import hold_latest
from server.protocol.calls import TakeSnapshots
from server.protocol.definitions import ClusterTable, define
from server.protocol.messages import NOT_THERE
from server.tablet import maintenance as server_maintenance
from server.tablet.config import SnapshotConfig
from server.tablet.hosting import Hosting
from server.tablet.janitor import Janitor
from server.tablet.maintenance import Maintenance
from server.tablet.metrics import Metrics
from server.tablet.requests import Requests
from server.tablet.steps import CALL_S
from tests.conftest import SUMS
from tests.support.buckets import add
from tests.support.snapshot_world import Crash, InMemorySession, MemoryStorage

INTERVAL_S = 100.0


BY_DAY = (
    SchemaBuilder()
    .column("day", pa.int64())
    .column("k", pa.int64())
    .agg_column("a", pa.int64(), "sum")
    .primary_key("day", "k")
    .partitioned_by("day")
    .build()
)


class Server:
    """One server's hosting and maintenance, over coordination and objects in memory."""

    def __init__(
        self,
        memory: MemoryCoordination,
        logs: Any,
        views: Path,
        *,
        clock_ms: Callable[[], int] = wall_clock_ms,
        log_ttl_s: float = 0,
        options: BucketOptions | None = None,
        call_s: float = CALL_S,
    ) -> None:
        """`clock_ms`: the cluster's clock, as its session knows it."""
        self.logs, self.now_s = logs, 0.0
        self.coordinator = Coordinator(memory.connect())
        self.server = self.coordinator.servers.register(f"127.0.0.1:{views.name[-1]}")
        session = InMemorySession(self.coordinator, self.server.name, clock_ms)
        self.hosting = Hosting(logs, views, options or BucketOptions(), clock_ms=session.now_ms)
        self.metrics = Metrics()
        self.janitor = Janitor(logs, session)
        self.maintenance = Maintenance(
            Requests(self.hosting, session),
            self.janitor,
            self.metrics,
            SnapshotConfig(interval_s=INTERVAL_S, log_ttl_s=log_ttl_s),
            call_s=call_s,
            clock_s=lambda: self.now_s,
        )

    def lead(self, table: CatalogTable, *numbers: int, partition: int = 0) -> None:
        self.hosting.set_table(ClusterTable(table))
        keys = [LeadKey(table.table_id, BucketId(partition, number)) for number in numbers]
        self.coordinator.leaders.take(self.server, keys)
        for key in keys:
            self.hosting.open(key)

    def let_go(self, *keys: LeadKey) -> None:
        for key in keys:
            self.hosting.drop(key)
        self.coordinator.leaders.give_up(self.server, keys)

    def look(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.maintenance.look()

    def snapshots(self, table: CatalogTable) -> dict[int, list[int]]:
        """Return the listed ids, by the numbers of the buckets that are led."""
        return {
            key.bucket.number: [
                one.snapshot_id for one in self.coordinator.snapshots.read(key).listed
            ]
            for key in sorted(self.hosting.led())
            if key.table_id == table.table_id
        }

    def put(self, table: CatalogTable, number: int, partition: int = 0) -> None:
        key = LeadKey(table.table_id, BucketId(partition, number))
        add(self.hosting.get(key).bucket, [number], [1])


@pytest.fixture
def memory() -> MemoryCoordination:
    return MemoryCoordination()


@pytest.fixture
def server(memory: MemoryCoordination, tmp_path: Path) -> Iterator[Server]:
    made = Server(memory, MemoryStorage(), tmp_path / "views-1")
    yield made
    made.hosting.close_all()


@pytest.fixture
def table(server: Server) -> CatalogTable:
    definition = define(SUMS, 3, column_locks=False, options={})
    return server.coordinator.tables.create("sums", definition)


def request(table: CatalogTable, *buckets: tuple[int, int]) -> TakeSnapshots:
    return TakeSnapshots(
        table_id=table.table_id,
        schema_version=1,
        buckets=tuple(BucketId(*bucket) for bucket in buckets),
    )


def test_snapshots_are_taken_once_per_interval_and_not_all_at_once(
    server: Server, table: CatalogTable
) -> None:
    server.lead(table, 0, 1, 2)
    for number in range(3):
        server.put(table, number)
    server.look()
    server.look(0.89 * INTERVAL_S)
    assert server.snapshots(table) == {0: [], 1: [], 2: []}
    server.look(0.22 * INTERVAL_S)
    assert server.snapshots(table) == {0: [1], 1: [1], 2: [1]}
    dues = {kept.due_s for kept in server.maintenance._kept.values()}
    assert len(dues) == 3
    server.put(table, 1)
    server.look(0.5 * INTERVAL_S)
    assert server.snapshots(table) == {0: [1], 1: [1], 2: [1]}
    server.look(0.61 * INTERVAL_S)
    assert server.snapshots(table) == {0: [1], 1: [1, 2], 2: [1]}, "only where there is news"


def test_the_time_of_the_next_snapshot_does_not_start_over_when_a_bucket_moves(
    memory: MemoryCoordination, table: CatalogTable, tmp_path: Path, server: Server
) -> None:
    """Neither if there is one, nor if there is none yet and the log is old enough."""
    clock_ms = [1_000_000]
    logs = MemoryStorage()
    made: list[Server] = []

    def moved() -> Server:
        if made:
            made[-1].let_go(*made[-1].hosting.led())
        views = tmp_path / f"moved-{len(made)}"
        made.append(Server(memory, logs, views, clock_ms=lambda: clock_ms[0], log_ttl_s=10**6))
        made[-1].lead(table, 0)
        return made[-1]

    for number in range(4):
        holder = moved()
        holder.put(table, 0)
        holder.look()
        clock_ms[0] += int(0.4 * INTERVAL_S * 1000)
        holder.look(0.4 * INTERVAL_S)
        assert holder.snapshots(table)[0] == ([] if number < 2 else [1])
    for _ in range(3):
        holder = moved()
        holder.put(table, 0)
        holder.look()
        clock_ms[0] += int(0.4 * INTERVAL_S * 1000)
        holder.look(0.4 * INTERVAL_S)
    assert len(holder.snapshots(table)[0]) == 2
    made[-1].let_go(*made[-1].hosting.led())
    assert server.snapshots(table) == {}


def test_one_on_demand_is_taken_at_once_and_the_next_is_due_an_interval_later(
    server: Server, table: CatalogTable
) -> None:
    server.lead(table, 0, 1)
    server.put(table, 0)
    server.look()
    server.now_s += 0.8 * INTERVAL_S
    answer = server.maintenance.take(request(table, (0, 0)))
    assert answer.results == (1,)
    assert server.snapshots(table) == {0: [1], 1: []}
    server.put(table, 0)
    server.look(0.31 * INTERVAL_S)
    assert server.snapshots(table) == {0: [1], 1: [1]}
    server.look(0.8 * INTERVAL_S)
    assert server.snapshots(table) == {0: [1, 2], 1: [1]}


def test_a_call_takes_some_for_as_long_as_it_may_and_the_next_ones_the_rest(
    memory: MemoryCoordination, tmp_path: Path
) -> None:
    server = Server(memory, MemoryStorage(), tmp_path / "views-1", call_s=0.0)
    definition = define(SUMS, 3, column_locks=False, options={})
    table = server.coordinator.tables.create("sums", definition)
    server.lead(table, 0, 1, 2)
    whole = request(table, (0, 0), (0, 1), (0, 2))
    some = replace(whole, some=True)
    assert server.maintenance.take(some).results == (1, NOT_THERE, NOT_THERE)
    rest = some.only([BucketId(0, 1), BucketId(0, 2)])
    assert server.maintenance.take(rest).results == (1, NOT_THERE)
    assert server.snapshots(table) == {0: [1], 1: [1], 2: []}
    # A client of an earlier release does not ask again.
    assert server.maintenance.take(whole).results == (1, 1, 1)
    server.maintenance.shutdown()
    server.hosting.close_all()


def test_the_log_behind_the_snapshots_is_cleaned(server: Server, table: CatalogTable) -> None:
    server.lead(table, 0)
    key = LeadKey(table.table_id, BucketId(0, 0))
    for _ in range(3):
        server.put(table, 0)
        server.maintenance.take(request(table, (0, 0)))
    oldest = server.coordinator.snapshots.read(key).kept[0]
    assert server.hosting.get(key).bucket.start_offset <= oldest.stable
    server.now_s += 0.001
    server.put(table, 0)
    server.maintenance.take(request(table, (0, 0)))
    assert server.hosting.get(key).bucket.start_offset > 0


def test_the_log_before_a_snapshot_is_rolled_up_a_little_at_each_look(
    memory: MemoryCoordination, tmp_path: Path
) -> None:
    options = BucketOptions(roll_up_segments=2)
    views = tmp_path / "views-1"
    server = Server(memory, MemoryStorage(), views, log_ttl_s=1 << 30, options=options)
    definition = define(SUMS, 3, column_locks=False, options={})
    table = server.coordinator.tables.create("sums", definition)
    server.lead(table, 0)
    storage = server.logs.child(ClusterTable(table).path(BucketId(0, 0)))

    def rolled() -> int:
        return len(LogNames.of(storage.names()).rolled)

    for _ in range(23):
        server.put(table, 0)
    server.look()
    assert rolled() == 0
    server.maintenance.take(request(table, (0, 0)))
    assert rolled() == 0
    found = []
    for _ in range(5):
        server.look()
        found.append(rolled())
    # 24 segments, of which the last one is never rolled up.
    assert found == [4, 8, 11, 11, 11]
    server.hosting.close_all()


def test_a_roll_up_that_fails_is_not_tried_before_the_next_snapshot(
    server: Server, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail(self: SnapshotKeeper) -> bool:
        calls.append(self)
        raise StorageUnavailable("the store is away")

    monkeypatch.setattr(SnapshotKeeper, "roll_up_log", fail)
    server.lead(table, 0)
    for expected in (1, 2):
        server.put(table, 0)
        server.maintenance.take(request(table, (0, 0)))
        for _ in range(3):
            server.look()
        assert len(calls) == expected


def test_the_cluster_s_clock_alone_says_how_old_a_segment_is(
    memory: MemoryCoordination, tmp_path: Path
) -> None:
    hour_ms = 3_600_000
    now_ms = hour_ms  # Half a century behind the clock of this machine.
    server = Server(
        memory, MemoryStorage(), tmp_path / "views-1", clock_ms=lambda: now_ms, log_ttl_s=3600
    )
    table = server.coordinator.tables.create(
        "sums", define(SUMS, 1, column_locks=False, options={})
    )
    server.lead(table, 0)
    bucket = server.hosting.get(LeadKey(table.table_id, BucketId(0, 0))).bucket

    def start_after(passed_ms: int) -> int:
        nonlocal now_ms
        now_ms += passed_ms
        server.put(table, 0)
        server.maintenance.take(request(table, (0, 0)))
        return bucket.start_offset

    assert [start_after(passed) for passed in (0, hour_ms // 2, hour_ms // 2)] == [0, 0, 0]
    assert start_after(1) == 2, "the leader's segment and the first put are an hour old"
    listed = server.coordinator.snapshots.read(LeadKey(table.table_id, BucketId(0, 0)))
    assert listed.kept[-1].created_ms == now_ms
    server.hosting.close_all()


def test_a_bucket_that_is_not_led_here_is_not_taken(server: Server, table: CatalogTable) -> None:
    server.lead(table, 0)
    with pytest.raises(NotLeader):
        server.maintenance.take(request(table, (0, 1)))


def failing(for_bucket: int, error: Exception) -> Callable[..., Any]:
    real = SnapshotKeeper.take

    def take(keeper: SnapshotKeeper) -> Any:
        if keeper._key.bucket.number == for_bucket:
            raise error
        return real(keeper)

    return take


@pytest.mark.parametrize(
    "error", [StorageUnavailable("unreachable"), OSError("disk"), RuntimeError("bug")], ids=repr
)
def test_what_fails_for_one_bucket_stops_no_other_and_is_not_tried_all_the_time(
    server: Server,
    table: CatalogTable,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.lead(table, 0, 1, 2)
    for number in range(3):
        server.put(table, number)
    server.look()
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(SnapshotKeeper, "take", failing(0, error))
        server.look(1.11 * INTERVAL_S)
        server.look(1)
    assert server.snapshots(table) == {0: [], 1: [1], 2: [1]}
    assert server.metrics.values()["tallybook_snapshot_failures_total"] == 1
    assert "have to wait" in caplog.text
    server.look(1.11 * INTERVAL_S)
    assert server.snapshots(table) == {0: [1], 1: [1], 2: [1]}


def test_a_clean_up_that_fails_is_not_tried_all_the_time(
    server: Server, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.lead(table, 0)
    server.put(table, 0)
    server.maintenance.take(request(table, (0, 0)))
    calls: list[None] = []

    def unreachable(*_: object, **__: object) -> None:
        calls.append(None)
        raise StorageUnavailable("unreachable")

    kept = server.maintenance._kept[LeadKey(table.table_id, BucketId(0, 0))]
    kept.keeper._unswept = True
    with monkeypatch.context() as patched:
        patched.setattr(SnapshotStorage, "sweep", unreachable)
        for _ in range(10):
            server.look(0.5)
        assert len(calls) == 1
        server.look(10)
        assert len(calls) == 2
    server.look(10)
    assert not kept.keeper.has_surplus


def test_a_bucket_that_is_closed_meanwhile_is_passed_over_quietly(
    server: Server, table: CatalogTable, caplog: pytest.LogCaptureFixture
) -> None:
    server.lead(table, 0, 1)
    for number in range(2):
        server.put(table, number)
    server.look()
    server.hosting.get(LeadKey(table.table_id, BucketId(0, 0))).bucket.close()
    with caplog.at_level(logging.WARNING):
        server.look(1.11 * INTERVAL_S)
    assert server.snapshots(table) == {0: [], 1: [1]}
    assert not caplog.records


def test_a_leader_that_was_superseded_lets_go_quietly(
    memory: MemoryCoordination,
    server: Server,
    table: CatalogTable,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.lead(table, 0)
    server.put(table, 0)
    server.maintenance.take(request(table, (0, 0)))
    successor = Server(memory, server.logs, tmp_path / "views-2")
    successor.hosting.set_table(ClusterTable(table))
    key = LeadKey(table.table_id, BucketId(0, 0))
    listed = server.coordinator.snapshots.read(key).listed
    successor.hosting.open(key, lambda: listed)
    successor.look()
    successor.maintenance.take(request(table, (0, 0)))
    with caplog.at_level(logging.WARNING):
        server.look(1.11 * INTERVAL_S)
    assert server.hosting.get(key).bucket.deposed
    assert not caplog.records
    successor.hosting.close_all()


def test_what_a_lease_held_is_freed_at_the_next_look(
    memory: MemoryCoordination, server: Server, table: CatalogTable
) -> None:
    server.lead(table, 0)
    key = LeadKey(table.table_id, BucketId(0, 0))
    for number in range(4):
        server.put(table, 0)
        server.maintenance.take(request(table, (0, 0)))
        if number == 0:
            server.coordinator.leases.acquire(
                table.table_id, "a", {key.bucket: 1}, SHORTEST_LEASE_MS
            )
    server.look(1)
    assert [one.snapshot_id for one in server.coordinator.snapshots.read(key).kept] == [1, 3, 4]
    memory.advance(SHORTEST_LEASE_MS)
    server.look(1)
    assert [one.snapshot_id for one in server.coordinator.snapshots.read(key).kept] == [3, 4]


# What was dropped


def test_the_files_of_a_dropped_table_wait_for_its_leaders(
    server: Server, table: CatalogTable
) -> None:
    server.lead(table, 0, 1)
    keys = list(server.hosting.led())
    server.maintenance.take(request(table, (0, 0)))
    server.coordinator.drop_table(table)
    server.janitor.look()
    assert server.logs.objects.now
    server.let_go(keys[0])
    server.janitor.look()
    path = ClusterTable(table).path(keys[0].bucket)
    assert not any(name.startswith(f"{path}/") for name in server.logs.objects.now)
    assert server.logs.objects.now
    assert server.coordinator.dropped.all()
    server.let_go(keys[1])
    server.janitor.look()
    assert not server.logs.objects.now
    assert not server.coordinator.dropped.all()


def test_what_was_dropped_leaves_no_directories(memory: MemoryCoordination, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    server = Server(memory, LocalStorage(logs), tmp_path / "views-1")
    table = server.coordinator.tables.create(
        "days", define(BY_DAY, 2, column_locks=False, options={})
    )
    ids = [server.coordinator.partitions.create(table, key) for key in (b"1", b"2")]
    for partition in ids:
        server.lead(table, 0, 1, partition=partition)
        server.maintenance.take(request(table, (partition, 0)))

    def directories(top: Path) -> set[str]:
        return {str(one.relative_to(top)) for one in top.rglob("*") if one.is_dir()}

    keys = sorted(server.hosting.led())
    server.coordinator.partitions.drop(table, b"1")
    server.let_go(*keys[:2])
    server.janitor.look()
    stays = ClusterTable(table).path(keys[2].bucket)
    goes = ClusterTable(table).path(keys[0].bucket)
    assert stays in directories(logs)
    assert not {one for one in directories(logs) if one.startswith(str(Path(goes).parent))}
    server.coordinator.drop_table(table)
    server.let_go(*keys[2:])
    server.janitor.look()
    assert directories(logs) == set()


def test_they_wait_for_its_leases_and_keep_nothing_else(
    memory: MemoryCoordination, server: Server, table: CatalogTable
) -> None:
    server.lead(table, 0, 1)
    keys = list(server.hosting.led())
    for number in range(2):
        for bucket in range(2):
            server.put(table, bucket)
        server.maintenance.take(request(table, (0, 0), (0, 1)))
        if number == 0:
            server.coordinator.leases.acquire(
                table.table_id, "a", {keys[0].bucket: 1}, SHORTEST_LEASE_MS
            )
    (first, _) = server.coordinator.snapshots.read(keys[0]).kept
    server.coordinator.drop_table(table)
    server.let_go(*keys)
    server.janitor.look()
    logs = server.logs.child(ClusterTable(table).path(keys[0].bucket))
    storage = SnapshotStorage(logs.child("snapshots"))
    manifest = storage.manifest(first.snapshot_id, first.term)
    needed = {file.object_name for file in manifest.files} | {manifest.object_name}
    assert set(logs.child("snapshots").names()) == needed
    assert logs.names(), "the log goes with the snapshot"
    other = server.logs.child(ClusterTable(table).path(keys[1].bucket))
    assert not other.names()
    assert not other.child("snapshots").names()
    memory.advance(SHORTEST_LEASE_MS)
    server.janitor.look()
    assert not server.logs.objects.now
    assert not server.coordinator.dropped.all()


def test_a_crash_before_it_is_forgotten_is_made_up_for(server: Server, table: CatalogTable) -> None:
    server.lead(table, 0)
    server.put(table, 0)
    server.coordinator.drop_table(table)
    server.let_go(*server.hosting.led())

    def crash() -> None:
        raise Crash

    with pytest.raises(Crash), arm("dropped.deleted", crash):
        server.janitor.look()
    assert server.coordinator.dropped.all()
    server.janitor.look()
    assert not server.coordinator.dropped.all()
    assert not server.logs.objects.now


def test_what_cannot_be_deleted_now_keeps_nothing_else(
    server: Server, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = server.coordinator.tables.create(
        "other", define(SUMS, 1, column_locks=False, options={})
    )
    for one in (table, other):
        server.lead(one, 0)
        server.put(one, 0)
        server.coordinator.drop_table(one)
    server.let_go(*server.hosting.led())
    bad = ClusterTable(table).path(BucketId(0, 0))
    real = MemoryStorage.delete

    def delete(storage: MemoryStorage, names: list[str]) -> None:
        if storage.prefix.startswith(bad) and names:
            raise StorageUnavailable("unreachable")
        real(storage, names)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryStorage, "delete", delete)
        server.janitor.look()
    assert [one.table.name for one in server.coordinator.dropped.all()] == ["sums"]
    server.janitor.look()
    assert not server.logs.objects.now


def test_only_the_first_of_the_servers_deletes(
    memory: MemoryCoordination, server: Server, table: CatalogTable, tmp_path: Path
) -> None:
    second = Server(memory, server.logs, tmp_path / "views-2")
    server.lead(table, 0)
    server.coordinator.drop_table(table)
    server.let_go(*server.hosting.led())
    first, other = sorted([server, second], key=lambda one: one.server.name)
    other.janitor.look()
    assert server.logs.objects.now
    first.janitor.look()
    assert not server.logs.objects.now


def test_a_dropped_partition_goes_and_the_others_stay(server: Server) -> None:
    table = server.coordinator.tables.create(
        "days", define(BY_DAY, 1, column_locks=False, options={})
    )
    ids = [server.coordinator.partitions.create(table, key) for key in (b"1", b"2")]
    for partition in ids:
        server.lead(table, 0, partition=partition)
        server.maintenance.take(request(table, (partition, 0)))
    keys = sorted(server.hosting.led())
    server.coordinator.partitions.drop(table, b"1")
    server.let_go(keys[0])
    server.janitor.look()
    paths = [ClusterTable(table).path(key.bucket) for key in keys]
    assert not any(name.startswith(f"{paths[0]}/") for name in server.logs.objects.now)
    assert any(name.startswith(f"{paths[1]}/snapshots/") for name in server.logs.objects.now)
    assert server.coordinator.partitions.dropped(table) == []
    assert server.coordinator.snapshots.read(keys[0]).version is None
    server.look()


# Leasing the latest


def test_a_lease_that_expires_while_others_are_taken_is_asked_for_again(
    memory: MemoryCoordination, server: Server, table: CatalogTable
) -> None:
    """The last bucket has no snapshot, and taking one lasts longer than the lease."""
    server.lead(table, 0, 1, 2)
    server.maintenance.take(request(table, (0, 0), (0, 1)))
    keys = [key.bucket for key in sorted(server.hosting.led())]
    asked: list[list[BucketId]] = []

    def take(buckets: Sequence[BucketId]) -> None:
        asked.append(list(buckets))
        if len(asked) > 1:  # At first there is none after all, and the others are held by then.
            memory.advance(2 * SHORTEST_LEASE_MS)
            server.maintenance.take(request(table, (0, 2)))

    held = hold_latest(
        lambda: server.coordinator,
        table.table_id,
        "a",
        keys,
        SHORTEST_LEASE_MS,
        take=take,
        deadline_s=10,
    )
    assert asked == [keys[2:], keys[2:]]
    (lease,) = server.coordinator.leases.all(table.table_id)
    assert lease.live
    assert dict(lease.snapshots) == {key: one.snapshot_id for key, one in held.items()}
    assert set(held) == set(keys)


def test_the_deadline_is_that_of_the_lease_and_not_of_a_call(
    server: Server, table: CatalogTable
) -> None:
    server.lead(table, 0, 1)
    keys = [BucketId(0, 0), BucketId(0, 1)]
    asked: list[Sequence[BucketId]] = []

    def take(buckets: Sequence[BucketId]) -> None:
        asked.append(buckets)
        if len(asked) < 3:
            raise ServerUnavailable("no leader took the call within 30 s")
        server.maintenance.take(request(table, buckets[0]))

    def hold(deadline_s: float) -> dict[BucketId, ListedSnapshot]:
        coordinator, table_id = server.coordinator, table.table_id
        return hold_latest(
            lambda: coordinator,
            table_id,
            "a",
            keys,
            SHORTEST_LEASE_MS,
            take=take,
            deadline_s=deadline_s,
        )

    with pytest.raises(ServerUnavailable, match="no leader took the call"):
        hold(0.0)
    # One bucket at a time, each of which is held before the next one has a snapshot.
    assert sorted(hold(60.0)) == keys
    assert [len(buckets) for buckets in asked] == [2, 2, 2, 1]


def test_where_no_snapshot_can_be_had_it_says_so_and_how_long_it_tried(
    server: Server, table: CatalogTable
) -> None:
    server.lead(table, 0)
    with pytest.raises(ServerUnavailable, match="1 buckets have no snapshot that could be held"):
        hold_latest(
            lambda: server.coordinator,
            table.table_id,
            "a",
            [BucketId(0, 0)],
            SHORTEST_LEASE_MS,
            take=lambda _: None,
            deadline_s=0.05,
        )
    assert server.coordinator.leases.all(table.table_id) == []


def test_a_stop_does_not_wait_for_a_call_that_hangs(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        goes_on.wait(180)

    monkeypatch.setattr(server.janitor, "look", hang)
    monkeypatch.setattr(server_maintenance, "_LOOK_S", 0.01)
    monkeypatch.setattr(server_maintenance, "_STOP_S", 0.01)
    server.maintenance.start()
    try:
        assert hangs.wait(180)
        server.maintenance.stop()
        assert not goes_on.is_set()
    finally:
        goes_on.set()
        server.maintenance._thread.join(180)
    assert not server.maintenance._thread.is_alive()
