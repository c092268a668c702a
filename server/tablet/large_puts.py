"""The calls of a tablet server that take large puts: chunks come in, and are advanced in parts."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa

from foundation.errors import (
    BadRequest,
    BatchTooLarge,
    ColumnTooLarge,
    InvalidValue,
    StagedPutLost,
    TornPut,
)
from foundation.ids import BucketId, LeadKey
from foundation.parallel import map_all
from merge_engine.bucket.options import MEBIBYTE
from merge_engine.bucket.overlay import Overlay
from merge_engine.bucket.results import BucketResult
from merge_engine.merging.batch import read_batch
from merge_engine.merging.fold import Update, fold
from merge_engine.merging.hashing import bucket_of
from merge_engine.merging.refused_keys import MOST_REFUSED
from recovery.leader.led_bucket import LedBucket, Overtaken, Put
from server.protocol import wire
from server.protocol.calls import Nothing
from server.protocol.definitions import ClusterTable
from server.protocol.puts import (
    Advance,
    AdvanceAnswer,
    ForgetPut,
    PutChunk,
    PutChunkAnswer,
    PutProgress,
    PutProgressAnswer,
    RowsCall,
)
from server.tablet.limits import Admission, Load
from server.tablet.metrics import Metrics
from server.tablet.requests import Requests, schema_of
from server.tablet.staging import PartsOfBucket, StagedPut, Staging

_ADVANCE_S = 1.0
# So long nobody else has wanted a bucket: then several parts are written there as one, up to this.
_ALONE_S = 0.5
_MOST_ROWS, _MOST_BYTES = 25_000, 8 * MEBIBYTE


def read_update(
    requests: Requests,
    table: ClusterTable,
    key: LeadKey,
    data: pa.RecordBatch | pa.Table,
    call: RowsCall[Any],
) -> Update:
    """Check rows that came for a bucket, and fold them; the call says how to read them."""
    rows = read_batch(
        data,
        table.history.schema(call.schema_version),
        requests.hosting.options,
        columns=call.columns,
        mode=call.mode,
        operation_column=call.operation_column,
    )
    if len(rows) and (bucket_of(rows.keys, table.buckets) != key.bucket.number).any():
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
        self, call: PutChunk, schema: pa.Schema, chunks: Callable[[], Any]
    ) -> PutChunkAnswer:
        """Take a chunk; `chunks` gives the messages of the stream."""
        session = self._requests.session.name
        table = self._requests.table(call)
        if not table.locked:
            raise BadRequest("a large put to a table without column locks; split it")
        schema_of(call, table)
        self._check_size(call.announced_bytes)
        with self._admission.put(call.announced_bytes) as load:
            parts = self._read(schema, chunks, table, load)
            # A put to a former leader would fail anyway, once all of it was uploaded.
            self._requests.hosting.get_all(
                [LeadKey(call.table_id, key) for key in {key for key, *_ in parts}]
            )
            staged = self._staging.begin(call.put, schema, call.chunk)
            staged.add(call.chunk, parts)
        self._metrics.count("bytes", load.received, table=table.name)
        return PutChunkAnswer(session=session, chunks=staged.chunks)

    def _read(
        self, schema: pa.Schema, chunks: Callable[[], Any], table: ClusterTable, load: Load
    ) -> list[tuple[BucketId, int, int, pa.Buffer]]:
        """Read a chunk to its closing message; without one, nothing of it counts."""
        wire.check_plain(schema)
        checksum = wire.Checksum()
        parts: list[tuple[BucketId, int, int, pa.Buffer]] = []
        closing: wire.Fields | None = None
        for chunk in chunks():
            if closing is not None:
                raise BadRequest("a put that goes on after its closing message")
            if chunk.data is None:
                closing = wire.decode(chunk.app_metadata or b"")
                continue
            key, number = PutChunk.read_place(chunk.app_metadata, table.buckets)
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

    def advance(self, call: Advance) -> AdvanceAnswer:
        """Go on with a put that has arrived whole, for about a second; say whether it is done."""
        session = self._requests.session.name
        self._requests.table(call)
        staged = self._staging.get(call.put_id)
        counts = {key: one.parts for key, one in call.buckets.items()}
        here = {key: len(one.parts) for key, one in staged.buckets.items()}
        if (counts, call.rows) != (here, staged.rows):
            raise BadRequest(
                f"a put of {call.rows:,} rows of which {staged.rows:,} arrived; "
                "nothing was written, send it again"
            )
        deadline = time.monotonic() + self._advance_s
        keys = sorted(call.buckets)
        with self._admission.put():
            found = map_all(
                self._pool,
                lambda key: self._run(partial(self._step, call, staged, key), deadline),
                keys,
            )
        results = {key: one for key, one in zip(keys, found, strict=True) if one is not None}
        refused = len(_refused(staged))
        done = len(results) == len(keys) or refused >= MOST_REFUSED
        refusal = InvalidValue.together(staged.refusals) if done and refused else None
        return AdvanceAnswer(
            session=session,
            done=done,
            rows_done=staged.rows_done,
            results=results if done and refusal is None else None,
            refusal=refusal,
        )

    def _step(self, call: Advance, staged: StagedPut, key: BucketId) -> BucketResult | None:
        """Write the next parts of a bucket, or try them; the result once all of them are.

        Once anything of the put is refused, its writer will undo it: all that is left is to find
        out what else is refused.
        """
        term = call.buckets[key].term
        try:
            if call.try_only or staged.refusals:
                return self._try_part(staged, key, term)
            return self._write_part(staged, key, term)
        except InvalidValue as exc:
            if not (call.takes_refusal and exc.refused):
                raise
            staged.refusals.append(exc)
            return None
        except ColumnTooLarge:
            # What is stored of the keys of several parts; of one, its writer sends smaller ones.
            with staged.at(key) as one:
                if one.together == 1:
                    raise
                one.most_together = one.together // 2
            return None

    def forget(self, call: ForgetPut) -> Nothing:
        """Let go of an upload."""
        self._staging.drop(call.put_id)
        return Nothing()

    def progress(self, call: PutProgress) -> PutProgressAnswer:
        """Say how much of a batch is here."""
        return self._staging.progress(call)

    def _run(self, step: Callable[[], BucketResult | None], deadline: float) -> BucketResult | None:
        """Take one step after the other, one at least, until it is done or time is over."""
        while (result := step()) is None and time.monotonic() < deadline:
            pass
        return result

    def _write_part(self, staged: StagedPut, key: BucketId, term: int) -> BucketResult | None:
        """Write the next parts of a bucket; the result once all of them are written."""
        with staged.at(key) as one:
            if one.result is not None:
                return one.result
            led, put = self._led(staged, key), _in_parts(staged.request)
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

    def _try_part(self, staged: StagedPut, key: BucketId, term: int) -> BucketResult | None:
        """Try the next part of a bucket on top of those before it."""
        with staged.at(key) as one:
            led = self._led(staged, key)
            first = max(one.tried, one.done or 0)
            if first < len(one.parts):
                self._try_parts_from(first, one, staged, led, key=key, term=term)
            if max(one.tried, one.done or 0) < len(one.parts):
                return None
            if one.overlay is not None:
                one.overlay.close()
                one.overlay = None
            end = led.bucket.end_offset
            return BucketResult(base_offset=end, end_offset=end)

    def _try_parts_from(
        self,
        first: int,
        one: PartsOfBucket,
        staged: StagedPut,
        led: LedBucket,
        *,
        key: BucketId,
        term: int,
    ) -> None:
        """Try the next parts of a bucket on top of those before them."""
        count = self._how_many(one, first, led)
        try:
            update = self._update(staged, key, first, count).without(_refused(staged))
        except InvalidValue:  # What else is refused of these rows is found when they come without.
            one.tried = first + count
            raise
        if len(update):
            if one.overlay is None:
                one.overlay = Overlay(self._staging.scratch.directory)
            one.turns = led.bucket.turns + 2  # It takes two, if nobody else comes.
            led.try_part(staged.request.writer, term, update, one.overlay)
        one.tried = first + count

    def _led(self, staged: StagedPut, key: BucketId) -> LedBucket:
        return self._requests.hosting.get(LeadKey(staged.request.table_id, key))

    def _how_many(self, one: PartsOfBucket, first: int, led: LedBucket) -> int:
        """Return how many parts to write as one: the bucket is held so long, and others may wait.

        One, if somebody else has had it since our last turn, or not long ago.
        """
        one.together = min(self._how_many_fit(one, first, led), one.most_together)
        return one.together

    def _how_many_fit(self, one: PartsOfBucket, first: int, led: LedBucket) -> int:
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

    def _update(self, staged: StagedPut, key: BucketId, first: int, count: int) -> Update:
        request = staged.request
        parts = [staged.part(key, number) for number in range(first, first + count)]
        return read_update(
            self._requests,
            self._requests.hosting.table(request.table_id),
            LeadKey(request.table_id, key),
            pa.Table.from_batches(parts),
            request,
        )


def _refused(staged: StagedPut) -> set[bytes]:
    """Return the keys of a put that were refused so far."""
    return {key for refusal in list(staged.refusals) for key in refusal.refused}


def _in_parts(call: PutChunk) -> Put:
    """Return the put as a leader judges it."""
    return Put(
        writer=call.writer,
        owner=call.owner,
        token=call.token,
        put_id=call.put_id,
        resumable=call.resumable,
    )
