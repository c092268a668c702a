"""What the tasks of a reader do, each in a process of Spark's: values that travel, and are read."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import InvalidInput, PartitionGone, UnknownTable
from foundation.ids import BucketId
from merge_engine.bucket.changelog import ABOUT_CHANGES, changelog_schema
from merge_engine.encoding.keys import KeyCodec
from merge_engine.merging.grouping import group_by_key
from merge_engine.schema.schema import Schema
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
from sink.source.schemas import CHANGE_TYPE, CHANGED, DELETE, INSERT, TIMESTAMP, UPSERT
from sink.worker_connections import connected

logger = logging.getLogger(__name__)

_KEYS_AT_ONCE = 50_000


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a query wants of a table, as this was known when the query was planned.

    `columns`: the value columns, by the names that they had then.
    """

    recipe: Recipe
    table: ClusterTable
    columns: tuple[str, ...]

    @property
    def remote(self) -> RemoteTable:
        """The table as it was then, over the connection of this process."""
        return RemoteTable(connected(self.recipe), self.table)

    def check(self) -> None:
        """Raise UnknownTable if it was dropped since: servers would be asked until the deadline."""
        try:
            self.remote.refresh()
        except UnknownTable as exc:
            raise UnknownTable(
                f"table {self.table.name} was dropped after this read of it was planned; if there "
                "is one of this name again, load a frame of that"
            ) from exc


@dataclass(frozen=True, kw_only=True)
class TableTask(ABC):
    """Something to read of a table."""

    wanted: Wanted

    @abstractmethod
    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield what was read; whoever asked for it chooses the columns, and their order."""


@dataclass(frozen=True, kw_only=True)
class ReadRows(TableTask):
    """Read all rows of buckets; `lease`: from the snapshots that this lease holds."""

    buckets: tuple[BucketId, ...]
    cut: Cut | None
    lease: str | None = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the key and the columns."""
        self.wanted.check()
        table, isolation = self.wanted.remote, Isolation.COMMITTED if self.cut else Isolation.LATEST
        if self.lease is None:
            yield from table.scan(
                self.wanted.columns, isolation=isolation, at=self.cut, buckets=self.buckets
            )
            return
        yield from table.scan(
            self.wanted.columns,
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
        self.wanted.check()
        yield from self.look_up(self.wanted.remote)

    def look_up(self, table: RemoteTable) -> list[pa.RecordBatch]:
        """Return the same, over the connection of this table."""
        rows = look_up(table.caller, self.keys, self.wanted.columns, self.cut, found=True)
        found: list[pa.RecordBatch] = rows.filter(rows[FOUND]).to_batches()
        return found


@dataclass(frozen=True, kw_only=True)
class ReadFirst(ReadRows):
    """Read all rows of buckets, as what a stream begins with."""

    as_upserts: bool

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows: as inserts of all that there is, or as upserts."""
        assert self.cut is not None
        constants = {
            CHANGE_TYPE: pa.scalar(UPSERT if self.as_upserts else INSERT, pa.string()),
            CHANGED: pa.scalar(list(self.wanted.columns), pa.list_(pa.string())),
            TIMESTAMP: pa.scalar(self.cut.time, pa.timestamp("us", tz="UTC")),
        }
        for batch in self._rows():
            found = batch
            for name, value in constants.items():
                found = found.append_column(name, pa.repeat(value, batch.num_rows))
            yield found

    def _rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows; a partition that was dropped since has none."""
        known = frozenset(self.wanted.remote.bucket_ids())
        for bucket in self.buckets:
            if bucket not in known:
                logger.warning("rows of bucket %s are not read: it was dropped", bucket)
                continue
            try:
                yield from ReadRows(wanted=self.wanted, buckets=(bucket,), cut=self.cut).batches()
            except PartitionGone as exc:
                logger.warning("rows of bucket %s are not read: %s", bucket, exc)


@dataclass(frozen=True, kw_only=True)
class ReadChanges(TableTask):
    """Read the change records of buckets from one cut to another."""

    buckets: tuple[BucketId, ...]
    since: Cut
    until: Cut

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield records of the columns that are wanted, under the names that they had."""
        for bucket, batch in self._records():
            name = pa.scalar(str(bucket), pa.string())
            yield batch.append_column(BUCKET, pa.repeat(name, batch.num_rows))

    def _records(self) -> Iterator[tuple[BucketId, pa.RecordBatch]]:
        """Yield records, each with its bucket; those about other columns are left out.

        A partition that was dropped since has none.
        """
        table = self.wanted.remote
        table.refresh()
        shown, names = None, {}
        for bucket in self.buckets:
            try:
                for batch in bucket_changes(table.caller, self.since, self.until, bucket):
                    if batch.schema != shown:
                        shown, names = batch.schema, self._names(table, batch.schema)
                    found = _under_old_names(batch, names, keys_only=not self.wanted.columns)
                    if found.num_rows:
                        yield bucket, found
            except PartitionGone as exc:
                logger.warning("changes of bucket %s are not read: %s", bucket, exc)

    def _names(self, table: RemoteTable, shown: pa.Schema) -> dict[str, str]:
        """Return the names that columns have in these records, and had when the query was planned.

        A server may know of alterations that we do not, or we of some that it does not.
        InvalidInput if a column was dropped: a query goes on with the columns that it began with.
        """
        table.refresh()
        schemas = [one for one in table.definition.history.schemas.values() if _fits(one, shown)]
        found = [self._names_in(schema) for schema in schemas]
        if not found or any(one != found[0] for one in found):
            raise InvalidInput(
                f"table {table.name} was altered while its changes were read; start the query again"
            )
        return found[0]

    def _names_in(self, schema: Schema) -> dict[str, str]:
        by_id = {column.id: column.name for column in schema.columns}
        before = self.wanted.table.schema
        names = {}
        for column in (*before.key_columns, *before.values(self.wanted.columns)):
            if column.id not in by_id:
                raise InvalidInput(
                    f"column '{column.name}' of table {self.wanted.table.name} was dropped while "
                    "it was read; start the query again, without it"
                )
            names[by_id[column.id]] = column.name
        return names


@dataclass(frozen=True, kw_only=True)
class ReadUpserts(ReadChanges):
    """Read the rows, as they are at the later cut, of all keys that changed; deletes have keys."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows, each with whether it is to be written or deleted."""
        keys = [column.name for column in self.wanted.table.schema.key_columns]
        for _, records in groupby(self._records(), key=lambda one: one[0]):
            distinct = self._distinct(pa.Table.from_batches([b.select(keys) for _, b in records]))
            for start in range(0, distinct.num_rows, _KEYS_AT_ONCE):
                some = distinct.slice(start, _KEYS_AT_ONCE)
                rows = look_up(
                    self.wanted.remote.caller, some, self.wanted.columns, self.until, found=True
                )
                kinds = pc.if_else(rows[FOUND], UPSERT, DELETE)
                yield from rows.append_column(CHANGE_TYPE, kinds).combine_chunks().to_batches()

    def _distinct(self, keys: pa.Table) -> pa.Table:
        """Return each key once. Not by `group_by`, which complains of how Flight aligns bytes."""
        codec = KeyCodec([column.type for column in self.wanted.table.schema.key_columns])
        whole = keys.combine_chunks()
        encoded = codec.encode([column.combine_chunks() for column in whole.columns])
        return whole.take(pa.array(group_by_key(encoded).first_rows))


def restricted(task: ReadChanges) -> ReadChanges:
    """Return a task with its cuts as far as they are about its buckets: they travel with it."""
    return replace(task, since=task.since.only(task.buckets), until=task.until.only(task.buckets))


def _fits(schema: Schema, shown: pa.Schema) -> bool:
    """Whether these are change records of a schema."""
    return bool(changelog_schema(schema) == shown)


def _under_old_names(
    batch: pa.RecordBatch, names: dict[str, str], *, keys_only: bool
) -> pa.RecordBatch:
    """Return change records of the columns that are wanted, under the names that they had.

    None of them if they are about other columns; of those who want keys only, all of them.
    """
    known = [name for name in batch.schema.names if name in names or name in ABOUT_CHANGES]
    found = batch.select(known).rename_columns([names.get(name, name) for name in known])
    told = batch.column(CHANGED)[0].as_py()
    changed = told if keys_only else [names[name] for name in told if name in names]
    if not changed:
        return found.slice(0, 0)
    at = found.schema.get_field_index(CHANGED)
    said = pa.repeat(pa.scalar(changed, pa.list_(pa.string())), found.num_rows)
    return found.set_column(at, found.schema.field(at), said)
