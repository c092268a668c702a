"""The writer's boundary over Flight: see `recovery.writer.access`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Protocol

import pyarrow as pa

from foundation.ids import BucketId
from locks.catalog.definitions import CatalogTable
from locks.coordinator import Coordinator
from merge_engine.bucket.results import BucketResult, UndoResult
from merge_engine.schema.schema import Schema
from recovery.leader.fenced_writers import Writer
from recovery.writer.access import Answers, DebtUndo, GrantedRows, Terms, Tried
from recovery.writer.parts import Part, PartCutter, PartSizes
from recovery.writer.redo import Promise, PromiseWriter, folded_rows
from server.client.outgoing import as_one_table
from server.client.puts import NOTHING, put_granted
from server.client.remote_table import RemoteTable
from server.client.table_caller import together
from server.client.undoing import undo_some
from server.client.uploads import LargePut
from server.protocol.writers import EndRecovery, Fence, Seal


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
    """A table of a cluster, as its writer reaches it, or who puts for it; a `TableAccess`.

    `sizes`: of what is sent in one call; kept within the limits of the servers that were met.
    """

    def __init__(
        self, cluster: Connection, table: RemoteTable, *, sizes: PartSizes | None = None
    ) -> None:
        self._cluster = cluster
        self._table = table
        self._caller = table.caller
        self._owns_cluster = False
        self.sizes = sizes or PartSizes()

    @property
    def coordinator(self) -> Coordinator:
        return self._cluster.coordinator

    @property
    def table(self) -> CatalogTable:
        return self._caller.table.table

    @property
    def schema(self) -> Schema:
        return self._caller.schema

    def refresh(self) -> None:
        self._caller.refresh()

    @property
    def remote(self) -> RemoteTable:
        """The table itself."""
        return self._table

    def bucket_ids(self) -> list[BucketId]:
        return self._caller.bucket_ids(None)

    def partitions(self) -> Mapping[bytes, int]:
        return dict(self._caller.read_partitions())

    def create_partition(self, key: bytes) -> int:
        return self._caller.create_partition(key)

    # --- The writer protocol --------------------------------------------------------------------

    def fence(
        self, writer: Writer, columns: Iterable[int], keys: Sequence[BucketId]
    ) -> Answers[int]:
        call = Fence(
            table_id=self._caller.table.table_id,
            schema_version=self.schema.version,
            buckets=tuple(keys),
            writer=writer,
            columns=tuple(sorted(columns)),
        )
        # A fence waits for a leader: it is how the writer gets to know the new one.
        shares = self._caller.ask(call)
        for _, answer in shares:
            self.sizes = self.sizes.within(answer.put_max_rows, answer.put_max_bytes)
        return together(shares)

    def undo(self, wanted: DebtUndo) -> Answers[UndoResult]:
        return undo_some(
            self._caller,
            wanted.debtor,
            wanted.columns,
            wanted.ranges,
            writer=wanted.writer,
            terms=wanted.terms,
        )

    def end_recovery(self, writer: Writer, terms: Terms) -> Answers[int]:
        call = EndRecovery(
            table_id=self._caller.table.table_id,
            schema_version=self.schema.version,
            buckets=terms,
            writer=writer,
        )
        return self._caller.call(call, patient=False)

    def seal(self, writer: Writer, terms: Terms, batch: int) -> Answers[int]:
        call = Seal(
            table_id=self._caller.table.table_id,
            schema_version=self.schema.version,
            buckets=terms,
            writer=writer,
            batch=batch,
        )
        return self._caller.call(call, patient=False)

    def shrink_parts(self) -> bool:
        smaller = self.sizes.smaller()
        self.sizes = smaller or self.sizes
        return smaller is not None

    def reconnect(self) -> "RemoteAccess":
        cluster = self._cluster.again()
        access = RemoteAccess(cluster, cluster.table_by_id(self._table.table_id), sizes=self.sizes)
        self.close()
        access._owns_cluster = True
        return access

    def close(self) -> None:
        """End a session that was opened here; the first one is whoever's that made it."""
        if self._owns_cluster:
            self._cluster.close()

    # --- Puts -----------------------------------------------------------------------------------

    def put(self, granted: GrantedRows) -> Answers[BucketResult]:
        """Put the rows; pieces of them are asked for once.

        A few rows are one call per server, and all its buckets try the merge before the first one
        writes. More go in parts.
        """
        schema = granted.rows.schema or self.schema
        granted = replace(granted, rows=replace(granted.rows, schema=schema))
        pieces = granted.rows.pieces(schema)
        first: list[pa.Table] = []
        for piece in pieces:
            first.append(piece)
            if not self._is_small(first):
                return self._put_large(granted, chain(first, pieces))
        if not first:
            return NOTHING
        return put_granted(self._caller, granted.of(pa.concat_tables(first)))

    def _put_large(self, granted: GrantedRows, pieces: Iterator[pa.Table]) -> Answers[BucketResult]:
        whole = granted.of(lambda: pieces)
        with closing(self._large_put(whole)) as large:
            large.add(self._cut(whole))
            return large.put()

    def try_rows(self, granted: GrantedRows) -> None:
        """Try the rows where they would be put; few or many as for `put`."""
        schema = granted.rows.schema or self.schema
        granted = replace(granted, rows=replace(granted.rows, schema=schema))
        parts = self._cut(granted)
        few: list[Part] = []
        for part in parts:
            few.append(part)
            if not self._is_small([one.rows for one in few]):
                with closing(self._large_put(granted)) as large:
                    large.add(chain(few, parts))
                    large.try_all()
                return
        self._put_parts(granted, few, try_only=True)

    def try_put(self, granted: GrantedRows, promise: PromiseWriter) -> Tried:
        """Try the rows, and write them down to be promised; few or many as for `put`."""
        folded = self._folded(granted)
        if folded is None:
            return _Tried(lambda: NOTHING)
        parts = self._written_down(folded, promise)
        few: list[Part] = []
        for part in parts:
            few.append(part)
            if not self._is_small([one.rows for one in few]):
                promise.in_parts = True
                return self._try_large(folded, chain(few, parts))
        self._put_parts(folded, few, try_only=True)
        return _Tried(lambda: self._put_parts(folded, few))

    def try_in_parts(self, granted: GrantedRows, promise: PromiseWriter) -> LargePut | None:
        """Do the same in parts, however few they are; None if there are no rows."""
        folded = self._folded(granted)
        if folded is None:
            return None
        return self._try_large(folded, self._written_down(folded, promise))

    def keep(self, granted: GrantedRows, promise: Promise) -> Answers[BucketResult]:
        schema = granted.rows.schema or self.schema
        parts = promise.parts(schema, self._caller.partition_ids())
        if not promise.in_parts:
            return self._put_parts(granted, list(parts))
        with closing(self._large_put(granted, resumable=True)) as large:
            large.add(parts)
            return large.put()

    def _folded(self, granted: GrantedRows) -> GrantedRows | None:
        rows = folded_rows(granted.rows, granted.rows.schema or self.schema)
        return None if rows is None else replace(granted, rows=rows)

    def _written_down(self, granted: GrantedRows, promise: PromiseWriter) -> Iterator[Part]:
        """Yield the parts of folded rows, and write them down on the way."""
        promise.begin(granted.rows)
        for part in self._cut(granted):
            promise.add(part)
            yield part

    def _cut(self, granted: GrantedRows) -> Iterator[Part]:
        """Yield rows in parts, each for one bucket that the grant is for."""
        rows = granted.rows
        assert rows.schema is not None
        # One may have been dropped and made anew, by another id.
        there = self._caller.read_partitions()
        find = partial(self._caller.find_fenced, grant=granted.grant)
        cutter = PartCutter(rows.schema, self._caller.table.buckets, find, self.sizes)
        for piece in rows.without_vain_deletes(rows.schema, there).pieces(rows.schema):
            yield from cutter.add(as_one_table(piece))
        yield from cutter.rest()

    def _try_large(self, granted: GrantedRows, parts: Iterable[Part]) -> LargePut:
        large = self._large_put(granted, resumable=True)
        with ExitStack() as unless_tried:
            unless_tried.enter_context(closing(large))
            large.add(parts)
            large.try_all()
            unless_tried.pop_all()
        return large

    def _large_put(self, granted: GrantedRows, *, resumable: bool = False) -> LargePut:
        chunk_bytes = self.sizes.chunk_bytes
        return LargePut(self._caller, granted, resumable=resumable, chunk_bytes=chunk_bytes)

    def _put_parts(
        self, granted: GrantedRows, parts: Sequence[Part], *, try_only: bool = False
    ) -> Answers[BucketResult]:
        """Put all parts at once."""
        if not parts:
            return NOTHING
        data = pa.Table.from_batches([part.rows for part in parts])
        return put_granted(self._caller, granted.of(data), try_only=try_only)

    def _is_small(self, pieces: Sequence[pa.Table | pa.RecordBatch]) -> bool:
        rows, size = sum(one.num_rows for one in pieces), sum(one.nbytes for one in pieces)
        return bool(rows <= self.sizes.call_rows and size <= self.sizes.chunk_bytes)


@dataclass(frozen=True)
class _Tried:
    """A batch that was tried and is small: a `Tried`."""

    put: Callable[[], Answers[BucketResult]]

    def close(self) -> None:
        """There is nothing to let go of."""
