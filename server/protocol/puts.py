"""The calls that put: rows in one stream, or a large put in chunks that are advanced afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import pyarrow as pa

from foundation.errors import BadRequest, InvalidValue
from foundation.ids import BucketId, Token
from merge_engine.bucket.results import BucketResult
from merge_engine.bucket.segment import AggMode
from recovery.leader.fenced_writers import Writer
from server.protocol import wire
from server.protocol.calls import (
    Answer_co,
    BucketsAnswer,
    BucketsCall,
    Call,
    Nothing,
    TableCall,
)
from server.protocol.messages import (
    BUCKETS,
    FLAG,
    MODE,
    NUMBER,
    OPTIONAL_TERM,
    TEXT,
    TEXTS,
    TOKEN,
    WRITER,
    Kind,
    Message,
    Row,
    by_bucket,
    listed,
)
from server.protocol.wire import Fields

GO_ON = b"go on"  # What a server says that has taken a put on, if its sender waits for that.

_RESULT = Row[BucketResult](
    3,
    lambda one: (one.base_offset, one.end_offset, int(one.repeated)),
    lambda row: BucketResult(base_offset=row[0], end_offset=row[1], repeated=bool(row[2])),
)
# Of a put in parts, between which others may have written.
_RESULT_OF_PARTS = Row[BucketResult](
    4,
    lambda one: (*_RESULT.write(one), one.changed),
    lambda row: replace(_RESULT.read(row), rows=row[3]),
)


def _read_refusal(received: Fields, name: str) -> InvalidValue:
    try:
        error = wire.error_of(received.get(name, dict))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise BadRequest(f"a refusal that cannot be read: {exc!r}") from exc
    if not isinstance(error, InvalidValue):
        raise BadRequest(f"a refusal that is {error!r}")
    return error


# Not as an error, which has no room for all keys that are refused.
_REFUSAL = Kind[InvalidValue](lambda name, error: {name: wire.to_fields(error)}, _read_refusal)


@dataclass(frozen=True, kw_only=True)
class PutAnswer(BucketsAnswer[BucketResult]):
    """What the put did. `sealed`: and that its batch is closed in these buckets.

    `refusal`: nothing was written, and why; then there are no results.
    """

    results: Annotated[tuple[BucketResult, ...], listed(_RESULT)]
    sealed: Annotated[bool, FLAG] = False
    refusal: Annotated[InvalidValue | None, _REFUSAL] = None


@dataclass(frozen=True, kw_only=True)
class RowsCall(TableCall[Answer_co]):
    """A call with rows: how they are read, whose they are, and how many bytes of them come."""

    columns: Annotated[tuple[str, ...] | None, TEXTS] = None
    mode: Annotated[AggMode, MODE]
    operation_column: Annotated[str | None, TEXT] = None
    owner: Annotated[str, TEXT]
    announced_bytes: Annotated[int, NUMBER.called("bytes")] = 0


@dataclass(frozen=True, kw_only=True)
class Put(RowsCall[PutAnswer], BucketsCall[PutAnswer]):
    """Write rows: one atomic commit per bucket. Each batch says the number of its bucket here.

    `buckets`: with the term of the leader that fenced the writer. `token`: a put with the same one
    counts once. `writer`: the holder of a column lock. `try_only`: write nothing, but refuse what a
    put would refuse now. `holds_end`: the closing message comes only when the server has said
    `GO_ON`: until then it is certain that nothing was written, whatever breaks. `seals`: the writer
    has nothing else of this batch for these buckets, so they may close it; the answer says if so.
    `takes_refusal`: keys that are refused are told in the answer, all of them.
    """

    name = "put"
    answer = PutAnswer
    buckets: Annotated[Mapping[BucketId, int | None], by_bucket(OPTIONAL_TERM)]
    token: Annotated[Token | None, TOKEN] = None
    writer: Annotated[Writer | None, WRITER] = None
    try_only: Annotated[bool, FLAG] = False
    holds_end: Annotated[bool, FLAG] = False
    seals: Annotated[bool, FLAG] = False
    takes_refusal: Annotated[bool, FLAG] = False

    @staticmethod
    def place(index: int) -> bytes:
        """Return what goes with a batch: the number, in the call, of the bucket that it is for."""
        return str(index).encode()

    def read_place(self, metadata: pa.Buffer | None) -> int:
        """Return what `place` was asked for."""
        try:
            index = int(bytes(metadata or b""))
        except ValueError as exc:
            raise BadRequest("a batch that does not say which bucket it is for") from exc
        if not 0 <= index < len(self.buckets):
            raise BadRequest(f"a batch for bucket {index} of {len(self.buckets)} of the put")
        return index


# --- Large puts ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PutChunkAnswer(Message):
    """How many chunks of the put are at the server."""

    session: Annotated[str, TEXT]
    chunks: Annotated[int, NUMBER]


@dataclass(frozen=True, kw_only=True)
class PutChunk(RowsCall[PutChunkAnswer]):
    """Upload a chunk of a large put; nothing is written yet. Each batch says its bucket and part.

    `resumable`: it has the same parts whoever sends it, and may be gone on with by others.
    """

    name = "put"
    answer = PutChunkAnswer
    token: Annotated[Token, TOKEN]
    writer: Annotated[Writer, WRITER]
    put_id: Annotated[str, TEXT.called("put")]
    resumable: Annotated[bool, FLAG] = False
    chunk: Annotated[int, NUMBER]

    @property
    def put(self) -> "PutChunk":
        """What all chunks of the put have in common."""
        return replace(self, chunk=0, announced_bytes=0)

    @staticmethod
    def place(bucket: BucketId, part: int) -> bytes:
        """Return what goes with a batch: its bucket, and which part of it this is."""
        return f"{bucket.partition} {bucket.number} {part}".encode()

    @staticmethod
    def read_place(metadata: pa.Buffer | None, buckets: int) -> tuple[BucketId, int]:
        """Return what `place` was asked for; `buckets`: how many a partition has."""
        try:
            partition, number, part = map(int, bytes(metadata or b"").split())
        except ValueError as exc:
            raise BadRequest("a batch that does not say which part it is of which bucket") from exc
        if partition < 0 or not 0 <= number < buckets or part < 0:
            raise BadRequest(f"a batch for bucket {partition}/{number}, which there is not")
        return BucketId(partition, number), part


def read_put(received: Fields) -> Put | PutChunk:
    """Return what the command of a stream of rows asks for."""
    return PutChunk.from_fields(received) if "put" in received else Put.from_fields(received)


class Uploads(NamedTuple):
    """What a bucket has to have of a large put: how many parts, for the leader of this term."""

    term: int
    parts: int


_UPLOADS = Row[Uploads](2, tuple, lambda row: Uploads(*row))


def _write_advanced(name: str, results: Mapping[BucketId, BucketResult]) -> dict[str, Any]:
    keys = BUCKETS.write("keys", tuple(results))
    return {**keys, **listed(_RESULT_OF_PARTS).write(name, tuple(results.values()))}


def _read_advanced(received: Fields, name: str) -> Mapping[BucketId, BucketResult]:
    results = listed(_RESULT_OF_PARTS).read(received, name)
    return dict(zip(BUCKETS.read(received, "keys"), results, strict=True))


_ADVANCED = Kind(_write_advanced, _read_advanced)


@dataclass(frozen=True, kw_only=True)
class AdvanceAnswer(Message):
    """How far the put is; the results once all is done, or the refusal once all is tried."""

    session: Annotated[str, TEXT]
    done: Annotated[bool, FLAG]
    rows_done: Annotated[int, NUMBER]
    results: Annotated[Mapping[BucketId, BucketResult] | None, _ADVANCED] = None
    refusal: Annotated[InvalidValue | None, _REFUSAL] = None


@dataclass(frozen=True, kw_only=True)
class Advance(TableCall[AdvanceAnswer]):
    """Go on with a large put for about a second: write its next parts, or try them.

    `rows` and `buckets` say what has to be there, all of it. `takes_refusal`: as of a `Put`; parts
    after one that is refused are tried only.
    """

    name = "advance"
    answer = AdvanceAnswer
    put_id: Annotated[str, TEXT.called("put")]
    rows: Annotated[int, NUMBER]
    buckets: Annotated[Mapping[BucketId, Uploads], by_bucket(_UPLOADS)]
    try_only: Annotated[bool, FLAG] = False
    takes_refusal: Annotated[bool, FLAG] = False


@dataclass(frozen=True, kw_only=True)
class ForgetPut(Call[Nothing]):
    """Let go of what was uploaded of a large put."""

    name = "forget_put"
    answer = Nothing
    put_id: Annotated[str, TEXT.called("put")]


@dataclass(frozen=True, kw_only=True)
class PutProgressAnswer(Message):
    """How much of a batch has arrived at a server, and how many rows of it are written."""

    rows: Annotated[int, NUMBER]
    bytes: Annotated[int, NUMBER]
    rows_done: Annotated[int, NUMBER]

    def __add__(self, other: "PutProgressAnswer") -> "PutProgressAnswer":
        """Return the same for two servers together."""
        return PutProgressAnswer(
            rows=self.rows + other.rows,
            bytes=self.bytes + other.bytes,
            rows_done=self.rows_done + other.rows_done,
        )


@dataclass(frozen=True, kw_only=True)
class PutProgress(Call[PutProgressAnswer]):
    """Ask how far a server is with a large batch."""

    name = "put_progress"
    answer = PutProgressAnswer
    table_id: Annotated[int, NUMBER.called("table")]
    owner: Annotated[str, TEXT]
    token: Annotated[Token, TOKEN]
