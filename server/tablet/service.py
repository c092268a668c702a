"""The Flight calls of a tablet server: each is read, judged, carried out and answered here.

do_put      Put, PutChunk: a stream of batches for buckets of this server
do_get      the streams: ReadChangelog, ReadChanges, Scan
do_exchange LookupStream: look-ups, one after the other
do_action   all other calls of `server.protocol`, by their names
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa
from pyarrow import flight

from foundation.errors import (
    BadRequest,
    BatchTooLarge,
    Closed,
    ColumnTooLarge,
    Deposed,
    InvalidValue,
    NotLeader,
    ServerFailed,
    SessionLost,
    StorageFull,
    TallybookError,
)
from foundation.ids import LeadKey
from foundation.parallel import WAITING_THREADS, Item, Mapper, Result, map_all
from recovery.leader.led_bucket import LedBucket, LedUpdate, put_led
from server.protocol import wire
from server.protocol.calls import Call, Nothing, Ping
from server.protocol.definitions import ClusterTable
from server.protocol.messages import Message
from server.protocol.puts import (
    GO_ON,
    Advance,
    ForgetPut,
    Put,
    PutAnswer,
    PutChunk,
    PutProgress,
    read_put,
)
from server.protocol.reads import (
    ChangedPieces,
    CloseScanners,
    LogEnds,
    Lookup,
    LookupStream,
    ReadChangelog,
    ReadChanges,
    Scan,
    StreamCall,
    stream_name,
)
from server.protocol.writers import EndRecovery, EndsAnswer, Fence, FenceAnswer, Seal, Undo
from server.tablet.complaints import Complaints
from server.tablet.large_puts import LargePuts, read_update
from server.tablet.limits import Admission, Load
from server.tablet.looking_up import LookingUp
from server.tablet.metrics import Metrics
from server.tablet.reading import Reading
from server.tablet.requests import Requests, schema_of
from server.tablet.scanners import Scanners
from server.tablet.scanning import Scanning
from server.tablet.staging import Staging
from server.tablet.steps import CALL_S
from server.tablet.undos import Undos

logger = logging.getLogger(__name__)

_DISK_FULL = "disk full"

Actions: TypeAlias = Mapping[type[Call[Any]], Callable[[Any], Message]]
"""What carries out a call, and answers it, by the call's class."""
Stream: TypeAlias = tuple[pa.Schema, Iterator[Any]]


class TabletService(flight.FlightServerBase):  # type: ignore[misc]
    """Serves the buckets that are hosted here."""

    def __init__(
        self,
        location: str,
        requests: Requests,
        admission: Admission,
        metrics: Metrics,
        *,
        scanners: Scanners,
        staging: Staging,
        complaints: Complaints | None = None,
        lookup_max_keys: int,
        actions: Actions,
        call_s: float = CALL_S,
        **security: Any,
    ) -> None:
        """`actions`: those that are somebody else's. `call_s`: see `Undos`."""
        super().__init__(location, **security)
        self._requests = requests
        self._hosting = requests.hosting
        self._session = requests.session
        self._admission = admission
        self._metrics = metrics
        self._complaints = complaints or Complaints(logger)
        workers = os.cpu_count() or 1
        # A put holds its buckets while it runs on its own threads: see OpenBuckets.
        self._put_pool = ThreadPoolExecutor(WAITING_THREADS, thread_name_prefix="tallybook-put")
        self._read_pool = ThreadPoolExecutor(workers, thread_name_prefix="tallybook-read")
        mapper: Mapper = partial(map_all, self._read_pool)
        self._reading = Reading(requests, mapper)
        self._looking_up = LookingUp(
            requests, admission, metrics, mapper, lookup_max_keys=lookup_max_keys
        )
        scanning = Scanning(self._requests, scanners, metrics, staging.scratch)
        self._large = LargePuts(requests, staging, admission, metrics)
        self._undos = Undos(requests, call_s=call_s)
        self._staging = staging
        carried_out: Actions = {
            Advance: self._large.advance,
            ForgetPut: self._large.forget,
            PutProgress: self._large.progress,
            Lookup: self._looking_up.lookup,
            Fence: self._fence,
            Undo: self._undos.undo,
            EndRecovery: self._end_recovery,
            Seal: self._seal,
            LogEnds: self._reading.ends,
            ChangedPieces: self._reading.pieces,
            CloseScanners: scanning.close,
            Ping: lambda _: Nothing(),
            **actions,
        }
        streamed: Mapping[type[StreamCall[Any]], Callable[[Any], Stream]] = {
            ReadChangelog: self._reading.changelog,
            ReadChanges: self._reading.changes,
            Scan: scanning.stream,
        }
        self._actions = {kind.name: (kind, answer) for kind, answer in carried_out.items()}
        self._streams = {kind.name: (kind, stream) for kind, stream in streamed.items()}

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
            call = read_put(wire.decode(descriptor.command or b""))
            answer = self._put(call, reader, writer)
            try:
                writer.write(answer.to_body())
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
            kind, carry_out = known
            # The keys of a look-up take memory when they are read.
            heavy = kind is Lookup
            with self._admission.holding(action.body.size) if heavy else nullcontext():
                return iter([carry_out(kind.from_body(action.body)).to_body()])

    def do_get(
        self, context: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.FlightDataStream:
        """Stream a bucket's changes, or its rows."""
        name = "unknown"
        with self._answering("stream", context):
            fields = wire.decode(ticket.ticket)
            name = stream_name(fields)
            if name not in self._streams:
                raise BadRequest(f"there is no stream {name!r}")
        with self._answering(name, context):
            kind, stream = self._streams[name]
            schema, batches = stream(kind.from_fields(fields))
        return flight.GeneratorStream(schema, self._streaming(name, context, batches))

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Answer look-ups, one after the other, until the caller ends it or one goes wrong."""
        with self._answering("lookups", context):
            call = LookupStream.from_fields(wire.decode(descriptor.command or b""))
            exchange = self._looking_up.begin(call)
            writer.begin(exchange.schema)
        chunks = _chunks(reader)
        while True:
            with self._refusing("lookups", context):
                chunk = next(chunks, None)
            if chunk is None:
                return
            with self._answering("lookup", context):
                answer = exchange.answer(chunk)
            try:
                writer.write_batch(answer)
            except (OSError, pa.ArrowException):
                logger.info("%s did not wait for the answer to its look-up", context.peer())
                return

    @contextmanager
    def _answering(self, call: str, context: flight.ServerCallContext) -> Iterator[None]:
        """Count and time a call, and turn its errors into Flight's."""
        with self._refusing(call, context), self._metrics.timed("call", call=call):
            yield

    @contextmanager
    def _refusing(self, call: str, context: flight.ServerCallContext) -> Iterator[None]:
        """Count the errors of a call, and turn them into Flight's."""
        try:
            yield
        except TallybookError as exc:
            error = exc
            if isinstance(exc, Deposed | Closed):
                self._session.look_again()
                error = NotLeader(f"{exc}: another server leads this bucket by now")
            elif isinstance(exc, SessionLost):  # Ours, not the caller's.
                error = NotLeader(f"this server has lost its session and leads nothing: {exc}")
            self._metrics.count("errors", call=call, error=type(error).__name__)
            if isinstance(exc, StorageFull):
                self._complaints.complain(_DISK_FULL, str(exc))
            bad = isinstance(error, BadRequest | BatchTooLarge)
            bad = bad and not isinstance(error, ColumnTooLarge)  # Its caller asks for less.
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
        self._large.shutdown()
        self._undos.shutdown()
        self._read_pool.shutdown()

    # --- Writing --------------------------------------------------------------------------------

    def _put(self, call: Put | PutChunk, reader: Any, writer: Any) -> Message:
        if isinstance(call, PutChunk):
            return self._large.receive(call, reader.schema, lambda: _chunks(reader))
        session = self._session.name
        table = self._requests.table(call)
        keys = self._requests.keys(table, call.buckets)
        self._check_size(0, call.announced_bytes)
        # Before the rows are read and folded: a put that is refused for one bucket is sent again
        # and again until that is open.
        self._hosting.get_all(keys)
        with self._admission.put(call.announced_bytes) as load:
            if call.holds_end:
                writer.write(GO_ON)
            received = self._receive(call, reader, load)
            self._session.check_connected()
            seals = call.seals and call.writer is not None and not call.try_only
            order = sorted(range(len(keys)), key=lambda at: keys[at])
            try:
                parts = self._parts(call, table, [(keys[at], received[at]) for at in order])
                results = put_led(
                    parts,
                    self._map,
                    writer=call.writer,
                    owner=call.owner,
                    token=call.token,
                    try_only=call.try_only,
                    seals=seals,
                )
            except InvalidValue as exc:
                if not call.takes_refusal:
                    raise
                self._metrics.count("errors", call="put", error=type(exc).__name__)
                return PutAnswer(session=session, results=(), refusal=exc)
        if not call.try_only:
            self._complaints.over(_DISK_FULL)
        for part, result in () if call.try_only else zip(parts, results, strict=True):
            self._metrics.count("rows", part.update.rows, table=table.name)
            self._metrics.count("keys_changed", result.changed, table=table.name)
        self._metrics.count("bytes", load.received, table=table.name)
        answers = dict(zip(order, results, strict=True))
        in_order = tuple(answers[at] for at in range(len(keys)))
        return PutAnswer(session=session, results=in_order, sealed=seals)

    def _receive(self, call: Put, reader: Any, load: Load) -> list[pa.Table]:
        """Read a put to its closing message; without one, nothing of it counts."""
        wire.check_plain(reader.schema)
        checksum = wire.Checksum()
        received: list[list[pa.RecordBatch]] = [[] for _ in call.buckets]
        closing: wire.Fields | None = None
        for chunk in _chunks(reader):
            if closing is not None:
                raise BadRequest("a put that goes on after its closing message")
            if chunk.data is None:
                closing = wire.decode(chunk.app_metadata or b"")
                continue
            at = call.read_place(chunk.app_metadata)
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

    def _parts(
        self, call: Put, table: ClusterTable, received: Sequence[tuple[LeadKey, pa.Table]]
    ) -> list[LedUpdate]:
        """Read and fold what came for each bucket; the error has the refused keys of all."""

        def part(at: int) -> LedUpdate | InvalidValue:
            try:
                return self._part(call, table, *received[at])
            except InvalidValue as exc:
                return exc

        parts = self._map(part, range(len(received)))
        refused = [one for one in parts if isinstance(one, InvalidValue)]
        if refused:
            raise InvalidValue.together(refused)
        return [one for one in parts if not isinstance(one, InvalidValue)]

    def _part(self, call: Put, table: ClusterTable, key: LeadKey, data: pa.Table) -> LedUpdate:
        led = self._hosting.get(key)
        schema_of(call, table)
        update = read_update(self._requests, table, key, data, call)
        return LedUpdate(bucket=led, update=update, term=call.buckets[key.bucket])

    def _fence(self, call: Fence) -> FenceAnswer:
        led = self._requests.led(call)
        session = self._session.name
        table = self._requests.table(call)
        record = self._session.coordinator.locks.record(table.table, call.writer.owner)
        terms = tuple(bucket.fence(call.writer, call.columns, record) for bucket in led)
        self._staging.drop_before(table.table_id, call.writer)
        options = self._hosting.options
        return FenceAnswer(
            session=session,
            results=terms,
            put_max_rows=options.put_max_rows,
            put_max_bytes=options.put_max_bytes,
        )

    def _end_recovery(self, call: EndRecovery) -> EndsAnswer:
        return self._ends(call, lambda led, term: led.end_recovery(call.writer, term))

    def _seal(self, call: Seal) -> EndsAnswer:
        return self._ends(call, lambda led, term: led.seal(call.writer, term, call.batch))

    def _ends(
        self, call: EndRecovery | Seal, carry_out: Callable[[LedBucket, int], int]
    ) -> EndsAnswer:
        led = self._requests.led(call)
        session = self._session.name
        ends = tuple(map(carry_out, led, call.buckets.values()))
        return EndsAnswer(session=session, results=ends)

    # --- What the calls have in common ----------------------------------------------------------

    def _map(self, call: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
        return map_all(self._put_pool, call, items)


def _chunks(reader: Any) -> Iterator[Any]:
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        except pa.ArrowException as exc:
            raise BadRequest(f"a put whose batches cannot be read: {exc}") from exc
        yield chunk
