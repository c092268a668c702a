"""A table of a cluster, with the calls of the embedded one; its buckets are on tablet servers."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pyarrow as pa

from foundation.arguments import (
    bucket_of,
    offsets_of,
    seconds_of,
    text_of,
    whole_of,
)
from foundation.deadlines import within
from foundation.errors import InvalidInput, TableAltered
from foundation.ids import BucketId, Token
from locks.catalog.definitions import TableDefinition
from locks.coordinator import Coordinator
from locks.encoding.offsets import Offsets
from locks.snapshots.list_records import ListedSnapshot
from merge_engine.bucket.results import BucketResult, PutResult
from merge_engine.bucket.segment import AggMode
from merge_engine.bucket.tokens import check_writer
from merge_engine.bucket.undo import UndoRange
from merge_engine.embedded.derived_calls import Data, DerivedCalls
from merge_engine.merging.dated_partitions import (
    OlderThan,
    dated_column,
    moment_of,
    older_partitions,
)
from merge_engine.merging.routing import partition_key, partition_rows
from merge_engine.schema.schema import Schema
from recovery.description import TableDescription
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from recovery.reader.standing import Standing, changes_of, scan_at
from recovery.reader.table_changes import TableChanges
from recovery.reader.table_scan import ScanSource, TableScan, chosen_buckets
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.asking import Result, ask
from server.client.changelog import (
    Changelog,
    ask_all,
    bucket_changes,
    earliest_cut,
    end_offsets,
)
from server.client.lookups import look_up, look_up_async, look_up_now
from server.client.puts import put_unlocked
from server.client.scan_sources import live_rows, row_schema, scan_log, scan_snapshots
from server.client.snapshot_lease import (
    BorrowedLease,
    HeldSnapshots,
    SnapshotLease,
    hold_latest,
    hold_whole,
)
from server.client.snapshots import take_all, take_some
from server.client.table_caller import ClusterConnection, TableCaller
from server.client.undoing import undo_all
from server.client.uploads import progress_of
from server.protocol.definitions import ClusterTable, emptied, evolved, retaining
from server.protocol.puts import PutProgress
from server.protocol.reads import ReadChangelog


class RemoteTable(DerivedCalls, Standing):
    """A table on servers. Safe for threads; made by `Cluster.table` and `Cluster.create_table`.

    A put is one atomic commit per bucket, and all buckets of one server try the merge before the
    first of them writes. Calls find the leaders by themselves and wait for one that moves.
    `caller` sends them.
    """

    _owns_connection = False

    def __init__(self, cluster: ClusterConnection, table: ClusterTable) -> None:
        self._cluster = cluster
        self.caller = TableCaller(cluster, table)

    @property
    def name(self) -> str:
        """The table's name."""
        return self.definition.name

    @property
    def table_id(self) -> int:
        """The id of this table; another one of the same name has another."""
        return self.definition.table_id

    @property
    def schema(self) -> Schema:
        """The schema as this client last saw it."""
        return self.definition.schema

    @property
    def buckets(self) -> int:
        """How many buckets each partition has."""
        return self.definition.buckets

    @property
    def definition(self) -> ClusterTable:
        """The table as the coordinator defines it, as this client last saw it."""
        return self.caller.table

    def describe(self) -> TableDescription:
        """Return what the table is, as it is now."""
        self.refresh()
        partitioned = bool(self.schema.partition_by)
        return self.definition.describe(self.partitions().num_rows if partitioned else None)

    def __repr__(self) -> str:
        return f"<RemoteTable {self.name} (id {self.table_id}), {self.buckets} buckets>"

    def _repr_html_(self) -> str:
        return self.definition.describe()._repr_html_()

    def truncate(self, *, force: bool = False) -> None:
        """Empty the table: another one takes its name and definition, in one transaction.

        From then on this is that one, with another id; who has the former one open is told that it
        was dropped. So is a writer: its lock went with the table. LockHeld while there is a live
        one, unless forced. Leases go on, and the files are deleted in time, as after a drop.
        """
        made = self._cluster.coordinator.truncate_table(self.definition.table, emptied, force=force)
        self.caller = TableCaller(self._cluster, ClusterTable(made))

    def refresh(self) -> None:
        """Look again at the definition: others may have altered it."""
        self.caller.refresh()

    def bucket_ids(self) -> list[BucketId]:
        """Return all buckets of all partitions, as they are now."""
        return self._buckets_at(None)

    def close(self) -> None:
        """End the connection to the cluster, if this table was unpickled with one of its own.

        That of a cluster's table is the cluster's, and stays. Closing twice is fine.
        """
        if self._owns_connection:
            self._cluster.close()

    def __enter__(self) -> "RemoteTable":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._owns_connection = True

    # --- Writing --------------------------------------------------------------------------------

    def writer(self, *, owner_id: str, columns: Sequence[str], **settings: Any) -> TableWriter:
        """Return a writer that holds a lock on these columns and writes each batch exactly once.

        Start it by `with`; `settings` are those of `TableWriter`: ttl_ms, handover, deadline_s,
        redo.
        """
        return self._cluster.writer(self, owner_id=owner_id, columns=columns, **settings)

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
        """Merge a batch; arguments as for the embedded table's `put`.

        Without a token, a connection that breaks at the wrong moment is an UnknownOutcome; with
        one, the same put is sent again and counts once. A table that has column locks is written
        by `writer` only.
        """
        rows = Rows(data=data, columns=columns, mode=mode, operation_column=operation_column)
        return put_unlocked(self.caller, rows, owner, token)

    def undo(
        self, debtor: str, columns: Sequence[str], offsets: Mapping[BucketId, int]
    ) -> dict[BucketId, BucketResult]:
        """Bring an owner's changes of these columns back; for tables without column locks.

        Those that were written before it. What the owner writes meanwhile stands, unless it is to
        keys that are brought back; let it pause all the same, for committed changelogs may leave
        such writes out.
        """
        ids = [column.id for column in self.schema.values(columns)]
        wanted = offsets_of(offsets, "what to undo to")
        ranges = {key: UndoRange(offset) for key, offset in wanted.items()}
        return dict(undo_all(self.caller, text_of(debtor, "an owner"), ids, ranges))

    def put_progress(self, owner: str, token: Token) -> dict[str, int]:
        """Return how much of a large batch has arrived at the servers, and how much is written."""
        check_writer(owner, token)
        call = PutProgress(table_id=self.table_id, owner=owner, token=token)
        return asdict(progress_of(self.caller, call))

    # --- Reading --------------------------------------------------------------------------------

    def cut(self) -> Cut:
        """Return where the table stands now: what each owner has committed, in all buckets.

        Of a table without column locks: what each bucket has.
        """
        if self.definition.locked:
            return self.caller.cut()
        with within(self.caller.calls.deadline_s):
            ends = Offsets(self.end_offsets())
            now_ms = self._ask(lambda there: there.store.now_ms())
        return replace(self.caller.cut(), ends=ends, time_ms=now_ms)

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
        of nulls from none; such look-ups do not go together with others.
        """
        shown = Isolation.of(isolation)
        if at is None and not found:
            return look_up_now(self.caller, keys, columns, shown)
        cut = None if at is None else self._check_cut(Cut.of(at))
        with within(self.caller.calls.deadline_s):
            return look_up(self.caller, keys, columns, cut, isolation=shown, found=found)

    async def lookup_async(
        self,
        keys: Data,
        columns: Sequence[str] | None = None,
        *,
        isolation: str = Isolation.LATEST,
        at: Cut | str | None = None,
        found: bool = False,
    ) -> pa.Table:
        """Look up without waiting, for programs that run an event loop; else as `lookup`.

        Any number may be under way at a time: they go to the servers together. No thread waits for
        one alone, unless it is one of many keys or at a cut, or a leader has to be looked for.
        """
        shown = Isolation.of(isolation)
        if at is None and not found:
            return await look_up_async(self.caller, keys, columns, shown)
        pool = self.caller.calls.lanes.pool
        look_up_at = partial(self.lookup, keys, columns, isolation=isolation, at=at, found=found)
        return await asyncio.get_running_loop().run_in_executor(pool, look_up_at)

    def _check_cut(self, cut: Cut) -> Cut:
        return self.definition.check_cut(cut)

    def _earliest(self) -> Cut:
        return earliest_cut(self.caller)

    def _buckets_at(self, cut: Cut | None) -> list[BucketId]:
        return self.caller.bucket_ids(cut)

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

        span_of = partial(self._span, since, until, buckets)
        span = span_of()
        self.refresh()  # Records have all columns that there are, not those we know of.
        reading = partial(bucket_changes, self.caller)
        anew = span_of if since is None else None
        return changes_of(span, self.schema, reading, begin_anew=anew)

    def changelog(
        self,
        bucket_id: BucketId,
        from_offset: int = 0,
        to_offset: int | None = None,
        *,
        isolation: str = Isolation.COMMITTED,
    ) -> Changelog:
        """Return a bucket's changes in [from, to) as records with finished values, to iterate.

        "committed" ends at the last stable offset and leaves out what was undone.
        """
        to_offset = None if to_offset is None else whole_of(to_offset, "to_offset")
        call = ReadChangelog(
            table_id=self.table_id,
            schema_version=self.schema.version,
            bucket=bucket_of(bucket_id),
            from_offset=whole_of(from_offset, "from_offset"),
            to_offset=to_offset,
            isolation=Isolation.of(isolation),
        )
        return Changelog(self.caller, call)

    def scan(
        self,
        columns: Sequence[str] | None = None,
        *,
        source: ScanSource = ScanSource.LIVE_KV,
        isolation: str = Isolation.COMMITTED,
        limit: int | None = None,
        buckets: Sequence[BucketId] | None = None,
        at: Cut | str | None = None,
        lease: HeldSnapshots | None = None,
        from_offsets: Mapping[BucketId, int] | None = None,
    ) -> TableScan:
        """Return all rows of the table, or of these buckets, to iterate or take whole.

        "committed" rows stand at one cut, in all buckets alike: at one that is taken now, or `at`
        the one that is given. LIVE_KV reads the leaders' rows. SNAPSHOT reads what `lease` holds,
        at the cut of the lease, from the object store alone; the log has what came since. LOG has
        change records from `from_offsets` on (0 where nothing is said) instead of rows. Without
        `columns`, live rows have all columns that there are at the cut, whatever was known here.
        """
        shown = Isolation.of(isolation)
        if (lease is not None) != (source is ScanSource.SNAPSHOT):
            raise InvalidInput("a lease goes with source=ScanSource.SNAPSHOT, and that needs one")
        if source is ScanSource.SNAPSHOT:
            if lease is None or not hasattr(lease, "snapshots"):
                raise InvalidInput(f"a lease is what `lease_latest` has returned, not {lease!r}")
            cut = self._cut_of(shown, at, lambda: lease.cut)
            return scan_snapshots(self.caller, columns, lease, cut, buckets=buckets, limit=limit)
        if source is ScanSource.LOG:
            if columns is not None or at is not None:
                raise InvalidInput(
                    "change records have the columns that changed, and begin at offsets: leave "
                    "`columns` and `at`; `changes` has those between cuts"
                )
            offsets = offsets_of(from_offsets or {}, "from_offsets")
            self.refresh()  # Records have all columns that there are, not those we know of.
            wanted = chosen_buckets(self._buckets_at(None), buckets)

            def open_log(key: BucketId) -> Changelog:
                return self.changelog(key, offsets.get(key, 0), isolation=shown)

            return scan_log(self.schema, wanted, open_log, limit=limit)
        stand = self._stand(shown, at, buckets)
        if columns is None:
            self.refresh()
        table, chosen = self.definition, self.schema.values(columns)
        opening = partial(live_rows, self.caller, table, chosen)
        anew = None if at is not None else partial(self._stand, shown, None, buckets)
        return scan_at(stand, row_schema(table, chosen), opening, limit=limit, stand_anew=anew)

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return all committed rows as one table: short for `scan(columns).to_arrow()`."""
        return self.scan(columns).to_arrow()

    def end_offsets(self) -> dict[BucketId, int]:
        """Return where the log of each bucket ends."""
        return end_offsets(self.caller)

    def _ask(self, question: Callable[[Coordinator], Result]) -> Result:
        return ask(lambda: self._cluster.coordinator, question)

    # --- Snapshots and leases -------------------------------------------------------------------

    def snapshot(self, buckets: Sequence[BucketId] | None = None) -> dict[BucketId, int]:
        """Have snapshots taken now, of these buckets or all; return the ids of the latest."""
        take = partial(take_all, self.caller)
        if buckets is None:
            return ask_all(self.caller, None, take)
        return take(chosen_buckets(self.bucket_ids(), buckets))

    def snapshots(self) -> dict[BucketId, tuple[ListedSnapshot, ...]]:
        """Return the snapshots of each bucket that may be leased, the oldest first."""
        keys = self.bucket_ids()
        self.caller.check_buckets(())  # Lists of a dropped table stay while its files do, or go.
        lists = self._ask(lambda there: there.snapshots.read_many(self.table_id, keys))
        return {key: found.listed for key, found in lists.items()}

    def lease_latest(
        self,
        lease_id: str,
        duration_s: float = 600.0,
        *,
        buckets: Sequence[BucketId] | None = None,
        renew: bool = True,
        deadline_s: float = 60.0,
    ) -> SnapshotLease:
        """Lease the latest snapshot of each bucket, taken now where there is none.

        It is renewed in the background, unless told otherwise, until it is dropped. `deadline_s`:
        how long to wait for a bucket more; ServerUnavailable then.
        """
        duration_ms = int(seconds_of(duration_s, "the duration of a lease") * 1000)
        deadline_s = seconds_of(deadline_s, "the deadline")

        def hold(some: Sequence[BucketId]) -> dict[BucketId, ListedSnapshot]:
            return hold_latest(
                lambda: self._cluster.coordinator,
                self.table_id,
                lease_id,
                some,
                duration_ms,
                take=partial(take_some, self.caller),
                deadline_s=deadline_s,
            )

        if buckets is None:
            held, cut = hold_whole(hold, self.cut, self._buckets_at)
        else:
            held, cut = hold(chosen_buckets(self.bucket_ids(), buckets)), self.cut()
        self.refresh()  # For who scans all columns: the cut may have some that are new.
        return SnapshotLease(
            lambda: self._cluster.coordinator,
            self.table_id,
            lease_id,
            held,
            duration_ms,
            cut=cut,
            renew=renew,
        )

    def borrow_lease(self, lease_id: str) -> BorrowedLease:
        """Return the snapshots of a lease that somebody else holds and renews, to scan them.

        UnknownLease if there is none of this id, or it has expired.
        """
        return BorrowedLease(
            lambda: self._cluster.coordinator, self.table_id, lease_id, self.caller.cut
        )

    # --- Schema and partitions ------------------------------------------------------------------

    def _evolve(self, change: Callable[[Schema], Schema], *, force: bool = False) -> None:
        """Alter the table as it is now; if somebody else did so meanwhile, look again."""
        self._alter(lambda definition: evolved(definition, change(self.schema)), force=force)

    def _alter(
        self, change: Callable[[TableDefinition], TableDefinition], *, force: bool = False
    ) -> None:
        while True:
            self.refresh()
            definition = change(self.definition.table.definition)
            try:
                altered = self._cluster.coordinator.alter_table(
                    self.definition.table, definition, force=force
                )
            except TableAltered:
                continue
            self.caller.table = ClusterTable(altered)
            return

    def partitions(self) -> pa.Table:
        """Return the values of the partition columns, one row per partition."""
        keys = self.caller.read_partitions() if self.schema.partition_by else ()
        return partition_rows(self.schema, keys)

    def create_partition(self, **values: Any) -> int:
        """Create a partition, unless there is one of these values; return its id."""
        return self.caller.create_partition(partition_key(self.schema, values))

    def drop_partition(self, **values: Any) -> None:
        """Drop a partition and its data. One of the same values later is a new one."""
        if not self.caller.drop_partition(partition_key(self.schema, values)):
            raise InvalidInput(f"there is no partition {values}")

    def drop_partitions(self, *, older_than: OlderThan) -> pa.Table:
        """Drop all partitions older than a date, a time, or an age, in one write; return them.

        As rows of the partition columns. All or none are dropped. Of those there are, one column is
        to be a DATE or TIMESTAMP. An age counts from now, by the cluster's clock.
        """
        dated_column(self.schema)
        before = moment_of(older_than, lambda: self._ask(lambda there: there.store.now_ms()))
        ids = self.caller.read_partitions()
        old = {key: ids[key] for key in older_partitions(self.schema, ids, before)}
        return partition_rows(self.schema, self.caller.drop_partitions(old))

    def set_retention(self, retention: timedelta | str | None) -> None:
        """Have partitions dropped by themselves once they are older; None: not any more."""
        self._alter(lambda definition: retaining(definition, retention))
