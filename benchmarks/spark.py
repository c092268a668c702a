"""A Spark session to measure in, and its streaming queries."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.workload import Workload

# One server and one bucket per core, as Spark has one task and one state store per core.
CORES = 2
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


@contextmanager
def local_spark(directory: Path) -> Iterator[Any]:
    """A quiet local session with two cores, and Spark's state store at its best for large states:

    RocksDB, whose checkpoints are logs of changes.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415

    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "4g",
        "spark.local.dir": str(directory / "spark"),
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": str(CORES),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.streaming.numRecentProgressUpdates": "1000",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = SparkSession.builder.master(f"local[{CORES}]").config(map=settings).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        # The JVM outlives the session, and would close the stores when their files are gone.
        session._jvm.org.apache.spark.sql.execution.streaming.state.StateStore.stop()
        session.stop()


def run_stream(writer: Any, name: str, *, checkpoints: Path, after: int = 0) -> list[float]:
    """Run a query over all that there is; return the seconds of each batch from `after` on."""
    writer = writer.option("checkpointLocation", str(checkpoints / name))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    if query.exception() is not None:
        raise query.exception()
    seconds = {
        progress.batchId: progress.durationMs["triggerExecution"] / 1000
        for progress in query.recentProgress
        if progress.numInputRows
    }
    return [spent for batch, spent in sorted(seconds.items()) if batch >= after]


def write_source(directory: Path, work: Workload, fill: int, measured: int) -> Path:
    """Write one file per batch: those that fill the table, and then those that are measured."""
    directory.mkdir(parents=True)
    batches = [*work.fill(), *(work.batch() for _ in range(fill))][:fill]
    batches += [work.batch() for _ in range(measured)]
    for number, batch in enumerate(batches):
        pq.write_table(pa.Table.from_batches([batch]), directory / f"{number:05d}.parquet")
        # The file source takes files in the order of their times.
        moment = 1_700_000_000 + number
        os.utime(directory / f"{number:05d}.parquet", (moment, moment))
    return directory
