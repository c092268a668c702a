"""Reading a table of a cluster: look-ups, changelogs, scans; snapshots, and leases on them."""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from locks import BucketKey, LeadKey, ListedSnapshot
from locks.deadlines import within
from merge_engine import (
    InvalidInput,
)
from merge_engine.batch import read_keys
from merge_engine.routing import gather, route
from merge_engine.table import Data, as_arrow
from server import wire
from server.changelog import Changelog
from server.errors import PartitionGone
from server.outgoing import rows_of
from server.requests import COMMITTED, LATEST
from server.scan_sources import LogRows, live_rows, log_schema, row_schema, snapshot_rows
from server.snapshot_lease import SnapshotLease, hold_latest
from server.table_calls import TableCalls
from server.table_scan import ScanSource, TableScan, chosen_buckets


class TableReads(TableCalls):
    """A table, as readers see it. Safe for threads."""

    def lookup(
        self, keys: Data, columns: Sequence[str] | None = None, *, isolation: str = LATEST
    ) -> pa.Table:
        """Return the keys and their values, in the order asked; nulls where absent.

        `isolation`: "latest" shows all that was written; "committed" masks what a column lock's
        holder has not committed yet.
        """
        with within(self._access.calls.deadline_s):
            return self._lookup(keys, columns, isolation)

    def _lookup(self, keys: Data, columns: Sequence[str] | None, isolation: str) -> pa.Table:
        table = self._table
        schema = table.schema
        key_columns = read_keys(as_arrow(keys, schema), schema)
        chosen = schema.values(columns)
        routes = route(schema, key_columns, table.buckets)
        known = [
            (key, target)
            for target in routes
            for key in [self._find_lead_key(target)]
            if key is not None
        ]
        key_schema = pa.schema([(column.name, column.type) for column in schema.key_columns])
        wanted = {
            key: pa.record_batch(
                rows_of(key_columns, target, whole=len(routes) == 1),
                schema=key_schema,
            )
            for key, target in known
        }
        value_schema = pa.schema([(column.name, column.type) for column in chosen])
        request = {"columns": [column.id for column in chosen], "isolation": _isolation(isolation)}

        def look(
            address: str, keys: Sequence[LeadKey], timeout_s: float
        ) -> Mapping[LeadKey, pa.RecordBatch]:
            fields = self._fields(table, request, [[*key.key] for key in keys])
            body = wire.frame(fields, key_schema, [wanted[key] for key in keys])
            answer = self._access.calls.connections.action(address, "lookup", body, timeout_s)
            return dict(zip(keys, wire.read_answer(answer, value_schema), strict=True))

        try:
            found = self._access.calls.scatter(
                list(wanted), table.buckets, look, check_moved=self._check_partitions
            )
        except PartitionGone:
            return self._lookup(keys, columns, isolation)
        values = gather(
            len(key_columns[0]),
            [target for _, target in known],
            [found[key] for key, _ in known],
            chosen,
        )
        fields = [(column.name, column.type) for column in (*schema.key_columns, *chosen)]
        return pa.Table.from_arrays([*key_columns, *values], schema=pa.schema(fields))

    def changelog(
        self,
        bucket: BucketKey,
        from_offset: int = 0,
        to_offset: int | None = None,
        *,
        isolation: str = COMMITTED,
    ) -> "Changelog":
        """Return a bucket's changes in [from, to) as records with finished values, to iterate.

        "committed" ends at the last stable offset and leaves out what was undone.
        """
        return Changelog(
            self._access.calls,
            LeadKey(self.table_id, bucket),
            self._table.buckets,
            self._fields(
                self._table,
                {"to_offset": to_offset, "isolation": _isolation(isolation)},
                [[*bucket]],
            ),
            from_offset,
        )

    def scan(
        self,
        columns: Sequence[str] | None = None,
        *,
        source: ScanSource = ScanSource.LIVE_KV,
        isolation: str = COMMITTED,
        limit: int | None = None,
        buckets: Sequence[BucketKey] | None = None,
        lease: SnapshotLease | None = None,
        from_offsets: Mapping[BucketKey, int] | None = None,
    ) -> TableScan:
        """Return all rows of the table, or of these buckets, to iterate or take whole.

        LIVE_KV reads the leaders' rows; SNAPSHOT those that `lease` holds, from the object store;
        LOG has change records from `from_offsets` on (0 where nothing is said) instead of rows.
        "committed" rows stand at each bucket's last stable offset.
        """
        table = self._table
        chosen = table.schema.values(columns)
        isolation = _isolation(isolation)
        if (lease is not None) != (source is ScanSource.SNAPSHOT):
            raise InvalidInput("a lease goes with source=ScanSource.SNAPSHOT, and that needs one")
        if source is ScanSource.SNAPSHOT:
            assert lease is not None
            known = list(lease.snapshots)
            opening = snapshot_rows(
                self._access.storage(),
                table,
                chosen,
                lease,
                isolation=isolation,
                knowing=self._knowing,
            )
            wanted = chosen_buckets(known, buckets)
            return TableScan(wanted, row_schema(table, chosen), opening, limit=limit)
        wanted = chosen_buckets(self.bucket_keys(), buckets)
        if source is ScanSource.LOG:
            if columns is not None:
                raise InvalidInput("change records have the columns that changed: leave `columns`")
            offsets = dict(from_offsets or {})
            self.refresh()  # Records have all columns that there are, not those we know of.
            schema = log_schema(self._table)

            def changes(key: BucketKey, most: int | None) -> LogRows:
                changelog = self.changelog(key, offsets.get(key, 0), isolation=isolation)
                return LogRows(changelog, schema, most)

            return TableScan(wanted, schema, changes, limit=limit)
        opening = live_rows(self._access.calls, table, chosen, isolation, self._check_partitions)
        return TableScan(wanted, row_schema(table, chosen), opening, limit=limit)

    # --- Snapshots and leases -------------------------------------------------------------------

    def snapshot(self, buckets: Sequence[BucketKey] | None = None) -> dict[BucketKey, int]:
        """Have snapshots taken now, of these buckets or all; return the ids of the latest."""
        wanted = chosen_buckets(self.bucket_keys(), buckets)
        rows: dict[BucketKey, list[int]] = {key: [] for key in wanted}
        answers, _ = self.call("snapshot", {}, rows, answer="snapshots", check_partitions=True)
        return answers

    def snapshots(self) -> dict[BucketKey, tuple[ListedSnapshot, ...]]:
        """Return the snapshots of each bucket that may be leased, the oldest first."""
        keys = self.bucket_keys()
        lists = self._access.coordinator.snapshots.read_many(self.table_id, keys)
        return {key: found.listed for key, found in lists.items()}

    def lease_latest(
        self,
        lease_id: str,
        duration_s: float = 600.0,
        *,
        buckets: Sequence[BucketKey] | None = None,
        renew: bool = True,
        deadline_s: float = 60.0,
    ) -> SnapshotLease:
        """Lease the latest snapshot of each bucket, taken now where there is none.

        It is renewed in the background, unless told otherwise, until it is dropped.
        """
        wanted = chosen_buckets(self.bucket_keys(), buckets)
        duration_ms = int(duration_s * 1000)
        held = hold_latest(
            lambda: self._access.coordinator,
            self.table_id,
            lease_id,
            wanted,
            duration_ms,
            take=self.snapshot,
            deadline_s=deadline_s,
        )
        return SnapshotLease(
            lambda: self._access.coordinator,
            self.table_id,
            lease_id,
            held,
            duration_ms,
            renew=renew,
        )

    def end_offsets(self) -> dict[BucketKey, int]:
        """Return where the log of each bucket ends."""
        rows: dict[BucketKey, list[int]] = {key: [] for key in self.bucket_keys()}
        answers, _ = self.call("ends", {}, rows, answer="ends")
        return answers


def _isolation(isolation: str) -> str:
    if isolation not in (COMMITTED, LATEST):
        raise InvalidInput(f"isolation is 'committed' or 'latest', not {isolation!r}")
    return isolation
