"""The writer's boundary over Flight: see `recovery.access`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

import pyarrow as pa

from locks import BucketKey, Coordinator, Table
from merge_engine import BatchTooLarge, PutResult, Schema
from merge_engine.options import MEBIBYTE
from recovery.access import Answers, Grant, Rows, Terms
from recovery.guard import Writer
from recovery.parts import PartCutter, PartSizes
from server.outgoing import as_one_table
from server.remote_table import RemoteTable, to_result

# Up to so many rows and bytes go in one call per server.
_SMALL_ROWS = 100_000
_SMALL_BYTES = 16 * MEBIBYTE


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
        found: dict[BucketKey, None] = {}
        for piece in rows.pieces(rows.schema or self.schema):
            found.update(dict.fromkeys(self._table.create_partitions(piece, schema=rows.schema)))
        return list(found)

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
    """Put rows under a grant; for whoever has the table, such as a Spark task.

    A few rows are one call per server: all its buckets try the merge before the first one writes.
    More go in parts.
    """
    pieces = rows.pieces(rows.schema or table.schema)
    first, is_all = _first_rows(pieces)
    if not first:
        return Answers({}, frozenset())
    if is_all:
        whole = replace(rows, data=pa.concat_tables(first))
        try:
            return _put_small(table, grant, whole, try_only=try_only)
        except BatchTooLarge:  # The server takes less than we think that it does.
            pieces = iter(())
    sizes = PartSizes()
    while True:
        try:
            return _put_large(table, grant, rows, chain(first, pieces), sizes, try_only=try_only)
        except BatchTooLarge:
            if sizes.rows == 1:
                raise
            # Nothing was written yet: parts are looked at when they arrive.
            sizes, first = sizes.smaller(), []
            pieces = rows.pieces(rows.schema or table.schema)


def _first_rows(pieces: Iterator[pa.Table]) -> tuple[list[pa.Table], bool]:
    """Return as much as one call takes, and whether that is all."""
    first: list[pa.Table] = []
    for piece in pieces:
        first.append(piece)
        if (
            sum(one.num_rows for one in first) > _SMALL_ROWS
            or sum(one.nbytes for one in first) > _SMALL_BYTES
        ):
            return first, False
    return first, True


def _put_large(
    table: RemoteTable,
    grant: Grant,
    rows: Rows,
    pieces: Iterable[pa.Table],
    sizes: PartSizes,
    *,
    try_only: bool,
) -> Answers[PutResult]:
    schema = rows.schema or table.schema
    cutter = PartCutter(schema, table.buckets, lambda to: table.find_fenced(to, grant), sizes)
    large = table.large_put(grant, replace(rows, schema=schema), sizes.chunk_bytes)
    with closing(large):
        for piece in pieces:
            large.add(cutter.add(as_one_table(piece)))
        large.add(cutter.rest())
        return large.run(try_only=try_only)


def _put_small(
    table: RemoteTable, grant: Grant, rows: Rows, *, try_only: bool
) -> Answers[PutResult]:
    assert not callable(rows.data)
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
