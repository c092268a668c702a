"""The embedded table: all partitions and buckets of a table in one process.

table = Table.create("orders", schema)
table.put({"customer_id": [7, 7], "revenue": [5, 3]})
table.lookup({"customer_id": [7]})
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from merge_engine.aggregates import AggFunction
from merge_engine.batch import Rows, read_batch, read_keys
from merge_engine.bucket import Bucket, PutResult
from merge_engine.catalog import BucketId, Catalog
from merge_engine.changelog import change_records
from merge_engine.errors import InvalidInput
from merge_engine.fold import fold
from merge_engine.local import OPERATION
from merge_engine.open_buckets import OpenBuckets
from merge_engine.options import BucketOptions
from merge_engine.routing import Route, gather, partition_key, partition_rows, route
from merge_engine.rows_at import finished_rows
from merge_engine.schema import Schema
from merge_engine.segment import AggMode, Operation, Token
from merge_engine.storage import local_directory, open_storage
from merge_engine.together import put_together

Data: TypeAlias = pa.RecordBatch | pa.Table | Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class TablePutResult:
    """What a put did: rows in, keys changed, and the result of each bucket that it reached."""

    rows: int
    buckets: Mapping[BucketId, PutResult]

    @property
    def changed(self) -> int:
        """How many keys changed."""
        return sum(result.changed for result in self.buckets.values())


class Table:
    """A table in one process, safe for use from several threads.

    A put is atomic per bucket, and all its buckets try the merge before the first one writes: bad
    input changes nothing anywhere. (A partition that the refused batch brought up may remain,
    empty.) Look-ups see each row whole.
    """

    def __init__(
        self, catalog: Catalog, view_directory: Path, options: BucketOptions | None = None
    ) -> None:
        self._catalog = catalog
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
    ) -> "Table":
        """Create a table in a directory, or at a URL such as `s3://bucket/table`.

        The number of buckets never changes. The log is at the location; the views, a cache, are in
        `view_directory` on this machine. `settings` go to the object store.
        """
        views = _view_directory(location, view_directory)
        catalog = Catalog.create(open_storage(location, **settings), schema, buckets)
        return cls(catalog, views, options)

    @classmethod
    def open(
        cls,
        location: str | Path,
        *,
        view_directory: str | Path | None = None,
        options: BucketOptions | None = None,
        **settings: Any,
    ) -> "Table":
        """Open a table that exists."""
        views = _view_directory(location, view_directory)
        return cls(Catalog.open(open_storage(location, **settings)), views, options)

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
    ) -> TablePutResult:
        """Merge a batch.

        `columns`: the value columns to write; None: those that the batch has. `operation_column`
        names a column with 'upsert' or 'delete' per row; a delete clears the written columns of
        its key. `owner` and `token`: a bucket applies an owner's token once; calling again with
        the same one completes what is missing and returns the first results for the rest.
        """
        if isinstance(data, Sequence) and not data:  # No rows, and no columns to check.
            return TablePutResult(rows=0, buckets={})
        schema = self.schema
        rows = read_batch(
            as_arrow(data, schema),
            schema,
            self._options,
            columns=columns,
            mode=mode,
            operation_column=operation_column,
        )
        return self._put_rows(rows, owner, token)

    def delete(
        self,
        keys: Data,
        *,
        columns: Sequence[str] | None = None,
        owner: str = "",
        token: Token | None = None,
    ) -> TablePutResult:
        """Clear these columns (None: all) of the keys; a row with none left is gone."""
        return self.put(
            as_deletes(keys, self.schema),
            columns=columns,
            operation_column=OPERATION,
            owner=owner,
            token=token,
        )

    def _put_rows(self, rows: Rows, owner: str, token: Token | None) -> TablePutResult:
        routes = route(self.schema, rows.keys, self._catalog.buckets)
        codec = self._catalog.history.key_codec
        whole = len(routes) == 1
        updates = self._buckets.map(
            lambda target: fold(rows if whole else rows.take(target.positions), codec), routes
        )
        targets = dict(zip(map(self._bucket_id, routes), updates, strict=True))
        ids = sorted(targets)
        buckets = self._buckets.map(self._buckets.get, ids)
        results = put_together(
            buckets,
            [targets[bucket_id] for bucket_id in ids],
            self._buckets.map_exclusive,
            owner=owner,
            token=token,
        )
        return TablePutResult(rows=len(rows), buckets=dict(zip(ids, results, strict=True)))

    def lookup(self, keys: Data, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the keys and their values, in the order asked; nulls where absent."""
        schema = self.schema
        key_columns = read_keys(as_arrow(keys, schema), schema)
        chosen = schema.values(columns)
        partitions = dict(self._catalog.partitions)
        known = [
            target
            for target in route(schema, key_columns, self._catalog.buckets)
            if target.partition_key in partitions
        ]

        def look(target: Route) -> pa.RecordBatch:
            index = pa.array(target.positions)
            bucket_id = BucketId(partitions[target.partition_key], target.bucket)
            keys_there = [array.take(index) for array in key_columns]
            return self.bucket(bucket_id).lookup_keys(keys_there, chosen)

        found = self._buckets.map(look, known)
        values = gather(len(key_columns[0]), known, found, chosen)
        fields = [(column.name, column.type) for column in (*schema.key_columns, *chosen)]
        return pa.Table.from_arrays([*key_columns, *values], schema=pa.schema(fields))

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows, bucket by bucket, in key order within each."""
        schema = self.schema
        # The same columns from every bucket, whatever is added or has their names in between.
        chosen = schema.values(columns)
        fields = [(column.name, column.type) for column in (*schema.key_columns, *chosen)]
        for bucket_id in self.bucket_ids():
            history, _, rows = self.bucket(bucket_id).pin()
            with closing(rows):
                for _, data in finished_rows(rows, history, chosen):
                    yield pa.RecordBatch.from_arrays(data.columns, schema=pa.schema(fields))

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return all rows as one table."""
        batches = list(self.scan(columns))
        if batches:
            return pa.Table.from_batches(batches)
        return self.lookup({column.name: [] for column in self.schema.key_columns}, columns)

    def changelog(
        self, bucket_id: BucketId, from_offset: int = 0, to_offset: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield a bucket's changes in [from, to) as records with finished values."""
        bucket = self.bucket(bucket_id)
        end = bucket.settled_end()
        # All records under one schema, which knows all that was written up to here.
        history = bucket.history
        stop = end if to_offset is None else min(to_offset, end)
        for segment in bucket.read_log(from_offset, stop):
            if segment.changes:
                first_offset = max(segment.header.base_offset, from_offset)
                yield change_records(segment, history, first_offset)

    def undo(
        self, debtor: str, columns: Sequence[str], offsets: Mapping[BucketId, int]
    ) -> Mapping[BucketId, PutResult]:
        """Bring an owner's changes of these columns back to the given offset of each bucket."""
        ids = list(offsets)
        results = self._buckets.map(
            lambda bucket_id: self.bucket(bucket_id).undo(debtor, columns, offsets[bucket_id]), ids
        )
        return dict(zip(ids, results, strict=True))

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
        mere cache of the log: keep them, or a copy.
        """
        for bucket_id in self.bucket_ids():
            bucket = self.bucket(bucket_id)
            before = bucket.end_offset
            if keep_from is not None:
                before = min(before, keep_from.get(bucket_id, 0))
            bucket.clean(before, older_than_ms=older_than_ms)

    def flush(self) -> None:
        """Write all views to disk."""
        self._buckets.map(lambda bucket_id: self.bucket(bucket_id).flush(), self.bucket_ids())

    def add_column(
        self,
        name: str,
        data_type: pa.DataType | str,
        function: AggFunction | str,
        **parameters: Any,
    ) -> None:
        """Add a value column; rows that exist have it untouched."""
        self._evolve(lambda schema: schema.add_column(name, data_type, function, **parameters))

    def drop_column(self, name: str) -> None:
        """Drop a value column, with its values."""
        self._evolve(lambda schema: schema.drop_column(name))

    def rename_column(self, old: str, new: str) -> None:
        """Give a column another name; its values stay."""
        self._evolve(lambda schema: schema.rename_column(old, new))

    def _evolve(self, change: Callable[[Schema], Schema]) -> None:
        with self._lock:
            self._buckets.evolve(self._catalog.evolve(change(self.schema)))

    def partitions(self) -> pa.Table:
        """Return the values of the partition columns, one row per partition."""
        return partition_rows(self.schema, self._catalog.partitions)

    def drop_partition(self, **values: Any) -> None:
        """Drop a partition and its data. One of the same values later is a new one."""
        key = partition_key(self.schema, values)
        with self._lock:
            if key not in self._catalog.partitions:
                raise InvalidInput(f"there is no partition {values}")
            partition = self._catalog.drop_partition(key)
            numbers = range(self._catalog.buckets)
            self._buckets.delete([BucketId(partition, number) for number in numbers])

    def bucket_ids(self) -> list[BucketId]:
        """Return all buckets of all partitions."""
        return self._catalog.bucket_ids()

    def bucket(self, bucket_id: BucketId) -> Bucket:
        """Return a bucket, opened on first use."""
        return self._buckets.get(bucket_id)

    def _bucket_id(self, target: Route) -> BucketId:
        with self._lock:
            partitions = self._catalog.partitions
            if target.partition_key not in partitions:
                self._catalog.create_partition(target.partition_key)
            return BucketId(partitions[target.partition_key], target.bucket)

    def close(self) -> None:
        """Write the views and let go of all buckets. Closing twice is fine."""
        self._buckets.close()

    def __enter__(self) -> "Table":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def as_arrow(data: Data, schema: Schema) -> pa.RecordBatch | pa.Table:
    """Return data as Arrow; dictionaries of columns and lists of rows are for small inputs."""
    if isinstance(data, pa.RecordBatch | pa.Table):
        return data
    try:
        if isinstance(data, Mapping):
            return pa.table(dict(data))
        rows = list(data)
        if not rows:  # Which says nothing of its columns.
            return pa.schema([(key.name, key.type) for key in schema.key_columns]).empty_table()
        return pa.Table.from_pylist(rows)
    except (pa.ArrowException, TypeError, AttributeError, UnicodeError) as exc:
        raise InvalidInput(f"cannot read this as a table: {exc}") from exc


def as_deletes(keys: Data, schema: Schema) -> pa.Table:
    """Return rows that delete these keys, to put with `OPERATION` as the operation column."""
    key_columns = read_keys(as_arrow(keys, schema), schema)
    names = [column.name for column in schema.key_columns]
    deletes = pa.array(np.full(len(key_columns[0]), Operation.DELETE, np.int8))
    return pa.table([*key_columns, deletes], names=[*names, OPERATION])


def _view_directory(location: str | Path, view_directory: str | Path | None) -> Path:
    if view_directory is not None:
        return Path(view_directory)
    directory = local_directory(location)
    if directory is None:
        raise InvalidInput(f"{location!r} is remote: give a local view_directory as well")
    return directory / "view"
