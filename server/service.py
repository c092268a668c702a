"""The Flight calls of a tablet server: each is read, judged, carried out and answered here.

do_put      put         a stream of batches for buckets of this server, one atomic commit each;
                        or a chunk of a large put, see `large_puts`
do_get      changelog   a bucket's changes
            scan        a bucket's rows
do_action   lookup, fence, undo, end_recovery, seal, ends, close_scanners, snapshot, status,
            advance, forget_put, put_progress
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeAlias

import pyarrow as pa
from pyarrow import flight

from locks import CoordinationError, LeadKey, SessionLost
from merge_engine import (
    AggMode,
    BatchTooLarge,
    Closed,
    Deposed,
    PutResult,
    StorageFull,
    TallybookError,
    Token,
)
from merge_engine.parallel import Item, Result, map_all
from recovery.errors import NotLeader
from recovery.guard import Writer
from recovery.led_bucket import LedUpdate, put_led
from server import wire
from server.complaints import Complaints
from server.definitions import ClusterTable
from server.errors import BadRequest, ServerFailed
from server.large_puts import LargePuts, ToRead, read_update
from server.limits import Admission, Load
from server.metrics import Metrics
from server.reading import Reading
from server.requests import Requests, schema_of
from server.scanners import Scanners
from server.scanning import Scanning
from server.staging import Staging
from server.undos import UNDO_S, Undos

logger = logging.getLogger(__name__)

_DISK_FULL = "disk full"

Answer: TypeAlias = dict[str, Any] | pa.Buffer
Action: TypeAlias = Callable[[pa.Buffer], Answer]


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
        actions: Mapping[str, Action],
        undo_s: float = UNDO_S,
        **security: Any,
    ) -> None:
        """`actions`: those that are somebody else's, by name. `undo_s`: see `Undos`."""
        super().__init__(location, **security)
        self._requests = requests
        self._hosting = requests.hosting
        self._session = requests.session
        self._admission = admission
        self._metrics = metrics
        self._complaints = complaints or Complaints(logger)
        workers = os.cpu_count() or 1
        # A put holds its buckets while it runs on its own threads: see OpenBuckets.
        self._put_pool = ThreadPoolExecutor(workers, thread_name_prefix="tallybook-put")
        self._reading = Reading(self._requests, admission, metrics, lookup_max_keys=lookup_max_keys)
        scanning = Scanning(self._requests, scanners, metrics, staging.scratch)
        self._streams = {"changelog": self._reading.changelog, "scan": scanning.stream}
        self._large = LargePuts(requests, staging, admission, metrics)
        self._undos = Undos(requests, undo_s=undo_s)
        self._staging = staging
        self._actions: dict[str, Action] = {
            "advance": self._large.advance,
            "forget_put": self._large.forget,
            "put_progress": self._large.progress,
            "lookup": self._reading.lookup,
            "fence": self._fence,
            "undo": self._undos.undo,
            "end_recovery": self._end_recovery,
            "seal": self._seal,
            "ends": self._reading.ends,
            "close_scanners": scanning.close,
            "ping": lambda _: {},
            **actions,
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
        """Stream a bucket's changes, or its rows."""
        call = "unknown"
        with self._answering("stream", context):
            fields = wire.decode(ticket.ticket)
            call = fields.get("call", str)
            if call not in self._streams:
                raise BadRequest(f"there is no stream {call!r}")
        with self._answering(call, context):
            schema, batches = self._streams[call](fields)
        return flight.GeneratorStream(schema, self._streaming(call, context, batches))

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
            elif isinstance(exc, SessionLost):  # Ours, not the caller's.
                error = NotLeader(f"this server has lost its session and leads nothing: {exc}")
            self._metrics.count("errors", call=call, error=type(error).__name__)
            if isinstance(exc, StorageFull):
                self._complaints.complain(_DISK_FULL, str(exc))
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
        self._large.shutdown()
        self._undos.shutdown()
        self._reading.close()

    # --- Writing --------------------------------------------------------------------------------

    def _put(self, fields: wire.Fields, reader: Any) -> dict[str, Any]:
        if "put" in fields:
            return self._large.receive(fields, reader.schema, lambda: _chunks(reader))
        session = self._session.name
        table = self._requests.table(fields)
        keys, terms = self._requests.keys(fields, 3)
        announced = fields.optional("bytes", int) or 0
        try_only = fields.optional("try_only", bool) or False
        self._check_size(0, announced)
        with self._admission.put(announced) as load:
            received = self._receive(reader, len(keys), load)
            self._session.check_connected()
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
        if not try_only:
            self._complaints.over(_DISK_FULL)
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
        led = self._hosting.get(key)
        operation = fields.optional("operation_column", str)
        version = schema_of(fields, table).version
        how = ToRead(fields.texts("columns"), _mode(fields), operation, version)
        update = read_update(self._requests, table, key, data, how)
        return LedUpdate(bucket=led, update=update, term=term if term >= 0 else None)

    def _fence(self, body: pa.Buffer) -> dict[str, Any]:
        fields, led, _ = self._requests.led(body, 2)
        session = self._session.name
        writer = _required_writer(fields)
        table = self._requests.table(fields)
        record = self._session.coordinator.record(table.table, writer.owner)
        columns = fields.integers("columns")
        terms = [bucket.fence(writer, columns, record) for bucket in led]
        self._staging.drop_before(table.table_id, writer)
        options = self._hosting.options
        return {
            "session": session,
            "terms": terms,
            "put_max_rows": options.put_max_rows,
            "put_max_bytes": options.put_max_bytes,
        }

    def _end_recovery(self, body: pa.Buffer) -> dict[str, Any]:
        fields, led, numbers = self._requests.led(body, 3)
        session = self._session.name
        writer = _required_writer(fields)
        ends = [
            bucket.end_recovery(writer, term) for bucket, (term,) in zip(led, numbers, strict=True)
        ]
        return {"session": session, "ends": ends}

    def _seal(self, body: pa.Buffer) -> dict[str, Any]:
        fields, led, numbers = self._requests.led(body, 3)
        session = self._session.name
        writer, batch = _required_writer(fields), fields.get("batch", int)
        ends = [
            bucket.seal(writer, term, batch) for bucket, (term,) in zip(led, numbers, strict=True)
        ]
        return {"session": session, "ends": ends}

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


def _bucket_index(metadata: pa.Buffer | None, buckets: int) -> int:
    try:
        index = int(bytes(metadata or b""))
    except ValueError as exc:
        raise BadRequest("a batch that does not say which bucket it is for") from exc
    if not 0 <= index < buckets:
        raise BadRequest(f"a batch for bucket {index} of {buckets} of the put")
    return index


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
