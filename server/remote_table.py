"""A table of a cluster, with the calls of the embedded one; its buckets are on tablet servers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from locks import BucketKey, LeadKey, TableAltered
from merge_engine import (
    AggFunction,
    AggMode,
    InvalidInput,
    PutResult,
    Schema,
    Token,
    UndoRange,
    UndoResult,
)
from merge_engine.batch import read_keys
from merge_engine.local import OPERATION
from merge_engine.routing import Route, partition_key, partition_rows, route
from merge_engine.table import Data, as_arrow, as_deletes
from recovery.access import Grant
from recovery.errors import NotFenced
from recovery.guard import Writer
from recovery.rows import Rows
from recovery.writer import TableWriter
from server.definitions import ClusterTable, evolved
from server.outgoing import as_one_table, to_messages
from server.table_reads import TableReads
from server.uploads import LargePut


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


_Results: TypeAlias = Mapping[LeadKey, PutResult]


@dataclass(frozen=True)
class _Part:
    """A put's rows for one bucket."""

    batches: Sequence[pa.RecordBatch]
    term: int


class RemoteTable(TableReads):
    """A table on servers. Safe for threads; made by `Cluster.table` and `Cluster.create_table`.

    A put is one atomic commit per bucket, and all buckets of one server try the merge before the
    first of them writes. Calls find the leaders by themselves and wait for one that moves.
    """

    def writer(self, *, owner_id: str, columns: Sequence[str], **settings: Any) -> TableWriter:
        """Return a writer that holds a lock on these columns and writes each batch exactly once.

        Start it by `with`; `settings` are those of `TableWriter`: ttl_ms, handover, deadline_s.
        """
        return self._access.writer(self, owner_id=owner_id, columns=columns, **settings)

    def close(self) -> None:
        """End the connection to the cluster: for a table that was unpickled with its own."""
        self._access.close()

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
        schema: Schema | None = None,
    ) -> RemotePutResult:
        """Merge a batch; arguments as for the embedded table's `put`.

        Without a token, a connection that breaks at the wrong moment is an UnknownOutcome; with
        one, the same put is sent again and counts once. `writer` and `terms`: of a column lock's
        holder, for tables that have column locks; then a leader that moved is not waited for.
        `try_only`: write nothing, but raise what a put would raise now. `schema`: a former one of
        the table, whose names the batch has.
        """
        table = self._table
        schema = schema or table.schema
        nothing = RemotePutResult(rows=0, buckets={}, sessions=frozenset())
        if isinstance(data, Sequence) and not data:
            return nothing
        if schema.partition_by:  # One may have been dropped and made anew, under another id.
            self._read_partitions()
        arrow = as_one_table(as_arrow(data, schema))
        routes = route(schema, read_keys(arrow, schema), table.buckets)
        leads = [self._lead_key(target, create=writer is None) for target in routes]
        parts = {
            key: _Part(to_messages(arrow, target, whole=len(routes) == 1), _term(terms, key.key))
            for key, target in zip(leads, routes, strict=True)
        }
        request: dict[str, Any] = {
            "columns": None if columns is None else list(columns),
            "mode": int(_mode(mode)),
            "operation_column": operation_column,
            "owner": owner,
            "token": None if token is None else list(token),
            "try_only": try_only,
            "schema_version": schema.version,
            **_of_writer(writer),
        }
        if not parts:  # Nobody to judge an empty batch but ourselves.
            return nothing
        sessions: set[str] = set()

        def send(address: str, keys: Sequence[LeadKey], timeout_s: float) -> _Results:
            buckets = [[*key.key, parts[key].term] for key in keys]
            batches = [(at, batch) for at, key in enumerate(keys) for batch in parts[key].batches]
            announced = sum(batch.nbytes for _, batch in batches)
            command = self._request(table, {**request, "bytes": announced}, buckets)
            put = self._access.calls.connections.put
            answer = put(address, command, arrow.schema, batches, timeout_s)
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

    def large_put(
        self, grant: Grant, rows: Rows, chunk_bytes: int, *, resumable: bool = False
    ) -> LargePut:
        """Begin a put of any size, for the holder of a column lock; `rows` says how to read it."""
        return LargePut(
            self._access.calls,
            self._table,
            grant,
            rows,
            resumable=resumable,
            chunk_bytes=chunk_bytes,
        )

    def find_fenced(self, target: Route, grant: Grant) -> BucketKey:
        """Return the bucket of a route; NotFenced if the grant is not for it."""
        key = self._lead_key(target, create=False).key
        _term(grant.terms, key)
        return key

    def create_partitions(self, data: Data, schema: Schema | None = None) -> list[BucketKey]:
        """Create the partitions of these rows that do not exist; return the buckets of all."""
        schema = schema or self.schema
        if not schema.partition_by:
            return []
        keys = read_keys(as_arrow(data, schema), schema)
        routes = {target.partition_key: target for target in route(schema, keys, 1)}
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
        """Bring an owner's changes of these columns back; for tables without column locks.

        Those that were written before it. What the owner writes meanwhile stands, unless it is to
        keys that are brought back; let it pause all the same, for committed changelogs may leave
        such writes out.
        """
        ids = [column.id for column in self.schema.values(columns)]
        fields = {"debtor": debtor, "columns": ids}
        ranges = {key: UndoRange(offset) for key, offset in offsets.items()}
        results: dict[BucketKey, UndoResult] = {}
        while ranges:
            answers, _ = self.undo_some(fields, ranges)
            for key, answer in answers.items():
                results[key] = results[key].then(answer) if key in results else answer
            ranges = {key: one.rest for key, one in answers.items() if one.rest is not None}
        return dict(results)

    def undo_some(
        self,
        fields: Mapping[str, Any],
        ranges: Mapping[BucketKey, UndoRange],
        terms: Mapping[BucketKey, int] | None = None,
    ) -> tuple[dict[BucketKey, UndoResult], frozenset[str]]:
        """Ask the servers once to go on with an undo; with whose sessions answered.

        `terms`: of a column lock's holder; then a leader that moved is not waited for.
        """
        rows = {
            key: [_term(terms, key), wanted.from_offset, _or_none(wanted.until)]
            for key, wanted in ranges.items()
        }
        answers, sessions = self.call("undo", fields, rows, answer="results", patient=terms is None)
        results = {key: _to_undo_result(row, ranges[key]) for key, row in answers.items()}
        return results, sessions

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

    def drop_column(self, name: str, *, force: bool = False) -> None:
        """Drop a value column, with its values; refused while a live lock pins it, unless forced.

        Whoever writes it is told so with its next batch.
        """
        self._evolve(lambda schema: schema.drop_column(name), force=force)

    def rename_column(self, old: str, new: str) -> None:
        """Give a column another name; its values stay."""
        self._evolve(lambda schema: schema.rename_column(old, new))

    def _evolve(self, change: Callable[[Schema], Schema], *, force: bool = False) -> None:
        """Alter the table as it is now; if somebody else did so meanwhile, look again."""
        while True:
            self.refresh()
            definition = evolved(self._table.table.definition, change(self.schema))
            try:
                altered = self._access.coordinator.alter_table(
                    self._table.table, definition, force=force
                )
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


def _to_undo_result(row: Sequence[int], wanted: UndoRange) -> UndoResult:
    base, end, rows, until = row
    rest = None if until < 0 else UndoRange(wanted.from_offset, until)
    return UndoResult(base_offset=base, end_offset=end, rows=rows, rest=rest)


def _or_none(offset: int | None) -> int:
    """Return an offset as the calls carry it: -1 where there is none."""
    return -1 if offset is None else offset


def _mode(mode: AggMode) -> AggMode:
    try:
        return AggMode(mode)
    except ValueError:
        names = ", ".join(f"{known.name} = {known.value}" for known in AggMode)
        raise InvalidInput(f"unknown agg mode {mode!r}; use one of {names}") from None
