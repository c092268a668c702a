"""The writer's boundary over buckets of this process: see `recovery.writer.access`.

Whoever leads is asked anew for every call, as over a network. A batch is put as it is cut into
parts: what waits in memory has an end, whatever the size of the batch.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Protocol, TypeVar

import pyarrow as pa

from foundation.errors import NotFenced
from foundation.ids import BucketId
from foundation.parallel import Mapper
from locks.catalog.definitions import CatalogTable
from locks.coordinator import Coordinator
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.results import BucketResult, UndoResult
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.merging.batch import read_batch
from merge_engine.merging.fold import Update, fold
from merge_engine.merging.routing import Route
from merge_engine.schema.schema import Schema
from recovery.embedded.part_puts import PartPut, try_parts
from recovery.leader.fenced_writers import Writer
from recovery.leader.led_bucket import LedBucket, LedUpdate, put_led
from recovery.writer.access import Answers, DebtUndo, Grant, GrantedRows, Terms, Tried
from recovery.writer.parts import Part, PartCutter, PartSizes
from recovery.writer.redo import Promise, PromiseWriter, folded_rows
from recovery.writer.rows import Rows

Item = TypeVar("Item")
Result = TypeVar("Result")
_NONE = -1  # The id of no partition.
_NOTHING: Answers[BucketResult] = Answers({}, frozenset())


@dataclass(frozen=True, kw_only=True)
class Leading:
    """A server that leads some of the buckets: its session, and those buckets."""

    session: str
    coordinator: Coordinator
    buckets: Mapping[BucketId, LedBucket]


class Place(Protocol):
    """A table whose buckets are led in this process: what it is, and who leads."""

    @property
    def table(self) -> CatalogTable:
        """The table as locks know it, as it was when it was last looked at."""

    @property
    def history(self) -> SchemaHistory:
        """Its schemas, as of then."""

    def refresh(self) -> None:
        """Look at the table again, and make sure that its buckets can be led here."""

    def partitions(self) -> Mapping[bytes, int]:
        """Return the ids of the partitions by key, as they are now."""

    def create_partition(self, key: bytes) -> int:
        """Return the id of the partition of this key, which is created if there is none."""

    def leading(self, keys: Sequence[BucketId]) -> Iterator[Leading]:
        """Yield who leads these buckets; NotLeader if nobody leads one of them."""

    def asking(self) -> AbstractContextManager[None]:
        """Within it, a leader is asked: what it raises that is not for writers is translated."""


def one_by_one(call: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
    """Call for every item, in this thread."""
    return [call(item) for item in items]


class EmbeddedAccess:
    """A table whose buckets are in this process, as its writer reaches them; a `TableAccess`."""

    def __init__(
        self,
        coordinator: Coordinator,
        place: Place,
        *,
        options: BucketOptions | None = None,
        sizes: PartSizes | None = None,
        undo_s: float = 1.0,
        mapper: Mapper = one_by_one,
    ) -> None:
        """`sizes`: of the parts that large batches are cut into.

        `undo_s`: about how long a call of `undo` goes on. `mapper`: for a put to several buckets.
        """
        self._coordinator = coordinator
        self._place = place
        self._options = options or BucketOptions()
        self._sizes = sizes or PartSizes()
        self._undo_s = undo_s
        self._mapper = mapper

    @property
    def coordinator(self) -> Coordinator:
        return self._coordinator

    def refresh(self) -> None:
        self._place.refresh()

    @property
    def table(self) -> CatalogTable:
        return self._place.table

    @property
    def schema(self) -> Schema:
        return self._place.history.current

    def bucket_ids(self) -> list[BucketId]:
        partitions = self._place.partitions()
        return [key for partition in sorted(partitions.values()) for key in self._keys(partition)]

    def partitions(self) -> Mapping[bytes, int]:
        return self._place.partitions()

    def create_partition(self, key: bytes) -> int:
        return self._place.create_partition(key)

    def fence(
        self, writer: Writer, columns: Iterable[int], keys: Sequence[BucketId]
    ) -> Answers[int]:
        wanted = sorted(columns)

        def fence(leading: Leading) -> dict[BucketId, int]:
            # Read since the call came in, and by the leader: it must not take our word for it.
            record = leading.coordinator.locks.record(self.table, writer.owner)
            return {key: led.fence(writer, wanted, record) for key, led in leading.buckets.items()}

        return self._ask(keys, fence)

    def undo(self, wanted: DebtUndo) -> Answers[UndoResult]:
        deadline = time.monotonic() + self._undo_s

        def go_on() -> bool:
            return time.monotonic() < deadline

        def undo(key: BucketId, led: LedBucket) -> UndoResult:
            return led.undo(
                wanted.writer,
                wanted.terms[key],
                wanted.debtor,
                wanted.columns,
                wanted.ranges[key],
                go_on=go_on,
            )

        return self._ask_each(list(wanted.ranges), undo)

    def end_recovery(self, writer: Writer, terms: Terms) -> Answers[int]:
        return self._ask_each(list(terms), lambda key, led: led.end_recovery(writer, terms[key]))

    def put(self, granted: GrantedRows) -> Answers[BucketResult]:
        grant, rows = granted.grant, granted.rows
        parts = self._cut(grant, rows)
        few, more = self._few(parts)
        if more is None:
            return self._put_few(grant, rows, few)
        return self._put_parts(grant, rows, chain(_drained(few), [more], parts))

    def try_rows(self, granted: GrantedRows) -> None:
        grant, rows = granted.grant, granted.rows
        parts = self._cut(grant, rows)
        few, more = self._few(parts)
        if more is None:
            self._put_few(grant, rows, few, try_only=True)
        else:
            rest = chain(_drained(few), [more], parts)
            try_parts(grant, rest, partial(self._fold, rows), self._ask_one)

    def try_put(self, granted: GrantedRows, promise: PromiseWriter) -> Tried:
        grant, rows = granted.grant, granted.rows
        folded = folded_rows(rows, rows.schema or self.schema)
        if folded is None:
            return _Tried(lambda: _NOTHING)
        promise.begin(folded)
        parts = _written_down(self._cut(grant, folded), promise)
        few, more = self._few(parts)
        promise.in_parts = more is not None
        if more is None:
            self._put_few(grant, folded, few, try_only=True)
            return _Tried(lambda: self._put_few(grant, folded, few))
        rest = chain(_drained(few), [more], parts)
        try_parts(grant, rest, partial(self._fold, folded), self._ask_one)
        # Memory does not hold them, but what was promised is there to be read.
        return _Tried(lambda: self.keep(GrantedRows(grant, folded), promise.written()))

    def keep(self, granted: GrantedRows, promise: Promise) -> Answers[BucketResult]:
        grant, rows = granted.grant, granted.rows
        there = frozenset(self._place.partitions().values())
        parts = promise.parts(rows.schema or self.schema, there)
        if promise.in_parts:
            return self._put_parts(grant, rows, parts, resumable=True)
        return self._put_few(grant, rows, list(parts))

    def seal(self, writer: Writer, terms: Terms, batch: int) -> Answers[int]:
        return self._ask_each(list(terms), lambda key, led: led.seal(writer, terms[key], batch))

    def shrink_parts(self) -> bool:
        smaller = self._sizes.smaller()
        self._sizes = smaller or self._sizes
        return smaller is not None

    def reconnect(self) -> "EmbeddedAccess":
        """Return the same: there is no session to lose before the table is closed."""
        self._place.refresh()
        return self

    def close(self) -> None:
        """The session is the table's."""

    # --- Puts -----------------------------------------------------------------------------------

    def _put_few(
        self, grant: Grant, rows: Rows, parts: Sequence[Part], *, try_only: bool = False
    ) -> Answers[BucketResult]:
        """Put one part per bucket; all buckets of a server try it before the first one writes."""
        updates = {part.key: self._fold(rows, part.rows) for part in parts}

        def put(leading: Leading) -> dict[BucketId, BucketResult]:
            keys = sorted(leading.buckets)
            of_leader = [
                LedUpdate(bucket=leading.buckets[key], update=updates[key], term=grant.terms[key])
                for key in keys
            ]
            results = put_led(
                of_leader,
                self._mapper,
                writer=grant.writer,
                owner=grant.owner,
                token=grant.token,
                try_only=try_only,
            )
            return dict(zip(keys, results, strict=True))

        return self._ask(sorted(updates), put)

    def _put_parts(
        self, grant: Grant, rows: Rows, parts: Iterable[Part], *, resumable: bool = False
    ) -> Answers[BucketResult]:
        put = PartPut(grant, self._ask_one, resumable=resumable)
        for part in parts:
            put.add(part, self._fold(rows, part.rows))
        return put.finish(partial(self._fold, rows))

    def _few(self, parts: Iterable[Part]) -> tuple[list[Part], Part | None]:
        """Return the parts, if there is one per bucket and memory holds them; else a first few.

        Then the second is the part after them.
        """
        few: list[Part] = []
        size = 0
        for part in parts:
            size += part.rows.nbytes
            if part.number or size > self._sizes.waiting_bytes:
                return few, part
            few.append(part)
        return few, None

    def _cut(self, grant: Grant, rows: Rows) -> Iterator[Part]:
        """Yield the rows in parts, those of a bucket in their order."""
        partitions = self._place.partitions()

        def find(target: Route) -> BucketId:
            key = BucketId(partitions.get(target.partition_key, _NONE), target.bucket)
            if key not in grant.terms:
                raise NotFenced(
                    "the batch has rows of a partition that its writer was not fenced for; the "
                    "writer creates it first"
                )
            return key

        schema = rows.schema or self.schema
        cutter = PartCutter(schema, self.table.definition.buckets, find, self._sizes)
        for piece in rows.without_vain_deletes(schema, partitions).pieces(schema):
            yield from cutter.add(piece)
        yield from cutter.rest()

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
        return fold(batch, self._place.history.key_codec)

    def _keys(self, partition: int) -> list[BucketId]:
        return [BucketId(partition, n) for n in range(self.table.definition.buckets)]

    # --- Asking the leaders ---------------------------------------------------------------------

    def _ask(
        self,
        keys: Sequence[BucketId],
        call: Callable[[Leading], Mapping[BucketId, Result]],
    ) -> Answers[Result]:
        results: dict[BucketId, Result] = {}
        sessions = set()
        for leading in self._place.leading(keys):
            with self._place.asking():
                results.update(call(leading))
            sessions.add(leading.session)
        return Answers(results, frozenset(sessions))

    def _ask_each(
        self, keys: Sequence[BucketId], call: Callable[[BucketId, LedBucket], Result]
    ) -> Answers[Result]:
        return self._ask(
            keys, lambda leading: {key: call(key, led) for key, led in leading.buckets.items()}
        )

    def _ask_one(self, key: BucketId, call: Callable[[LedBucket], Result]) -> Answers[Result]:
        return self._ask_each([key], lambda _, led: call(led))


@dataclass(frozen=True)
class _Tried:
    """A batch that was tried; a `Tried`."""

    put: Callable[[], Answers[BucketResult]]

    def close(self) -> None:
        """There is nothing to let go of."""


def _drained(parts: list[Part]) -> Iterator[Part]:
    """Yield the parts in their order, and let go of them."""
    parts.reverse()
    while parts:
        yield parts.pop()


def _written_down(parts: Iterable[Part], promise: PromiseWriter) -> Iterator[Part]:
    """Yield the parts, and write them down on the way."""
    for part in parts:
        promise.add(part)
        yield part
