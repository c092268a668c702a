"""The table and the batches that are measured: an int64 key, a few cheap columns, random rows."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from merge_engine.aggregates.registry import AggFunction
from merge_engine.bucket.bucket import Bucket
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from merge_engine.storage.objects import LocalStorage

# Positions times this, modulo a number without other factors than 2 and 5, visit every key once, in
# no order.
_SCATTER = 6_180_339
_STATUSES = pa.array([f"status-{number:05d}" for number in range(1_000)])


def schema_of(*, string: bool = True) -> Schema:
    """Return the schema: sum, maximum, count and, unless told otherwise, the last string."""
    builder = (
        SchemaBuilder()
        .column("key", pa.int64())
        .agg_column("total", pa.int64(), AggFunction.SUM)
        .agg_column("highest", pa.float64(), AggFunction.MAX)
        .agg_column("events", pa.int64(), AggFunction.COUNT)
    )
    if string:
        builder.agg_column("status", pa.string(), AggFunction.LAST_VALUE)
    return builder.primary_key("key").build()


class Workload:
    """Batches for a table of so many keys; the same ones for the same seed.

    The number of keys has no other factors than 2 and 5, as round numbers have.
    """

    def __init__(
        self, keys: int, *, batch_rows: int = 100_000, string: bool = True, seed: int = 0
    ) -> None:
        self.keys = keys
        self.schema = schema_of(string=string)
        self.history = SchemaHistory([self.schema])
        self._batch_rows = batch_rows
        self._string = string
        self._random = np.random.default_rng(seed)

    def fill(self, since: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield batches that together have every key from `since` on once, in no order."""
        count = self.keys - since
        for start in range(0, count, self._batch_rows):
            positions = np.arange(start, min(start + self._batch_rows, count), dtype=np.int64)
            yield self._rows(since + positions * _SCATTER % count)

    def batch(self) -> pa.RecordBatch:
        """Return the next batch of random keys; some of them come more than once."""
        return self._rows(self._random.integers(0, self.keys, self._batch_rows))

    def _rows(self, keys: np.ndarray[tuple[int], np.dtype[np.int64]]) -> pa.RecordBatch:
        size = len(keys)
        columns = {
            "key": keys,
            "total": self._random.integers(0, 100, size),
            "highest": self._random.random(size),
            "events": self._random.integers(0, 100, size),
        }
        if self._string:
            chosen = self._random.integers(0, len(_STATUSES), size)
            columns["status"] = _STATUSES.take(pa.array(chosen))
        return pa.record_batch(columns)


def open_bucket(directory: Path, history: SchemaHistory) -> Bucket:
    """Open a bucket whose log and view are in this directory; every commit is synced to disk."""
    return Bucket(LocalStorage(log_of(directory)), view_of(directory), history, identity="bench")


def log_of(directory: Path) -> Path:
    """Return where `open_bucket` puts the log."""
    return directory / "log"


def view_of(directory: Path) -> Path:
    """Return where `open_bucket` puts the view."""
    return directory / "view"
