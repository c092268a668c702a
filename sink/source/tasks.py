"""What the tasks of a reader do, each in a process of Spark's: values that travel, and are read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import InvalidInput
from foundation.ids import BucketId
from merge_engine.bucket.changelog import ABOUT_CHANGES
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from recovery.reader.table_changes import BUCKET
from recovery.reader.table_scan import ScanSource
from server.client.changelog import bucket_changes
from server.client.cluster import Recipe
from server.client.lookups import look_up
from server.client.remote_table import RemoteTable
from server.protocol.definitions import ClusterTable
from server.protocol.reads import FOUND
from sink.source.schemas import CHANGE_TYPE, CHANGED, DELETE, INSERT, UPSERT
from sink.worker_connections import connected

# There are not more tasks than that: with more buckets, a task reads several.
MOST_TASKS = 1_000
_KEYS_AT_ONCE = 50_000


@dataclass(frozen=True, kw_only=True)
class TableTask:
    """Something to read of a table, as it was known when the query was planned.

    `columns`: the value columns that are wanted, by the names that they had then.
    """

    recipe: Recipe
    table: ClusterTable
    columns: tuple[str, ...]

    @property
    def remote(self) -> RemoteTable:
        """The table, over the connection of this process."""
        return RemoteTable(connected(self.recipe), self.table)


@dataclass(frozen=True, kw_only=True)
class ReadRows(TableTask):
    """Read all rows of buckets; `lease`: from the snapshots that this lease holds."""

    buckets: tuple[BucketId, ...]
    cut: Cut | None
    lease: str | None = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the key and the columns."""
        table, isolation = self.remote, Isolation.COMMITTED if self.cut else Isolation.LATEST
        if self.lease is None:
            yield from table.scan(
                self.columns, isolation=isolation, at=self.cut, buckets=self.buckets
            )
            return
        yield from table.scan(
            self.columns,
            source=ScanSource.SNAPSHOT,
            lease=table.borrow_lease(self.lease),
            isolation=isolation,
            at=self.cut,
            buckets=self.buckets,
        )


@dataclass(frozen=True, kw_only=True)
class ReadKeys(TableTask):
    """Look keys up; those that there are not are left out."""

    keys: pa.Table
    cut: Cut | None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the key and the columns of those that there are."""
        rows = look_up(self.remote.caller, self.keys, self.columns, self.cut, found=True)
        yield from rows.filter(rows[FOUND]).to_batches()


@dataclass(frozen=True, kw_only=True)
class ReadChanges(TableTask):
    """Read the change records of buckets from one cut to another."""

    buckets: tuple[BucketId, ...]
    since: Cut
    until: Cut

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield records of the columns that are wanted, under the names that they had."""
        table = self.remote
        table.refresh()
        names = _names_now(self.table, table.definition)
        for bucket in self.buckets:
            for batch in bucket_changes(table.caller, self.since, self.until, bucket):
                renamed = _under_old_names(batch, names)
                name = pa.scalar(str(bucket), pa.string())
                yield renamed.append_column(BUCKET, pa.repeat(name, renamed.num_rows))


@dataclass(frozen=True, kw_only=True)
class ReadUpserts(ReadChanges):
    """Read the rows, as they are at the later cut, of all keys that changed; deletes have keys."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows, each with whether it is to be written or deleted."""
        table = self.remote
        keys = [column.name for column in self.table.schema.key_columns]
        fresh = RemoteTable(connected(self.recipe), self.table)
        fresh.refresh()
        names = _names_now(self.table, fresh.definition)
        for bucket in self.buckets:
            changed = [
                _under_old_names(batch, names).select(keys)
                for batch in bucket_changes(fresh.caller, self.since, self.until, bucket)
            ]
            if not changed:
                continue
            distinct = pa.Table.from_batches(changed).group_by(keys).aggregate([])
            for start in range(0, distinct.num_rows, _KEYS_AT_ONCE):
                some = distinct.slice(start, _KEYS_AT_ONCE)
                rows = look_up(table.caller, some, self.columns, self.until, found=True)
                kinds = pc.if_else(rows[FOUND], UPSERT, DELETE)
                yield from rows.append_column(CHANGE_TYPE, kinds).combine_chunks().to_batches()


@dataclass(frozen=True, kw_only=True)
class ReadFirst(ReadRows):
    """Read all rows of buckets, as what a stream begins with."""

    as_upserts: bool

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows: as inserts of all that there is, or as upserts."""
        columns = pa.scalar(list(self.columns), pa.list_(pa.string()))
        for batch in super().batches():
            kind = UPSERT if self.as_upserts else INSERT
            kinds = pa.repeat(pa.scalar(kind, pa.string()), batch.num_rows)
            changed = pa.repeat(columns, batch.num_rows)
            yield batch.append_column(CHANGE_TYPE, kinds).append_column(CHANGED, changed)


def grouped(buckets: Sequence[BucketId]) -> list[tuple[BucketId, ...]]:
    """Return the buckets of each task: one, unless there are very many."""
    size = -(-len(buckets) // MOST_TASKS) or 1
    return [tuple(buckets[at : at + size]) for at in range(0, len(buckets), size)]


def restricted(task: ReadChanges) -> ReadChanges:
    """Return a task with its cuts as far as they are about its buckets: they travel with it."""
    return replace(task, since=task.since.only(task.buckets), until=task.until.only(task.buckets))


def _names_now(before: ClusterTable, now: ClusterTable) -> dict[str, str]:
    """Return the names that columns have by now, and had when the query was planned.

    InvalidInput if one was dropped: a query goes on with the columns that it began with.
    """
    by_id = {column.id: column.name for column in now.schema.columns}
    names = {}
    for column in before.schema.columns:
        if column.id not in by_id:
            raise InvalidInput(
                f"column '{column.name}' of table {now.name} was dropped while it was read; start "
                "the query again, without it"
            )
        names[by_id[column.id]] = column.name
    return names


def _under_old_names(batch: pa.RecordBatch, names: dict[str, str]) -> pa.RecordBatch:
    """Return change records under old names; columns that were added since are left out."""
    known = [name for name in batch.schema.names if name in names or name in ABOUT_CHANGES]
    found = batch.select(known).rename_columns([names.get(name, name) for name in known])
    if all(old == new for new, old in names.items()) and len(known) == batch.num_columns:
        return found
    lists = [
        [names[name] for name in listed if name in names]
        for listed in found.column(CHANGED).to_pylist()
    ]
    at = found.schema.get_field_index(CHANGED)
    found = found.set_column(at, found.schema.field(at), pa.array(lists, pa.list_(pa.string())))
    return found.filter(pc.greater(pc.list_value_length(found.column(CHANGED)), 0))
