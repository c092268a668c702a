"""DuckDB, in a database file: upsert by primary key, or MERGE without an index.

Batches are folded by pyarrow before: on few keys that was ten times faster than DuckDB's own
GROUP BY when it was tried, on many there was no clear difference. Every statement is a transaction,
whose write-ahead log is synced.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.peers.peer import NotInstalled, Work, folded

_UPSERT = """
    INSERT INTO rows SELECT * FROM batch ON CONFLICT (key) DO UPDATE SET
        total = rows.total + excluded.total,
        highest = greatest(rows.highest, excluded.highest),
        events = rows.events + excluded.events
"""
_MERGE = """
    MERGE INTO rows USING batch ON rows.key = batch.key
    WHEN MATCHED THEN UPDATE SET
        total = rows.total + batch.total,
        highest = greatest(rows.highest, batch.highest),
        events = rows.events + batch.events
    WHEN NOT MATCHED THEN INSERT VALUES (batch.key, batch.total, batch.highest, batch.events)
"""


class DuckDB:
    """A table in a file, whose batches are folded in by one statement each."""

    def __init__(self, directory: Path, statement: str, key: str) -> None:
        try:
            import duckdb  # noqa: PLC0415
        except ImportError as exc:
            raise NotInstalled("duckdb is not installed (pip install 'tallybook[bench]')") from exc
        directory.mkdir(parents=True)
        self._statement = statement
        self._connection: Any = duckdb.connect(str(directory / "rows.db"))
        self._connection.execute(
            f"CREATE TABLE rows (key {key}, total BIGINT, highest DOUBLE, events BIGINT)"
        )

    @classmethod
    def upsert_by_key(cls, directory: Path, _: Work) -> "DuckDB":
        """Open a table with a primary key, for `INSERT ... ON CONFLICT DO UPDATE`."""
        return cls(directory, _UPSERT, "BIGINT PRIMARY KEY")

    @classmethod
    def merge(cls, directory: Path, _: Work) -> "DuckDB":
        """Open a table without an index, for `MERGE INTO`, which joins."""
        return cls(directory, _MERGE, "BIGINT")

    def load(self, events: Iterator[pa.RecordBatch]) -> None:
        """Insert, and write all to the file."""
        for batch in events:
            self._run("INSERT INTO rows SELECT * FROM batch", batch=folded(batch))
        self._connection.execute("CHECKPOINT")

    def upsert(self, events: pa.RecordBatch) -> None:
        """Fold a batch, and merge it."""
        self._run(self._statement, batch=folded(events))

    def settle(self) -> None:
        """DuckDB puts nothing off to the background."""

    def read(self, keys: pa.Array) -> pa.Table:
        """Join the rows with the keys."""
        self._connection.register("wanted", pa.table({"key": keys}))
        found = self._connection.sql("SELECT rows.* FROM rows SEMI JOIN wanted USING (key)")
        return found.to_arrow_table()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _run(self, statement: str, *, batch: pa.Table) -> None:
        self._connection.register("batch", batch)
        self._connection.execute(statement)
