"""ClickHouse by chDB: an AggregatingMergeTree on disk, whose parts are merged later.

An insert only writes a part; rows of a key are put together by merges in the background, and by
every reader. Nothing is synced, which is its default. Rows are inserted as they are where most keys
of a batch differ, and grouped where they do not: each is faster there.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.peers.peer import NotInstalled, Work

_TABLE = """
    CREATE TABLE bench.rows (
        key Int64,
        total SimpleAggregateFunction(sum, Int64),
        highest SimpleAggregateFunction(max, Float64),
        events SimpleAggregateFunction(sum, Int64)
    ) ENGINE = AggregatingMergeTree ORDER BY key
"""
_AS_THEY_ARE = "SELECT key, total, highest, 1 FROM Python(batch)"
_GROUPED = "SELECT key, sum(total), max(highest), count(events) FROM Python(batch) GROUP BY key"
_MERGES_DEADLINE_S = 30.0


class ClickHouse:
    """A table of an embedded server; there is one such server in a process at a time."""

    def __init__(self, directory: Path, work: Work) -> None:
        try:
            from chdb import session  # noqa: PLC0415
        except ImportError as exc:
            raise NotInstalled("chdb is not installed (pip install 'tallybook[bench]')") from exc
        self._session: Any = session.Session(str(directory))
        self._session.query("CREATE DATABASE bench")
        self._session.query(_TABLE)
        self._rows = _AS_THEY_ARE if work.keys > work.batch_rows else _GROUPED

    def load(self, events: Iterator[pa.RecordBatch]) -> None:
        """Insert, and merge all parts into one."""
        for batch in events:
            self._insert(batch, _AS_THEY_ARE)
        self._session.query("OPTIMIZE TABLE bench.rows FINAL")

    def upsert(self, events: pa.RecordBatch) -> None:
        """Write a part."""
        self._insert(events, self._rows)

    def settle(self) -> None:
        """Wait for the merges that are under way."""
        deadline = time.monotonic() + _MERGES_DEADLINE_S
        while int(self._session.query("SELECT count() FROM system.merges", "CSV").data()):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def read(self, keys: pa.Array) -> pa.Table:
        """Group the rows of the keys, as every reader has to."""
        wanted = pa.table({"key": keys})  # noqa: F841 (The query finds it by its name.)
        answer = self._session.query(
            "SELECT key, sum(total) AS total, max(highest) AS highest, sum(events) AS events "
            "FROM bench.rows WHERE key IN (SELECT key FROM Python(wanted)) GROUP BY key",
            "ArrowStream",
        )
        with pa.ipc.open_stream(answer.bytes()) as stream:
            return stream.read_all()

    def close(self) -> None:
        """Stop the embedded server."""
        self._session.close()

    def _insert(self, events: pa.RecordBatch, rows: str) -> None:
        batch = pa.Table.from_batches([events])  # noqa: F841 (The query finds it by its name.)
        self._session.query(f"INSERT INTO bench.rows {rows}")
