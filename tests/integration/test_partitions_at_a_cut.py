"""Reads beside a batch that brings a partition up: it is seen whole, or not at all."""

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tallybook as tb
from foundation.errors import InvalidInput, PartitionGone
from foundation.ids import BucketId
from locks.catalog.partitions import PartitionCatalog
from locks.column_locks.locks import ColumnLocks
from recovery.reader.isolation import Isolation
from sink.source.planning import RowsPlan, plan_rows
from sink.worker_connections import disconnect
from tests.support.day_tables import DAYS
from tests.support.streams import driven
from tests.support.zookeeper_server import wait_until

ALL = 1_000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tb.Cluster]:
    directory = tmp_path_factory.mktemp("partitions")
    with tb.LocalCluster(directory, servers=2) as local, local.connect() as client:
        yield client
        disconnect(client.recipe)


class World:
    """A table of several days, whose sum is always `ALL`, and a reader that is slow.

    A batch moves some of it to a new day before the reader's next cut is taken, and another one
    does after it has listed the partitions next.
    """

    def __init__(self, table: tb.AnyTable, reader: tb.AnyTable, stack: ExitStack) -> None:
        self.reader: Any = reader
        self._table = table
        self.writer = stack.enter_context(table.writer(owner_id="mover", columns=["a"]))
        self.writer.write(0, tb.Rows(data={"day": ["mo"], "k": [1], "a": [ALL]}))
        self.beginning = table.cut()

    def move(self, day: str) -> None:
        """Commit a batch that moves some to another day."""
        rows = {"day": ["mo", day], "k": [1, 1], "a": [-100, 100]}
        self.writer.write(self.writer.next_batch(), tb.Rows(data=rows))

    def moving_meanwhile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the reader be slow at both places."""
        cut, listing, days = ColumnLocks.read, PartitionCatalog.ids, {"new", "newer"}
        moving = threading.Lock()  # The writer lists partitions, too.

        def move(day: str) -> None:
            if day in days and moving.acquire(blocking=False):
                days.remove(day)
                self.move(day)
                moving.release()

        def read(self_: Any, table: Any) -> Any:
            move("new")
            return cut(self_, table)

        def ids(self_: Any, table: Any) -> Any:
            found = listing(self_, table)
            move("newer")
            return found

        monkeypatch.setattr(ColumnLocks, "read", read)
        monkeypatch.setattr(PartitionCatalog, "ids", ids)


@pytest.fixture(params=["embedded", "cluster"])
def world(request: pytest.FixtureRequest, tmp_path: Path, cluster: tb.Cluster) -> Iterator[World]:
    with ExitStack() as stack:
        if request.param == "embedded":
            table = stack.enter_context(tb.Table.create(str(tmp_path / "table"), DAYS, buckets=2))
            yield World(table, table, stack)
        else:
            yield remote(cluster, stack)


@pytest.fixture
def remote_world(cluster: tb.Cluster) -> Iterator[World]:
    with ExitStack() as stack:
        yield remote(cluster, stack)


def remote(cluster: tb.Cluster, stack: ExitStack) -> World:
    """The reader knows the partitions that there were when it was made, and no more."""
    table = cluster.create_table(f"t{uuid.uuid4().hex}", DAYS, buckets=2)
    reader = cluster.table(table.name)
    world = World(table, reader, stack)
    assert reader.partitions().num_rows == 1
    return world


def total(rows: pa.Table) -> int:
    return sum(value or 0 for value in rows["a"].to_pylist())


def change(records: pa.Table) -> int:
    """What change records add up to."""
    signs = {"update_preimage": -1, "delete": -1}
    kinds, values = records["_change_type"].to_pylist(), records["a"].to_pylist()
    return sum(signs.get(kind, 1) * one for kind, one in zip(kinds, values, strict=True))


KEYS = {"day": ["mo", "new", "newer"], "k": [1, 1, 1]}
READS: dict[str, Callable[[World], int]] = {
    "scan": lambda one: total(one.reader.scan().to_arrow()),
    "scan, iterated": lambda one: total(pa.Table.from_batches(one.reader.scan())),
    "scan with a limit": lambda one: total(one.reader.scan(limit=100).to_arrow()),
    "look-up": lambda one: total(one.reader.lookup(KEYS, isolation="committed")),
    "look-up with a flag": lambda one: total(
        one.reader.lookup(KEYS, isolation="committed", found=True)
    ),
    "changes": lambda one: ALL + change(one.reader.changes(since=one.beginning).to_arrow()),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_sees_a_batch_that_brings_a_partition_up_whole_or_not_at_all(
    world: World, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    world.moving_meanwhile(monkeypatch)
    assert READS[read](world) == ALL
    there = world.reader.lookup(KEYS)["a"].to_pylist()
    assert there[1] == 100, "and there was one"


def test_a_look_up_that_does_not_wait_does_so_too(
    remote_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote_world.moving_meanwhile(monkeypatch)
    found = asyncio.run(remote_world.reader.lookup_async(KEYS, isolation="committed"))
    assert total(found) == ALL


def test_a_read_of_an_earlier_cut_is_at_that_whatever_has_come_since(world: World) -> None:
    for day in ("new", "newer"):
        before = world.reader.cut()
        world.move(day)
        for at in (before, str(before), world.reader.cut()):
            assert total(world.reader.lookup(KEYS, at=at)) == ALL
            assert total(world.reader.scan(at=at).to_arrow()) == ALL


def test_a_look_up_at_a_cut_finds_what_was_dropped_and_made_anew(remote_world: World) -> None:
    world = remote_world
    world.move("new")
    cut = world.reader.cut()
    assert world.reader.lookup(KEYS, at=cut)["a"].to_pylist() == [900, 100, None]
    world.reader.drop_partition(day="new")
    world.move("new")
    after = world.reader.cut()
    assert world.reader.lookup(KEYS, at=after)["a"].to_pylist() == [800, 100, None]
    assert world.reader.lookup(KEYS, at=cut)["a"].to_pylist() == [900, None, None]


# --- Spark ----------------------------------------------------------------------------------------


def planned(world: World, cluster: tb.Cluster, **plan: Any) -> int:
    """Return the sum of what the tasks of a plan read."""
    wanted = RowsPlan(columns=["day", "k", "a"], **plan)
    tasks = plan_rows(world.reader, cluster.recipe, wanted)
    return sum(total(pa.Table.from_batches([one])) for task in tasks for one in task.batches())


@pytest.mark.parametrize(
    "plan",
    [{}, {"allowed": {"day": ["mo", "new", "newer"]}}, {"keys": KEYS | {"k": [1]}}],
    ids=["all rows", "partitions", "keys"],
)
def test_so_do_the_tasks_of_a_frame(
    remote_world: World, cluster: tb.Cluster, monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any]
) -> None:
    remote_world.moving_meanwhile(monkeypatch)
    assert planned(remote_world, cluster, **plan) == ALL


def test_a_frame_of_some_partitions_has_their_rows_though_one_is_made_anew_meanwhile(
    remote_world: World, cluster: tb.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows of the cut, or an error: not none of them."""
    world, listing = remote_world, PartitionCatalog.ids

    def ids(self: Any, table: Any) -> Any:
        monkeypatch.setattr(PartitionCatalog, "ids", listing)
        found = listing(self, table)
        world.reader.drop_partition(day="mo")
        world.reader.create_partition(day="mo")
        return found

    monkeypatch.setattr(PartitionCatalog, "ids", ids)
    with suppress(PartitionGone):
        assert planned(world, cluster, allowed={"day": ["mo"]}) == ALL


def test_so_does_a_stream_that_begins_with_all_rows(
    remote_world: World, cluster: tb.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = remote_world
    with driven(cluster.address, world.reader, start="full") as stream:
        stream.start(available_now=False)
        world.moving_meanwhile(monkeypatch)
        rows = stream.step()
        assert rows is not None
        assert sum(row["a"] for row in rows) == ALL
        world.move("newest")
        following = stream.step()
        assert following is not None
        assert change(pa.Table.from_pylist(following)) == 0


# --- Leases ---------------------------------------------------------------------------------------


def snapshot_rows(world: World, lease: Any, **how: Any) -> int:
    source = tb.ScanSource.SNAPSHOT
    return total(world.reader.scan(source=source, lease=lease, **how).to_arrow())


def test_leased_snapshots_that_lack_a_partition_are_not_taken_for_all_rows(
    remote_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cut has half of the batch that brought the partition up."""
    world = remote_world
    world.moving_meanwhile(monkeypatch)
    with world.reader.lease_latest("copy", renew=False) as lease:
        assert snapshot_rows(world, lease) == ALL
        world.move("newest")
        assert snapshot_rows(world, lease) == ALL, "at its own cut"
        for other, at in ((lease, world.reader.cut()), (world.reader.borrow_lease("copy"), None)):
            with pytest.raises(InvalidInput, match=r"whose partitions came later.*say buckets="):
                snapshot_rows(world, other, at=at)
            some = list(lease.snapshots)
            assert snapshot_rows(world, other, at=at, buckets=some) == ALL - 100
            snapshot_rows(world, other, isolation=Isolation.LATEST)  # Each as it is.


# --- Dropped beside a question --------------------------------------------------------------------


def led(cluster: tb.Cluster, table: Any) -> list[BucketId]:
    """Return the buckets of a table that servers lead."""
    return [
        BucketId(*map(int, one["bucket"].split("/")))
        for server in cluster.status()
        for one in server["buckets"]
        if one["table_id"] == table.table_id
    ]


@pytest.mark.parametrize("ask", ["end_offsets", "changes", "cut", "lease_latest"])
def test_what_asks_all_buckets_goes_on_without_those_that_are_dropped_meanwhile(
    cluster: tb.Cluster, monkeypatch: pytest.MonkeyPatch, ask: str
) -> None:
    table = cluster.create_table(f"t{uuid.uuid4().hex}", DAYS, buckets=2, column_locks=False)
    table.put({"day": ["mo", "tu"], "k": [1, 1], "a": [1, 1]})
    listing = PartitionCatalog.ids

    def ids(self: Any, of: Any) -> Any:
        monkeypatch.setattr(PartitionCatalog, "ids", listing)
        found = listing(self, of)
        table.drop_partition(day="mo")
        wait_until(lambda: all(one.partition != 1 for one in led(cluster, table)), "it is let go")
        return found

    monkeypatch.setattr(PartitionCatalog, "ids", ids)
    found = getattr(table, ask)(*(["copy"] if ask == "lease_latest" else []))
    left = set(table.bucket_ids())
    buckets = {
        "end_offsets": lambda: found,
        "changes": lambda: found.buckets,
        "cut": lambda: found.ends,
        "lease_latest": lambda: found.snapshots,
    }[ask]()
    assert left == set(buckets)
    assert len(left) == 2
