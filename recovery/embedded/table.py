"""The embedded table: all partitions and buckets of a table in one process.

table = Table.create("orders", schema)
table.put({"customer_id": [7, 7], "revenue": [5, 3]})
table.lookup({"customer_id": [7]})
with table.writer(owner_id="etl", columns=["revenue"]) as writer: ...
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from foundation.arguments import bucket_of, whole_of
from foundation.ids import BucketId
from locks.encoding.offsets import Offsets
from merge_engine.bucket.changelog import ChangeBatch
from merge_engine.bucket.log import wall_clock_ms
from merge_engine.bucket.options import MEBIBYTE, BucketOptions
from merge_engine.embedded.catalog import Catalog
from merge_engine.embedded.derived_calls import Data
from merge_engine.embedded.table import EmbeddedTable, KeysThere, Look
from merge_engine.schema.schema import Column
from merge_engine.storage.objects import ObjectStorage
from merge_engine.storage.scratch import Scratch
from recovery.description import TableDescription
from recovery.embedded.access import EmbeddedAccess
from recovery.embedded.local_locks import LocalLocks
from recovery.embedded.place import EmbeddedPlace
from recovery.embedded.reads import EmbeddedChangelog, EmbeddedRows
from recovery.reader.bucket_scan import BucketScan, open_scan
from recovery.reader.changes import BucketChanges, open_changes, open_changes_between
from recovery.reader.committed_lookup import Asked, committed_lookup
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from recovery.reader.standing import Standing, at_own_cut, changes_of, scan_at
from recovery.reader.table_changes import TableChanges
from recovery.reader.table_scan import OpenRows, TableScan
from recovery.writer.parts import PartSizes
from recovery.writer.table_writer import TableWriter

# A part is a file that is synced. Nobody else waits for a bucket as the clients of a server do.
_SIZES = PartSizes(rows=25_000, bytes=8 * MEBIBYTE)


class Table(EmbeddedTable, Standing):
    """A table in one process, safe for use from several threads.

    A put is atomic per bucket, and all its buckets try the merge before the first one writes: bad
    input changes nothing anywhere. Look-ups see each row whole. Anybody may put, but not to columns
    that a writer holds.
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
        super().__init__(storage, catalog, view_directory, name=name, options=options)
        self._locks = LocalLocks(storage.child("locks"), catalog, name)
        self._place = EmbeddedPlace(catalog, self._buckets, self._locks, self._partition_id)
        self._scratch = Scratch(None)

    def writer(self, *, owner_id: str, columns: Sequence[str], **settings: Any) -> TableWriter:
        """Return a writer that holds a lock on these columns and writes each batch exactly once.

        Start it by `with`, and close it before the table; `settings` are those of `TableWriter`:
        ttl_ms, handover, deadline_s, redo. If its process dies, the next writer of the owner
        recovers.
        """
        access = EmbeddedAccess(
            self._locks.coordinator,
            self._place,
            options=self._options,
            sizes=_SIZES,
            mapper=self._buckets.map_exclusive,
        )
        return TableWriter(access, owner_id, columns, **settings)

    def describe(self) -> TableDescription:
        """Return what the table is, as it is now. Its locks are there for those who want them."""
        schema = self.schema
        return TableDescription(
            name=self.name,
            table_id=self.table_id,
            schema=schema,
            buckets=self._catalog.buckets,
            partitions=len(self._catalog.partitions) if schema.partition_by else None,
        )

    def __repr__(self) -> str:
        return f"<Table {self.name} (id {self.table_id}), {self._catalog.buckets} buckets>"

    def _repr_html_(self) -> str:
        return self.describe()._repr_html_()

    # --- Reading --------------------------------------------------------------------------------

    def cut(self) -> Cut:
        """Return where the table stands now: what each writer has committed, in all buckets.

        And what was put without one, by bucket.
        """
        cut = self._locks.cut()
        ends = {bucket: self.bucket(bucket).settled_end() for bucket in self.bucket_ids()}
        return replace(cut, ends=Offsets(ends), time_ms=max(cut.time_ms, wall_clock_ms()))

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

        `keys`: lists of values, or one value, of each key column. `isolation`: "latest" shows all
        that was written; "committed" what was committed, of all keys at one cut, so that no batch
        is seen in part. `at`: at this cut. `found`: with a last column, `_found`, that tells a row
        of nulls from none.
        """

        def read() -> pa.Table:
            cut = self._cut_of(isolation, at, self._locks.cut)
            look = self._latest if cut is None else self._at(cut)
            return self._look_up(keys, columns, look, found=found)

        return read() if at is not None else at_own_cut(read)

    def _check_cut(self, cut: Cut) -> Cut:
        return cut.checked(self.table_id, self.name)

    def _buckets_at(self, cut: Cut | None) -> list[BucketId]:  # noqa: ARG002
        return self.bucket_ids()

    def _latest(
        self, asked: Sequence[KeysThere], columns: Sequence[Column], found: str | None
    ) -> list[Any]:
        def look(one: KeysThere) -> pa.RecordBatch:
            return self.bucket(one.bucket_id).lookup_keys(one.key_columns, columns, found=found)

        return self._buckets.map(look, asked)

    def _at(self, cut: Cut) -> Look:
        def look(
            asked: Sequence[KeysThere], columns: Sequence[Column], found: str | None
        ) -> list[Any]:
            wanted = [
                Asked(self.bucket(one.bucket_id), cut.at(one.bucket_id), one.key_columns)
                for one in asked
            ]
            return committed_lookup(wanted, columns, self._buckets.map, found=found)

        return look

    def scan(
        self,
        columns: Sequence[str] | None = None,
        *,
        isolation: str = Isolation.COMMITTED,
        limit: int | None = None,
        buckets: Sequence[BucketId] | None = None,
        at: Cut | str | None = None,
    ) -> TableScan:
        """Return all rows of the table, or of these buckets, to iterate or take whole.

        Bucket after bucket, in key order within each. "committed" rows stand at one cut, in all
        buckets alike: at one that is taken now, or `at` the one that is given.
        """
        stand, schema = self._stand(isolation, at, buckets), self.schema
        # The same columns from every bucket, whatever is added or has their names in between.
        chosen = schema.values(columns)

        def opening(cut: Cut | None) -> OpenRows:
            def open_rows(bucket_id: BucketId, most: int | None) -> EmbeddedRows:
                def pin() -> BucketScan:
                    there = None if cut is None else cut.at(bucket_id)
                    return open_scan(self.bucket(bucket_id), there, scratch=self._scratch)

                return EmbeddedRows(pin, chosen, most)

            return open_rows

        fields = [(column.name, column.type) for column in (*schema.key_columns, *chosen)]
        anew = None if at is not None else partial(self._stand, isolation, None, buckets)
        return scan_at(stand, pa.schema(fields), opening, limit=limit, stand_anew=anew)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return all committed rows as one table: short for `scan(columns).to_arrow()`."""
        return self.scan(columns).to_arrow()

    def changes(
        self,
        since: Cut | str | None = None,
        until: Cut | str | None = None,
        *,
        buckets: Sequence[BucketId] | None = None,
    ) -> TableChanges:
        """Return the change records that lead from one cut to another, of whole batches.

        Without `since`, from as far back as the logs go; without `until`, to a cut that is taken
        now. What was undone is left out, and so is what is not committed.
        """

        def read(first: Cut, last: Cut, bucket: BucketId) -> Iterator[ChangeBatch]:
            found = open_changes_between(self.bucket(bucket), first.at(bucket), last.at(bucket))
            version = found.schema.version
            return (ChangeBatch(batch, version) for batch, _ in found.records())

        span_of = partial(self._span, since, until, buckets)
        anew = span_of if since is None else None
        return changes_of(span_of(), self.schema, read, begin_anew=anew)

    def _earliest(self) -> Cut:
        starts = {bucket: self.bucket(bucket).start_offset for bucket in self.bucket_ids()}
        return Cut(table=self.table_id, epoch=None, time_ms=0, ends=Offsets(starts))

    def changelog(
        self,
        bucket_id: BucketId,
        from_offset: int = 0,
        to_offset: int | None = None,
        *,
        isolation: str = Isolation.COMMITTED,
    ) -> EmbeddedChangelog:
        """Return a bucket's changes in [from, to) as records with finished values, to iterate.

        "committed" ends at the last stable offset and leaves out what was undone.
        """
        is_committed = Isolation.of(isolation) is Isolation.COMMITTED
        bucket_id = bucket_of(bucket_id)
        from_offset = whole_of(from_offset, "from_offset")
        to_offset = None if to_offset is None else whole_of(to_offset, "to_offset")

        def changes(start: int) -> BucketChanges:
            return open_changes(
                self.bucket(bucket_id),
                bucket_id,
                self._locks.records,
                start,
                to_offset,
                committed=is_committed,
            )

        return EmbeddedChangelog(changes, from_offset)

    # --- What locks have to say -----------------------------------------------------------------

    def clean(
        self,
        *,
        older_than_ms: int | None = None,
        keep_from: Mapping[BucketId, int] | None = None,
    ) -> None:
        """Drop the log as far as the views on disk have it, except what is younger or to be kept.

        What a writer has not committed is kept, for it may have to be undone. `keep_from`: offsets
        from which a bucket's log must stay, such as those that an `undo` is to go back to. From
        then on the views are no longer a mere cache of the log: keep them, or a copy. What stays of
        the log before these offsets is rolled up: many small segments become few objects.
        """
        kept: dict[BucketId, int] = {}
        for bucket_id in self.bucket_ids():
            asked = None if keep_from is None else keep_from.get(bucket_id, 0)
            offsets = [o for o in (asked, self._locks.keep_from(bucket_id)) if o is not None]
            kept[bucket_id] = min(offsets, default=self.bucket(bucket_id).end_offset)
        super().clean(older_than_ms=older_than_ms, keep_from=kept)

    def _check_free(self, columns: Iterable[int], owner: str) -> None:
        self._locks.check_free(columns, owner)

    def _dropping(self, columns: frozenset[int]) -> AbstractContextManager[None]:
        return self._locks.dropping(columns)

    def close(self) -> None:
        """Write the views and let go of all buckets. Closing twice is fine.

        The lock of a writer that is still open stays held, for its owner to come back.
        """
        with ExitStack() as stack:
            stack.callback(partial(super().close))
            stack.callback(self._locks.close)
