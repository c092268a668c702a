"""Readers of whole tables, Spark's among them, while writers, servers and executors are killed.

Two writers only move amounts between keys of all buckets: every committed read of the whole table
has the same sum, whatever dies. `TALLYBOOK_EXAMPLES` makes a longer run; a failure prints its seed.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tallybook as tb
from recovery.writer.rows import Rows
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from sink.source.planning import RowsPlan, plan_rows
from sink.worker_connections import disconnect
from tests.conftest import schema_of
from tests.fault.cluster_load import LONGER, leaders, noted, rounds, wait_until_led
from tests.fault.moving_writer import KEYS, TOTAL, Movers, rows_of, table_schema, writer_of
from tests.support.spark_session import quiet_spark
from tests.support.zookeeper_server import wait_until

DEADLINE_S = 60.0
BUCKETS = 4
_numbers = count()


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """Run Spark with executors that are processes of their own."""
    with quiet_spark(
        "local-cluster[2,1,1024]",
        spark_task_maxFailures=8,
    ) as session:
        tb.spark.register(session)
        yield session


@pytest.fixture
def table(client: Cluster) -> RemoteTable:
    """Create a table that has what each writer begins with."""
    name = f"moved_{next(_numbers)}"
    created = client.create_table(name, table_schema(), buckets=BUCKETS)
    for column in "ab":
        with writer_of(created, column) as writer:
            writer.write(0, Rows(data=rows_of(column, 0, 0)))
    return created


@pytest.mark.spark
@pytest.mark.parametrize("seed", range(rounds(1, 200)))
def test_every_read_of_the_whole_table_has_the_same_sum_whatever_is_killed(
    seed: int, cluster: LocalCluster, table: RemoteTable, spark: Any, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    place = {"zookeeper": cluster.address, "table": table.name, "deadline": "60 s"}
    reader = spark.read.format("tallybook").options(**place)
    with ExitStack() as stack:
        note = stack.enter_context(noted(seed))
        movers = stack.enter_context(Movers(cluster, table, seed, tmp_path / "redo"))
        stream = stack.enter_context(_followed(spark, place, tmp_path / "checkpoint"))
        for fault in _faults(chance, rounds(1)):
            note(fault)
            with _meanwhile(partial(_do, fault, cluster, movers)):
                for _ in range(2 if LONGER else 1):
                    # A frame stands at the cut of its first use: each read has one of its own.
                    sums = reader.load().selectExpr("sum(a)", "sum(b)").first()
                    assert sums[:] == (TOTAL, TOTAL)
                    assert _sums(table.scan().to_arrow()) == (TOTAL, TOTAL)
                    keys = {"k": list(range(KEYS))}
                    assert _sums(table.lookup(keys, isolation="committed")) == (TOTAL, TOTAL)
            stream.check()
        wait_until(lambda: stream.batches > 3, "micro-batches follow each other", DEADLINE_S)
        for column in "ab":
            movers.running[column].kill()
            movers.running[column].wait()
        stream.end()
    rows = table.scan().to_arrow().to_pylist()
    assert stream.rows == {row["k"]: (row["a"], row["b"]) for row in rows}


def _faults(chance: random.Random, times: int) -> list[str]:
    """Return what is killed, each of it in its turn; in a short run one writer and one server."""
    if not LONGER:
        pairs = [["writer a", "writer b"], ["server 0", "server 1"]]
        return [*map(chance.choice, pairs), "zookeeper", "executor"]
    faults = ["writer a", "writer b", "server 0", "server 1", "zookeeper", "executor"] * times
    chance.shuffle(faults)
    return faults


def _do(fault: str, cluster: LocalCluster, movers: Movers) -> None:
    what, _, which = fault.partition(" ")
    if what == "writer":
        movers.kill(which)
    elif what == "server":
        server = cluster.servers[int(which)]
        server.kill()
        server.start()
        cluster.wait_until_joined()
    elif what == "zookeeper":
        cluster.zookeeper.kill()
        cluster.zookeeper.start()
    else:
        assert what == "executor"
        os.kill(_executors()[0], signal.SIGKILL)


def _executors() -> list[int]:
    """Return the executors that this process's Spark has started, somewhere below it."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            names[int(path.name)] = (path / "cmdline").read_bytes()
        except OSError:
            continue  # It has just ended.

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    found = [pid for pid, name in names.items() if b"CoarseGrainedExecutorBackend" in name]
    return [pid for pid in found if is_ours(pid)]


@contextmanager
def _meanwhile(call: Callable[[], None]) -> Iterator[None]:
    """Do something else while the block runs; both have ended afterwards."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(2 * DEADLINE_S)
        assert not thread.is_alive()
    assert errors == []


def _sums(rows: pa.Table) -> tuple[int, int]:
    return sum(rows["a"].to_pylist()), sum(rows["b"].to_pylist())


class _Followed:
    """A stream of upserts, applied to a dictionary: after each micro-batch the sums are the same.

    Its micro-batches are small, so that most of them end at a cut that nobody has taken.
    """

    def __init__(self, spark: Any, place: dict[str, str], checkpoint: Path) -> None:
        self.rows: dict[int, tuple[int, int]] = {}
        self.batches = 0
        self._wrong: list[str] = []
        self._spark, self._place, self._checkpoint = spark, place, checkpoint
        self.query = self._writing(maxRowsPerTrigger="2000").start()

    def _writing(self, **options: str) -> Any:
        stream = self._spark.readStream.format("tallybook").options(**self._place, **options)
        stream = stream.option("start", "full").option("mode", "upserts").load()
        writing = stream.writeStream.foreachBatch(self._apply)
        return writing.option("checkpointLocation", str(self._checkpoint))

    def _apply(self, frame: Any, number: int) -> None:
        for row in frame.collect():
            assert row._change_type == "upsert"
            self.rows[row.k] = (row.a, row.b)
        sums = tuple(sum(row[at] for row in self.rows.values()) for at in (0, 1))
        if sums != (TOTAL, TOTAL):
            self._wrong.append(f"batch {number}: {sums}")
        self.batches += 1

    def check(self) -> None:
        """Raise unless all was well so far, and it runs."""
        assert self._wrong == []
        assert self.query.isActive, str(self.query.exception())[-3000:]

    def end(self) -> None:
        """Stop it, anywhere; start it again, without a limit, and have it read all that is left."""
        self.query.stop()
        self.query = self._writing().trigger(availableNow=True).start()
        assert self.query.awaitTermination(DEADLINE_S)
        assert self._wrong == []


@contextmanager
def _followed(spark: Any, place: dict[str, str], checkpoint: Path) -> Iterator[_Followed]:
    followed = _Followed(spark, place, checkpoint)
    try:
        yield followed
    finally:
        followed.query.stop()


# --- A task, and its leader ---------------------------------------------------------------------

# More than goes over the wire before anybody reads it, so that a task can be met in the middle.
WIDE = schema_of(a=(pa.int64(), "sum"), note=(pa.string(), "last_value"))
WIDE_ROWS = 240
NOTE = "x" * 100_000


@pytest.fixture
def wide(client: Cluster) -> RemoteTable:
    created = client.create_table(f"wide_{next(_numbers)}", WIDE, buckets=2)
    with created.writer(owner_id="w", columns=["a", "note"]) as writer:
        for batch in range(4):
            keys = list(range(60 * batch, 60 * batch + 60))
            writer.write(batch, Rows(data={"k": keys, "a": keys, "note": [NOTE] * 60}))
    return created


@pytest.fixture(autouse=True)
def nothing_is_left_connected(client: Cluster) -> Iterator[None]:
    """Close the connection of tasks that this process has run, as the processes of Spark do."""
    yield
    disconnect(client.recipe)


def planned(client: Cluster, table: RemoteTable) -> list[Any]:
    return plan_rows(table, client.recipe, RowsPlan(columns=["k", "a", "note"]))


def overwrite(table: RemoteTable) -> None:
    """Change all rows, so that a read that is not at its cut shows."""
    with table.writer(owner_id="w", columns=["a", "note"]) as writer:
        keys = list(range(WIDE_ROWS))
        rows = {"k": keys, "a": [-10_000] * WIDE_ROWS, "note": [""] * WIDE_ROWS}
        writer.write(writer.next_batch(), Rows(data=rows))


def keys_of(batches: list[pa.RecordBatch]) -> list[int]:
    for batch in batches:
        assert batch["a"].to_pylist() == batch["k"].to_pylist()
    return [key for batch in batches for key in batch["k"].to_pylist()]


def test_a_task_whose_leader_is_killed_in_the_middle_has_every_row_once(
    cluster: LocalCluster, client: Cluster, wide: RemoteTable
) -> None:
    tasks = planned(client, wide)
    reading = [(task, task.batches()) for task in tasks]
    begun = [(next(batches), batches) for _, batches in reading]
    overwrite(wide)
    leading = leaders(client, wide)
    for server in cluster.servers:
        if server.address in leading.values():
            server.kill()
            server.start()
    cluster.wait_until_joined()
    found = [keys_of([first, *rest]) for first, rest in begun]
    assert sorted(key for keys in found for key in keys) == list(range(WIDE_ROWS))


def test_a_bucket_that_moves_between_planning_and_reading_has_the_rows_of_its_cut(
    cluster: LocalCluster, client: Cluster, wide: RemoteTable
) -> None:
    tasks = planned(client, wide)
    overwrite(wide)
    gone, stays = cluster.servers
    gone.kill()
    try:
        wait_until_led(client, wide, [stays])
        found = [keys_of(list(task.batches())) for task in tasks]
    finally:
        gone.start()
    assert sorted(key for keys in found for key in keys) == list(range(WIDE_ROWS))


def test_tasks_wait_for_a_zookeeper_that_is_away_for_ten_seconds(
    cluster: LocalCluster, client: Cluster, wide: RemoteTable
) -> None:
    tasks = planned(client, wide)
    cluster.zookeeper.kill()
    back_at = time.monotonic() + 10

    def come_back() -> None:
        wait_until(lambda: time.monotonic() > back_at, "ten seconds pass", 20)
        cluster.zookeeper.start()

    with _meanwhile(come_back):
        found = [keys_of(list(task.batches())) for task in tasks]
    assert sorted(key for keys in found for key in keys) == list(range(WIDE_ROWS))
