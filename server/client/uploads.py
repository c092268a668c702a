"""Large puts, as a client sends them: parts go to their leaders in chunks, and are then advanced.

Every call is short, so a server that hangs is noticed as soon as elsewhere. What fails is not sent
again: whoever holds the column lock starts over, under a new epoch.
"""

import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pyarrow as pa

from foundation.errors import InvalidValue, NotLeader, ServerUnavailable
from foundation.ids import BucketId, LeadKey
from foundation.parallel import at_once, map_all
from merge_engine.bucket.options import MEBIBYTE
from merge_engine.bucket.results import BucketResult
from recovery.writer.access import Answers, GrantedRows
from recovery.writer.parts import Part
from server.client.asking import ask
from server.client.connections import Broken
from server.client.table_caller import Answer, TableCaller
from server.protocol.calls import Call
from server.protocol.puts import (
    Advance,
    AdvanceAnswer,
    ForgetPut,
    PutChunk,
    PutProgress,
    PutProgressAnswer,
    Uploads,
)

CHUNK_BYTES = 16 * MEBIBYTE
_AT_ONCE = 8


class Uploaded(NamedTuple):
    """What a server has of a put, for somebody else to go on with; `parts` are (*bucket, count)."""

    address: str
    put_id: str
    rows: int
    parts: tuple[tuple[int, int, int], ...]


@dataclass
class _Upload:
    """What goes to one server: what waits to be sent, and what was."""

    address: str
    put_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    waiting: list[tuple[bytes, pa.RecordBatch]] = field(default_factory=list)
    waiting_bytes: int = 0
    chunks: int = 0
    rows: int = 0
    parts: dict[BucketId, int] = field(default_factory=dict)

    def uploaded(self) -> Uploaded:
        """Return what others need to know, to go on with it."""
        assert not self.waiting
        parts = tuple((*key, count) for key, count in self.parts.items())
        return Uploaded(self.address, self.put_id, self.rows, parts)

    @classmethod
    def of(
        cls, address: str, put_id: str, rows: int, parts: Iterable[tuple[int, int, int]]
    ) -> "_Upload":
        """Return an upload of somebody else."""
        counts = {BucketId(partition, number): count for partition, number, count in parts}
        return cls(address, put_id, rows=rows, parts=counts)


class LargePut:
    """One put of a writer, to all its buckets. Not safe for threads.

    Add the parts; then try them, or put them. `close` lets the servers forget it. One that is
    `resumable` has the same parts whoever sends it, and may be gone on with; see `Put`.
    """

    def __init__(
        self,
        caller: TableCaller,
        granted: GrantedRows,
        *,
        resumable: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """`granted`: how the rows are to be read; the rows themselves come as parts."""
        rows, grant = granted.rows, granted.grant
        assert rows.schema is not None
        self._calls = caller.calls
        self._table = caller.table
        self._terms = grant.terms
        self._chunk_bytes = chunk_bytes
        self._first = PutChunk(
            table_id=caller.table.table_id,
            schema_version=rows.schema.version,
            columns=None if rows.columns is None else tuple(rows.columns),
            mode=rows.mode,
            operation_column=rows.operation_column,
            owner=grant.owner,
            token=grant.token,
            writer=grant.writer,
            put_id="",
            resumable=resumable,
            chunk=0,
        )
        self._uploads: dict[str, _Upload] = {}
        # All parts of a bucket go where its first one went: other threads use the same directory,
        # and may learn meanwhile that the bucket has moved. The former leader refuses the put, and
        # the writer starts over.
        self._upload_of: dict[BucketId, _Upload] = {}
        self._taken_over: list[_Upload] = []
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tallybook-upload")

    def add(self, parts: Iterable[Part]) -> None:
        """Send parts, or keep them until a chunk is full."""
        for part in parts:
            upload = self._upload_to(part.key)
            upload.waiting.append((PutChunk.place(part.key, part.number), part.rows))
            upload.waiting_bytes += part.rows.nbytes
            upload.parts[part.key] = part.number + 1
            upload.rows += part.rows.num_rows
            if upload.waiting_bytes >= self._chunk_bytes:
                self._send(upload)

    def _upload_to(self, key: BucketId) -> _Upload:
        """Return the upload that has the parts of a bucket."""
        if key not in self._upload_of:
            lead = LeadKey(self._table.table_id, key)
            address = self._calls.directory.address_of(lead, self._table.buckets)
            self._upload_of[key] = self._uploads.setdefault(address, _Upload(address))
        return self._upload_of[key]

    def put(self) -> Answers[BucketResult]:
        """Write all parts."""
        return self._run(try_only=False)

    def try_all(self) -> Answers[BucketResult]:
        """See whether all parts can be merged, one on top of the other."""
        return self._run(try_only=True)

    def _run(self, *, try_only: bool) -> Answers[BucketResult]:
        uploads = self._all()
        map_all(self._pool, self._send, uploads)
        answers = map_all(self._pool, lambda one: self._advance(one, try_only), uploads)
        refused = [answer.refusal for answer in answers if answer.refusal is not None]
        if refused:
            raise InvalidValue.together(refused)
        results = {
            key: result for answer in answers for key, result in (answer.results or {}).items()
        }
        return Answers(results, frozenset(answer.session for answer in answers))

    def hand_over(self) -> list[Uploaded]:
        """Leave what the servers have to somebody else; this one is closed."""
        self._pool.shutdown()
        return [upload.uploaded() for upload in self._all()]

    def take_over(self, uploads: Iterable[Uploaded]) -> None:
        """Go on with what others have uploaded for this put."""
        self._taken_over += [_Upload.of(*upload) for upload in uploads]

    def _all(self) -> list[_Upload]:
        return [*self._uploads.values(), *self._taken_over]

    def close(self) -> None:
        """Let the servers forget what they do not need any more; if not told, they will anyway."""
        for upload in self._all():
            try:
                self._call(upload, ForgetPut(put_id=upload.put_id))
            except Exception:  # They forget it by themselves.
                continue
        self._pool.shutdown()

    def _send(self, upload: _Upload) -> None:
        if not upload.waiting:
            return
        call = replace(
            self._first,
            put_id=upload.put_id,
            chunk=upload.chunks,
            announced_bytes=upload.waiting_bytes,
        )
        schema = upload.waiting[0][1].schema
        with self._curable(upload):
            self._calls.connections.put(
                upload.address, call, schema, upload.waiting, self._calls.attempt_s
            )
        upload.waiting, upload.waiting_bytes = [], 0
        upload.chunks += 1

    def _advance(self, upload: _Upload, try_only: bool) -> AdvanceAnswer:
        call = self._to_advance(upload, try_only=try_only)
        while True:
            answer = self._call(upload, call)
            if answer.done:
                return answer

    def _to_advance(self, upload: _Upload, *, try_only: bool) -> Advance:
        return Advance(
            table_id=self._table.table_id,
            schema_version=self._first.schema_version,
            put_id=upload.put_id,
            rows=upload.rows,
            buckets={key: Uploads(self._terms[key], parts) for key, parts in upload.parts.items()},
            try_only=try_only,
            takes_refusal=True,
        )

    def _call(self, upload: _Upload, call: Call[Answer]) -> Answer:
        with self._curable(upload):
            return self._calls.connections.call(upload.address, call, self._calls.attempt_s)

    @contextmanager
    def _curable(self, upload: _Upload) -> Iterator[None]:
        """A leader that moved, or a server that broke off, is for the writer to start over with."""
        try:
            yield
        except (NotLeader, Broken) as exc:
            self._calls.directory.doubt(LeadKey(self._table.table_id, key) for key in upload.parts)
            if isinstance(exc, Broken):
                raise ServerUnavailable(f"a large put was cut off: {exc}") from exc
            raise


def progress_of(caller: TableCaller, call: PutProgress) -> PutProgressAnswer:
    """Return how far all servers together are with a large batch, as far as they answer.

    They are asked side by side.
    """
    calls = caller.calls
    nothing = PutProgressAnswer(rows=0, bytes=0, rows_done=0)

    def progress_at(address: str) -> PutProgressAnswer:
        try:
            return calls.connections.call(address, call, calls.attempt_s)
        except Broken:  # It is not needed for the batch, or the batch finds out.
            return nothing

    servers = ask(lambda: caller.cluster.coordinator, lambda there: there.servers.all())
    return sum(at_once(progress_at, [server.address for server in servers]), nothing)
