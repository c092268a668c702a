"""The sources of a table's scan, each bucket by bucket: live rows, KV snapshots, the log."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from locks import BucketKey, LeadKey, ListedSnapshot
from merge_engine import Column, InvalidInput, ObjectStorage, SchemaHistory
from merge_engine.changelog import changelog_schema
from server.bucket_rows import BucketRows
from server.calls import Calls
from server.changelog import Changelog
from server.definitions import ClusterTable
from server.requests import COMMITTED
from server.snapshot_lease import SnapshotLease
from server.snapshot_rows import SnapshotRows
from server.table_scan import OpenRows, Rows


def row_schema(table: ClusterTable, columns: Sequence[Column]) -> pa.Schema:
    """Return the key and these columns, as scans have them."""
    named = [*table.schema.key_columns, *columns]
    return pa.schema([(column.name, column.type) for column in named])


def live_rows(
    calls: Calls, table: ClusterTable, columns: Sequence[Column], isolation: str, check_moved: Any
) -> OpenRows:
    """Return how to open a bucket's rows at its leader."""

    def open_rows(key: BucketKey, limit: int | None) -> Rows:
        fields = {
            "table": table.table_id,
            "schema_version": table.schema.version,
            "buckets": [[*key]],
            "columns": [column.id for column in columns],
            "isolation": isolation,
        }
        lead = LeadKey(table.table_id, key)
        return BucketRows(calls, lead, table.buckets, fields, limit=limit, check_moved=check_moved)

    return open_rows


def snapshot_rows(
    storage: ObjectStorage,
    table: ClusterTable,
    columns: Sequence[Column],
    lease: SnapshotLease,
    *,
    isolation: str,
    knowing: Callable[[int], SchemaHistory],
) -> OpenRows:
    """Return how to open a bucket's rows in the snapshot that is leased.

    `knowing`: returns the table's schemas, up to this version at least.
    """
    snapshots: Mapping[BucketKey, ListedSnapshot] = lease.snapshots

    def open_rows(key: BucketKey, limit: int | None) -> Rows:
        if key not in snapshots:
            raise InvalidInput(f"lease {lease.lease_id} holds no snapshot of bucket {key}")
        return SnapshotRows(
            storage,
            table,
            key,
            snapshots[key],
            columns,
            knowing=knowing,
            committed=isolation == COMMITTED,
            limit=limit,
            check=lease.check,
        )

    return open_rows


def log_schema(table: ClusterTable) -> pa.Schema:
    """Return what change records have."""
    return changelog_schema(table.schema)


class LogRows:
    """A bucket's change records from an offset on, to iterate once.

    `offset` is where to go on, behind what was yielded; where a limit cut an update in two, it is
    that of the update, whose first image then comes again.
    """

    def __init__(self, changes: Changelog, schema: pa.Schema, limit: int | None) -> None:
        self._changes = changes
        self._schema = schema
        self._limit = limit
        self.offset = changes.next_offset

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches, as many records as the limit says."""
        left = self._limit
        for batch in self._changes:
            if batch.schema != self._schema:
                raise InvalidInput(
                    "the table was altered while its log was read; begin again from the offset of "
                    "each bucket, with `table.refresh()` first"
                )
            self.offset = self._changes.next_offset
            if left is not None and batch.num_rows >= left:
                if batch.num_rows > left:
                    self.offset = batch.column("_log_offset")[left].as_py()
                yield batch.slice(0, left)
                return
            left = None if left is None else left - batch.num_rows
            yield batch
        self.offset = self._changes.next_offset

    def close(self) -> None:
        """Nothing is held for it."""
