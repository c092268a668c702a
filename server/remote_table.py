"""A table of a cluster, with the calls of the embedded one; its buckets are on tablet servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from locks import BucketKey, Coordinator, LeadKey, ListedSnapshot, TableAltered
from merge_engine import (
    AggFunction,
    AggMode,
    InvalidInput,
    ObjectStorage,
    PutResult,
    Schema,
    Token,
)
from merge_engine.batch import read_keys
from merge_engine.local import OPERATION
from merge_engine.routing import Route, gather, partition_key, partition_rows, route
from merge_engine.table import Data, as_arrow, as_deletes
from recovery.errors import NotFenced
from recovery.guard import Writer
from recovery.writer import TableWriter
from server import wire
from server.calls import Calls
from server.changelog import Changelog
from server.definitions import ClusterTable, evolved
from server.errors import PartitionGone
from server.outgoing import as_one_table, rows_of, to_messages
from server.requests import COMMITTED, LATEST
from server.scan_sources import LogRows, live_rows, log_schema, row_schema, snapshot_rows
from server.snapshot_lease import SnapshotLease, hold_latest
from server.table_scan import ScanSource, TableScan, chosen_buckets


class Access(Protocol):
    """What a table needs of its cluster."""

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, over this client's session."""

    @property
    def calls(self) -> Calls:
        """The calls to servers."""

    def storage(self) -> ObjectStorage:
        """The object store that has the cluster's logs and snapshots."""

    def writer(
        self, table: "RemoteTable", *, owner_id: str, columns: Sequence[str], **settings: Any
    ) -> TableWriter:
        """Return a writer of these columns."""

    def close(self) -> None:
        """End the connection."""


@dataclass(frozen=True, kw_only=True)
class RemotePutResult:
    """What a put did: rows in, and the result of each bucket that it reached.

    `sessions`: the names of the servers' sessions that answered.
    """

    rows: int
    buckets: Mapping[BucketKey, PutResult]
    sessions: frozenset[str]

    @property
    def changed(self) -> int:
        """How many keys changed."""
        return sum(result.changed for result in self.buckets.values())


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A put's rows for one bucket."""

    batches: Sequence[pa.RecordBatch]
    term: int


class RemoteTable:
    """A table on servers. Safe for threads; made by `Cluster.table` and `Cluster.create_table`.

    A put is one atomic commit per bucket, and all buckets of one server try the merge before the
    first of them writes. Calls find the leaders by themselves and wait for one that moves.
    """

    def __init__(self, access: Access, table: ClusterTable) -> None:
        self._access = access
        self._table = table
        self._partitions: dict[bytes, int] = {}
        if not table.schema.partition_by:
            self._partitions = {b"": 0}

    @property
    def name(self) -> str:
        """The table's name."""
        return self._table.name

    @property
    def table_id(self) -> int:
        """The id of this table; another one of the same name has another."""
        return self._table.table_id

    @property
    def schema(self) -> Schema:
        """The schema as this client last saw it."""
        return self._table.schema

    @property
    def buckets(self) -> int:
        """How many buckets each partition has."""
        return self._table.buckets

    @property
    def definition(self) -> ClusterTable:
        """The table as the coordinator defines it, as this client last saw it."""
        return self._table

    def writer(self, *, owner_id: str, columns: Sequence[str], **settings: Any) -> TableWriter:
        """Return a writer that holds a lock on these columns and writes each batch exactly once.

        Start it by `with`; `settings` are those of `TableWriter`: ttl_ms, handover, deadline_s.
        """
        return self._access.writer(self, owner_id=owner_id, columns=columns, **settings)

    def close(self) -> None:
        """End the connection to the cluster: for a table that was unpickled with its own."""
        self._access.close()

    def refresh(self) -> None:
        """Look again at the definition: others may have altered it."""
        self._table = ClusterTable(self._access.coordinator.table_by_id(self.table_id))

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
        writer: Writer | None = None,
        terms: Mapping[BucketKey, int] | None = None,
        try_only: bool = False,
    ) -> RemotePutResult:
        """Merge a batch; arguments as for the embedded table's `put`.

        Without a token, a connection that breaks at the wrong moment is an UnknownOutcome; with
        one, the same put is sent again and counts once. `writer` and `terms`: of a column lock's
        holder, for tables that have column locks; then a leader that moved is not waited for.
        `try_only`: write nothing, but raise what a put would raise now.
        """
        table = self._table
        schema = table.schema
        if isinstance(data, Sequence) and not data:
            return RemotePutResult(rows=0, buckets={}, sessions=frozenset())
        if schema.partition_by:  # One may have been dropped and made anew, under another id.
            self._read_partitions()
        arrow = as_one_table(as_arrow(data, schema))
        routes = route(schema, read_keys(arrow, schema), table.buckets)
        parts = {
            key: _Part(
                batches=to_messages(arrow, target, whole=len(routes) == 1),
                term=_term(terms, key.key),
            )
            for target in routes
            for key in [self._lead_key(target, create=writer is None)]
        }
        request: dict[str, Any] = {
            "columns": None if columns is None else list(columns),
            "mode": int(_mode(mode)),
            "operation_column": operation_column,
            "owner": owner,
            "token": None if token is None else list(token),
            "try_only": try_only,
            **_of_writer(writer),
        }
        if not parts:
            # Nobody to judge an empty batch but ourselves.
            return RemotePutResult(rows=0, buckets={}, sessions=frozenset())
        sessions: set[str] = set()

        def send(
            address: str, keys: Sequence[LeadKey], timeout_s: float
        ) -> Mapping[LeadKey, PutResult]:
            buckets = [[*key.key, parts[key].term] for key in keys]
            batches = [(at, batch) for at, key in enumerate(keys) for batch in parts[key].batches]
            announced = sum(batch.nbytes for _, batch in batches)
            command = self._request(table, {**request, "bytes": announced}, buckets)
            connections = self._access.calls.connections
            answer = connections.put(address, command, arrow.schema, batches, timeout_s)
            sessions.add(answer.get("session", str))
            return dict(zip(keys, map(to_result, answer.rows("results", 3)), strict=True))

        results = self._access.calls.scatter(
            list(parts),
            table.buckets,
            send,
            repeatable=token is not None,
            patient=writer is None,
            changes=True,
            check_moved=self._check_partitions,
        )
        return RemotePutResult(
            rows=arrow.num_rows,
            buckets={key.key: result for key, result in results.items()},
            sessions=frozenset(sessions),
        )

    def create_partitions(self, data: Data) -> list[BucketKey]:
        """Create the partitions of these rows that do not exist; return the buckets of all."""
        if not self.schema.partition_by:
            return []
        keys = read_keys(as_arrow(data, self.schema), self.schema)
        routes = {target.partition_key: target for target in route(self.schema, keys, 1)}
        found = [self._lead_key(target, create=True).key.partition for target in routes.values()]
        return [BucketKey(p, number) for p in found for number in range(self.buckets)]

    def delete(
        self,
        keys: Data,
        *,
        columns: Sequence[str] | None = None,
        owner: str = "",
        token: Token | None = None,
    ) -> RemotePutResult:
        """Clear these columns (None: all) of the keys; a row with none left is gone."""
        return self.put(
            as_deletes(keys, self.schema),
            columns=columns,
            operation_column=OPERATION,
            owner=owner,
            token=token,
        )

    def undo(
        self, debtor: str, columns: Sequence[str], offsets: Mapping[BucketKey, int]
    ) -> dict[BucketKey, PutResult]:
        """Bring an owner's changes of these columns back; for tables without column locks."""
        ids = [column.id for column in self.schema.values(columns)]
        fields = {"debtor": debtor, "columns": ids}
        rows = {key: [-1, offset] for key, offset in offsets.items()}
        answers, _ = self.call("undo", fields, rows, answer="results")
        return {key: to_result(answer) for key, answer in answers.items()}

    # --- Reading --------------------------------------------------------------------------------

    def lookup(
        self, keys: Data, columns: Sequence[str] | None = None, *, isolation: str = LATEST
    ) -> pa.Table:
        """Return the keys and their values, in the order asked; nulls where absent.

        `isolation`: "latest" shows all that was written; "committed" masks what a column lock's
        holder has not committed yet.
        """
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
            return self.lookup(keys, columns, isolation=isolation)
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
            opening = snapshot_rows(self._access.storage(), table, chosen, isolation, lease)
            wanted = chosen_buckets(known, buckets)
            return TableScan(wanted, row_schema(table, chosen), opening, limit=limit)
        wanted = chosen_buckets(self.bucket_keys(), buckets)
        if source is ScanSource.LOG:
            if columns is not None:
                raise InvalidInput("change records have the columns that changed: leave `columns`")
            offsets = dict(from_offsets or {})

            def changes(key: BucketKey, most: int | None) -> LogRows:
                changelog = self.changelog(key, offsets.get(key, 0), isolation=isolation)
                return LogRows(changelog, most)

            return TableScan(wanted, log_schema(table), changes, limit=limit)
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

    # --- Schema and partitions ------------------------------------------------------------------

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
        """Alter the table as it is now; if somebody else did so meanwhile, look again."""
        while True:
            self.refresh()
            definition = evolved(self._table.table.definition, change(self.schema))
            try:
                altered = self._access.coordinator.alter_table(self._table.table, definition)
            except TableAltered:
                continue
            self._table = ClusterTable(altered)
            return

    def partitions(self) -> pa.Table:
        """Return the values of the partition columns, one row per partition."""
        keys = self._read_partitions() if self.schema.partition_by else ()
        return partition_rows(self.schema, keys)

    def create_partition(self, **values: Any) -> int:
        """Create a partition, unless there is one of these values; return its id."""
        key = partition_key(self.schema, values)
        partition = self._access.coordinator.create_partition(self._table.table, key)
        self._partitions[key] = partition
        return partition

    def drop_partition(self, **values: Any) -> None:
        """Drop a partition and its data. One of the same values later is a new one."""
        key = partition_key(self.schema, values)
        if self._access.coordinator.drop_partition(self._table.table, key) is None:
            raise InvalidInput(f"there is no partition {values}")
        self._partitions.pop(key, None)

    def bucket_keys(self) -> list[BucketKey]:
        """Return all buckets of all partitions, as they are now."""
        partitions = self._read_partitions()
        return [
            BucketKey(partitions[key], number)
            for key in sorted(partitions)
            for number in range(self.buckets)
        ]

    def _read_partitions(self) -> dict[bytes, int]:
        if self.schema.partition_by:
            self._partitions = self._access.coordinator.partitions(self._table.table)
        return self._partitions

    # --- Calls ----------------------------------------------------------------------------------

    def call(
        self,
        action: str,
        fields: Mapping[str, Any],
        rows: Mapping[BucketKey, Sequence[int]],
        *,
        answer: str,
        patient: bool = True,
        check_partitions: bool = False,
    ) -> tuple[dict[BucketKey, Any], frozenset[str]]:
        """Call an action for many buckets, once per server.

        Returns what `answer` says of each bucket, and the sessions of the servers that answered.
        `check_partitions`: PartitionGone for a bucket that nobody leads because it is no more.
        """
        table = self._table
        sessions: set[str] = set()

        def send(address: str, keys: Sequence[LeadKey], timeout_s: float) -> dict[LeadKey, Any]:
            buckets = [[*key.key, *rows[key.key]] for key in keys]
            body = self._request(table, fields, buckets)
            reply = wire.decode(
                self._access.calls.connections.action(address, action, body, timeout_s)
            )
            sessions.add(reply.get("session", str))
            return dict(zip(keys, reply.get(answer, list), strict=True))

        keys = [LeadKey(self.table_id, key) for key in rows]
        results = self._access.calls.scatter(
            keys,
            table.buckets,
            send,
            patient=patient,
            check_moved=self._check_partitions if check_partitions else None,
        )
        return {key.key: result for key, result in results.items()}, frozenset(sessions)

    def _request(
        self, table: ClusterTable, fields: Mapping[str, Any], buckets: list[list[int]]
    ) -> bytes:
        return wire.encode(self._fields(table, fields, buckets))

    def _fields(
        self, table: ClusterTable, fields: Mapping[str, Any], buckets: list[list[int]]
    ) -> dict[str, Any]:
        return {
            "table": table.table_id,
            "schema_version": table.schema.version,
            "buckets": buckets,
            **fields,
        }

    def _check_partitions(self, keys: Sequence[LeadKey]) -> None:
        """Raise PartitionGone if buckets have no leader because they are no more."""
        if self.schema.partition_by:
            there = set(self._read_partitions().values())
            gone = sorted({key.key.partition for key in keys} - there)
            if gone:
                raise PartitionGone(
                    f"the partitions with ids {gone} of table {self.name} were dropped meanwhile"
                )

    def _lead_key(self, target: Route, *, create: bool) -> LeadKey:
        found = self._find_lead_key(target)
        if found is not None:
            return found
        if not create:
            raise NotFenced(
                "the batch has rows of a partition that does not exist; its writer creates it first"
            )
        key = target.partition_key
        partition = self._access.coordinator.create_partition(self._table.table, key)
        self._partitions[key] = partition
        return LeadKey(self.table_id, BucketKey(partition, target.bucket))

    def _find_lead_key(self, target: Route) -> LeadKey | None:
        if target.partition_key not in self._partitions:
            self._read_partitions()
        partition = self._partitions.get(target.partition_key)
        if partition is None:
            return None
        return LeadKey(self.table_id, BucketKey(partition, target.bucket))


def _of_writer(writer: Writer | None) -> dict[str, Any]:
    return {} if writer is None else {"writer": writer.owner, "epoch": writer.epoch}


def _term(terms: Mapping[BucketKey, int] | None, key: BucketKey) -> int:
    """Return the term of the leader that fenced the writer; -1 for writers without a lock."""
    if terms is None:
        return -1
    if key not in terms:
        raise NotFenced(
            f"bucket {key.partition}/{key.number} was not fenced: its partition is new; its "
            "writer creates and fences it first"
        )
    return terms[key]


def to_result(row: Sequence[int]) -> PutResult:
    """Return a bucket's answer to a put or undo."""
    base, end, repeated = row
    return PutResult(base_offset=base, end_offset=end, repeated=bool(repeated))


def _mode(mode: AggMode) -> AggMode:
    try:
        return AggMode(mode)
    except ValueError:
        names = ", ".join(f"{known.name} = {known.value}" for known in AggMode)
        raise InvalidInput(f"unknown agg mode {mode!r}; use one of {names}") from None


def _isolation(isolation: str) -> str:
    if isolation not in (COMMITTED, LATEST):
        raise InvalidInput(f"isolation is 'committed' or 'latest', not {isolation!r}")
    return isolation
