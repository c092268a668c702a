"""The sources of a table's scan, each bucket by bucket: live rows, KV snapshots, the log."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa

from foundation.errors import InvalidInput
from foundation.ids import BucketId
from locks.snapshots.list_records import ListedSnapshot
from merge_engine.bucket.changelog import changelog_schema
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.schema.schema import Column, Schema
from merge_engine.storage.objects import ObjectStorage
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from recovery.reader.table_scan import OpenRows, RowStream, TableScan, chosen_buckets
from server.client.bucket_rows import BucketRows
from server.client.changelog import Changelog
from server.client.snapshot_lease import HeldSnapshots, check_whole
from server.client.snapshot_rows import SnapshotRows
from server.client.table_caller import TableCaller
from server.protocol.definitions import ClusterTable
from server.protocol.reads import Scan


def row_schema(table: ClusterTable, columns: Sequence[Column]) -> pa.Schema:
    """Return the key and these columns, as scans have them."""
    named = [*table.schema.key_columns, *columns]
    return pa.schema([(column.name, column.type) for column in named])


def live_rows(
    caller: TableCaller, table: ClusterTable, columns: Sequence[Column], cut: Cut | None
) -> OpenRows:
    """Return how to open a bucket's rows at its leader: at the cut, or as they are."""

    def open_rows(key: BucketId, limit: int | None) -> RowStream:
        scan = Scan(
            table_id=table.table_id,
            schema_version=table.schema.version,
            bucket=key,
            columns=tuple(column.id for column in columns),
            isolation=Isolation.LATEST if cut is None else Isolation.COMMITTED,
            cut=None if cut is None else cut.only([key]),
            limit=limit,
        )
        return BucketRows(caller, scan)

    return open_rows


def snapshot_rows(
    storage: ObjectStorage,
    table: ClusterTable,
    columns: Sequence[Column],
    lease: HeldSnapshots,
    *,
    cut: Cut | None,
    knowing: Callable[[int], SchemaHistory],
) -> OpenRows:
    """Return how to open a bucket's rows in the snapshot that is leased, at the cut or as it is.

    `knowing`: returns the table's schemas, up to this version at least.
    """
    snapshots: Mapping[BucketId, ListedSnapshot] = lease.snapshots

    def open_rows(key: BucketId, limit: int | None) -> RowStream:
        if key not in snapshots:
            raise InvalidInput(f"lease {lease.lease_id} holds no snapshot of bucket {key}")
        return SnapshotRows(
            storage,
            table,
            key,
            snapshots[key],
            columns,
            knowing=knowing,
            cut=None if cut is None else cut.at(key),
            limit=limit,
            check=lease.check,
        )

    return open_rows


def scan_snapshots(
    caller: TableCaller,
    columns: Sequence[str] | None,
    lease: HeldSnapshots,
    cut: Cut | None,
    *,
    buckets: Sequence[BucketId] | None,
    limit: int | None,
) -> TableScan:
    """Return the rows of the snapshots that a lease holds, or of these buckets of it."""
    wanted = chosen_buckets(list(lease.snapshots), buckets)
    if cut is not None and buckets is None:
        check_whole(lease, cut, caller.bucket_ids)
    table, storage = caller.table, caller.cluster.storage()
    chosen = table.schema.values(columns)
    opening = snapshot_rows(storage, table, chosen, lease, cut=cut, knowing=caller.knowing)
    return TableScan(wanted, row_schema(table, chosen), opening, cut=cut, limit=limit)


def scan_log(
    schema: Schema,
    buckets: Sequence[BucketId],
    open_log: Callable[[BucketId], Changelog],
    *,
    limit: int | None,
) -> TableScan:
    """Return the change records of buckets, shown under this schema."""

    def open_rows(key: BucketId, most: int | None) -> LogRows:
        return LogRows(open_log(key), schema.version, most)

    return TableScan(buckets, changelog_schema(schema), open_rows, limit=limit)


class LogRows:
    """A bucket's change records from an offset on, to iterate once.

    `offset` is where to go on, after what was yielded; where a limit cut an update in two, it is
    that of the update, whose first image then comes again.
    """

    def __init__(self, changes: Changelog, schema_version: int, limit: int | None) -> None:
        """`schema_version`: the one under which records are wanted."""
        self._changes = changes
        self._version = schema_version
        self._limit = limit
        self.offset = changes.next_offset
        self.closed = False

    def open_early(self) -> None:
        """Nothing is held for it."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches, as many records as the limit says."""
        left = self._limit
        for batch, version in self._changes.with_version():
            if version != self._version:
                raise InvalidInput(
                    "the table was altered while its log was read; begin again from the offset of "
                    "each bucket, with `table.refresh()` first"
                )
            self.offset = self._changes.next_offset
            if not batch.num_rows:
                continue
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
        self.closed = True
