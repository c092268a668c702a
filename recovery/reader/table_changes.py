"""The changes of a table between two cuts, bucket after bucket."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from foundation.errors import InvalidInput
from foundation.ids import BucketId
from foundation.parallel import map_all
from merge_engine.bucket.changelog import ChangeBatch, changelog_schema
from merge_engine.schema.schema import Schema
from recovery.reader.cut import Cut

BUCKET = "_bucket"
_AT_ONCE = 4
ReadBucket = Callable[[BucketId], Iterator[ChangeBatch]]
"""Yields the change records of a bucket."""


class TableChanges:
    """Change records, to iterate any number of times: whole batches, each owner's in their order.

    Applied to the table as it was at `since`, they give what it is at `until`. They are in log
    order within a bucket; between buckets there is no order.
    """

    def __init__(
        self,
        buckets: Sequence[BucketId],
        table_schema: Schema,
        read: ReadBucket,
        cuts: tuple[Cut, Cut],
    ) -> None:
        """`table_schema`: the one under which records are shown."""
        since, until = cuts
        if not since.is_before(until):
            raise InvalidInput(
                f"`since` is not before `until`: {since!r} has what {until!r} has not; give them "
                "in the order in which they were taken"
            )
        self.buckets = list(buckets)
        self.since, self.until = since, until
        named = pa.field(BUCKET, pa.string())
        self.schema: pa.Schema = changelog_schema(table_schema).append(named)
        self._version = table_schema.version
        self._read = read

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches of records, bucket after bucket."""
        for bucket in self.buckets:
            yield from self.of_bucket(bucket)

    def __repr__(self) -> str:
        since = "the logs' beginning" if self.since is None else repr(self.since)
        return f"<TableChanges from {since} to {self.until!r}; buckets: {len(self.buckets)}>"

    def of_bucket(self, bucket: BucketId) -> Iterator[pa.RecordBatch]:
        """Yield the records of one bucket."""
        for batch, version in self._read(bucket):
            if version != self._version:
                raise InvalidInput(
                    "the table was altered while its changes were read; begin again, from the same "
                    "cut, with `table.changes`"
                )
            name = pa.array([str(bucket)], pa.string()).take(pa.array([0] * batch.num_rows))
            yield pa.RecordBatch.from_arrays([*batch.columns, name], schema=self.schema)

    def to_arrow(self) -> pa.Table:
        """Return all records as one table; a few buckets are read at a time."""
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tallybook-changes") as pool:
            found = map_all(pool, lambda bucket: list(self.of_bucket(bucket)), self.buckets)
        return pa.Table.from_batches([batch for some in found for batch in some], self.schema)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        reader = pa.RecordBatchReader.from_batches(self.schema, iter(self))
        return reader.__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        return self.schema.__arrow_c_schema__()
