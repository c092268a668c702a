"""Where the examples run: a cluster and a Spark of their own, both gone at the end.

    python -m examples.exact_counters

Each example is a function of a `Setting`; `alone` makes one and runs it.
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import tallybook as tb


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A cluster's address, a Spark session, and a directory for input and checkpoints."""

    address: str
    spark: Any
    directory: Path

    def add_file(self, source: str, rows: Mapping[str, Sequence[Any]] | pa.Table) -> str:
        """Add a file of rows to an input directory, for a stream to find; return the directory."""
        directory = self.directory / source
        directory.mkdir(parents=True, exist_ok=True)
        table = rows if isinstance(rows, pa.Table) else pa.table(dict(rows))
        hidden = directory / f".{len(list(directory.iterdir()))}.parquet"
        pq.write_table(table, hidden)
        hidden.rename(directory / hidden.name[1:])
        return str(directory)

    def run(self, stream: Any, sink: tb.AggregateSink, checkpoint: str) -> None:
        """Write all that a stream has into a table, batch by batch, and end."""
        with closing(sink):
            query = (
                stream.writeStream.foreachBatch(sink)
                .option("checkpointLocation", str(self.directory / checkpoint))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()


def alone(example: Callable[[Setting], Any]) -> None:
    """Run an example on a cluster of its own."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession  # noqa: PLC0415

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="tallybook-example-") as directory,
            tb.LocalCluster(Path(directory) / "cluster", servers=2) as local,
        ):
            example(Setting(address=local.address, spark=spark, directory=Path(directory)))
    finally:
        spark.stop()
