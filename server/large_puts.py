"""The calls of a tablet server that take large puts: chunks come in, and are advanced part by part.

do_put      a chunk     batches, each with its bucket and part as metadata, and a closing message
do_action   advance     go on with a put for about a second: write its next parts, or try them
            forget_put  let go of what was uploaded
            put_progress  how much of a batch is here, and how much is written
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from locks import BucketKey, LeadKey
from merge_engine import AggMode, BatchTooLarge, PutResult, Token
from merge_engine.batch import read_batch
from merge_engine.fold import Update, fold
from merge_engine.hashing import bucket_of
from merge_engine.options import MEBIBYTE
from merge_engine.overlay import Overlay
from merge_engine.parallel import map_all
from recovery.errors import TornPut
from recovery.guard import Writer
from recovery.led_bucket import LedBucket, Overtaken, Put
from server import wire
from server.definitions import ClusterTable
from server.errors import BadRequest, StagedPutLost
from server.limits import Admission, Load
from server.metrics import Metrics
from server.requests import Requests, schema_of
from server.staging import PartsOfBucket, PutRequest, StagedPut, Staging

_ADVANCE_S = 1.0
# So long nobody else has wanted a bucket: then several parts are written there as one, up to this.
_ALONE_S = 0.5
_MOST_ROWS, _MOST_BYTES = 25_000, 8 * MEBIBYTE


class ToRead(NamedTuple):
    """How the rows of a put are to be read, and under which version of the schema."""

    columns: Sequence[str] | None
    mode: AggMode
    operation_column: str | None
    schema_version: int


def read_update(
    requests: Requests,
    table: ClusterTable,
    key: LeadKey,
    data: pa.RecordBatch | pa.Table,
    how: ToRead,
) -> Update:
    """Check rows that came for a bucket, and fold them."""
    rows = read_batch(
        data,
        table.history.schema(how.schema_version),
        requests.hosting.options,
        columns=how.columns,
        mode=how.mode,
        operation_column=how.operation_column,
    )
    if len(rows) and (bucket_of(rows.keys, table.buckets) != key.key.number).any():
        raise BadRequest(f"a put to bucket {key} has rows of other buckets")
    return fold(rows, table.history.key_codec)


class LargePuts:
    """Answers the holders of column locks that put more than one call takes. Safe for threads."""

    def __init__(
        self,
        requests: Requests,
        staging: Staging,
        admission: Admission,
        metrics: Metrics,
        *,
        advance_s: float = _ADVANCE_S,
    ) -> None:
        self._requests = requests
        self._staging = staging
        self._admission = admission
        self._metrics = metrics
        self._advance_s = advance_s
        # Not the puts' threads: a part waits for its bucket, and a put that holds it needs those.
        # And half of the cores at most: others are to be answered meanwhile.
        workers = max((os.cpu_count() or 1) // 2, 1)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tallybook-part")

    def shutdown(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    # --- Chunks come in -------------------------------------------------------------------------

    def receive(
        self, fields: wire.Fields, schema: pa.Schema, chunks: Callable[[], Any]
    ) -> dict[str, Any]:
        """Take a chunk; `chunks` gives the messages of the stream."""
        session = self._requests.session.name
        table = self._requests.table(fields)
        if not table.locked:
            raise BadRequest("a large put to a table without column locks; split it")
        schema_of(fields, table)
        request = _request(fields, table)
        announced = fields.optional("bytes", int) or 0
        self._check_size(announced)
        with self._admission.put(announced) as load:
            parts = self._read(schema, chunks, table, load)
            staged = self._staging.begin(request, schema, fields.get("chunk", int))
            staged.add(fields.get("chunk", int), parts)
        self._metrics.count("bytes", load.received, table=table.name)
        return {"session": session, "chunks": staged.chunks}

    def _read(
        self, schema: pa.Schema, chunks: Callable[[], Any], table: ClusterTable, load: Load
    ) -> list[tuple[BucketKey, int, int, pa.Buffer]]:
        """Read a chunk to its closing message; without one, nothing of it counts."""
        wire.check_plain(schema)
        checksum = wire.Checksum()
        parts: list[tuple[BucketKey, int, int, pa.Buffer]] = []
        closing: wire.Fields | None = None
        for chunk in chunks():
            if closing is not None:
                raise BadRequest("a put that goes on behind its closing message")
            if chunk.data is None:
                closing = wire.decode(chunk.app_metadata or b"")
                continue
            key, number = _part_of(chunk.app_metadata, table.buckets)
            data = checksum.keep(chunk.data)
            load.grow(data.size)
            self._check_size(load.received, chunk.data.num_rows)
            parts.append((key, number, chunk.data.num_rows, data))
        if closing is None:
            raise BadRequest(
                f"a put that was cut short after {checksum.rows:,} rows; nothing was written"
            )
        checksum.check(closing)
        return parts

    def _check_size(self, size: int, rows: int = 0) -> None:
        options = self._requests.hosting.options
        if size > options.put_max_bytes or rows > options.put_max_rows:
            raise BatchTooLarge(
                f"a chunk of more than {options.put_max_bytes:,} bytes (put_max_bytes), or a part "
                f"of more than {options.put_max_rows:,} rows (put_max_rows); nothing was written, "
                "send smaller ones"
            )

    # --- And are advanced -----------------------------------------------------------------------

    def advance(self, body: pa.Buffer) -> dict[str, Any]:
        """Go on with a put that has arrived whole, for about a second; say whether it is done."""
        fields = wire.decode(body)
        session = self._requests.session.name
        self._requests.table(fields)
        staged = self._staging.get(fields.get("put", str))
        rows = fields.rows("buckets", 4)
        terms = {BucketKey(row[0], row[1]): row[2] for row in rows}
        counts = {BucketKey(row[0], row[1]): row[3] for row in rows}
        here = {key: len(one.parts) for key, one in staged.buckets.items()}
        if (counts, fields.get("rows", int)) != (here, staged.rows):
            raise BadRequest(
                f"a put of {fields.get('rows', int):,} rows of which {staged.rows:,} arrived; "
                "nothing was written, send it again"
            )
        step = self._try_part if fields.optional("try_only", bool) else self._write_part
        deadline = time.monotonic() + self._advance_s
        keys = sorted(terms)
        with self._admission.put():
            done = map_all(
                self._pool,
                lambda key: self._run(partial(step, staged, key, terms[key]), deadline),
                keys,
            )
        answer: dict[str, Any] = {
            "session": session,
            "done": all(one is not None for one in done),
            "rows_done": staged.rows_done,
        }
        if answer["done"]:
            answer["results"] = [
                [one.base_offset, one.end_offset, int(one.repeated), one.changed]
                for one in done
                if one is not None
            ]
            answer["keys"] = [list(key) for key in keys]
        return answer

    def forget(self, body: pa.Buffer) -> dict[str, Any]:
        """Let go of an upload."""
        self._staging.drop(wire.decode(body).get("put", str))
        return {}

    def progress(self, body: pa.Buffer) -> dict[str, Any]:
        """Say how much of a batch is here."""
        fields = wire.decode(body)
        token = Token(*fields.integers("token"))
        table_id, owner = fields.get("table", int), fields.get("owner", str)
        return dict(self._staging.progress(table_id, owner, token))

    def _run(self, step: Callable[[], PutResult | None], deadline: float) -> PutResult | None:
        """Take one step after the other, one at least, until it is done or time is over."""
        while (result := step()) is None and time.monotonic() < deadline:
            pass
        return result

    def _write_part(self, staged: StagedPut, key: BucketKey, term: int) -> PutResult | None:
        """Write the next parts of a bucket; the result once all of them are written."""
        with staged.at(key) as one:
            if one.result is not None:
                return one.result
            led, put = self._led(staged, key), staged.request.put
            try:
                first = led.parts_done(put, term) if one.done is None else one.done
                count = self._how_many(one, first, led)
                update = self._update(staged, key, first, count)
                self._requests.session.check_connected()
                one.turns = led.bucket.turns + 1  # If nobody else comes.
                result = led.put_part(
                    *(put, term, update),
                    part=first,
                    parts=count,
                    more=first + count < len(one.parts),
                )
            except Overtaken as exc:
                other_id = exc.put_id
            else:
                one.result = result
                one.done = first + count if result is None else len(one.parts)
                name = self._requests.hosting.table(staged.request.table_id).name
                self._metrics.count("rows", update.rows, table=name)
                return result
        try:
            other = self._staging.get(other_id)
        except StagedPutLost as exc:
            raise TornPut(f"a put was begun by an upload that is gone: start over ({exc})") from exc
        result = self._write_part(other, key, term)
        if result is not None:
            with staged.at(key) as one:
                one.result = result
        return result

    def _try_part(self, staged: StagedPut, key: BucketKey, term: int) -> PutResult | None:
        """Try the next part of a bucket on top of those before it."""
        with staged.at(key) as one:
            led = self._led(staged, key)
            count = self._how_many(one, one.tried, led)
            update = self._update(staged, key, one.tried, count)
            if one.overlay is None:
                one.overlay = Overlay(self._staging.scratch.directory)
            one.turns = led.bucket.turns + 2  # It takes two, if nobody else comes.
            led.try_part(staged.request.put.writer, term, update, one.overlay)
            one.tried += count
            if one.tried < len(one.parts):
                return None
            one.overlay.close()
            one.overlay, one.tried = None, 0
            end = led.bucket.end_offset
            return PutResult(base_offset=end, end_offset=end)

    def _led(self, staged: StagedPut, key: BucketKey) -> LedBucket:
        return self._requests.hosting.get(LeadKey(staged.request.table_id, key))

    def _how_many(self, one: PartsOfBucket, first: int, led: LedBucket) -> int:
        """Return how many parts to write as one: the bucket is held so long, and others may wait.

        One, if somebody else has had it since our last turn, or not long ago.
        """
        now_s = time.monotonic()
        if led.bucket.turns != one.turns:
            one.alone_s = now_s
        if now_s - one.alone_s < _ALONE_S:
            return 1
        options = self._requests.hosting.options
        rows = min(_MOST_ROWS, options.put_max_rows)
        size = min(_MOST_BYTES, options.put_max_bytes)
        count = 0
        for part in one.parts[first:]:
            rows, size = rows - part.rows, size - part.size
            if count and (rows < 0 or size < 0):
                break
            count += 1
        return count

    def _update(self, staged: StagedPut, key: BucketKey, first: int, count: int) -> Update:
        request = staged.request
        parts = [staged.part(key, number) for number in range(first, first + count)]
        return read_update(
            self._requests,
            self._requests.hosting.table(request.table_id),
            LeadKey(request.table_id, key),
            pa.Table.from_batches(parts),
            ToRead(request.columns, request.mode, request.operation_column, request.schema_version),
        )


def _request(fields: wire.Fields, table: ClusterTable) -> PutRequest:
    token = fields.integers("token")
    if len(token) != 2:
        raise BadRequest("a token that is not an epoch and a batch")
    mode = fields.get("mode", int)
    if mode not in set(AggMode):
        raise BadRequest(f"a put of agg mode {mode}, which there is not")
    columns = fields.texts("columns")
    return PutRequest(
        table_id=table.table_id,
        schema_version=fields.get("schema_version", int),
        columns=None if columns is None else tuple(columns),
        mode=AggMode(mode),
        operation_column=fields.optional("operation_column", str),
        put=Put(
            writer=Writer(fields.get("writer", str), fields.get("epoch", int)),
            owner=fields.get("owner", str),
            token=Token(*token),
            put_id=fields.get("put", str),
            resumable=fields.optional("resumable", bool) or False,
        ),
    )


def _part_of(metadata: pa.Buffer | None, buckets: int) -> tuple[BucketKey, int]:
    try:
        partition, number, part = map(int, bytes(metadata or b"").split())
    except ValueError as exc:
        raise BadRequest("a batch that does not say which part it is of which bucket") from exc
    if partition < 0 or not 0 <= number < buckets or part < 0:
        raise BadRequest(f"a batch for bucket {partition}/{number}, which there is not")
    return BucketKey(partition, number), part
