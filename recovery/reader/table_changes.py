"""The changes of a table between two cuts, bucket after bucket."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pyarrow as pa

from foundation.errors import CutTooOld, InvalidInput
from foundation.ids import BucketId
from foundation.parallel import map_all
from merge_engine.bucket.changelog import ChangeBatch, changelog_schema
from merge_engine.schema.schema import Schema
from recovery.reader.cut import Cut

BUCKET = "_bucket"
_AT_ONCE = 4
_MOST_ATTEMPTS = 5
ReadBucket = Callable[[BucketId], Iterator[ChangeBatch]]
"""Yields the change records of a bucket."""


class Stretch(NamedTuple):
    """Between which cuts changes are read, of which buckets, and how."""

    since: Cut
    until: Cut
    buckets: Sequence[BucketId]
    read: ReadBucket


class TableChanges:
    """Change records, to iterate any number of times: whole batches, each owner's in their order.

    Applied to the table as it was at `since`, they give what it is at `until`. They are in log
    order within a bucket; between buckets there is no order. Without a `since` that was given, they
    begin where the logs do: later than before, if these are cleaned before a record has come.
    """

    def __init__(
        self,
        stretch: Stretch,
        table_schema: Schema,
        *,
        begin_anew: Callable[[], Stretch] | None = None,
    ) -> None:
        """`table_schema`: the one under which records are shown.

        `begin_anew`: looks again where the logs begin; None: the caller has said where to begin.
        """
        since, until = stretch.since, stretch.until
        if not since.is_before(until):
            raise InvalidInput(
                f"`since` is not before `until`: {since!r} has what {until!r} has not; give them "
                "in the order in which they were taken"
            )
        self.buckets = list(stretch.buckets)
        self.until = until
        self._since = since
        self._begin_anew = begin_anew
        self._begun = 1
        named = pa.field(BUCKET, pa.string())
        self.schema: pa.Schema = changelog_schema(table_schema).append(named)
        self._version = table_schema.version
        self._read = stretch.read

    @property
    def since(self) -> Cut:
        """Where they begin. Whoever has asked for it gets the changes from there on."""
        self._begin_anew = None
        return self._since

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches of records, bucket after bucket."""
        while True:
            try:
                for bucket in self.buckets:
                    for batch in self.of_bucket(bucket):
                        self._begin_anew = None
                        yield batch
                return
            except CutTooOld:
                if not self._has_another_beginning():
                    raise

    def _has_another_beginning(self) -> bool:
        """Begin where the logs do by now, if that may be: they were cleaned meanwhile."""
        if self._begin_anew is None or self._begun == _MOST_ATTEMPTS:
            return False
        self._begun += 1
        self._since, self.until, buckets, self._read = self._begin_anew()
        self.buckets = list(buckets)
        return True

    def __repr__(self) -> str:
        cuts = f"from {self._since!r} to {self.until!r}"
        return f"<TableChanges {cuts}; buckets: {len(self.buckets)}>"

    def of_bucket(self, bucket: BucketId) -> Iterator[pa.RecordBatch]:
        """Yield the records of one bucket."""
        for batch, version in self._read(bucket):
            if version != self._version:
                raise InvalidInput(
                    "the table was altered while its changes were read; begin again, from the same "
                    "cut, with `table.changes`"
                )
            if not batch.num_rows:  # Its columns were dropped, or this was all.
                continue
            name = pa.array([str(bucket)], pa.string()).take(pa.array([0] * batch.num_rows))
            yield pa.RecordBatch.from_arrays([*batch.columns, name], schema=self.schema)

    def to_arrow(self) -> pa.Table:
        """Return all records as one table; a few buckets are read at a time."""
        while True:
            try:
                with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tallybook-changes") as pool:
                    found = map_all(pool, lambda bucket: list(self.of_bucket(bucket)), self.buckets)
                break
            except CutTooOld:
                if not self._has_another_beginning():
                    raise
        self._begin_anew = None
        return pa.Table.from_batches([batch for some in found for batch in some], self.schema)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        reader = pa.RecordBatchReader.from_batches(self.schema, iter(self))
        return reader.__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        return self.schema.__arrow_c_schema__()
