"""Spark readers against Parquet, cuts against bare ZooKeeper, committed scans beside a writer."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from kazoo.client import KazooClient

import tallybook as tb
from benchmarks.figure import Figure, Setting
from benchmarks.measure import Pairs, interleave, timed
from benchmarks.spark import CORES, local_spark, run_stream
from benchmarks.workload import Workload
from locks.store.paths import owner_path
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster

_COLUMNS = ("total", "highest", "events", "status")
_BUCKETS = 8
_OWNERS = 10
_JOBS = 15
_CUTS = 200
_BATCHES = 10
_STREAM_ROUNDS = 3


def spark_read(setting: Setting) -> Iterator[Figure]:
    """Batch reads of a whole table against Parquet, and of one key against an empty job."""
    directory = setting.directory / "spark_read"
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    with filled(directory, work) as (local, table), local_spark(directory) as spark:
        rows = directory / "rows.parquet"
        pq.write_table(table.scan().to_arrow(), rows)
        tb.spark.register(spark)
        options = {"zookeeper": local.address, "table": table.name}
        reader = spark.read.format("tallybook").options(**options)
        parquet = spark.read.parquet(str(rows))
        yield from _whole(setting, reader.load(), parquet)
        yield from _two_columns(setting, spark, options, parquet)
        with local.connect() as client:
            yield from _one_key(setting, spark, client, options)


def _whole(setting: Setting, frame: Any, parquet: Any) -> Iterator[Figure]:
    count = setting.keys
    yield _in_turn(setting, partial(drain, frame), partial(drain, parquet), count).speed(
        "spark_read_vs_parquet",
        what=f"`spark.read` of {count:,} rows and 5 columns, {_BUCKETS} buckets on two servers, "
        "against `spark.read.parquet` of one file of the same rows",
        unit="rows",
        goal=">=0.5",
    )


def _two_columns(
    setting: Setting, spark: Any, options: dict[str, str], parquet: Any
) -> Iterator[Figure]:
    def ours() -> None:
        place = options["zookeeper"]
        drain(tb.spark.read(spark, options["table"], ["key", "total"], zookeeper=place))

    def theirs() -> None:
        drain(parquet.select("key", "total"))

    yield _in_turn(setting, ours, theirs, setting.keys).speed(
        "spark_read_two_columns_vs_parquet",
        what=f"`tb.spark.read` of {setting.keys:,} rows and 2 of 5 columns, the cut taken each "
        "time, against `spark.read.parquet` of the same two",
        unit="rows",
    )


def _one_key(
    setting: Setting, spark: Any, client: Cluster, options: dict[str, str]
) -> Iterator[Figure]:
    from pyspark.sql.datasource import DataSource, DataSourceReader  # noqa: PLC0415

    frame = spark.read.format("tallybook").options(**options, pushFilters="true").load()

    class NoRows(DataSourceReader):  # type: ignore[misc]
        def read(self, _: Any) -> Iterator[tuple[Any, ...]]:
            return iter(())

    class Nothing(DataSource):  # type: ignore[misc]
        def schema(self) -> str:
            return "key BIGINT"

        def reader(self, schema: Any) -> NoRows:  # noqa: ARG002
            return NoRows()

    spark.dataSource.register(Nothing)
    nothing = spark.read.format("Nothing").load()

    def by_filter() -> Any:
        return frame.where("key = 77").collect()

    def by_key() -> Any:
        return tb.spark.read(spark, options["table"], keys={"key": [77]}, cluster=client).collect()

    def empty() -> Any:
        return spark.range(0, 0, 1, 1).collect()

    def in_turn(ours: Callable[[], Any], other: Callable[[], Any]) -> Pairs:
        def step() -> tuple[float, float]:
            seconds, found = timed(ours)
            assert [row.key for row in found] == [77]
            return seconds, timed(other)[0]

        for _ in range(_JOBS):  # The JVM takes some to get to speed.
            step()
        return interleave(setting.runs, _JOBS, step)

    yield in_turn(by_key, empty).duration(
        "spark_read_one_key_vs_empty_job",
        what=f"`tb.spark.read(..., keys=..., cluster=...)` of one of {setting.keys:,} keys, over "
        "an open connection, against an empty Spark job: `spark.range(0, 0, 1, 1).collect()`",
        goal="<=2",
    )
    yield in_turn(by_filter, empty).duration(
        "spark_read_one_key_by_filter_vs_empty_job",
        what="the same key by a filter of `spark.read` that is pushed down, against the same",
        goal="<=2",
    )
    yield in_turn(by_filter, nothing.collect).duration(
        "spark_read_one_key_by_filter_vs_empty_python_source",
        what="the same, against a data source in Python that has no rows, planned before",
    )


def spark_stream(setting: Setting) -> Iterator[Figure]:
    """The stream of changes against Spark streaming the same change rows from Parquet."""
    directory = setting.directory / "spark_stream"
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    with filled(directory, work) as (local, table), local_spark(directory) as spark:
        tb.spark.register(spark)
        cut = table.cut()
        source = _write_changes(directory / "changes", table, work)
        options = {"zookeeper": local.address, "table": table.name, "start": str(cut)}
        schema = spark.read.parquet(str(source)).schema
        ours, theirs = [], []
        for round_ in range(_STREAM_ROUNDS + 1):
            run = partial(run_stream, checkpoints=directory / f"round{round_}")
            stream = spark.readStream.format("tallybook").options(**options)
            stream = stream.option("maxRowsPerTrigger", 2 * setting.batch_rows).load()
            files = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
            mine = run(stream.writeStream.format("noop"), "ours")
            other = run(files.parquet(str(source)).writeStream.format("noop"), "theirs")
            assert len(mine) == len(other) == _BATCHES
            if round_:  # The first one is for the JVM to get to speed.
                ours.append(sum(mine))
                theirs.append(sum(other))
        records = sum(pq.read_metadata(one).num_rows for one in source.iterdir())
    yield Pairs([s / records for s in ours], [s / records for s in theirs]).speed(
        "spark_stream_vs_parquet_stream",
        what=f"change records/s of a stream, a batch of {setting.batch_rows:,} rows into "
        f"{setting.keys:,} keys per micro-batch, against Spark streaming the same records from "
        "Parquet files",
        unit="records",
        goal=">=0.5",
    )


def cuts(setting: Setting) -> Iterator[Figure]:
    """Taking a cut of a table with many owners against reading their records."""
    directory = setting.directory / "cuts"
    builder = tb.SchemaBuilder().column("key", "BIGINT").primary_key("key")
    for number in range(_OWNERS):
        builder.agg_column(f"c{number}", "BIGINT", "sum")
    with ExitStack() as stack:
        local = stack.enter_context(LocalCluster(directory, servers=CORES))
        client: Cluster = stack.enter_context(local.connect())
        table = client.create_table("bench", builder.build(), buckets=16)
        for number in range(_OWNERS):
            name = f"c{number}"
            writer = stack.enter_context(table.writer(owner_id=f"owner-{number}", columns=[name]))
            writer.write(0, tb.Rows(data={"key": list(range(100)), name: [1] * 100}))
        paths = [owner_path(table.table_id, f"owner-{number}") for number in range(_OWNERS)]
        kazoo = KazooClient(local.address)
        kazoo.start()
        stack.callback(kazoo.close)
        stack.callback(kazoo.stop)

        def bare() -> None:
            for path in paths:
                kazoo.get(path)

        def step() -> tuple[float, float]:
            return timed(table.cut)[0], timed(bare)[0]

        pairs = interleave(setting.runs, _CUTS, step)
    yield pairs.duration(
        "cut_vs_bare_read",
        what=f"`table.cut()` of a table with 16 buckets and {_OWNERS} owners, against bare kazoo "
        "`get` of the same records, one after the other",
        goal="<=5",
    )


def scan_beside_writer(setting: Setting) -> Iterator[Figure]:
    """Committed scans while a writer commits a batch a second, against the same alone."""
    directory = setting.directory / "scan_beside_writer"
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    small = Workload(setting.keys, batch_rows=setting.batch_rows // 10, seed=1)

    def scan(table: RemoteTable) -> float:
        seconds, rows = timed(lambda: table.scan().to_arrow().num_rows)
        assert rows == setting.keys
        return seconds / setting.keys

    with filled(directory, work) as (_, table):
        scan(table)

        def step() -> tuple[float, float]:
            with _writing(table, small):
                beside = scan(table)
            return beside, scan(table)

        pairs = interleave(setting.runs, 3, step)
    yield pairs.speed(
        "scan_beside_writer_ratio",
        what=f"committed scan of {setting.keys:,} rows in {_BUCKETS} buckets on two servers while "
        f"a writer commits {setting.batch_rows // 10:,} rows every second, against the same scan "
        "when nobody writes",
        unit="rows",
        goal=">=0.8",
    )


@contextmanager
def _writing(table: RemoteTable, work: Workload) -> Iterator[None]:
    """Have a writer commit a batch at once, and then every second, until the block ends."""
    ended, committed = threading.Event(), threading.Event()

    def write() -> None:
        with table.writer(owner_id="bench", columns=_COLUMNS) as writer:
            while not ended.is_set():
                began = time.monotonic()
                writer.write(writer.batch + 1, tb.Rows(data=work.batch(), columns=_COLUMNS))
                committed.set()
                ended.wait(max(0.0, 1 - (time.monotonic() - began)))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert committed.wait(60)
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def filled(directory: Path, work: Workload) -> Iterator[tuple[LocalCluster, RemoteTable]]:
    """Yield a cluster of two servers, and a table with every key of the workload."""
    with (
        LocalCluster(directory / "cluster", servers=CORES) as local,
        local.connect() as client,
    ):
        table = client.create_table("bench", work.schema, buckets=_BUCKETS)
        with table.writer(owner_id="bench", columns=_COLUMNS) as writer:
            for number, batch in enumerate(work.fill()):
                writer.write(number, tb.Rows(data=batch, columns=_COLUMNS))
        yield local, table


def _write_changes(directory: Path, table: RemoteTable, work: Workload) -> Path:
    """Write more batches, and the change records of each as a Parquet file."""
    directory.mkdir(parents=True)
    with table.writer(owner_id="bench", columns=_COLUMNS) as writer:
        for number in range(_BATCHES):
            since = table.cut()
            writer.write(writer.batch + 1, tb.Rows(data=work.batch(), columns=_COLUMNS))
            changes: pa.Table = table.changes(since=since).to_arrow()
            pq.write_table(changes, directory / f"{number:05d}.parquet")
    return directory


def _in_turn(
    setting: Setting, ours: Callable[[], None], theirs: Callable[[], None], count: int
) -> Pairs:
    def step() -> tuple[float, float]:
        return timed(ours)[0] / count, timed(theirs)[0] / count

    for _ in range(2):
        step()
    return interleave(setting.runs, 2, step)


def drain(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()
