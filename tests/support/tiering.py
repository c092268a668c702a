"""A cluster whose tables are copied to lakes, and what their tests check: copies equal tables."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
from deltalake import DeltaTable

import tallybook as tb
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from sink.lake.files import conformed
from sink.tiering.progress import Summary
from tests.conftest import SUMS
from tests.support.spark_session import quiet_spark
from tests.support.stream_scene import EAGER
from tests.support.zookeeper_server import wait_until

KINDS: dict[str, dict[str, Any]] = {
    "vectors": {"layout": "vectors"},
    "rewrite": {"layout": "rewrite"},
    "parquet": {"format": "parquet"},
}
"""All that a copy can be."""
PLAIN_FILES = "DuckDB, of files"
Row = dict[str, Any]


class TieringScene:
    """A cluster whose logs go as soon as nothing holds them, a Spark session, and lakes."""

    def __init__(self, local: LocalCluster, client: Cluster, spark: Any, directory: Path) -> None:
        self.local, self.client, self.spark = local, client, spark
        self._directory = directory
        self._number = 0
        self._stack = ExitStack()

    def table(self, schema: Any = SUMS, *, buckets: int = 2, **settings: Any) -> RemoteTable:
        """Create a table of its own for a test."""
        return self.client.create_table(
            f"tiered_{self._next()}", schema, buckets=buckets, **settings
        )

    def lake(self) -> str:
        """Return a path that nobody has used."""
        return str(self._directory / f"lake-{self._next()}")

    def writer(
        self, table: RemoteTable, columns: Sequence[str] | None = None, owner: str = "w", **how: Any
    ) -> TableWriter:
        """Return a writer that has started, and is closed with the test."""
        chosen = [one.name for one in table.schema.value_columns] if columns is None else columns
        writer = table.writer(owner_id=owner, columns=list(chosen), **how)
        return self._stack.enter_context(writer)

    def tier(self, table: RemoteTable | str, lake: str, **options: Any) -> Summary:
        """Have one round done; a failure is one, and is not tried again."""
        name = table if isinstance(table, str) else table.name
        given = {"once": True, "attempts": 1, **options}
        return tb.tiering.run(self.spark, name, lake, cluster=self.client, **given)

    def union(self, table: RemoteTable, lake: str, **options: str) -> pa.Table:
        """Return what Spark reads of a table with its copy."""
        reader = self.spark.read.format("tallybook").option("zookeeper", self.local.address)
        return reader.options(table=table.name, lake=lake, **options).load().toArrow()

    def version(self, lake: str, version: int, **options: str) -> pa.Table:
        """Return what Spark reads of a version of a copy; it is told of no cluster."""
        reader = self.spark.read.format("tallybook")
        return reader.options(lake=lake, lakeVersion=str(version), **options).load().toArrow()

    def counted(self, table: RemoteTable) -> dict[str, int]:
        """Return what servers have been asked for, of a table."""
        found = [one["metrics"] for one in self.client.status()]
        return {
            name: sum(
                int(one.get(f'tallybook_{name}_total{{table="{table.name}"}}', 0)) for one in found
            )
            for name in ("keys_looked_up", "rows_scanned")
        }

    def leases(self, table: RemoteTable) -> list[str]:
        """Return the leases of a table that hold."""
        known = self.client.coordinator.leases.all(table.table_id)
        return sorted(one.lease_id for one in known if one.live)

    def close(self) -> None:
        """End the writers of a test."""
        self._stack.close()
        self._stack = ExitStack()

    def _next(self) -> int:
        self._number += 1
        return self._number


@contextmanager
def tiering_scene(directory: Path) -> Iterator[TieringScene]:
    """Run a cluster of two servers, and Spark."""
    with (
        quiet_spark("local[2]") as spark,
        LocalCluster(directory / "cluster", servers=2, session_timeout_s=2.0, options=EAGER) as one,
        one.connect() as client,
    ):
        tb.spark.register(spark)
        yield TieringScene(one, client, spark, directory)


# --- What is written ------------------------------------------------------------------------------


def write(writer: TableWriter, rows: Mapping[str, Sequence[Any]] | pa.Table) -> None:
    """Commit a batch; a column `op` says what each row is."""
    names = rows.column_names if isinstance(rows, pa.Table) else rows
    operation = "op" if "op" in names else None
    writer.write(writer.next_batch(), Rows(data=rows, operation_column=operation))


def clean_log(table: RemoteTable, commit: Any) -> None:
    """Have the log cleaned up to now: snapshots are taken until former ones are kept no more."""

    def starts() -> dict[str, int]:
        status = table._cluster.status()  # type: ignore[attr-defined]
        return {
            bucket["bucket"]: bucket["start_offset"]
            for server in status
            for bucket in server["buckets"]
            if bucket["table_id"] == table.table_id
        }

    before = starts()
    for _ in range(2):
        commit()
        table.snapshot()
    wait_until(
        lambda: all(at > before.get(one, 0) for one, at in starts().items()), "the log is cleaned"
    )


# --- What is checked ------------------------------------------------------------------------------


def shown(rows: Any) -> list[str]:
    """Return rows so that they can be compared, whatever their order: NaN equals NaN."""
    found = rows if isinstance(rows, pa.Table) else pa.table(rows)
    return sorted(repr({name: _plain(row[name]) for name in sorted(row)}) for row in _rows(found))


def _rows(table: pa.Table) -> list[Row]:
    found: list[Row] = table.to_pylist()
    return found


def _plain(value: Any) -> Any:
    """Return a value as all readers have it: some have lists of pairs for maps, as records."""
    if isinstance(value, dict):
        if set(value) == {"key", "value"}:
            return _plain(value["key"]), _plain(value["value"])
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    return value


def check_copy(
    table: RemoteTable, lake: str, settings: Mapping[str, Any] | None = None
) -> pa.Table:
    """Check that a copy is the table at the copy's cut, row for row, whoever reads it.

    Return the rows.
    """
    copy = tb.tiering.find(lake, storage_settings=settings)
    expected = table.scan(at=copy.cut).to_arrow()
    keys = [one.name for one in table.schema.key_columns]
    distinct = {tuple(row[name] for name in keys) for row in _rows(expected)}
    assert len(distinct) == expected.num_rows == copy.rows
    for reader, rows in readings(copy, lake, settings):
        assert rows.num_rows == len(distinct), reader
        # Files have the columns of when they were written.
        found = conformed(rows, expected.schema) if reader == PLAIN_FILES else rows
        assert shown(found.select(expected.schema.names)) == shown(expected), reader
    return expected


def readings(
    copy: Any, lake: str, settings: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, pa.Table]]:
    """Yield what each reader finds in a lake."""
    yield "tallybook", copy.to_arrow()
    is_delta = copy._lake.log.__class__.__name__ == "DeltaLog"
    vectors = copy._state.mark.layout.value == "vectors"
    if is_delta:
        delta = DeltaTable(lake, storage_options=flat(settings))
        rows = pa.table(delta.scan()) if vectors else delta.to_pyarrow_table()
        yield "deltalake", rows
        yield "Polars", pl.read_delta(lake, storage_options=flat(settings)).to_arrow()
        if vectors:
            with duckdb.connect() as database:
                stream = pa.RecordBatchReader.from_stream(delta.scan())
                yield "DuckDB", database.from_arrow(stream).to_arrow_table()
    if not vectors and settings is None and copy.files:
        with duckdb.connect() as database:
            files = database.read_parquet(copy.files, union_by_name=True)
            yield PLAIN_FILES, files.to_arrow_table()


def flat(settings: Mapping[str, Any] | None) -> dict[str, str]:
    """Return settings of obstore as delta-rs takes them."""
    flattened: dict[str, str] = {}
    for name, value in (settings or {}).items():
        if isinstance(value, Mapping):
            flattened |= flat(value)
        else:
            flattened[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return flattened


def objects(lake: str) -> set[str]:
    """Return the names of all files in a lake but for its log."""
    return {one.name for one in Path(lake).iterdir() if one.is_file()}
