"""The writer's boundary over buckets of this process: see `recovery.access`.

    leader = OneLeader(connect, "orders", logs, views)
    access = EmbeddedAccess(connect, "orders", leader)
    with TableWriter(access, "etl", ["revenue"]) as writer: ...

Whoever leads is asked anew for every call, server by server, as over a network.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, TypeAlias, TypeVar

import pyarrow as pa

from locks import BucketKey, CoordinationStore, Coordinator, SessionLost
from locks import Table as KnownTable
from merge_engine import (
    BucketOptions,
    Closed,
    PutResult,
    Schema,
    SchemaHistory,
    UndoRange,
    UndoResult,
)
from merge_engine.batch import read_batch, read_keys
from merge_engine.fold import Update, fold
from merge_engine.overlay import Overlay
from merge_engine.routing import Route, route
from recovery.access import Answers, Grant, Terms, Tried
from recovery.errors import NotFenced, NotLeader, TornPut
from recovery.guard import Writer
from recovery.led_bucket import LedBucket, LedUpdate, Overtaken, Put, put_led
from recovery.parts import Part, PartCutter, PartSizes
from recovery.redo import Promise, PromiseWriter, folded_rows
from recovery.rows import Rows

Connect = Callable[[], CoordinationStore]
Item = TypeVar("Item")
_Parts: TypeAlias = Mapping[BucketKey, Sequence[pa.RecordBatch]]
_NONE = -1  # The id of no partition.
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Leading:
    """A server that leads some of the buckets: its session, and those buckets."""

    session: str
    coordinator: Coordinator
    buckets: Mapping[BucketKey, LedBucket]


class Leaders(Protocol):
    """Finds who leads."""

    def leading(self, keys: Sequence[BucketKey]) -> Iterator[Leading]:
        """Yield the servers that lead these buckets; NotLeader if nobody leads one of them."""


class EmbeddedAccess:
    """A table whose buckets are in this process, as its writer reaches them; a `TableAccess`."""

    def __init__(
        self,
        connect: Connect,
        name: str,
        leaders: Leaders,
        *,
        options: BucketOptions | None = None,
        deadline_s: float = 30.0,
        table_id: int | None = None,
        sizes: PartSizes | None = None,
        undo_s: float = 1.0,
    ) -> None:
        """`table_id`: of the table that it was before, whatever has its name by now.

        `sizes`: of the parts that large batches are cut into. `undo_s`: about how long a call of
        `undo` goes on.
        """
        self._sizes = sizes or PartSizes()
        self._undo_s = undo_s
        self._connect = connect
        self._name = name
        self._leaders = leaders
        self._options = options or BucketOptions()
        self._deadline_s = deadline_s
        self._coordinator = Coordinator(connect(), deadline_s=deadline_s)
        by_id, by_name = self._coordinator.table_by_id, self._coordinator.table
        self._table = by_name(name) if table_id is None else by_id(table_id)
        self._history = history_of(self._table)

    @property
    def coordinator(self) -> Coordinator:
        return self._coordinator

    def refresh(self) -> None:
        table = self._coordinator.table_by_id(self._table.table_id)
        if table.version != self._table.version:
            self._table, self._history = table, history_of(table)

    @property
    def table(self) -> KnownTable:
        return self._table

    @property
    def schema(self) -> Schema:
        return self._history.current

    def bucket_keys(self) -> list[BucketKey]:
        partitions = self._partitions()
        return [key for partition in sorted(partitions.values()) for key in self._keys(partition)]

    def create_partitions(self, rows: Rows) -> list[BucketKey]:
        schema = rows.schema or self.schema
        if not schema.partition_by:
            return []
        needed = {
            target.partition_key
            for piece in rows.pieces(schema)
            for target in route(schema, read_keys(piece, schema), 1)
        }
        known = self._partitions()
        create = self._coordinator.create_partition
        return [
            key
            for partition_key in sorted(needed)
            for key in self._keys(known.get(partition_key) or create(self._table, partition_key))
        ]

    def fence(
        self, writer: Writer, columns: Iterable[int], keys: Sequence[BucketKey]
    ) -> Answers[int]:
        wanted = sorted(columns)

        def fence(leading: Leading) -> dict[BucketKey, int]:
            # Read since the call came in, and by the leader: it must not take our word for it.
            record = leading.coordinator.record(self._table, writer.owner)
            return {key: led.fence(writer, wanted, record) for key, led in leading.buckets.items()}

        return self._ask(keys, fence)

    def undo(
        self,
        writer: Writer,
        terms: Terms,
        debtor: str,
        columns: Iterable[int],
        ranges: Mapping[BucketKey, UndoRange],
    ) -> Answers[UndoResult]:
        ids = sorted(columns)
        deadline = time.monotonic() + self._undo_s

        def go_on() -> bool:
            return time.monotonic() < deadline

        return self._ask_each(
            list(ranges),
            lambda key, led: led.undo(writer, terms[key], debtor, ids, ranges[key], go_on=go_on),
        )

    def end_recovery(self, writer: Writer, terms: Terms) -> Answers[int]:
        return self._ask_each(list(terms), lambda key, led: led.end_recovery(writer, terms[key]))

    def put(self, grant: Grant, rows: Rows) -> Answers[PutResult]:
        parts = self._parts(grant, rows)
        if _is_large(parts):
            return self._put_large(grant, rows, parts)
        return self._put_small(grant, rows, parts)

    def try_put(self, grant: Grant, rows: Rows, promise: PromiseWriter) -> Tried:
        folded = folded_rows(rows, rows.schema or self.schema)
        if folded is None:
            return _Tried(lambda: Answers({}, frozenset()))
        promise.begin(folded)
        parts = self._parts(grant, folded)
        for key, of_bucket in parts.items():
            for number, data in enumerate(of_bucket):
                promise.add(Part(key, number, data))
        promise.in_parts = _is_large(parts)
        if promise.in_parts:
            self._try_large(grant, folded, parts)
        else:
            self._put_small(grant, folded, parts, try_only=True)
        return _Tried(lambda: self._put_promised(grant, folded, parts, promise.in_parts))

    def keep(self, grant: Grant, promise: Promise, rows: Rows) -> Answers[PutResult]:
        parts: dict[BucketKey, list[pa.RecordBatch]] = {}
        there = frozenset(self._partitions().values())
        for part in promise.parts(rows.schema or self.schema, there):
            parts.setdefault(part.key, []).append(part.rows)
        return self._put_promised(grant, rows, parts, promise.in_parts)

    def _put_promised(
        self, grant: Grant, rows: Rows, parts: _Parts, in_parts: bool
    ) -> Answers[PutResult]:
        if in_parts:
            return self._put_large(grant, rows, parts, resumable=True)
        return self._put_small(grant, rows, parts)

    def _put_small(
        self, grant: Grant, rows: Rows, parts: _Parts, *, try_only: bool = False
    ) -> Answers[PutResult]:
        """Put one part per bucket; all buckets of a server try it before the first one writes."""
        updates = {key: self._fold(rows, of_bucket[0]) for key, of_bucket in parts.items()}

        def put(leading: Leading) -> dict[BucketKey, PutResult]:
            keys = sorted(leading.buckets)
            parts = [
                LedUpdate(bucket=leading.buckets[key], update=updates[key], term=grant.terms[key])
                for key in keys
            ]
            results = put_led(
                parts,
                _one_by_one,
                writer=grant.writer,
                owner=grant.owner,
                token=grant.token,
                try_only=try_only,
            )
            return dict(zip(keys, results, strict=True))

        return self._ask(sorted(updates), put)

    def _try_large(self, grant: Grant, rows: Rows, parts: _Parts) -> None:
        """Try one part after the other, on top of those before it."""

        def try_all(key: BucketKey, led: LedBucket) -> None:
            with TemporaryDirectory() as directory, closing(Overlay(Path(directory))) as overlay:
                for part in parts[key]:
                    update = self._fold(rows, part)
                    led.try_part(grant.writer, grant.terms[key], update, overlay)

        self._ask_each(sorted(parts), try_all)

    def _put_large(
        self, grant: Grant, rows: Rows, parts: _Parts, *, resumable: bool = False
    ) -> Answers[PutResult]:
        """Put one part after the other, as a server does with what was uploaded to it."""
        put = Put(
            writer=grant.writer,
            owner=grant.owner,
            token=grant.token,
            put_id=uuid.uuid4().hex,
            resumable=resumable,
        )

        def put_all(key: BucketKey, led: LedBucket) -> PutResult:
            result = None
            for number, part in enumerate(parts[key]):
                update, more = self._fold(rows, part), number + 1 < len(parts[key])
                try:
                    result = led.put_part(put, grant.terms[key], update, part=number, more=more)
                except Overtaken as exc:
                    raise TornPut(f"{exc}, and who sent that is gone, or still at it") from exc
                if result is not None:
                    break
            assert result is not None
            return result

        return self._ask_each(sorted(parts), put_all)

    def seal(self, writer: Writer, terms: Terms, batch: int) -> Answers[int]:
        return self._ask_each(list(terms), lambda key, led: led.seal(writer, terms[key], batch))

    def reconnect(self) -> "EmbeddedAccess":
        return EmbeddedAccess(
            self._connect,
            self._name,
            self._leaders,
            options=self._options,
            deadline_s=self._deadline_s,
            table_id=self._table.table_id,
            sizes=self._sizes,
            undo_s=self._undo_s,
        )

    def close(self) -> None:
        """End the writer's session; the leaders are whoever's that made them."""
        self._coordinator.store.close()

    # --- Asking the leaders ---------------------------------------------------------------------

    def _ask(
        self,
        keys: Sequence[BucketKey],
        call: Callable[[Leading], Mapping[BucketKey, Result]],
    ) -> Answers[Result]:
        results: dict[BucketKey, Result] = {}
        sessions = set()
        for leading in self._leaders.leading(keys):
            with _leader_that_left():
                results.update(call(leading))
            sessions.add(leading.session)
        return Answers(results, frozenset(sessions))

    def _ask_each(
        self, keys: Sequence[BucketKey], call: Callable[[BucketKey, LedBucket], Result]
    ) -> Answers[Result]:
        return self._ask(
            keys, lambda leading: {key: call(key, led) for key, led in leading.buckets.items()}
        )

    # --- Rows and buckets -----------------------------------------------------------------------

    def _parts(self, grant: Grant, rows: Rows) -> dict[BucketKey, list[pa.RecordBatch]]:
        """Cut the rows into parts for each bucket."""
        partitions = self._partitions()

        def find(target: Route) -> BucketKey:
            key = BucketKey(partitions.get(target.partition_key, _NONE), target.bucket)
            if key not in grant.terms:
                raise NotFenced(
                    "the batch has rows of a partition that its writer was not fenced for; the "
                    "writer creates it first"
                )
            return key

        schema = rows.schema or self.schema
        cutter = PartCutter(schema, self._table.definition.buckets, find, self._sizes)
        parts: dict[BucketKey, list[pa.RecordBatch]] = {}
        for piece in rows.pieces(schema):
            for part in cutter.add(piece):
                parts.setdefault(part.key, []).append(part.rows)
        for part in cutter.rest():
            parts.setdefault(part.key, []).append(part.rows)
        return parts

    def _fold(self, rows: Rows, data: pa.RecordBatch) -> Update:
        """Fold a part; all that is wrong with its rows alone is found here."""
        batch = read_batch(
            data,
            rows.schema or self.schema,
            self._options,
            columns=rows.columns,
            mode=rows.mode,
            operation_column=rows.operation_column,
        )
        return fold(batch, self._history.key_codec)

    def _partitions(self) -> dict[bytes, int]:
        if not self.schema.partition_by:
            return {b"": 0}
        return self._coordinator.partitions(self._table)

    def _keys(self, partition: int) -> list[BucketKey]:
        return [BucketKey(partition, n) for n in range(self._table.definition.buckets)]


def history_of(table: KnownTable) -> SchemaHistory:
    """Return all schemas of a table, the current one last."""
    definition = table.definition
    return SchemaHistory(map(Schema.from_json, (*definition.former, definition.schema)))


@contextmanager
def _leader_that_left() -> Iterator[None]:
    """A bucket that was closed, and a session that was lost, are the leader's: find another."""
    try:
        yield
    except (Closed, SessionLost) as exc:
        raise NotLeader(f"this leader has left; ask who leads now ({exc})") from exc


@dataclass(frozen=True)
class _Tried:
    """A batch that was tried; a `Tried`."""

    put: Callable[[], Answers[PutResult]]

    def close(self) -> None:
        """There is nothing to let go of."""


def _is_large(parts: _Parts) -> bool:
    return max(map(len, parts.values()), default=0) > 1


def _one_by_one(call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [call(item) for item in items]
