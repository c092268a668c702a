"""The embedded table without its locks and readers: all buckets of a table in one process.

What users have is `recovery.embedded.table.Table`, on top of this.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import pyarrow as pa

from foundation.arguments import offsets_of, text_of, whole_of
from foundation.errors import ColumnTooLarge, InvalidInput
from foundation.ids import BucketId, Token
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log import wall_clock_ms
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.put_to_all import commit_held, held, plan_held
from merge_engine.bucket.results import BucketResult, PutResult
from merge_engine.bucket.segment import AggMode
from merge_engine.bucket.undo import UndoRange
from merge_engine.embedded.catalog import Catalog
from merge_engine.embedded.derived_calls import (
    FOUND,
    Data,
    DerivedCalls,
    as_arrow,
)
from merge_engine.embedded.open_buckets import OpenBuckets
from merge_engine.merging.batch import BatchRows, read_batch, read_keys
from merge_engine.merging.dated_partitions import (
    OlderThan,
    dated_column,
    moment_of,
    older_partitions,
)
from merge_engine.merging.fold import Update, fold
from merge_engine.merging.routing import Route, gather, partition_key, partition_rows, route
from merge_engine.schema.schema import Column, Schema
from merge_engine.storage.objects import ObjectStorage, local_directory, open_storage


class KeysThere(NamedTuple):
    """Keys to look up that are of one bucket, in the table's types."""

    bucket_id: BucketId
    key_columns: Sequence[pa.Array]


Look: TypeAlias = Callable[
    [Sequence[KeysThere], Sequence[Column], str | None], list[pa.RecordBatch]
]
"""Looks keys up in each of their buckets; with a name, a last column says which are there."""


class EmbeddedTable(DerivedCalls):
    """The buckets of a table in one process: written, altered, cleaned. Safe for threads.

    A put is atomic per bucket, and all its buckets try the merge before the first one writes: bad
    input changes nothing anywhere.
    """

    def __init__(
        self,
        storage: ObjectStorage,
        catalog: Catalog,
        view_directory: Path,
        *,
        name: str,
        options: BucketOptions | None = None,
    ) -> None:
        self._storage = storage
        self._catalog = catalog
        self._name = name
        self._options = options or BucketOptions()
        self._lock = threading.RLock()
        self._buckets = OpenBuckets(catalog, view_directory, self._options)

    @classmethod
    def create(
        cls,
        location: str | Path,
        schema: Schema,
        *,
        buckets: int = 4,
        view_directory: str | Path | None = None,
        options: BucketOptions | None = None,
        **settings: Any,
    ) -> Self:
        """Create a table in a directory, or at a URL such as `s3://bucket/table`.

        The number of buckets never changes. The log is at the location; the views, a cache, are in
        `view_directory` on this machine. `settings` go to the object store.
        """
        if not isinstance(schema, Schema):
            raise InvalidInput(f"a table is created with a Schema, not {schema!r}")
        whole_of(buckets, "the number of buckets")
        _check_options(options)
        views = _view_directory(location, view_directory)
        storage = open_storage(location, **settings)
        catalog = Catalog.create(storage, schema, buckets)
        return cls(storage, catalog, views, name=_name_of(location), options=options)

    @classmethod
    def open(
        cls,
        location: str | Path,
        *,
        view_directory: str | Path | None = None,
        options: BucketOptions | None = None,
        **settings: Any,
    ) -> Self:
        """Open a table that exists."""
        _check_options(options)
        views = _view_directory(location, view_directory)
        storage = open_storage(location, **settings)
        catalog = Catalog.open(storage)
        return cls(storage, catalog, views, name=_name_of(location), options=options)

    @property
    def name(self) -> str:
        """What the table is called: the last part of its location."""
        return self._name

    @property
    def schema(self) -> Schema:
        """The current schema."""
        return self._catalog.history.current

    @property
    def table_id(self) -> str:
        """The id of this table; another one of the same name has another."""
        return self._catalog.table_id

    def put(
        self,
        data: Data,
        *,
        columns: Sequence[str] | None = None,
        mode: AggMode = AggMode.ACCUMULATE,
        operation_column: str | None = None,
        owner: str = "",
        token: Token | None = None,
    ) -> PutResult:
        """Merge a batch.

        `columns`: the value columns to write; None: those that the batch has. `operation_column`
        names a column with 'upsert' or 'delete' per row; a delete clears the written columns of
        its key. `owner` and `token`: a bucket applies an owner's token once; calling again with
        the same one completes what is missing and returns the first results for the rest.
        """
        if isinstance(data, Sequence) and not data:  # No rows, and no columns to check.
            return PutResult(rows=0, buckets={})
        schema = self.schema
        rows = read_batch(
            as_arrow(data, schema, mode),
            schema,
            self._options,
            columns=columns,
            mode=mode,
            operation_column=operation_column,
        )
        return self._put_rows(rows, owner, token)

    def _put_rows(self, rows: BatchRows, owner: str, token: Token | None) -> PutResult:
        update = fold(rows, self._catalog.history.key_codec)
        routes = route(self.schema, update.keys, self._catalog.buckets)
        updates = [update]
        if len(routes) != 1:
            updates = update.split([target.positions for target in routes])
        put = partial(
            self._put_updates,
            columns=[column.id for column in rows.columns],
            owner=owner,
            token=token,
        )
        there = dict(self._catalog.partitions)
        old, new = [], []
        for target, part in zip(routes, updates, strict=True):
            if target.partition_key in there:
                old.append((target, part))
            elif part.touches.any():  # Without a partition there is nothing to delete.
                new.append((target, part))
        if new:  # What is refused leaves no partition.
            put(old, try_only=True)
        return PutResult(rows=len(rows), buckets=put([*old, *new]))

    def _put_updates(
        self,
        targets: Sequence[tuple[Route, Update]],
        *,
        columns: Sequence[int],
        owner: str,
        token: Token | None,
        try_only: bool = False,
    ) -> dict[BucketId, BucketResult]:
        """Put to each bucket its update; `try_only`: raise what that would raise now."""
        updates = {self._bucket_id(target): update for target, update in targets}
        ids = sorted(updates)
        buckets = self._buckets.map(self._buckets.get, ids)
        mapper = self._buckets.map_exclusive
        with held(buckets):
            self._check_free(columns, owner)
            parts = [updates[bucket_id] for bucket_id in ids]
            plans = plan_held(buckets, parts, mapper, owner=owner, token=token)
            if try_only:
                return {}
            results = commit_held(buckets, plans, mapper)
        return dict(zip(ids, results, strict=True))

    @abstractmethod
    def _check_free(self, columns: Iterable[int], owner: str) -> None:
        """Raise if these columns, or what this owner does, are not for everybody to write.

        Called while the buckets are held that are written next.
        """

    def _look_up(
        self, keys: Data, columns: Sequence[str] | None, look: Look, *, found: bool = False
    ) -> pa.Table:
        """Return the keys and their values, in the order asked; nulls where absent.

        `found`: with a last column, `FOUND`, that says whether there is such a row.
        """
        schema = self.schema
        key_columns = read_keys(as_arrow(keys, schema), schema)
        return self._look_up_typed(key_columns, schema.values(columns), look, found=found)

    def _look_up_typed(
        self, key_columns: Sequence[pa.Array], chosen: Sequence[Column], look: Look, *, found: bool
    ) -> pa.Table:
        """Do so with keys in the table's types; in halves, where Arrow does not hold all."""
        try:
            return self._look_up_at_once(key_columns, chosen, look, found=found)
        except ColumnTooLarge:
            middle = len(key_columns[0]) // 2
            if not middle:
                raise
        halves = ([key[:middle] for key in key_columns], [key[middle:] for key in key_columns])
        return pa.concat_tables(
            [self._look_up_typed(half, chosen, look, found=found) for half in halves]
        )

    def _look_up_at_once(
        self, key_columns: Sequence[pa.Array], chosen: Sequence[Column], look: Look, *, found: bool
    ) -> pa.Table:
        schema, partitions = self.schema, dict(self._catalog.partitions)
        known = [
            target
            for target in route(schema, key_columns, self._catalog.buckets)
            if target.partition_key in partitions
        ]

        asked = [
            KeysThere(
                BucketId(partitions[target.partition_key], target.bucket),
                [array.take(pa.array(target.positions)) for array in key_columns],
            )
            for target in known
        ]
        fields = [(column.name, column.type) for column in chosen]
        if found:
            fields.append((FOUND, pa.bool_()))
        rows = look(asked, chosen, FOUND if found else None)
        values = gather(len(key_columns[0]), known, rows, pa.schema(fields))
        if found:  # Null where there is not even such a partition.
            values[-1] = values[-1].fill_null(False)
        keys_shown = [(column.name, column.type) for column in schema.key_columns]
        return pa.Table.from_arrays(
            [*key_columns, *values], schema=pa.schema([*keys_shown, *fields])
        )

    def undo(
        self, debtor: str, columns: Sequence[str], offsets: Mapping[BucketId, int]
    ) -> dict[BucketId, BucketResult]:
        """Bring an owner's changes of these columns back to the given offset of each bucket."""
        text_of(debtor, "an owner")
        offsets = offsets_of(offsets, "what to undo to")
        undone = [column.id for column in self.schema.values(columns)]

        def undo(bucket_id: BucketId) -> BucketResult:
            return self.bucket(bucket_id).undo(
                debtor,
                undone,
                UndoRange(offsets[bucket_id]),
                check=lambda: self._check_free(undone, debtor),
            )

        ids = list(offsets)
        return dict(zip(ids, self._buckets.map(undo, ids), strict=True))

    def end_offsets(self) -> dict[BucketId, int]:
        """Return where the log of each bucket ends."""
        return {bucket_id: self.bucket(bucket_id).end_offset for bucket_id in self.bucket_ids()}

    def clean(
        self,
        *,
        older_than_ms: int | None = None,
        keep_from: Mapping[BucketId, int] | None = None,
    ) -> None:
        """Drop the log as far as the views on disk have it, except what is younger or to be kept.

        `keep_from`: offsets from which a bucket's log must stay, such as those of an owner's last
        commit: an undo cannot go back further than the log. From then on the views are no longer a
        mere cache of the log: keep them, or a copy. What stays of the log before these offsets is
        rolled up: many small segments become few objects.
        """
        for bucket_id in self.bucket_ids():
            bucket = self.bucket(bucket_id)
            before = bucket.end_offset
            if keep_from is not None:
                before = min(before, keep_from.get(bucket_id, 0))
            bucket.clean(before, older_than_ms=older_than_ms)
            while bucket.roll_up(before):
                pass

    def flush(self) -> None:
        """Write all views to disk."""
        self._buckets.map(lambda bucket_id: self.bucket(bucket_id).flush(), self.bucket_ids())

    def _evolve(self, change: Callable[[Schema], Schema], *, force: bool = False) -> None:
        with self._lock:
            before, after = self.schema, change(self.schema)
            dropped = _value_ids(before) - _value_ids(after)
            with self._dropping(dropped) if dropped and not force else nullcontext():
                history = self._catalog.evolve(after)
            self._buckets.evolve(history)

    @abstractmethod
    def _dropping(self, columns: frozenset[int]) -> AbstractContextManager[None]:
        """Return what holds while columns are dropped: within it, nobody takes a lock on them."""

    def partitions(self) -> pa.Table:
        """Return the values of the partition columns, one row per partition."""
        return partition_rows(self.schema, self._catalog.partitions)

    def create_partition(self, **values: Any) -> int:
        """Create a partition, unless there is one of these values; return its id."""
        return self._partition_id(partition_key(self.schema, values))

    def drop_partition(self, **values: Any) -> None:
        """Drop a partition and its data. One of the same values later is a new one."""
        key = partition_key(self.schema, values)
        with self._lock:
            if key not in self._catalog.partitions:
                raise InvalidInput(f"there is no partition {values}")
            self._drop_partition(key)

    def drop_partitions(self, *, older_than: OlderThan) -> pa.Table:
        """Drop all partitions older than a date, a time, or an age; return them as rows.

        One after the other, the oldest first: if it is cut off, call it again. Of the partition
        columns one is to be a DATE or TIMESTAMP. An age counts from now, by this machine's clock.
        """
        dated_column(self.schema)
        before = moment_of(older_than, wall_clock_ms)
        with self._lock:
            old = older_partitions(self.schema, self._catalog.partitions, before)
            for key in old:
                self._drop_partition(key)
        return partition_rows(self.schema, old)

    def _drop_partition(self, key: bytes) -> None:
        """Within the lock."""
        partition = self._catalog.drop_partition(key)
        numbers = range(self._catalog.buckets)
        self._buckets.delete([BucketId(partition, number) for number in numbers])

    def bucket_ids(self) -> list[BucketId]:
        """Return all buckets of all partitions."""
        return self._catalog.bucket_ids()

    def path(self, bucket_id: BucketId) -> str:
        """Return where a bucket's log is below `log`, and its view below the views."""
        return self._catalog.path(bucket_id)

    def bucket(self, bucket_id: BucketId) -> Bucket:
        """Return a bucket, opened on first use."""
        return self._buckets.get(bucket_id)

    def _bucket_id(self, target: Route) -> BucketId:
        return BucketId(self._partition_id(target.partition_key), target.bucket)

    def _partition_id(self, key: bytes) -> int:
        """Return the id of the partition of this key, which is created if there is none."""
        with self._lock:
            if key not in self._catalog.partitions:
                self._catalog.create_partition(key)
            return self._catalog.partitions[key]

    def close(self) -> None:
        """Write the views and let go of all buckets. Closing twice is fine."""
        self._buckets.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _view_directory(location: str | Path, view_directory: str | Path | None) -> Path:
    if view_directory is not None:
        return Path(view_directory)
    directory = local_directory(location)
    if directory is None:
        raise InvalidInput(f"{location!r} is remote: give a local view_directory as well")
    return directory / "view"


def _check_options(options: BucketOptions | None) -> None:
    if options is not None and not isinstance(options, BucketOptions):
        raise InvalidInput(f"options are BucketOptions, not {options!r}")


def _value_ids(schema: Schema) -> frozenset[int]:
    return frozenset(column.id for column in schema.value_columns)


def _name_of(location: str | Path) -> str:
    directory = local_directory(location)
    whole = str(location).rstrip("/") if directory is None else str(directory.resolve())
    return whole.rpartition("/")[2]
