"""What tests of the Spark sink share: tables, sinks, micro-batches and streaming queries."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from locks.column_locks.records import LockRecord
from merge_engine.schema.schema import Schema
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from sink.aggregate_sink import AggregateSink
from tests.support.zookeeper_server import wait_until

QUERY_S = 300
KEYS = range(20)


class Killed(BaseException):
    """Ends a batch as a kill would: nothing that handles errors cleans up behind it."""


class Sinks:
    """A cluster, a Spark session, and the tables and sinks that tests make of them."""

    def __init__(self, local: LocalCluster, client: Cluster, spark: Any) -> None:
        self.local = local
        self.client = client
        self.spark = spark
        self._made: list[AggregateSink] = []
        self._numbers = count()

    def table(self, schema: Schema, *, buckets: int = 3, **settings: Any) -> RemoteTable:
        """Create a table that nobody else writes to."""
        name = f"table_{next(self._numbers)}"
        return self.client.create_table(name, schema, buckets=buckets, **settings)

    def sink(self, table: RemoteTable, columns: Sequence[str], **settings: Any) -> AggregateSink:
        """Return a sink that is closed at the end."""
        settings.setdefault("deadline_s", 60.0)
        sink = AggregateSink(self.local.address, table.name, columns=columns, **settings)
        self._made.append(sink)
        return sink

    def frame(self, data: pa.Table | Sequence[Mapping[str, Any]], parts: int = 1) -> Any:
        """Return rows as a DataFrame of so many source partitions, in their order."""
        table = data if isinstance(data, pa.Table) else pa.Table.from_pylist(list(data))
        context = self.spark.sparkContext
        frame = self._of_arrow(table)
        assert parts <= context.defaultParallelism or parts == 1
        return frame if parts > 1 else frame.coalesce(1)

    def _of_arrow(self, table: pa.Table) -> Any:
        if not self.spark.version.startswith("3."):
            return self.spark.createDataFrame(table)
        from pyspark.sql.pandas.types import from_arrow_schema  # noqa: PLC0415

        rows = table.to_pylist(maps_as_pydicts="strict")
        schema = from_arrow_schema(table.schema, prefer_timestamp_ntz=True)
        return self.spark.createDataFrame(rows, schema)

    def source(self, directory: Path, *, files: int = 1) -> Any:
        """Return a stream of the Parquet files in a directory, so many in a batch."""
        schema = self.spark.read.parquet(str(directory)).schema
        reader = self.spark.readStream.schema(schema).option("maxFilesPerTrigger", files)
        return reader.parquet(str(directory))

    def start(self, stream: Any, sink: Any, checkpoint: Path) -> Any:
        """Start a query that ends when its source is exhausted."""
        return (
            stream.writeStream.foreachBatch(sink)
            .queryName(f"query at {checkpoint}")
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )

    def run(self, stream: Any, sink: Any, checkpoint: Path) -> Any:
        """Run a query to its end; returns it, with its exception if it has one."""
        query = self.start(stream, sink, checkpoint)
        try:
            assert query.awaitTermination(QUERY_S), "the query did not end"
        except Exception as exc:
            query.failure = str(exc)
        else:
            query.failure = None
        return query

    def record(self, table: RemoteTable, owner: str) -> LockRecord:
        """Return the lock record of an owner."""
        record = self.client.coordinator.locks.record(table.definition.table, owner)
        assert record is not None
        return record

    def wait_until_released(self, table: RemoteTable, owner: str) -> None:
        """Return when the owner has released its lock."""
        wait_until(lambda: not self.record(table, owner).held, f"`{owner}` released its lock")

    def close(self) -> None:
        """Close all sinks."""
        made, self._made = self._made, []
        for sink in made:
            sink.close()


def ones(keys: Any = KEYS) -> pa.Table:
    """Return rows that add one to `a` and ten to `b`."""
    return pa.table({"k": list(keys), "a": [1] * len(keys), "b": [10] * len(keys)})


def counted(times: int, keys: Any = KEYS) -> dict[int, tuple[int, int]]:
    """Return the table after so many of these."""
    return dict.fromkeys(keys, (times, 10 * times))


def write_file(directory: Path, number: int, data: pa.Table | Iterable[Mapping[str, Any]]) -> None:
    """Add a file to a stream's source."""
    table = data if isinstance(data, pa.Table) else pa.Table.from_pylist(list(data))
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{number:05}.writing"
    pq.write_table(table, temporary)
    temporary.rename(directory / f"{number:05}.parquet")


def stored(table: RemoteTable, keys: Any, **settings: Any) -> dict[Any, tuple[Any, ...]]:
    """Return the rows of these keys that exist: key -> values of all value columns."""
    names = [column.name for column in table.schema.key_columns]
    rows = [key if isinstance(key, tuple) else (key,) for key in keys]
    asked = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    found = table.lookup(asked, **settings).to_pylist()
    values = {
        key: tuple(value for name, value in row.items() if name not in names)
        for key, row in zip(keys, found, strict=True)
    }
    return {key: row for key, row in values.items() if any(value is not None for value in row)}


def parquet_rows(directory: Path) -> list[dict[str, Any]]:
    """Return all rows of the Parquet files in a directory."""
    return [
        row
        for path in sorted(directory.glob("*.parquet"))
        for row in pq.ParquetFile(path).read().to_pylist()
    ]


@contextmanager
def sinks_of(local: LocalCluster, spark: Any) -> Iterator[Sinks]:
    """Connect to a cluster, and close all sinks at the end."""
    with local.connect() as client:
        sinks = Sinks(local, client, spark)
        try:
            yield sinks
        finally:
            sinks.close()
