"""The writer's boundary over Flight: see `recovery.access`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import pyarrow as pa

from locks import BucketKey, Coordinator, Table
from merge_engine import PutResult, Schema, UndoRange, UndoResult
from recovery.access import Answers, Grant, Terms, Tried
from recovery.guard import Writer
from recovery.parts import Part, PartCutter, PartSizes
from recovery.redo import Promise, PromiseWriter, folded_rows
from recovery.rows import Rows
from server import wire
from server.outgoing import as_one_table
from server.remote_table import RemoteTable
from server.uploads import LargePut

_DEFAULT_SIZES = PartSizes()
_NOTHING: Answers[PutResult] = Answers({}, frozenset())


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
        self.sizes = PartSizes()

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
        return Answers(*self._table.call("fence", fields, rows, answer="terms", seen=self._learn))

    def _learn(self, answer: wire.Fields) -> None:
        """Keep what we send within the limits of all servers that we have met."""
        limits = answer.get("put_max_rows", int), answer.get("put_max_bytes", int)
        self.sizes = self.sizes.within(*limits)

    def undo(
        self,
        writer: Writer,
        terms: Terms,
        debtor: str,
        columns: Iterable[int],
        ranges: Mapping[BucketKey, UndoRange],
    ) -> Answers[UndoResult]:
        fields = {**_of(writer), "debtor": debtor, "columns": sorted(columns)}
        return Answers(*self._table.undo_some(fields, ranges, terms))

    def end_recovery(self, writer: Writer, terms: Terms) -> Answers[int]:
        return self._ends("end_recovery", _of(writer), terms)

    def put(self, grant: Grant, rows: Rows) -> Answers[PutResult]:
        return put(self._table, grant, rows, self.sizes)

    def try_put(self, grant: Grant, rows: Rows, promise: PromiseWriter) -> Tried:
        return try_put(self._table, grant, rows, promise, self.sizes)

    def keep(self, grant: Grant, promise: Promise, rows: Rows) -> Answers[PutResult]:
        parts = promise.parts(rows.schema or self.schema, self._table.partition_ids())
        if not promise.in_parts:
            return _put_parts(self._table, grant, rows, list(parts))
        large = self._table.large_put(grant, rows, self.sizes.chunk_bytes, resumable=True)
        with closing(large):
            large.add(parts)
            return large.put()

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
    table: RemoteTable,
    grant: Grant,
    rows: Rows,
    sizes: PartSizes = _DEFAULT_SIZES,
) -> Answers[PutResult]:
    """Put rows under a grant; for whoever has the table, such as a Spark task.

    A few rows are one call per server, and all its buckets try the merge before the first one
    writes. More go in parts. Pieces are asked for once.
    """
    pieces = rows.pieces(rows.schema or table.schema)
    first: list[pa.Table] = []
    for piece in pieces:
        first.append(piece)
        if not _is_small(first, sizes):
            return _put_large(table, grant, rows, chain(first, pieces), sizes)
    if not first:
        return _NOTHING
    return _put_small(table, grant, replace(rows, data=pa.concat_tables(first)))


def try_put(
    table: RemoteTable,
    grant: Grant,
    rows: Rows,
    promise: PromiseWriter,
    sizes: PartSizes = _DEFAULT_SIZES,
) -> Tried:
    """Try rows under a grant, and write them down to be promised; few or many as for `put`."""
    folded = folded_rows(rows, rows.schema or table.schema)
    if folded is None:
        return _Tried(lambda: _NOTHING)
    parts = _written_down(folded, cut(table, grant, folded, sizes), promise)
    few: list[Part] = []
    for part in parts:
        few.append(part)
        if not _is_small([one.rows for one in few], sizes):
            promise.in_parts = True
            large = table.large_put(grant, folded, sizes.chunk_bytes, resumable=True)
            return _try_large(large, chain(few, parts))
    _put_parts(table, grant, folded, few, try_only=True)
    return _Tried(lambda: _put_parts(table, grant, folded, few))


def try_in_parts(
    table: RemoteTable, grant: Grant, rows: Rows, promise: PromiseWriter, sizes: PartSizes
) -> LargePut | None:
    """Do the same in parts, however few they are; None if there are no rows."""
    folded = folded_rows(rows, rows.schema or table.schema)
    if folded is None:
        return None
    parts = _written_down(folded, cut(table, grant, folded, sizes), promise)
    large = table.large_put(grant, folded, sizes.chunk_bytes, resumable=True)
    return _try_large(large, parts)


def _try_large(large: LargePut, parts: Iterable[Part]) -> LargePut:
    with ExitStack() as unless_tried:
        unless_tried.enter_context(closing(large))
        large.add(parts)
        large.try_all()
        unless_tried.pop_all()
    return large


def _written_down(rows: Rows, parts: Iterable[Part], promise: PromiseWriter) -> Iterator[Part]:
    """Yield the parts of folded rows, and write them down on the way."""
    promise.begin(rows)
    for part in parts:
        promise.add(part)
        yield part


def cut(table: RemoteTable, grant: Grant, rows: Rows, sizes: PartSizes) -> Iterator[Part]:
    """Yield rows in parts, each for one bucket that the grant is for."""
    assert rows.schema is not None
    table.partition_ids()  # One may have been dropped and made anew, under another id.
    find = partial(table.find_fenced, grant=grant)
    cutter = PartCutter(rows.schema, table.buckets, find, sizes)
    for piece in rows.pieces(rows.schema):
        yield from cutter.add(as_one_table(piece))
    yield from cutter.rest()


@dataclass(frozen=True)
class _Tried:
    """A batch that was tried and is small: a `Tried`."""

    put: Callable[[], Answers[PutResult]]

    def close(self) -> None:
        """There is nothing to let go of."""


def _put_parts(
    table: RemoteTable,
    grant: Grant,
    rows: Rows,
    parts: Sequence[Part],
    *,
    try_only: bool = False,
) -> Answers[PutResult]:
    """Put all parts at once."""
    if not parts:
        return _NOTHING
    whole = replace(rows, data=pa.Table.from_batches([part.rows for part in parts]))
    return _put_small(table, grant, whole, try_only=try_only)


def _is_small(pieces: Sequence[pa.Table | pa.RecordBatch], sizes: PartSizes) -> bool:
    rows, size = sum(one.num_rows for one in pieces), sum(one.nbytes for one in pieces)
    return bool(rows <= sizes.call_rows and size <= sizes.chunk_bytes)


def _put_large(
    table: RemoteTable,
    grant: Grant,
    rows: Rows,
    pieces: Iterator[pa.Table],
    sizes: PartSizes,
) -> Answers[PutResult]:
    rows = replace(rows, data=lambda: pieces, schema=rows.schema or table.schema)
    with closing(table.large_put(grant, rows, sizes.chunk_bytes)) as large:
        large.add(cut(table, grant, rows, sizes))
        return large.put()


def _put_small(
    table: RemoteTable, grant: Grant, rows: Rows, *, try_only: bool = False
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
