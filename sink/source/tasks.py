"""What the tasks of a reader do, each in a process of Spark's: values that travel, and are read."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import InvalidInput, PartitionGone, UnknownTable
from foundation.ids import BucketId
from merge_engine.bucket.changelog import ABOUT_CHANGES
from merge_engine.embedded.derived_calls import FOUND
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
from sink.source.schemas import CHANGE_TYPE, CHANGED, DELETE, INSERT, TIMESTAMP, UPSERT
from sink.worker_connections import connected

logger = logging.getLogger(__name__)

_KEYS_AT_ONCE = 50_000


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a query wants of a table, as this was known when the query was planned.

    `columns`: the value columns, by the names that they had then. `states`: those whose states are
    wanted, too, of look-ups.
    """

    recipe: Recipe
    table: ClusterTable
    columns: tuple[str, ...]
    states: tuple[str, ...] = ()

    @property
    def remote(self) -> RemoteTable:
        """The table as it was then, over the connection of this process."""
        return RemoteTable(connected(self.recipe), self.table)

    def check(self) -> None:
        """Raise UnknownTable if it was dropped since: leased snapshots could still be read."""
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
        known = frozenset(self.wanted.remote.caller.bucket_ids(self.cut))
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
    """Read the change records of buckets from one cut to another.

    `all_or_nothing`: PartitionGone if one was dropped meanwhile; else there is less of it.
    """

    buckets: tuple[BucketId, ...]
    since: Cut
    until: Cut
    all_or_nothing: bool = False

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield records of the columns that are wanted, under the names that they had."""
        for bucket, batch, _ in self._records():
            name = pa.scalar(str(bucket), pa.string())
            yield batch.append_column(BUCKET, pa.repeat(name, batch.num_rows))

    def _records(self) -> Iterator["_Records"]:
        """Yield records; those about other columns are left out.

        A partition that was dropped since has none, unless all are needed.
        """
        table = self.wanted.remote
        table.refresh()
        shown: Schema | None = None
        names: dict[str, str] = {}
        for bucket in self.buckets:
            try:
                for batch, version in bucket_changes(table.caller, self.since, self.until, bucket):
                    if not batch.num_rows:
                        continue
                    if shown is None or version != shown.version:
                        shown = table.caller.knowing(version).schema(version)
                        names = self._names_in(shown)
                    found = _under_old_names(batch, names, keys_only=self._of_any_column)
                    if found.num_rows:
                        yield _Records(bucket, found, self._speaks_of_all(batch, shown))
            except PartitionGone as exc:
                if self.all_or_nothing:
                    raise
                logger.warning("changes of bucket %s are not read: %s", bucket, exc)

    @property
    def _of_any_column(self) -> bool:
        """Whether records about other columns than those that are wanted come, too."""
        return not self.wanted.columns

    def _speaks_of_all(self, batch: pa.RecordBatch, schema: Schema) -> bool:
        """Whether records are about all columns of their schema, and all of these are wanted."""
        changed = len(batch.column(CHANGED)[0].as_py())
        return changed == len(self.wanted.columns) == len(schema.value_columns)

    def _names_in(self, schema: Schema) -> dict[str, str]:
        """Return the names that columns have in records, and had when the query was planned.

        `schema`: the one under which the records are shown, which may be a later one than ours.
        InvalidInput if a column was dropped: a query goes on with the columns that it began with.
        """
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
    """Read the rows, as they are at the later cut, of all keys that changed; deletes have keys.

    `of_any_column`: also where it is another column that changed than those that are wanted. That
    may be what a row begins or ends with.
    """

    of_any_column: bool = False

    @property
    def _of_any_column(self) -> bool:
        return self.of_any_column or not self.wanted.columns

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield rows, each with whether it is to be written or deleted."""
        return (batch for _, batch in self.by_bucket())

    def by_bucket(self) -> Iterator[tuple[BucketId, pa.RecordBatch]]:
        """Yield the same, bucket after bucket, each key once, in the order of keys."""
        for bucket, records in groupby(self._records(), key=lambda one: one.bucket):
            for rows in self._rows(records):
                yield from ((bucket, batch) for batch in rows.combine_chunks().to_batches())

    def _rows(self, records: Iterable["_Records"]) -> Iterator[pa.Table]:
        """Yield the rows of the keys of records: they are looked up, unless records have them."""
        keys = [column.name for column in self.wanted.table.schema.key_columns]
        batches: list[pa.RecordBatch] = []
        count, have_rows = 0, not self.wanted.states
        for one in records:
            count += one.batch.num_rows
            if have_rows and not (one.whole and count <= _KEYS_AT_ONCE):
                have_rows, batches = False, [batch.select(keys) for batch in batches]
            batches.append(one.batch if have_rows else one.batch.select(keys))
        if have_rows:
            yield self._last_images(pa.Table.from_batches(batches))
            return
        distinct = self._by_key(pa.Table.from_batches(batches))
        for start in range(0, distinct.num_rows, _KEYS_AT_ONCE):
            rows = look_up(
                self.wanted.remote.caller,
                distinct.slice(start, _KEYS_AT_ONCE),
                self.wanted.columns,
                self.until,
                states=self.wanted.states,
                found=True,
            )
            kinds = pc.if_else(rows[FOUND], UPSERT, DELETE)
            yield rows.drop_columns([FOUND]).append_column(CHANGE_TYPE, kinds)

    def _last_images(self, records: pa.Table) -> pa.Table:
        """Return rows by records of all columns: the last of a key says what it is since.

        A record of a row that is gone has the values that it had: these are not told.
        """
        last = self._by_key(records, last=True)
        gone = pc.equal(last[CHANGE_TYPE], DELETE).combine_chunks()
        rows = last.drop_columns([*ABOUT_CHANGES])
        if gone.true_count:
            there = pa.array(np.arange(len(gone)), mask=gone.to_numpy(zero_copy_only=False))
            keys = {column.name for column in self.wanted.table.schema.key_columns}
            for at, name in enumerate(rows.column_names):
                if name not in keys:
                    rows = rows.set_column(at, rows.field(at), rows.column(at).take(there))
        return rows.append_column(CHANGE_TYPE, pc.if_else(gone, DELETE, UPSERT))

    def _by_key(self, rows: pa.Table, *, last: bool = False) -> pa.Table:
        """Return the first row of each key, or the last, in the order of keys.

        Not by `group_by`, which complains of how Flight aligns bytes.
        """
        columns = self.wanted.table.schema.key_columns
        codec = KeyCodec([column.type for column in columns])
        whole = rows.combine_chunks()
        encoded = codec.encode([whole[column.name].combine_chunks() for column in columns])
        groups = group_by_key(encoded)
        return whole.take(pa.array(groups.last_rows if last else groups.first_rows))


class _Records(NamedTuple):
    """Change records of a bucket; `whole`: they are about all columns of the table."""

    bucket: BucketId
    batch: pa.RecordBatch
    whole: bool


def restricted(task: ReadChanges) -> ReadChanges:
    """Return a task with its cuts as far as they are about its buckets: they travel with it."""
    return replace(task, since=task.since.only(task.buckets), until=task.until.only(task.buckets))


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
