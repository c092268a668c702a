"""Large puts on their way: rows wait on this server's disk until all are there.

A client uploads a put in chunks, each of them a call that is checked by itself, and then asks to
*advance* it, again and again, until it is done. A call carries on for about a second, so that
nobody waits long for an answer, and whoever asks, goes on with it: the task that sent the rows, or
another one that has the same token. Nothing is written before all that was sent has arrived.

What waits here goes with the server, or when its writer has no use for it any more: its epoch is
over, or its batch is. A writer that waits long for more rows keeps what it has uploaded.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pyarrow as pa
import xxhash

from foundation.background import surviving
from foundation.errors import BadRequest, InvalidValue, StagedPutLost, TallybookError, UnknownTable
from foundation.ids import BucketId
from locks.coordinator import Coordinator
from merge_engine.bucket.overlay import Overlay
from merge_engine.bucket.results import BucketResult
from merge_engine.storage.scratch import Scratch, ScratchFile
from recovery.leader.fenced_writers import Writer
from server.protocol.puts import PutChunk, PutProgress, PutProgressAnswer

logger = logging.getLogger(__name__)

SPOOL = "spool"
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class _Stored:
    """Where a part is in the spool, and the checksum (xxh3_64) of what it was when it came."""

    offset: int
    size: int
    checksum: int
    rows: int


@dataclass
class PartsOfBucket:
    """The parts of one bucket, how many of them are done, and the result of the last one.

    `done` is None as long as the bucket was not asked. `tried` are those that were tried, after
    those that are done. `turns`: of the bucket, if nobody has had it
    since we did.
    `together`: how many parts were taken as one last, `most_together` how many may be.
    `alone_s`: since when nobody else has wanted it.
    """

    parts: list[_Stored] = field(default_factory=list)
    done: int | None = None
    tried: int = 0
    turns: int = -1
    together: int = 1
    most_together: int = sys.maxsize
    alone_s: float = 0.0
    overlay: Overlay | None = None
    result: BucketResult | None = None


class StagedPut:
    """One upload. Safe for threads: of two who advance a bucket, one waits.

    `request`: what all its chunks say of it.
    """

    def __init__(self, request: PutChunk, schema: pa.Schema, file: ScratchFile) -> None:
        self.request = request
        self.schema = schema
        self._file = file
        self._reading = os.open(file.path, os.O_RDONLY)
        self._lock = threading.Lock()
        self.buckets: dict[BucketId, PartsOfBucket] = {}
        self._working: dict[BucketId, threading.Lock] = {}
        self._closed = False
        self.chunks = 0
        self.rows = 0
        self.used_s = 0.0
        # What was refused of it so far. From then on its parts are tried, and not written.
        self.refusals: list[InvalidValue] = []

    @property
    def bytes(self) -> int:
        """How much room it takes."""
        return self._file.size

    @property
    def rows_done(self) -> int:
        """How many rows were written."""
        return sum(
            part.rows for one in self.buckets.values() for part in one.parts[: one.done or 0]
        )

    def add(self, chunk: int, parts: Iterable[tuple[BucketId, int, int, pa.Buffer]]) -> None:
        """Keep a chunk: per part its bucket, number, rows and bytes. One that is there is ignored.

        StagedPutLost if one before it is missing.
        """
        with self._lock:
            if self._closed:
                raise _lost(self.request.put_id)
            if chunk < self.chunks:
                return
            if chunk > self.chunks:
                raise StagedPutLost(
                    f"chunk {chunk} of a put comes after chunk {self.chunks - 1}: start over"
                )
            rows = 0
            added: list[tuple[BucketId, _Stored]] = []
            counts = {key: len(one.parts) for key, one in self.buckets.items()}
            for key, number, part_rows, data in parts:
                if number != counts.get(key, 0):
                    raise BadRequest(f"part {number} of bucket {key} comes out of order")
                counts[key] = number + 1
                offset, checksum = self._file.size, xxhash.xxh3_64_intdigest(data)
                size = self._file.write(data)
                added.append((key, _Stored(offset, size, checksum, part_rows)))
                rows += part_rows
            self._file.flush()
            for key, stored in added:
                self.buckets.setdefault(key, PartsOfBucket()).parts.append(stored)
                self._working.setdefault(key, threading.Lock())
            self.chunks += 1
            self.rows += rows

    def part(self, key: BucketId, number: int) -> pa.RecordBatch:
        """Return a part's rows; only within `at`. StagedPutLost if the disk has changed them."""
        stored = self.buckets[key].parts[number]
        data = os.pread(self._reading, stored.size, stored.offset)
        if xxhash.xxh3_64_intdigest(data) != stored.checksum:
            raise StagedPutLost(
                f"part {number} of bucket {key} was damaged on the disk of the spool; start over"
            )
        return pa.ipc.read_record_batch(pa.py_buffer(data), self.schema)

    @contextmanager
    def at(self, key: BucketId) -> Iterator[PartsOfBucket]:
        """Work on the parts of a bucket, alone; StagedPutLost if the upload was forgotten."""
        with self._working[key]:
            if self._closed:
                raise _lost(self.request.put_id)
            yield self.buckets[key]

    def close(self) -> None:
        """Free its room, after the parts that are just being worked on. Closing twice is fine."""
        self._closed = True
        for key, working in list(self._working.items()):
            with working:
                one = self.buckets[key]
                if one.overlay is not None:
                    one.overlay.close()
                    one.overlay = None
        with self._lock:
            reading, self._reading = self._reading, -1
            if reading >= 0:
                os.close(reading)
            self._file.close()


class Staging:
    """The uploads of a server. Safe for threads."""

    def __init__(
        self,
        scratch: Scratch,
        *,
        ttl_s: float,
        is_needed: Callable[[PutChunk], bool],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ttl_s`: how long nobody asks for one until `is_needed` is asked; TallybookError: who
        knows."""
        self.scratch = scratch
        self._ttl_s = ttl_s
        self._is_needed = is_needed
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._puts: dict[str, StagedPut] = {}
        self._closed = threading.Event()
        self._reaper = threading.Thread(target=self._reap, name="tallybook-staging", daemon=True)
        self._reaper.start()

    def begin(self, request: PutChunk, schema: pa.Schema, chunk: int) -> StagedPut:
        """Return the upload that a chunk belongs to; a new one with chunk 0."""
        put_id = request.put_id
        with self._lock:
            staged = self._puts.get(put_id)
            if staged is None and chunk == 0:
                staged = self._puts[put_id] = StagedPut(request, schema, self.scratch.file())
            if staged is None:
                raise _lost(put_id)
            if staged.request != request or staged.schema != schema:
                raise BadRequest(f"put {put_id} goes on as another one")
            staged.used_s = self._clock_s()
            return staged

    def get(self, put_id: str) -> StagedPut:
        """Return an upload; StagedPutLost if it is not here any more."""
        with self._lock:
            staged = self._puts.get(put_id)
            if staged is None:
                raise _lost(put_id)
            staged.used_s = self._clock_s()
            return staged

    def drop(self, put_id: str) -> None:
        """Forget an upload."""
        with self._lock:
            staged = self._puts.pop(put_id, None)
        if staged is not None:
            staged.close()

    def drop_before(self, table_id: int, writer: Writer) -> None:
        """Forget what earlier epochs of this writer have uploaded: it is fenced."""
        for put_id, staged in self._all():
            known = staged.request.writer
            ours = staged.request.table_id == table_id and known.owner == writer.owner
            if ours and known.epoch < writer.epoch:
                self.drop(put_id)

    def progress(self, call: PutProgress) -> PutProgressAnswer:
        """Return how much of a batch has arrived here, and was written, by all its uploads."""
        found = [
            staged
            for _, staged in self._all()
            if staged.request.table_id == call.table_id
            and (staged.request.owner, staged.request.token) == (call.owner, call.token)
        ]
        return PutProgressAnswer(
            rows=sum(staged.rows for staged in found),
            bytes=sum(staged.bytes for staged in found),
            rows_done=sum(staged.rows_done for staged in found),
        )

    def __len__(self) -> int:
        return len(self._puts)

    def shutdown(self) -> None:
        """Forget all of them."""
        self._closed.set()
        for put_id, _ in self._all():
            self.drop(put_id)
        self._reaper.join()

    def _all(self) -> list[tuple[str, StagedPut]]:
        with self._lock:
            return list(self._puts.items())

    def reap(self) -> None:
        """Forget what nobody has asked for in a while, and nobody will."""
        for put_id, staged in self._all():
            if self._clock_s() - staged.used_s <= self._ttl_s:
                continue
            try:
                if self._is_needed(staged.request):
                    staged.used_s = self._clock_s()
                    continue
            except TallybookError as exc:
                logger.info("whether an upload is still needed is not known: %s", exc)
                continue
            with suppress(OSError):
                self.drop(put_id)

    def _reap(self) -> None:
        while not self._closed.wait(min(self._ttl_s / 4, _LONGEST_PAUSE_S)):
            with surviving("forgetting uploads that nobody needs"):
                self.reap()


def is_needed(put: PutChunk, coordinator: Coordinator) -> bool:
    """Whether the writer of an upload may still ask for it, by its lock as it is now."""
    try:
        table = coordinator.tables.get_by_id(put.table_id)
        lock = coordinator.locks.look(table, put.writer.owner)
    except UnknownTable:
        return False
    if lock is None or not lock.live or lock.record.epoch != put.writer.epoch:
        return False
    if (put.owner, put.token.epoch) != put.writer:  # A debt, which is paid before it is ready.
        return not lock.record.ready
    return lock.record.batch < put.token.batch


def _lost(put_id: str) -> StagedPutLost:
    return StagedPutLost(
        f"put {put_id} is not on this server: it was restarted, or the put's batch or epoch is "
        "over; start over"
    )
