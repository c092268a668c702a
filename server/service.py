"""The Flight calls of a tablet server: each is read, judged, carried out and answered here.

do_put      put         a stream of batches for buckets of this server, one atomic commit each
do_get      changelog   a bucket's changes
do_action   lookup, fence, undo, end_recovery, seal, ends, status
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
from pyarrow import flight

from locks import BucketKey, CoordinationError, Coordinator, LeadKey
from merge_engine import (
    AggMode,
    BatchTooLarge,
    Closed,
    Column,
    Deposed,
    PutResult,
    Schema,
    TallybookError,
    Token,
    UnknownColumn,
)
from merge_engine.batch import read_batch, read_keys
from merge_engine.changelog import change_records, changelog_schema
from merge_engine.fold import fold
from merge_engine.hashing import bucket_of
from merge_engine.parallel import Item, Result, map_all
from recovery.errors import NotLeader
from recovery.guard import Writer
from recovery.isolation import committed_changes
from recovery.isolation_lookup import committed_lookup
from recovery.led_bucket import LedBucket, LedUpdate, put_led
from server import wire
from server.definitions import ClusterTable
from server.errors import BadRequest, ServerFailed
from server.hosting import Hosting
from server.limits import Admission, Load
from server.metrics import Metrics

logger = logging.getLogger(__name__)

Answer: TypeAlias = dict[str, Any] | pa.Buffer
COMMITTED, LATEST = "committed", "latest"


class Session(Protocol):
    """This server's place in the cluster, for as long as it lasts."""

    @property
    def name(self) -> str:
        """The name of the session node; NotLeader if there is no session at the moment."""

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, over this session."""

    def check(self) -> None:
        """Raise NotLeader while the connection to ZooKeeper is down: others may lead by now."""

    def look_again(self) -> None:
        """Say that leads may have changed."""


class TabletService(flight.FlightServerBase):  # type: ignore[misc]
    """Serves the buckets that are hosted here."""

    def __init__(
        self,
        location: str,
        hosting: Hosting,
        admission: Admission,
        metrics: Metrics,
        session: Session,
        *,
        lookup_max_keys: int,
        status: Callable[[], dict[str, Any]],
        **security: Any,
    ) -> None:
        super().__init__(location, **security)
        self._hosting = hosting
        self._admission = admission
        self._metrics = metrics
        self._session = session
        self._lookup_max_keys = lookup_max_keys
        workers = os.cpu_count() or 1
        # A put holds its buckets while it runs on its own threads: see OpenBuckets.
        self._put_pool = ThreadPoolExecutor(workers, thread_name_prefix="tallybook-put")
        # Not the puts' threads: an undo waits for its bucket, and a put that holds it needs those.
        self._undo_pool = ThreadPoolExecutor(workers, thread_name_prefix="tallybook-undo")
        self._read_pool = ThreadPoolExecutor(workers, thread_name_prefix="tallybook-read")
        self._actions: dict[str, Callable[[pa.Buffer], Answer]] = {
            "lookup": self._lookup,
            "fence": self._fence,
            "undo": self._undo,
            "end_recovery": self._end_recovery,
            "seal": self._seal,
            "ends": self._ends,
            "status": lambda _: status(),
            "ping": lambda _: {},
        }

    # --- Flight's entry points ------------------------------------------------------------------

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        """Take a put; it has happened when the answer is written, and not before."""
        with self._answering("put", context):
            answer = self._put(wire.decode(descriptor.command or b""), reader)
            try:
                writer.write(wire.encode(answer))
            except (OSError, pa.ArrowException):
                logger.info("%s did not wait for the answer to its put", context.peer())

    def do_action(
        self, context: flight.ServerCallContext, action: flight.Action
    ) -> Iterator[pa.Buffer]:
        """Carry out one of the small calls."""
        known = self._actions.get(action.type)
        with self._answering(action.type if known else "unknown", context):
            if known is None:
                raise BadRequest(f"there is no action {action.type!r}")
            answer = known(action.body)
            return iter([wire.encode(answer) if isinstance(answer, dict) else answer])

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        """Stream a bucket's changes."""
        with self._answering("changelog", context):
            schema, batches = self._changelog(wire.decode(ticket.ticket))
        return flight.GeneratorStream(schema, self._streaming("changelog", context, batches))

    @contextmanager
    def _answering(self, call: str, context: flight.ServerCallContext) -> Iterator[None]:
        """Count and time a call, and turn its errors into Flight's."""
        try:
            with self._metrics.timed("call", call=call):
                yield
        except (TallybookError, CoordinationError) as exc:
            error = exc
            if isinstance(exc, Deposed | Closed):
                self._session.look_again()
                error = NotLeader(f"{exc}: another server leads this bucket by now")
            self._metrics.count("errors", call=call, error=type(error).__name__)
            bad = isinstance(error, BadRequest | BatchTooLarge)
            what, level = wire.readable(str(error)), logging.WARNING if bad else logging.INFO
            logger.log(level, "refused a %s from %s: %s", call, context.peer(), what)
            try:
                raise wire.to_flight_error(error) from exc
            finally:
                # A cycle of error and frame would keep what a refused put has sent.
                del error
        except flight.FlightError:
            self._metrics.count("errors", call=call, error="Broken")
            raise
        except Exception as exc:
            self._metrics.count("errors", call=call, error="ServerFailed")
            logger.exception("a %s from %s failed", call, context.peer())
            what = f"the server failed: {type(exc).__name__}: {exc}; its log says more"
            raise wire.to_flight_error(ServerFailed(what)) from exc

    def _streaming(
        self, call: str, context: flight.ServerCallContext, batches: Iterator[Any]
    ) -> Iterator[Any]:
        while True:
            with self._answering(call, context):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def shutdown(self) -> None:
        """Stop answering; calls under way end first."""
        super().shutdown()
        self._put_pool.shutdown()
        self._undo_pool.shutdown()
        self._read_pool.shutdown()

    # --- Writing --------------------------------------------------------------------------------

    def _put(self, fields: wire.Fields, reader: Any) -> dict[str, Any]:
        session = self._session.name
        table = self._table(fields)
        keys, terms = self._keys(fields, 3)
        announced = fields.optional("bytes", int) or 0
        try_only = fields.optional("try_only", bool) or False
        self._check_size(0, announced)
        with self._admission.put(announced) as load:
            received = self._receive(reader, len(keys), load)
            self._session.check()
            order = sorted(range(len(keys)), key=lambda at: keys[at])
            parts = self._map(
                lambda at: self._part(fields, table, keys[at], terms[at], received[at]), order
            )
            results = put_led(
                parts,
                self._map,
                writer=_writer(fields),
                owner=fields.get("owner", str),
                token=_token(fields),
                try_only=try_only,
            )
        for part, result in () if try_only else zip(parts, results, strict=True):
            self._metrics.count("rows", part.update.rows, table=table.name)
            self._metrics.count("keys_changed", result.changed, table=table.name)
        self._metrics.count("bytes", load.received, table=table.name)
        answers = dict(zip(order, results, strict=True))
        return {
            "session": session,
            "results": [_result(answers[at]) for at in range(len(keys))],
        }

    def _receive(self, reader: Any, buckets: int, load: Load) -> list[pa.Table]:
        """Read a put to its closing message; without one, nothing of it counts."""
        wire.check_plain(reader.schema)
        checksum = wire.Checksum()
        received: list[list[pa.RecordBatch]] = [[] for _ in range(buckets)]
        closing: wire.Fields | None = None
        for chunk in _chunks(reader):
            if closing is not None:
                raise BadRequest("a put that goes on behind its closing message")
            if chunk.data is None:
                closing = wire.decode(chunk.app_metadata or b"")
                continue
            at = _bucket_index(chunk.app_metadata, buckets)
            batch, size = checksum.take(chunk.data)
            load.grow(size)
            received[at].append(batch)
            self._check_size(checksum.rows, load.received)
        if closing is None:
            raise BadRequest(
                f"a put that was cut short after {checksum.rows:,} rows; nothing was written"
            )
        checksum.check(closing)
        return [pa.Table.from_batches(batches, reader.schema) for batches in received]

    def _check_size(self, rows: int, size: int) -> None:
        options = self._hosting.options
        if rows > options.put_max_rows or size > options.put_max_bytes:
            raise BatchTooLarge(
                f"a put of more than {options.put_max_rows:,} rows (put_max_rows) or "
                f"{options.put_max_bytes:,} bytes (put_max_bytes); nothing was written, split it"
            )

    def _part(
        self, fields: wire.Fields, table: ClusterTable, key: LeadKey, term: int, data: pa.Table
    ) -> LedUpdate:
        try:
            data.validate(full=True)
        except pa.ArrowInvalid as exc:
            raise BadRequest(f"a put whose batches are damaged: {exc}") from exc
        led = self._hosting.get(key)
        rows = read_batch(
            data,
            _schema(fields, table),
            self._hosting.options,
            columns=fields.texts("columns"),
            mode=_mode(fields),
            operation_column=fields.optional("operation_column", str),
        )
        if len(rows) and (bucket_of(rows.keys, table.buckets) != key.key.number).any():
            raise BadRequest(f"a put to bucket {key} has rows of other buckets")
        update = fold(rows, table.history.key_codec)
        return LedUpdate(bucket=led, update=update, term=term if term >= 0 else None)

    def _fence(self, body: pa.Buffer) -> dict[str, Any]:
        fields, led, _ = self._led(body, 2)
        session = self._session.name
        writer = _required_writer(fields)
        table = self._table(fields)
        record = self._session.coordinator.record(table.table, writer.owner)
        columns = fields.integers("columns")
        return {
            "session": session,
            "terms": [bucket.fence(writer, columns, record) for bucket in led],
        }

    def _undo(self, body: pa.Buffer) -> dict[str, Any]:
        fields, led, numbers = self._led(body, 4)
        session = self._session.name
        columns, debtor = fields.integers("columns"), fields.get("debtor", str)
        writer = _writer(fields)

        def undo(at: int) -> PutResult:
            term, from_offset = numbers[at]
            self._session.check()
            if writer is None:
                return led[at].undo_unlocked(debtor, columns, from_offset)
            return led[at].undo(writer, term, debtor, columns, from_offset)

        results = map_all(self._undo_pool, undo, range(len(led)))
        return {"session": session, "results": list(map(_result, results))}

    def _end_recovery(self, body: pa.Buffer) -> dict[str, Any]:
        fields, led, numbers = self._led(body, 3)
        session = self._session.name
        writer = _required_writer(fields)
        ends = [
            bucket.end_recovery(writer, term) for bucket, (term,) in zip(led, numbers, strict=True)
        ]
        return {"session": session, "ends": ends}

    def _seal(self, body: pa.Buffer) -> dict[str, Any]:
        fields, led, numbers = self._led(body, 3)
        session = self._session.name
        writer, batch = _required_writer(fields), fields.get("batch", int)
        ends = [
            bucket.seal(writer, term, batch) for bucket, (term,) in zip(led, numbers, strict=True)
        ]
        return {"session": session, "ends": ends}

    # --- Reading --------------------------------------------------------------------------------

    def _lookup(self, body: pa.Buffer) -> pa.Buffer:
        with self._admission.holding(body.size):
            return self._look_up(body)

    def _look_up(self, body: pa.Buffer) -> pa.Buffer:
        fields, batches = wire.unframe(body)
        table = self._table(fields)
        keys, _ = self._keys(fields, 2)
        if len(batches) != len(keys):
            raise BadRequest(f"a look-up in {len(keys)} buckets with keys for {len(batches)}")
        wanted = sum(batch.num_rows for batch in batches)
        if wanted > self._lookup_max_keys:
            raise BatchTooLarge(
                f"a look-up of {wanted:,} keys; the limit is {self._lookup_max_keys:,} "
                "(lookup_max_keys): split it"
            )
        schema = _schema(fields, table)
        columns = [_column(schema, table, number) for number in fields.integers("columns")]
        committed = _is_committed(fields)
        self._session.check()

        def look(at: int) -> pa.RecordBatch:
            led = self._hosting.get(keys[at])
            values = read_keys(batches[at], schema)
            if committed:
                read = self._records_of(table)
                found = committed_lookup(led.bucket, led.key, read, values, columns)
            else:
                found = led.bucket.lookup_keys(values, columns)
            return found.select([column.name for column in columns])

        found = map_all(self._read_pool, look, range(len(keys)))
        self._metrics.count("keys_looked_up", wanted, table=table.name)
        return wire.answer(found)

    def _changelog(self, fields: wire.Fields) -> tuple[pa.Schema, Iterator[Any]]:
        """Return batches of change records, each with where to go on as metadata."""
        table = self._table(fields)
        keys, _ = self._keys(fields, 2)
        if len(keys) != 1:
            raise BadRequest(f"a changelog of {len(keys)} buckets; it is read one by one")
        [key] = keys
        led = self._hosting.get(key)
        start, stop = fields.get("from_offset", int), fields.optional("to_offset", int)
        history = led.bucket.history
        schema = changelog_schema(history.current)
        self._session.check()
        if _is_committed(fields):
            committed = committed_changes(led.bucket, led.key, self._records_of(table), start, stop)
            segments, end = iter(committed), committed.end
        else:
            end = led.bucket.settled_end()
            end = end if stop is None else min(end, stop)
            segments = led.bucket.read_log(start, end)

        def changes() -> Iterator[Any]:
            for segment in segments:
                if segment.changes:
                    first = max(segment.header.base_offset, start)
                    following = wire.encode({"next_offset": min(segment.header.end_offset, end)})
                    yield change_records(segment, history, first), following
            nothing = pa.RecordBatch.from_pylist([], schema=schema)
            yield nothing, wire.encode({"next_offset": max(start, end)})

        return schema, changes()

    def _ends(self, body: pa.Buffer) -> dict[str, Any]:
        _, led, _ = self._led(body, 2)
        session = self._session.name
        self._session.check()
        return {
            "session": session,
            "starts": [bucket.bucket.start_offset for bucket in led],
            "ends": [bucket.bucket.settled_end() for bucket in led],
        }

    # --- What the calls have in common ----------------------------------------------------------

    def _map(self, call: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
        return map_all(self._put_pool, call, items)

    def _table(self, fields: wire.Fields) -> ClusterTable:
        """Return the table, under a schema at least as new as the caller's."""
        table_id, version = fields.get("table", int), fields.get("schema_version", int)
        table = self._hosting.table(table_id)
        if version > table.schema.version:
            newer = ClusterTable(self._session.coordinator.table_by_id(table_id))
            self._hosting.set_table(newer)
            table = self._hosting.table(table_id)
        return table

    def _keys(self, fields: wire.Fields, width: int) -> tuple[list[LeadKey], list[int]]:
        """Return the buckets of a request and, if it has them, the terms."""
        table_id = fields.get("table", int)
        rows = fields.rows("buckets", width)
        keys = [LeadKey(table_id, BucketKey(row[0], row[1])) for row in rows]
        if len(set(keys)) != len(keys):
            raise BadRequest("a request that names a bucket twice")
        buckets = self._hosting.table(table_id).buckets
        for key in keys:
            if key.key.partition < 0 or not 0 <= key.key.number < buckets:
                raise BadRequest(f"bucket {key} is none of a table with {buckets} buckets")
        return keys, [row[2] for row in rows] if width > 2 else []

    def _led(
        self, body: pa.Buffer, width: int
    ) -> tuple[wire.Fields, list[LedBucket], list[list[int]]]:
        """Return an action's fields, its buckets, and the further numbers of each."""
        fields = wire.decode(body)
        self._table(fields)
        keys, _ = self._keys(fields, width)
        numbers = [row[2:] for row in fields.rows("buckets", width)]
        return fields, [self._hosting.get(key) for key in keys], numbers

    def _records_of(self, table: ClusterTable) -> Callable[[], Any]:
        if not table.locked:
            return dict
        return lambda: self._session.coordinator.records(table.table)


def _chunks(reader: Any) -> Iterator[Any]:
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        except pa.ArrowException as exc:
            raise BadRequest(f"a put whose batches cannot be read: {exc}") from exc
        yield chunk


def _bucket_index(metadata: pa.Buffer | None, buckets: int) -> int:
    try:
        index = int(bytes(metadata or b""))
    except ValueError as exc:
        raise BadRequest("a batch that does not say which bucket it is for") from exc
    if not 0 <= index < buckets:
        raise BadRequest(f"a batch for bucket {index} of {buckets} of the put")
    return index


def _schema(fields: wire.Fields, table: ClusterTable) -> Schema:
    """Return the schema that the caller works with: names are its, ids are everybody's."""
    version = fields.get("schema_version", int)
    if version not in table.history.schemas:
        raise BadRequest(f"table {table.name} has no schema version {version}")
    return table.history.schema(version)


def _column(schema: Schema, table: ClusterTable, number: int) -> Column:
    column = schema.column_by_id(number)
    if column is None:
        raise UnknownColumn(f"table {table.name} has no column with id {number}")
    return column


def _writer(fields: wire.Fields) -> Writer | None:
    if "writer" not in fields:
        return None
    return _required_writer(fields)


def _required_writer(fields: wire.Fields) -> Writer:
    return Writer(fields.get("writer", str), fields.get("epoch", int))


def _mode(fields: wire.Fields) -> AggMode:
    mode = fields.get("mode", int)
    if mode not in set(AggMode):
        raise BadRequest(f"a put of agg mode {mode}, which there is not")
    return AggMode(mode)


def _token(fields: wire.Fields) -> Token | None:
    if "token" not in fields:
        return None
    numbers = fields.integers("token")
    if len(numbers) != 2:
        raise BadRequest("a token that is not an epoch and a batch")
    return Token(*numbers)


def _result(result: PutResult) -> list[int]:
    return [result.base_offset, result.end_offset, int(result.repeated)]


def _is_committed(fields: wire.Fields) -> bool:
    isolation = fields.get("isolation", str)
    if isolation not in (COMMITTED, LATEST):
        raise BadRequest(f"no isolation is called {isolation!r}; use {COMMITTED!r} or {LATEST!r}")
    return isolation == COMMITTED
