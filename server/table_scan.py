"""Scans of a table: bucket after bucket, each as of its own log offset."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from types import TracebackType
from typing import Protocol

import pyarrow as pa

from locks import BucketKey
from merge_engine import InvalidInput
from server.errors import UnknownOrExpiredScannerError

_AT_ONCE = 4
_MOST_ATTEMPTS = 5


class ScanSource(Enum):
    """Where a scan reads: the leaders' rows, a KV snapshot, or the log."""

    LIVE_KV = "live_kv"
    SNAPSHOT = "snapshot"
    LOG = "log"


class Rows(Protocol):
    """The rows of one bucket, to iterate once."""

    @property
    def offset(self) -> int:
        """Where they stand in the log."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches."""

    def close(self) -> None:
        """Let go of whatever is held for them."""


OpenRows = Callable[[BucketKey, int | None], Rows]
"""Opens a bucket; the number is the most rows that are wanted of it."""


class TableScan:
    """Rows of a table, to iterate, or to take whole by `to_arrow`.

    `offsets` has each bucket that was begun, with the log offset at which its rows stand: the
    changelog from there on adds up to the table.
    """

    def __init__(
        self,
        buckets: Sequence[BucketKey],
        schema: pa.Schema,
        open_rows: OpenRows,
        *,
        limit: int | None = None,
    ) -> None:
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise InvalidInput(f"a limit is a number of rows, not {limit!r}")
        self._buckets = list(buckets)
        self._schema = schema
        self._open_rows = open_rows
        self._limit = limit
        self._open: Rows | None = None
        self.offsets: dict[BucketKey, int] = {}

    @property
    def schema(self) -> pa.Schema:
        """The columns of the batches."""
        return self._schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches, bucket after bucket, in key order within each.

        UnknownOrExpiredScannerError: a bucket's rows cannot be had to their end as of the same
        offset any more, because its leader moved or they were not read for long. Begin again.
        """
        left = self._limit
        for bucket in self._buckets:
            if left == 0:
                return
            rows = self._open = self._open_rows(bucket, left)
            try:
                self.offsets[bucket] = rows.offset
                for batch in rows:
                    # Not the one before, if its leader moved before the first row came.
                    self.offsets[bucket] = rows.offset
                    left = None if left is None else left - batch.num_rows
                    yield batch.rename_columns(self._schema.names)
                self.offsets[bucket] = rows.offset
            finally:
                rows.close()

    def to_arrow(self) -> pa.Table:
        """Return all rows, or as many as the limit says; a bucket that moves is read again."""
        batches: list[pa.RecordBatch] = []
        if self._limit is None:
            with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tallybook-scan") as pool:
                for found in pool.map(self._whole, self._buckets):
                    batches += found
        else:
            left = self._limit
            for bucket in self._buckets:
                found = self._whole(bucket, left) if left else []
                left -= sum(batch.num_rows for batch in found)
                batches += found
        named = [batch.rename_columns(self._schema.names) for batch in batches]
        return pa.Table.from_batches(named, self._schema)

    def close(self) -> None:
        """Let go of the bucket that is being read. Closing twice is fine."""
        rows, self._open = self._open, None
        if rows is not None:
            rows.close()

    def _whole(self, bucket: BucketKey, limit: int | None = None) -> list[pa.RecordBatch]:
        """Nobody has seen a row before all are here, so a scan that was lost is begun again."""
        attempts = 0
        while True:
            rows = self._open_rows(bucket, limit)
            try:
                found = list(rows)
                self.offsets[bucket] = rows.offset
                return found
            except UnknownOrExpiredScannerError:
                attempts += 1
                if attempts == _MOST_ATTEMPTS:
                    raise
            finally:
                rows.close()

    def __enter__(self) -> "TableScan":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def chosen_buckets(
    known: Sequence[BucketKey], wanted: Sequence[BucketKey] | Mapping[BucketKey, object] | None
) -> list[BucketKey]:
    """Return the buckets to scan: those asked for, if they exist; all, if nobody asked."""
    if wanted is None:
        return list(known)
    buckets = list(dict.fromkeys(BucketKey(*bucket) for bucket in wanted))
    missing = sorted(set(buckets) - set(known))
    if missing:
        raise InvalidInput(f"the table has no buckets {missing}")
    return buckets
