"""One huge first micro-batch: its rate, its memory, its recovery, and what others notice of it."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.figure import Figure, Setting
from benchmarks.measure import Pairs, peak_mib
from benchmarks.spark import CORES, local_spark, write_source
from benchmarks.workload import Workload
from foundation.failpoints import arm
from recovery.writer.rows import Rows
from server.launch.local_cluster import LocalCluster
from sink.aggregate_sink import AggregateSink

_COLUMNS = ("total", "highest", "events")
_BUCKETS = 4
_SMALL_ROWS = 1_000
_SMALL_PUTS = 150
_WARM_UP_FILES = 2


def backfill(setting: Setting) -> Iterator[Figure]:
    """One micro-batch of many files through the sink, over the same files one by one."""
    directory = setting.directory / "backfill"
    keys = setting.backfill_rows // 2
    work = Workload(keys, batch_rows=setting.batch_rows, string=False)
    files = setting.backfill_rows // setting.batch_rows
    source = write_source(directory / "source", work, 0, files)
    seconds: dict[str, float] = {}
    grown: dict[str, float] = {}
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(directory / "cluster", servers=CORES))
        client = stack.enter_context(cluster.connect())
        spark = stack.enter_context(local_spark(directory))
        for name, at_once in (("warm-up", _WARM_UP_FILES), ("one by one", 1), ("at once", files)):
            table = client.create_table(name.replace(" ", "-"), work.schema, buckets=_BUCKETS)
            sink = AggregateSink(cluster.address, table.name, columns=_COLUMNS)
            before = _memory_mib(cluster)
            began = time.perf_counter()
            with _TaskMemory() as tasks:
                _run(spark, source, sink, directory / table.name, at_once)
            seconds[name] = time.perf_counter() - began
            grown = {who: peak - before[who] for who, peak in _memory_mib(cluster).items()}
            grown["largest task"] = tasks.peak_mib
            sink.close()
            if name != "at once":
                client.drop_table(table.name, force=True)
    rows = setting.backfill_rows
    yield Pairs([seconds["at once"] / rows], [seconds["one by one"] / rows]).speed(
        "backfill_vs_small_batches_ratio",
        what=f"events/s of one micro-batch of {rows:,} rows, {keys:,} keys, through the sink on "
        f"{CORES} servers, against the same rows in batches of {setting.batch_rows:,} (one run)",
        unit="events",
        goal=">=0.7",
    )
    who = max(grown, key=lambda one: grown[one])
    yield Figure(
        name="backfill_memory_mib",
        what="peak memory during that batch beyond the peak before it, of the process that grew "
        f"most ({who}): servers, this driver's Python, and the Python of tasks (all that it has)",
        ours=", ".join(f"{name} {mib:,.0f} MiB" for name, mib in grown.items()),
        baseline="before the batch",
        value=grown[who],
        goal="<1024",
    )


def backfill_recovery(setting: Setting) -> Iterator[Figure]:
    """Undo of a large micro-batch that fails at its end, over the time it took to write."""
    directory = setting.directory / "recovery"
    work = Workload(setting.backfill_rows // 2, batch_rows=setting.batch_rows, string=False)
    files = setting.backfill_rows // setting.batch_rows
    source = write_source(directory / "source", work, 0, files)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(directory / "cluster", servers=CORES))
        client = stack.enter_context(cluster.connect())
        spark = stack.enter_context(local_spark(directory))
        warm = client.create_table("warm", work.schema, buckets=_BUCKETS)
        sink = AggregateSink(cluster.address, warm.name, columns=_COLUMNS)
        _run(spark, source, sink, directory / "warm", _WARM_UP_FILES)
        sink.close()
        table = client.create_table("bench", work.schema, buckets=_BUCKETS)
        sink = AggregateSink(cluster.address, table.name, columns=_COLUMNS, owner_id="bench")
        began = time.perf_counter()
        died: list[float] = []

        def die() -> None:
            died.append(time.perf_counter())
            raise _Died

        with arm("writer.sealed", die), suppress(Exception):
            _run(spark, source, sink, directory / "bench", files)
        ended = time.perf_counter()  # The writer takes back at once what has failed for good.
        undone = sink.status()["undone_keys"]
        sink.close()
        assert len(died) == 1
        assert undone >= setting.backfill_rows // 4
    yield Pairs([ended - died[0]], [died[0] - began]).duration(
        "backfill_recovery_vs_write_ratio",
        what=f"recovery of a micro-batch of {setting.backfill_rows:,} rows that failed behind its "
        "last row, against the time it took to write (one run)",
        goal="<=1",
    )


def puts_beside_backfill(setting: Setting) -> Iterator[Figure]:
    """p99 of small puts into the buckets that a large batch is written to, over that alone."""
    work = Workload(setting.backfill_rows // 2, batch_rows=setting.batch_rows, string=False)
    files = max(setting.backfill_rows // setting.batch_rows // 4, 4)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(setting.directory / "beside", servers=CORES))
        client = stack.enter_context(cluster.connect())
        table = client.create_table("bench", work.schema, buckets=_BUCKETS)
        small = stack.enter_context(table.writer(owner_id="small", columns=["events"]))
        large = stack.enter_context(table.writer(owner_id="large", columns=["total", "highest"]))
        random = np.random.default_rng(3)

        def p99() -> float:
            times = []
            for _ in range(_SMALL_PUTS):
                keys = random.integers(0, setting.keys, _SMALL_ROWS)
                data = pa.table({"key": keys, "events": np.ones(_SMALL_ROWS, np.int64)})
                began = time.perf_counter()
                small.write(small.next_batch(), Rows(data=data, columns=["events"]))
                times.append(time.perf_counter() - began)
            return float(np.quantile(times, 0.99))

        p99()
        alone = p99()
        loading = threading.Thread(
            target=lambda: large.write(0, _rows(work, files, ["total", "highest"]))
        )
        loading.start()
        while not table.put_progress("large", large._grant(0).token)["rows_done"]:
            time.sleep(0.05)
        beside = p99()
        still = loading.is_alive()
        loading.join()
    yield Pairs([beside], [alone]).duration(
        "small_put_p99_beside_backfill_ratio",
        what=f"p99 of {_SMALL_PUTS} batches of {_SMALL_ROWS:,} rows by another writer, "
        "while a large one is written, against the same alone"
        + ("" if still else " (the large one ended first)"),
        goal="<=5",
    )


class _Died(Exception):
    """The batch fails, just before it would be committed."""


def _rows(work: Workload, files: int, columns: Any = _COLUMNS) -> Rows:
    names = ["key", *columns]

    def pieces() -> Iterator[pa.Table]:
        for _ in range(files):
            yield pa.Table.from_batches([work.batch()]).select(names)

    return Rows(data=pieces, columns=list(columns))


def _run(spark: Any, source: Path, sink: AggregateSink, checkpoint: Path, at_once: int) -> None:
    stream = (
        spark.readStream.schema("key BIGINT, total BIGINT, highest DOUBLE, events BIGINT")
        .option("maxFilesPerTrigger", at_once)
        .parquet(str(source))
    )
    writer = stream.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    if at_once == _WARM_UP_FILES:  # A few batches will do.
        query = writer.start()
        while len(query.recentProgress) < 3:
            time.sleep(0.1)
        query.stop()
        return
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    if query.exception() is not None:
        raise query.exception()


def _memory_mib(cluster: LocalCluster) -> dict[str, float]:
    """Return the largest resident size so far of each server and of this process."""
    processes = {f"server {server.number}": str(server.pid) for server in cluster.servers}
    return {name: peak_mib(pid) for name, pid in {**processes, "driver": "self"}.items()}


class _TaskMemory:
    """The largest resident size of any of Spark's Python workers, for the duration of a block."""

    def __init__(self) -> None:
        self.peak_mib = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "_TaskMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.5):
            for command in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):  # It has ended meanwhile.
                    if b"pyspark.daemon" in command.read_bytes():
                        self.peak_mib = max(self.peak_mib, peak_mib(command.parent.name))
