"""What every table can do, in one process or on servers: the same calls under the same names."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import pyarrow as pa

from foundation.ids import BucketId, Token
from merge_engine.aggregates.registry import AggFunction
from merge_engine.bucket.results import BucketResult, PutResult
from merge_engine.bucket.segment import AggMode
from merge_engine.embedded.derived_calls import Data
from merge_engine.merging.dated_partitions import OlderThan
from merge_engine.schema.schema import Schema
from recovery.description import TableDescription
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from recovery.reader.table_changes import TableChanges
from recovery.reader.table_scan import TableScan
from recovery.writer.table_writer import TableWriter


class Changes(Protocol):
    """Change records of a bucket, to iterate."""

    @property
    def next_offset(self) -> int:
        """Where a later one goes on, after what came."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches."""


class AnyTable(Protocol):
    """A table: `tb.Table`, or the table of a cluster. Safe for threads.

    For annotations of what works with both. One contract test runs over both; either can do more.
    Look-ups are "latest" unless told otherwise, scans and changelogs "committed". Committed reads
    stand at one cut: one that they take, or one that they are given (`at`).
    """

    @property
    def name(self) -> str:
        """What the table is called."""

    @property
    def table_id(self) -> int | str:
        """The id of this table; another one of the same name has another."""

    @property
    def schema(self) -> Schema:
        """The schema, as it is known here."""

    def describe(self) -> TableDescription:
        """Return what the table is, as it is now: columns and their functions, buckets, id."""

    # --- Writing --------------------------------------------------------------------------------

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
        """Merge a batch: one atomic commit per bucket. With a token, it counts once."""

    def delete(
        self,
        keys: Data,
        *,
        columns: Sequence[str] | None = None,
        owner: str = "",
        token: Token | None = None,
    ) -> PutResult:
        """Clear these columns (None: all) of the keys; a row with none left is gone."""

    def undo(
        self, debtor: str, columns: Sequence[str], offsets: Mapping[BucketId, int]
    ) -> dict[BucketId, BucketResult]:
        """Bring an owner's changes of these columns back to the given offset of each bucket."""

    def writer(self, *, owner_id: str, columns: Sequence[str], **settings: Any) -> TableWriter:
        """Return a writer that holds a lock on these columns and writes each batch exactly once."""

    # --- Reading --------------------------------------------------------------------------------

    def cut(self) -> Cut:
        """Return where the table stands now: what each owner has committed, in all buckets."""

    def lookup(
        self,
        keys: Data,
        columns: Sequence[str] | None = None,
        *,
        isolation: str = Isolation.LATEST,
        at: Cut | str | None = None,
        found: bool = False,
    ) -> pa.Table:
        """Return the keys and their values, in the order asked; nulls where absent.

        `keys`: lists of values, or one value, of each key column. `found`: with a last column,
        `_found`, that tells a row of nulls from none.
        """

    def scan(
        self,
        columns: Sequence[str] | None = None,
        *,
        isolation: str = Isolation.COMMITTED,
        limit: int | None = None,
        buckets: Sequence[BucketId] | None = None,
        at: Cut | str | None = None,
    ) -> TableScan:
        """Return all rows of the table, or of these buckets, to iterate or take whole."""

    def changes(
        self,
        since: Cut | str | None = None,
        until: Cut | str | None = None,
        *,
        buckets: Sequence[BucketId] | None = None,
    ) -> TableChanges:
        """Return the change records that lead from one cut to another, of whole batches."""

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return all committed rows as one table: short for `scan(columns).to_arrow()`."""

    def changelog(
        self,
        bucket_id: BucketId,
        from_offset: int = 0,
        to_offset: int | None = None,
        *,
        isolation: str = Isolation.COMMITTED,
    ) -> Changes:
        """Return a bucket's changes in [from, to) as records with finished values, to iterate."""

    def end_offsets(self) -> dict[BucketId, int]:
        """Return where the log of each bucket ends."""

    def bucket_ids(self) -> list[BucketId]:
        """Return all buckets of all partitions."""

    # --- Schema and partitions ------------------------------------------------------------------

    def add_column(
        self,
        name: str,
        data_type: pa.DataType | str,
        function: AggFunction | str,
        **parameters: Any,
    ) -> None:
        """Add a value column; rows that exist have it untouched."""

    def drop_column(self, name: str, *, force: bool = False) -> None:
        """Drop a value column, with its values; refused while a live lock pins it, unless forced.

        Whoever writes it is told so with its next batch.
        """

    def rename_column(self, old: str, new: str) -> None:
        """Give a column another name; its values stay."""

    def partitions(self) -> pa.Table:
        """Return the values of the partition columns, one row per partition."""

    def create_partition(self, **values: Any) -> int:
        """Create a partition, unless there is one of these values; return its id."""

    def drop_partition(self, **values: Any) -> None:
        """Drop a partition and its data. One of the same values later is a new one."""

    def drop_partitions(self, *, older_than: OlderThan) -> pa.Table:
        """Drop all partitions older than a date, a time, or an age; return them as rows."""

    # --- Life -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of what is held for this table. Closing twice is fine."""

    def __enter__(self) -> Self:
        """Close it at the end of the block."""

    def __exit__(self, *exc: object) -> None:
        """Close it."""
