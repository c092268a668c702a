"""Snapshots of tables on servers: taken, restored, leased, scanned, and dropped under a lease."""

import logging
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tallybook as tb
from foundation.errors import CorruptRecord, InvalidInput, UnknownLease
from foundation.failpoints import arm
from foundation.ids import BucketId, LeadKey
from locks.store.base import ANY_VERSION, Write
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from locks.store.paths import STORAGE, snapshot_list_path
from merge_engine.schema.builder import SchemaBuilder
from recovery.reader.table_scan import ScanSource, TableScan
from recovery.writer.rows import Rows as WriterRows
from server.client.cluster import Cluster, connect
from server.client.remote_table import RemoteTable
from server.client.snapshot_lease import SnapshotLease
from server.tablet.config import ServerConfig, SnapshotConfig
from server.tablet.tablet_server import TabletServer
from tests.conftest import schema_of
from tests.support.moto_server import S3Server, s3_server
from tests.support.raw_flight import client_of, running
from tests.support.zookeeper_server import chroot, wait_until, zookeeper_server

SUMS = schema_of(a=(pa.int64(), "sum"), b=(pa.int64(), "sum"))
BUCKETS = 2
ROOT = Path(__file__).parents[2]
KEYS = list(range(40))
# The shortest that a lease may last.
SHORT_S = 2.0
DEADLINE_S = 30.0
# The log goes as soon as no snapshot needs it.
EAGER = SnapshotConfig(interval_s=1000, retained=2, log_ttl_s=0)

Rows = dict[int, int]


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("snapshots")) as server:
        yield server


class Scene:
    """One server after the other on the same logs, and a client."""

    def __init__(self, address: str, directory: Path) -> None:
        self.address, self.directory = address, directory
        self.logs, self.views = directory / "logs", directory / "views"

    @contextmanager
    def run(
        self, snapshots: SnapshotConfig = EAGER, **settings: Any
    ) -> Iterator[tuple[TabletServer, Cluster]]:
        with ExitStack() as stack:
            server = stack.enter_context(
                running(self.address, self.directory, snapshots=snapshots, **settings)
            )
            yield server, stack.enter_context(client_of(self.address))

    def objects(self) -> list[Path]:
        """Return all objects of all logs and snapshots."""
        return [path for path in self.logs.rglob("*") if path.is_file()]


@pytest.fixture
def scene(zookeeper: EmbeddedZooKeeper, tmp_path: Path) -> Scene:
    return Scene(chroot(zookeeper), tmp_path)


def create(client: Cluster, *, locked: bool = False) -> RemoteTable:
    return client.create_table("sums", SUMS, buckets=BUCKETS, column_locks=locked)


def put(table: RemoteTable, amount: int = 1) -> None:
    table.put({"k": KEYS, "a": [amount] * len(KEYS)})


def rows(table: RemoteTable, **arguments: Any) -> Rows:
    found = table.scan(["a"], **arguments).to_arrow()
    return dict(zip(found["k"].to_pylist(), found["a"].to_pylist(), strict=True))


def leased_rows(table: RemoteTable, lease: SnapshotLease, isolation: str = "committed") -> Rows:
    return rows(table, source=ScanSource.SNAPSHOT, lease=lease, isolation=isolation)


def all_of(amount: int) -> Rows:
    return dict.fromkeys(KEYS, amount)


def ids(table: RemoteTable) -> list[list[int]]:
    return [[one.snapshot_id for one in found] for found in table.snapshots().values()]


def kept(client: Cluster, table: RemoteTable) -> list[list[int]]:
    """Return the ids of all that are kept, listed or not."""
    lists = client.coordinator.snapshots.read_many(table.table_id, table.bucket_ids())
    return [[one.snapshot_id for one in found.kept] for found in lists.values()]


def starts(client: Cluster) -> list[int]:
    (status,) = client.status()
    return [bucket["start_offset"] for bucket in status["buckets"]]


def test_snapshots_are_taken_by_themselves_while_there_is_news(scene: Scene) -> None:
    with scene.run(SnapshotConfig(interval_s=0.2)) as (_, client):
        table = create(client)
        for _ in range(3):
            put(table)
            before = ids(table)
            wait_until(
                lambda before=before: all(  # type: ignore[misc]
                    new[-1:] > old[-1:] for new, old in zip(ids(table), before, strict=True)
                ),
                "another snapshot of each bucket",
                DEADLINE_S,
            )
            for found in table.snapshots().values():
                assert len(found) <= 2
            with table.lease_latest("reader", SHORT_S) as lease:
                assert set(leased_rows(table, lease)) == set(KEYS)


def test_a_snapshot_on_demand_has_all_that_was_put(scene: Scene) -> None:
    with scene.run() as (_, client):
        table = create(client)
        put(table)
        assert table.snapshot() == dict.fromkeys(table.bucket_ids(), 1)
        assert table.snapshot() == dict.fromkeys(table.bucket_ids(), 1), "there is nothing new"
        put(table)
        (first, second) = table.bucket_ids()
        assert table.snapshot([second]) == {second: 2}
        assert ids(table) == [[1], [1, 2]]
        with table.lease_latest("reader", renew=False) as lease:
            assert {key: one.snapshot_id for key, one in lease.snapshots.items()} == {
                first: 1,
                second: 2,
            }
            as_is = table.scan(source=ScanSource.SNAPSHOT, lease=lease, isolation="latest")
            assert set(as_is.to_arrow()["a"].to_pylist()) == {1, 2}
            assert as_is.offsets == {key: one.applied for key, one in lease.snapshots.items()}
            put(table)
            scan = table.scan(["a"], source=ScanSource.SNAPSHOT, lease=lease)
            assert set(scan.to_arrow()["a"].to_pylist()) == {2}, "with what came since, at its cut"
            assert (scan.cut, scan.offsets) == (lease.cut, {})
            now = table.cut()
            assert rows(table, source=ScanSource.SNAPSHOT, lease=lease, at=now) == all_of(3)
        with pytest.raises(InvalidInput, match="no buckets"):
            table.snapshot([BucketId(0, 9)])
        with pytest.raises(InvalidInput, match="a lease goes with"):
            table.scan(source=ScanSource.SNAPSHOT)


def test_a_server_with_an_empty_disk_restores_what_the_log_has_no_more(scene: Scene) -> None:
    with scene.run() as (_, client):
        table = create(client)
        for _ in range(4):
            put(table)
            table.snapshot()
        put(table)
        assert all(start > 0 for start in starts(client)), "the log alone is not enough"
    shutil.rmtree(scene.views)
    with scene.run() as (_, client):
        table = client.table("sums")
        assert rows(table) == all_of(5)
        put(table)
        table.snapshot()
        assert rows(table) == all_of(6)


def test_a_server_whose_clock_is_ahead_deletes_nothing_of_a_young_log(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour = SnapshotConfig(interval_s=1000, retained=1, log_ttl_s=3600)
    with scene.run(hour) as (_, client):
        put(create(client))
    real, ahead_ns = time.time_ns, 2 * 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: real() + ahead_ns)
    with scene.run(hour) as (_, client):
        table = client.table("sums")
        for _ in range(2):
            put(table)
            table.snapshot()
        assert starts(client) == [0] * BUCKETS
        [key, _] = table.bucket_ids()
        dated = pa.Table.from_batches(list(table.changelog(key, 0)))["_commit_timestamp"]
        assert max(dated.cast(pa.int64()).to_pylist()) < real() / 1000 + 60e6


def test_a_snapshot_that_is_newer_than_what_its_reader_knows_is_read_whole(scene: Scene) -> None:
    with scene.run() as (_, client):
        table = create(client, locked=True)
        stale = client.table("sums")
        table.add_column("c", pa.int64(), "sum")
        leases: list[SnapshotLease] = []
        with table.writer(owner_id="job", columns=["a", "c"]) as writer:
            writer.write(0, WriterRows(data={"k": KEYS, "a": KEYS, "c": KEYS}))

            def snapshot() -> None:
                """Within a batch, so that a committed scan masks what was put."""
                table.snapshot()
                leases.append(stale.lease_latest("reader"))

            with arm("writer.put", snapshot):
                writer.write(1, WriterRows(data={"k": KEYS, "a": KEYS, "c": KEYS}))
            table.add_column("d", pa.int64(), "sum")
        with table.writer(owner_id="other", columns=["d"]) as writer:
            writer.write(0, WriterRows(data={"k": [*KEYS, -1], "d": [1] * (len(KEYS) + 1)}))
        [lease] = leases
        for isolation, times in (("committed", 1), ("latest", 2)):
            assert leased_rows(stale, lease, isolation) == {key: times * key for key in KEYS}
        # What was written since, under a schema that neither the snapshot nor its reader knows.
        now = rows(stale, source=ScanSource.SNAPSHOT, lease=lease, at=table.cut())
        assert now == {-1: None} | {key: 2 * key for key in KEYS}
        lease.drop()


def test_a_view_that_is_older_than_the_log_is_restored(scene: Scene) -> None:
    with scene.run() as (_, client):
        put(create(client))
    shutil.copytree(scene.views, scene.directory / "old")
    with scene.run() as (_, client):
        table = client.table("sums")
        for _ in range(4):
            put(table)
            table.snapshot()
    shutil.rmtree(scene.views)
    (scene.directory / "old").rename(scene.views)
    with scene.run() as (_, client):
        assert rows(client.table("sums")) == all_of(5)


def test_a_damaged_list_keeps_no_bucket_from_its_log(scene: Scene) -> None:
    config = SnapshotConfig(interval_s=3600)
    with scene.run(config) as (_, client):
        table = create(client)
        put(table)
        table.snapshot()
        store = client.coordinator.store
        path = snapshot_list_path(table.table_id, 0, 0)
        node = store.read(path)
        assert node is not None
        store.transact([Write(path, node.data[:-1], node.version)])
    shutil.rmtree(scene.views)
    with scene.run(config) as (_, client):
        table = client.table("sums")
        assert rows(table) == all_of(1)
        put(table)
        assert rows(table) == all_of(2)


def test_where_the_logs_are_is_not_believed_when_it_is_damaged(scene: Scene) -> None:
    with scene.run() as (_, client):
        store = client.coordinator.store
        node = store.read(STORAGE)
        assert node is not None
        for at in range(len(node.data)):
            damaged = bytearray(node.data)
            damaged[at] ^= 1 << at % 8
            store.transact([Write(STORAGE, bytes(damaged), ANY_VERSION)])
            with pytest.raises(CorruptRecord, match="/storage"):
                client.storage()


@pytest.mark.parametrize("damage", ["flipped", "gone", "manifest"])
def test_a_damaged_snapshot_is_passed_over_for_the_one_before(
    scene: Scene, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with scene.run() as (_, client):
        table = create(client)
        for _ in range(3):
            put(table)
            table.snapshot()
        put(table)
        storage = client.storage()
        for key, found in table.snapshots().items():
            objects = storage.child(table.definition.path(key)).child("snapshots")
            before, last = (f"{one.snapshot_id}-{one.term}.manifest" for one in found)
            target = last
            if damage != "manifest":
                shared = _objects_in(objects.read(before))
                target = next(iter(sorted(_objects_in(objects.read(last)) - shared)))
            path = scene.logs / table.definition.path(key) / "snapshots" / target
            if damage == "gone":
                path.unlink()
            else:
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data)
    shutil.rmtree(scene.views)
    with caplog.at_level(logging.WARNING), scene.run() as (_, client):
        table = client.table("sums")
        assert rows(table) == all_of(4)
        assert caplog.text.count("is passed over") == BUCKETS
        put(table)
        # The next one is whole: it shares nothing with the damaged one that it would not have.
        table.snapshot()
    shutil.rmtree(scene.views)
    caplog.clear()
    with caplog.at_level(logging.WARNING), scene.run() as (_, client):
        assert rows(client.table("sums")) == all_of(5)
        assert "is passed over" not in caplog.text


def _objects_in(manifest: bytes) -> set[str]:
    """Return the names of the data objects that a manifest names."""
    return {name.decode() for name in re.findall(rb"[0-9a-f]{64}-\d+", manifest)}


def test_a_lease_survives_a_restart_of_everything(tmp_path: Path) -> None:
    with zookeeper_server(tmp_path) as zookeeper:
        scene = Scene(zookeeper.address, tmp_path)
        with scene.run() as (_, client):
            table = create(client)
            put(table)
            taken = str(table.lease_latest("tiering", 600, renew=False).cut)
    with zookeeper_server(tmp_path) as zookeeper:
        scene.address = zookeeper.address
        with scene.run() as (_, client):
            table = client.table("sums")
            for _ in range(4):
                put(table)
                table.snapshot()
            assert all(found[0] == 1 for found in kept(client, table))
            (lease,) = client.coordinator.leases.all(table.table_id)
            assert (lease.lease_id, lease.live) == ("tiering", True)
            lists = client.coordinator.snapshots.read_many(table.table_id, table.bucket_ids())
            again = SnapshotLease(
                lambda: client.coordinator,
                table.table_id,
                "tiering",
                {key: found.kept[0] for key, found in lists.items()},
                600_000,
                cut=tb.Cut.of(taken),
                renew=False,
            )
            assert leased_rows(table, again) == leased_rows(table, again, "latest") == all_of(1)
            assert rows(table, at=taken) == all_of(1), "the log is there, too"
            assert rows(table) == all_of(5)


def test_a_lease_is_renewed_for_as_long_as_it_is_held_and_freed_soon_after(scene: Scene) -> None:
    with scene.run() as (_, client):
        table = create(client)
        put(table)
        store = client.coordinator.store
        lease = table.lease_latest("tiering", SHORT_S)
        other = table.lease_latest("backup", 600, renew=False, buckets=[BucketId(0, 1)])
        for _ in range(3):
            put(table)
            table.snapshot()
        ends_ms = store.now_ms() + int(3.2 * SHORT_S * 1000)
        wait_until(lambda: store.now_ms() > ends_ms, "three durations to pass", DEADLINE_S)
        assert kept(client, table) == [[1, 3, 4]] * 2
        assert leased_rows(table, lease) == all_of(1)
        lease.drop()
        lease.drop()
        wait_until(
            lambda: kept(client, table) == [[3, 4], [1, 3, 4]], "what is free to go", DEADLINE_S
        )
        assert set(leased_rows(table, other)) < set(KEYS)
        other.release([BucketId(0, 1)])
        wait_until(lambda: kept(client, table) == [[3, 4]] * 2, "all of it to go", DEADLINE_S)
        assert not client.coordinator.leases.all(table.table_id)


def test_a_lease_that_nobody_renews_expires_and_is_freed_within_seconds(scene: Scene) -> None:
    with scene.run() as (_, client):
        table = create(client)
        put(table)
        lease = table.lease_latest("tiering", SHORT_S, renew=False)
        for _ in range(3):
            put(table)
            table.snapshot()
        wait_until(lambda: kept(client, table) == [[3, 4]] * 2, "it to expire", DEADLINE_S)
        with pytest.raises(UnknownLease, match="there is no lease `tiering`"):
            lease.renew()
        with pytest.raises(UnknownLease, match="was not renewed for 2 s and has expired"):
            leased_rows(table, lease)


@pytest.mark.parametrize("partitioned", [False, True], ids=["table", "partition"])
def test_what_is_leased_of_a_dropped_one_is_read_until_the_lease_ends(
    scene: Scene, partitioned: bool
) -> None:
    with scene.run() as (_, client):
        if partitioned:
            builder = SchemaBuilder().column("day", pa.int64()).column("k", pa.int64())
            builder.agg_column("a", pa.int64(), "sum").primary_key("day", "k")
            schema = builder.partitioned_by("day").build()
            table = client.create_table("sums", schema, buckets=BUCKETS, column_locks=False)
            for day in (1, 2):
                table.put({"day": [day] * 40, "k": KEYS, "a": [1] * 40})
        else:
            table = create(client)
            put(table)
        lease = table.lease_latest("tiering", 600, renew=False)
        held = lease.snapshots
        if partitioned:
            table.drop_partition(day=1)
        else:
            client.drop_table("sums")
        assert client.coordinator.dropped.all() or partitioned
        wait_until(
            lambda: (
                not any(
                    client.coordinator.leaders.leader_of(LeadKey(table.table_id, key))
                    for key in set(held) - (set(table.bucket_ids()) if partitioned else set())
                )
            ),
            "its leaders to let go",
            DEADLINE_S,
        )
        for isolation in ("committed", "latest"):
            assert leased_rows(table, lease, isolation) == all_of(1)
        lease.drop()
        if partitioned:
            gone = [key for key in held if key not in table.bucket_ids()]
            assert len(gone) == BUCKETS
            paths = [scene.logs / table.definition.path(key) for key in gone]
            wait_until(
                lambda: not any(path for at in paths for path in at.rglob("*") if path.is_file()),
                "the files to go",
                DEADLINE_S,
            )
            assert rows(table) == all_of(1)
        else:
            wait_until(lambda: not scene.objects(), "all files to go", DEADLINE_S)
            wait_until(
                lambda: not client.coordinator.dropped.all(), "it to be forgotten", DEADLINE_S
            )


def test_the_latest_is_leased_while_snapshots_come_and_go(scene: Scene) -> None:
    """Between asking which is the latest and leasing it, it is retired; every bucket is held."""
    with scene.run(SnapshotConfig(interval_s=1000, retained=1, log_ttl_s=0)) as (_, client):
        table = create(client)
        stop = threading.Event()
        failed: list[BaseException] = []

        def keep_taking() -> None:
            try:
                while not stop.is_set():
                    put(table)
                    table.snapshot()
            except BaseException as exc:  # Said by the test.
                failed.append(exc)

        taker = threading.Thread(target=keep_taking)
        taker.start()
        try:
            for number in range(8):
                with table.lease_latest(f"reader-{number}", SHORT_S) as lease:
                    assert set(lease.snapshots) == set(table.bucket_ids())
                    assert set(leased_rows(table, lease)) == set(KEYS) or number == 0
        finally:
            stop.set()
            taker.join(DEADLINE_S)
        assert not failed
        wait_until(
            lambda: all(len(found) == 1 for found in kept(client, table)), "the rest", DEADLINE_S
        )


def test_a_snapshot_in_the_middle_of_a_batch_shows_what_was_committed(scene: Scene) -> None:
    """Its rows, and the changes from its cut on, add up to the table."""
    with scene.run() as (_, client):
        table = create(client, locked=True)
        batch = WriterRows(data={"k": KEYS, "a": [1] * len(KEYS)})
        scans: list[TableScan] = []

        def take() -> None:
            with table.lease_latest("reader", SHORT_S, renew=False) as lease:
                assert leased_rows(table, lease, "committed") == all_of(1)
                assert leased_rows(table, lease, "latest") == all_of(2)
                scans.append(table.scan(["a"], source=ScanSource.SNAPSHOT, lease=lease))
                scans[0].to_arrow()

        with table.writer(owner_id="x", columns=["a"]) as writer:
            writer.write(1, batch)
            with arm("writer.put", take):
                writer.write(2, batch)
        changes = table.changes(scans[0].cut).to_arrow()
        after = [row for row in changes.to_pylist() if row["_change_type"] == "update_postimage"]
        assert {row["k"]: row["a"] for row in after} == all_of(2) == rows(table)
        assert {(row["_owner"], row["_batch"]) for row in after} == {("x", 2)}


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def test_all_of_it_in_an_object_store(
    s3: S3Server, zookeeper: EmbeddedZooKeeper, tmp_path: Path
) -> None:
    address, logs = chroot(zookeeper), f"{s3.create_bucket()}/logs"

    @contextmanager
    def run() -> Iterator[Cluster]:
        config = ServerConfig(
            zookeeper=address,
            logs=logs,
            views=tmp_path / "views",
            snapshots=EAGER,
            storage_settings=s3.settings,
        )
        with (
            TabletServer(config),
            connect(address, storage_settings=s3.settings) as client,
        ):
            yield client

    with run() as client:
        table = create(client)
        for _ in range(4):
            put(table)
            table.snapshot()
        assert all(start > 0 for start in starts(client))
    shutil.rmtree(tmp_path / "views")
    with run() as client:
        table = client.table("sums")
        assert rows(table) == all_of(4)
        with table.lease_latest("reader") as lease:
            put(table)
            assert leased_rows(table, lease) == all_of(4)
        client.drop_table("sums")
        storage = client.storage()
        paths = [table.definition.path(key) for key in table.bucket_ids()]
        wait_until(
            lambda: (
                not any(
                    storage.child(path).names() + storage.child(path).child("snapshots").names()
                    for path in paths
                )
            ),
            "all objects to go",
            DEADLINE_S,
        )
