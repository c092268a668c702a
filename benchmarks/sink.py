"""The Spark sink, end to end: against Spark's own stateful aggregation, and against Delta MERGE.

All read the same Parquet files as a stream, one file per batch, in one `local[2]` session.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.figure import Figure, Finding, Setting, Skipped
from benchmarks.measure import Pairs, timed
from benchmarks.peers.delta import Delta
from benchmarks.peers.ours import present
from benchmarks.peers.peer import NotInstalled
from benchmarks.peers.race import loading
from benchmarks.peers.reference import Reference, WrongResult
from benchmarks.spark import CORES, local_spark, run_stream, write_source
from benchmarks.workload import Workload
from merge_engine.bucket.results import BucketResult
from recovery.writer.access import Answers, Grant
from recovery.writer.batch_work import RowsWork
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from sink.aggregate_sink import AggregateSink

_COLUMNS = ("total", "highest", "events")
_EMPTY_BATCHES = 12
_DELTA_BATCHES = 3


def sink_vs_stateful(setting: Setting) -> Iterator[Finding]:
    """Events per second of the sink and of Spark's stateful aggregation, on many and few keys.

    A foreachBatch that only collects its batch runs beside them: no sink by the driver's route can
    be faster than that. The rows of ours and the state of theirs are checked.
    """
    yield Skipped(
        what="Paimon's write-only table as a sink",
        reason="there is no contestant for it: where this was written, Maven Central answered 404 "
        "for its jars, so none could be tried",
    )
    for label, keys, goal, bare_goal in (
        ("1m", setting.keys, ">=6", ">=0.75"),
        ("10k", setting.small_keys, ">=2", ">=0.93"),
    ):
        directory = setting.directory / f"stateful-{label}"
        fill = max(keys // setting.batch_rows, 2)
        measured = setting.runs * 2
        work = Workload(keys, batch_rows=setting.batch_rows, string=False)
        source = write_source(directory / "source", work, fill, measured)
        with ExitStack() as stack:
            cluster = stack.enter_context(LocalCluster(directory / "cluster", servers=CORES))
            client = stack.enter_context(cluster.connect())
            spark = stack.enter_context(local_spark(directory))
            # The first round is for the JVM to compile what it runs, of all three.
            for round_ in ("warm-up", "measured"):
                table = client.create_table(round_, work.schema, buckets=CORES)
                sink = AggregateSink(cluster.address, round_, columns=_COLUMNS)
                run = partial(run_stream, checkpoints=directory / round_, after=fill)
                ours = run(_stream(spark, source).writeStream.foreachBatch(sink), "ours")
                theirs = run(_stateful(_stream(spark, source)), "theirs")
                bare = run(_stream(spark, source).writeStream.foreachBatch(_collect), "bare")
                sink.close()
            _check(keys, source, table, _state(spark, directory / "measured" / "theirs"))
        rows = setting.batch_rows
        ours, theirs, bare = ([s / rows for s in times] for times in (ours, theirs, bare))
        yield Pairs(ours, theirs).speed(
            f"sink_{label}_keys_vs_stateful",
            what=f"events/s end to end of the sink, {rows:,}-row batches into {keys:,} keys, "
            "against Spark's stateful aggregation (RocksDB state store, changelog checkpoints) of "
            "the same files",
            unit="events",
            goal=goal,
        )
        yield Pairs(ours, bare).speed(
            f"sink_{label}_keys_vs_bare_collect",
            what=f"events/s end to end of the sink, {rows:,}-row batches into {keys:,} keys, "
            "against a foreachBatch that collects its batch and does nothing with it",
            unit="events",
            goal=bare_goal,
        )


def _collect(frame: Any, _: int) -> None:
    frame.toArrow()


def _state(spark: Any, checkpoint: Path) -> pa.Table:
    """Return what Spark's stateful aggregation has in its state store."""
    state = spark.read.format("statestore").load(str(checkpoint))
    return state.selectExpr("key.*", "value.*").toArrow().rename_columns(["key", *_COLUMNS])


def _check(keys: int, source: Path, table: RemoteTable, state: pa.Table) -> None:
    """Compare both with the reference; raises WrongResult."""
    reference = Reference(keys)
    for file in source.iterdir():
        for batch in pq.read_table(file).to_batches():
            reference.add(batch)
    every = pa.array(np.arange(keys))
    found = table.lookup(pa.table({"key": every}), isolation="committed")
    reference.check("the sink", every, present(found))
    reference.check("Spark's stateful aggregation", every, state)


def sink_overhead(setting: Setting) -> Iterator[Figure]:
    """What the sink adds to an empty batch, and undo through the writer against its batch."""
    directory = setting.directory / "overhead"
    work = Workload(setting.keys, batch_rows=setting.batch_rows, string=False)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(directory / "cluster", servers=CORES))
        client = stack.enter_context(cluster.connect())
        client.create_table("bench", work.schema, buckets=CORES)
        spark = stack.enter_context(local_spark(directory))
        frame = spark.createDataFrame([], "key BIGINT, total BIGINT, highest DOUBLE, events BIGINT")
        sink = AggregateSink(
            cluster.address, "bench", columns=_COLUMNS, owner_id="bench", route="driver"
        )
        ours, theirs = [], []
        for batch in range(_EMPTY_BATCHES):
            began = time.perf_counter()
            sink(frame, batch)
            ours.append(time.perf_counter() - began)
            began = time.perf_counter()
            frame.toArrow()
            theirs.append(time.perf_counter() - began)
        sink.close()
    extra = (median(ours[2:]) - median(theirs[2:])) * 1000
    yield Figure(
        name="sink_empty_batch_overhead_ms",
        what="time that the sink takes for an empty batch, beyond collecting it",
        ours=f"{median(ours[2:]) * 1000:.0f} ms",
        baseline=f"{median(theirs[2:]) * 1000:.0f} ms",
        value=extra,
        goal="<50",
    )
    yield from _undo(setting, directory, work)


def _undo(setting: Setting, directory: Path, work: Workload) -> Iterator[Figure]:
    """A batch that fails after its puts is undone before the error is raised."""
    writes, undos = [], []
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(directory / "undo", servers=CORES))
        client = stack.enter_context(cluster.connect())
        table = client.create_table("bench", work.schema, buckets=CORES)
        writer = stack.enter_context(table.writer(owner_id="bench", columns=_COLUMNS))
        for number, batch in enumerate(work.fill()):
            writer.write(number, Rows(data=batch, columns=_COLUMNS))
        for _ in range(setting.runs):
            rows = Rows(data=work.batch(), columns=_COLUMNS)
            seconds, _ = timed(partial(writer.write, writer.batch + 1, rows))
            writes.append(seconds)
            undos.append(_time_of_undo(writer, Rows(data=work.batch(), columns=_COLUMNS)))
    yield Pairs(undos, writes).duration(
        "writer_undo_vs_write",
        what=f"recovery of a batch of {setting.batch_rows:,} rows in {setting.keys:,} keys that "
        "failed before its commit (acquire, fence, undo, ready), against writing one",
        goal="<=1",
    )


class _Failure(Exception):
    """What goes wrong after the puts."""


def _time_of_undo(writer: TableWriter, rows: Rows) -> float:
    failed = 0.0

    class PutAndFail(RowsWork):
        def put(self, grant: Grant) -> Answers[BucketResult]:
            nonlocal failed
            super().put(grant)
            failed = time.perf_counter()
            raise _Failure

    try:
        writer.run(writer.batch + 1, PutAndFail(lambda: writer.access, rows))
    except _Failure:
        return time.perf_counter() - failed
    raise AssertionError("it did not fail")


def sink_vs_delta(setting: Setting) -> Iterator[Finding]:
    """The sink against foreachBatch with delta-rs MERGE, once the table is large."""
    directory = setting.directory / "delta"
    try:
        delta = Delta(directory / "table")
    except NotInstalled as exc:
        yield Skipped(what="foreachBatch with delta-rs MERGE", reason=str(exc))
        return
    work = Workload(setting.large_keys, batch_rows=setting.batch_rows, string=False)
    delta.load(loading(setting.large_keys))
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(directory / "cluster", servers=CORES))
        client = stack.enter_context(cluster.connect())
        table = client.create_table("bench", work.schema, buckets=CORES)
        with table.writer(owner_id="bench", columns=_COLUMNS) as writer:
            for number, batch in enumerate(loading(setting.large_keys)):
                writer.write(number, Rows(data=batch, columns=_COLUMNS))
        spark = stack.enter_context(local_spark(directory))
        sink = AggregateSink(
            cluster.address, "bench", columns=_COLUMNS, owner_id="bench", route="driver"
        )
        stack.callback(sink.close)
        source = directory / "source"
        source.mkdir()
        ours, theirs, keys = [], [], []
        for number in range(_DELTA_BATCHES):
            batch = work.batch()
            keys.append(batch["key"].to_numpy())
            pq.write_table(pa.Table.from_batches([batch]), source / f"{number}.parquet")
            frame = spark.read.parquet(str(source / f"{number}.parquet"))
            batch_id = setting.large_keys + number
            ours.append(timed(partial(sink, frame, batch_id))[0] / setting.batch_rows)
            theirs.append(timed(partial(_merge, delta, frame))[0] / setting.batch_rows)
        written = pa.array(np.unique(np.concatenate(keys)))
        sink.close()
        ours_found = table.lookup(pa.table({"key": written}), isolation="committed")
        if not ours_found.sort_by("key").equals(delta.read(written).sort_by("key")):
            raise WrongResult("the sink and delta-rs have different rows")
    yield Pairs(ours, theirs).speed(
        "sink_10m_keys_vs_delta_merge",
        what=f"events/s of the sink's foreachBatch, {setting.batch_rows:,}-row batches into a "
        f"table of {setting.large_keys:,} rows, against a foreachBatch with delta-rs MERGE",
        unit="events",
        goal=">=3",
    )


def _merge(delta: Delta, frame: Any) -> None:
    for batch in frame.toArrow().combine_chunks().to_batches():
        delta.upsert(batch)


def _stream(spark: Any, source: Path) -> Any:
    return (
        spark.readStream.schema("key BIGINT, total BIGINT, highest DOUBLE, events BIGINT")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(source))
    )


def _stateful(frame: Any) -> Any:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    grouped = frame.groupBy("key").agg(F.sum("total"), F.max("highest"), F.count("events"))
    return grouped.writeStream.outputMode("update").format("noop")
