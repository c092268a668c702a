"""The writer's boundary over Flight: see `recovery.access`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from locks import BucketKey, Coordinator, Table
from merge_engine import PutResult, Schema
from recovery.access import Answers, Grant, Rows, Terms
from recovery.guard import Writer
from server.remote_table import RemoteTable, to_result


class Connection(Protocol):
    """A connection to a cluster, and how to get another one."""

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, over this connection's session."""

    def table_by_id(self, table_id: int) -> RemoteTable:
        """Return the table of this id."""

    def again(self) -> "Connection":
        """Return another connection, in another session."""

    def close(self) -> None:
        """End the session."""


class RemoteAccess:
    """A table of a cluster, as its writer reaches it; a `TableAccess`."""

    def __init__(self, cluster: Connection, table: RemoteTable) -> None:
        self._cluster = cluster
        self._table = table
        self._owns_cluster = False

    @property
    def coordinator(self) -> Coordinator:
        return self._cluster.coordinator

    @property
    def table(self) -> Table:
        return self._table.definition.table

    @property
    def schema(self) -> Schema:
        return self._table.schema

    def refresh(self) -> None:
        self._table.refresh()

    @property
    def remote(self) -> RemoteTable:
        """The table itself."""
        return self._table

    def bucket_keys(self) -> list[BucketKey]:
        return self._table.bucket_keys()

    def create_partitions(self, rows: Rows) -> list[BucketKey]:
        return self._table.create_partitions(rows.data, schema=rows.schema)

    def fence(
        self, writer: Writer, columns: Iterable[int], keys: Sequence[BucketKey]
    ) -> Answers[int]:
        fields = {**_of(writer), "columns": sorted(columns)}
        rows: dict[BucketKey, list[int]] = {key: [] for key in keys}
        # A fence waits for a leader: it is how the writer gets to know the new one.
        return Answers(*self._table.call("fence", fields, rows, answer="terms"))

    def undo(
        self,
        writer: Writer,
        terms: Terms,
        debtor: str,
        columns: Iterable[int],
        offsets: Mapping[BucketKey, int],
    ) -> Answers[PutResult]:
        fields = {**_of(writer), "debtor": debtor, "columns": sorted(columns)}
        rows = {key: [terms[key], offset] for key, offset in offsets.items()}
        results, sessions = self._table.call("undo", fields, rows, answer="results", patient=False)
        return Answers({key: to_result(row) for key, row in results.items()}, sessions)

    def end_recovery(self, writer: Writer, terms: Terms) -> Answers[int]:
        return self._ends("end_recovery", _of(writer), terms)

    def put(self, grant: Grant, rows: Rows, *, try_only: bool = False) -> Answers[PutResult]:
        return put(self._table, grant, rows, try_only=try_only)

    def seal(self, writer: Writer, terms: Terms, batch: int) -> Answers[int]:
        return self._ends("seal", {**_of(writer), "batch": batch}, terms)

    def _ends(self, action: str, fields: Mapping[str, Any], terms: Terms) -> Answers[int]:
        rows = {key: [term] for key, term in terms.items()}
        return Answers(*self._table.call(action, fields, rows, answer="ends", patient=False))

    def reconnect(self) -> "RemoteAccess":
        cluster = self._cluster.again()
        access = RemoteAccess(cluster, cluster.table_by_id(self._table.table_id))
        self.close()
        access._owns_cluster = True
        return access

    def close(self) -> None:
        """End a session that was opened here; the first one is whoever's that made it."""
        if self._owns_cluster:
            self._cluster.close()


def put(
    table: RemoteTable, grant: Grant, rows: Rows, *, try_only: bool = False
) -> Answers[PutResult]:
    """Put rows under a grant; for whoever has the table, such as a Spark task."""
    result = table.put(
        rows.data,
        columns=rows.columns,
        mode=rows.mode,
        operation_column=rows.operation_column,
        owner=grant.owner,
        token=grant.token,
        writer=grant.writer,
        terms=grant.terms,
        try_only=try_only,
        schema=rows.schema,
    )
    return Answers(result.buckets, result.sessions)


def _of(writer: Writer) -> dict[str, Any]:
    return {"writer": writer.owner, "epoch": writer.epoch}
