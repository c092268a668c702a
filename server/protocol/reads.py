"""The calls that read: look-ups, what is known of logs, and the streams of scans and changelogs.

A look-up is an action that has batches with it, or a message of an exchange (`LookupStream`): for
whoever looks up again and again, a message costs less than half of what a call does. A stream is a
ticket that names it; each of its batches comes with a message.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Annotated, Any, Self, TypeVar, cast

import pyarrow as pa

from foundation.errors import BadRequest, CorruptRecord
from foundation.ids import BucketId, Token
from recovery.reader.cut import Cut
from recovery.reader.cut_between import Piece
from recovery.reader.isolation import Isolation
from server.protocol import wire
from server.protocol.calls import BucketsAnswer, BucketsCall, Call, Nothing, TableCall
from server.protocol.messages import (
    FLAG,
    NOT_THERE,
    NUMBER,
    NUMBERS,
    OCTETS,
    TEXT,
    TEXTS,
    Kind,
    Message,
    one_bucket,
)
from server.protocol.wire import Fields

Told_co = TypeVar("Told_co", bound=Message, covariant=True)


def _read_isolation(received: Fields, name: str) -> Isolation:
    isolation = received.get(name, str)
    if isolation not in set(Isolation):
        known = " or ".join(repr(one.value) for one in Isolation)
        raise BadRequest(f"no isolation is called {isolation!r}; use {known}")
    return Isolation(isolation)


def _read_cut(received: Fields, name: str) -> Cut:
    try:
        return Cut.decode(received.octets(name) or b"")
    except CorruptRecord as exc:
        raise BadRequest(str(exc)) from exc


_ISOLATION = Kind[Isolation](lambda name, value: {name: value.value}, _read_isolation)
_CUT = Kind[Cut](lambda name, value: {name: value.encode().hex()}, _read_cut)


# --- Look-ups, and what is known of logs --------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LookupAnswer(Message):
    """The values, a batch per bucket. Their schema, which the caller knows, does not travel."""

    body: pa.Buffer

    @classmethod
    def of(cls, batches: Sequence[pa.RecordBatch]) -> Self:
        """Return the answer that has these batches."""
        return cls(body=wire.answer(batches))

    def batches(self, schema: pa.Schema) -> list[pa.RecordBatch]:
        """Return the batches, of the schema that was asked for."""
        return wire.read_answer(self.body, schema)

    def to_body(self) -> pa.Buffer:
        return self.body

    @classmethod
    def from_body(cls, body: bytes | pa.Buffer) -> Self:
        return cls(body=pa.py_buffer(body))


@dataclass(frozen=True, kw_only=True)
class Lookup(BucketsCall[LookupAnswer]):
    """Ask for columns, by id, of these keys of each bucket.

    `cut`: where committed rows stand; without one, each server takes its own. `found`: say in a
    last column, `FOUND`, whether there is such a row. `states`: columns, by id, whose states are
    wanted after the values; a server that does not know the field answers without them.
    """

    name = "lookup"
    answer = LookupAnswer
    columns: Annotated[tuple[int, ...], NUMBERS]
    isolation: Annotated[Isolation, _ISOLATION]
    cut: Annotated[Cut | None, _CUT] = None
    found: Annotated[bool, FLAG] = False
    states: Annotated[tuple[int, ...], NUMBERS] = ()
    keys: Mapping[BucketId, pa.RecordBatch] = field(default_factory=dict, compare=False)

    def only(self, buckets: Sequence[BucketId]) -> Self:
        cut = None if self.cut is None else self.cut.only(buckets)
        return replace(super().only(buckets), cut=cut)

    def to_body(self) -> pa.Buffer:
        batches = [self.keys[bucket] for bucket in self.buckets]
        return wire.frame(self.to_fields(), batches[0].schema, batches)

    @classmethod
    def from_body(cls, body: bytes | pa.Buffer) -> Self:
        fields, batches = wire.unframe(pa.py_buffer(body))
        call = cls.from_fields(fields)
        if len(batches) != len(call.buckets):
            raise BadRequest(
                f"a look-up in {len(call.buckets)} buckets with keys for {len(batches)}"
            )
        return replace(call, keys=dict(zip(call.buckets, batches, strict=True)))


@dataclass(frozen=True, kw_only=True)
class LookupStream(TableCall[Nothing]):
    """Begin an exchange of look-ups that all ask for these columns, by id.

    A message is a batch of keys, bucket after bucket, and says how many each has (`write_shares`);
    its answer has them and their values, in this order. What goes wrong ends the exchange.
    Committed rows stand where the server takes a cut, one for all keys of a message.
    """

    name = "lookups"
    answer = Nothing
    columns: Annotated[tuple[int, ...], NUMBERS]
    isolation: Annotated[Isolation, _ISOLATION]

    def to_fields(self) -> dict[str, Any]:
        return {"call": self.name, **super().to_fields()}

    @classmethod
    def from_fields(cls, received: Fields) -> Self:
        if stream_name(received) != cls.name:
            raise BadRequest(f"there is no exchange {stream_name(received)!r}")
        return super().from_fields(received)

    @property
    def cut(self) -> None:
        """Where its rows stand: the server takes that."""
        return None

    def keys_of(self, keys: pa.RecordBatch, shares: bytes) -> dict[BucketId, pa.RecordBatch]:
        """Return what a message asks for, by bucket; BadRequest if that does not add up."""
        wanted: dict[BucketId, pa.RecordBatch] = {}
        at, found = 0, read_shares(shares)
        if len(found) == 1 and found[0][1] == keys.num_rows:
            return {found[0][0]: keys}
        asked = sum(rows for _, rows in found)
        if asked != keys.num_rows or len(dict(found)) != len(found):
            raise BadRequest(f"a look-up of {keys.num_rows} keys whose buckets do not add up")
        for bucket, rows in found:
            wanted[bucket] = keys.slice(at, rows)
            at += rows
        return wanted


_SHARE = struct.Struct("<qqq")


def write_shares(shares: Iterable[tuple[BucketId, int]]) -> bytes:
    """Return how many keys each bucket has: partition, number and count, of 64 bits each."""
    return b"".join(_SHARE.pack(*bucket, rows) for bucket, rows in shares)


def read_shares(data: bytes) -> list[tuple[BucketId, int]]:
    """Return the reverse of `write_shares`; BadRequest for anything else."""
    if not data or len(data) % _SHARE.size:
        raise BadRequest(f"a look-up that names its buckets in {len(data)} bytes")
    found = [(BucketId(*row[:2]), row[2]) for row in _SHARE.iter_unpack(data)]
    if min(rows for _, rows in found) < 1:
        raise BadRequest("a look-up of no keys in a bucket")
    return found


@dataclass(frozen=True, kw_only=True)
class LogEndsAnswer(BucketsAnswer[int]):
    """Where the logs end, where they start, and about how many rows the buckets have."""

    results: Annotated[tuple[int, ...], NUMBERS.called("ends")]
    starts: Annotated[tuple[int, ...], NUMBERS]
    rows: Annotated[tuple[int, ...] | None, NUMBERS] = None


@dataclass(frozen=True, kw_only=True)
class LogEnds(BucketsCall[LogEndsAnswer]):
    """Ask where the logs of buckets end."""

    name = "ends"
    answer = LogEndsAnswer


def _write_pieces(name: str, values: Sequence[Sequence[Piece]]) -> dict[str, Any]:
    """Owners and sets of columns are few: a row has their numbers."""
    owners: dict[str, int] = {}
    columns: dict[frozenset[int], int] = {}
    rows = [
        [
            owners.setdefault(piece.owner, len(owners)),
            *(piece.token or (NOT_THERE, NOT_THERE)),
            *(piece.keys, piece.time_ms, piece.end_offset),
            columns.setdefault(piece.columns, len(columns)),
        ]
        for pieces in values
        for piece in pieces
    ]
    return {
        name: rows,
        "counts": list(map(len, values)),
        "owners": list(owners),
        "columns": [" ".join(map(str, sorted(one))) for one in columns],
    }


def _read_pieces(received: Fields, name: str) -> tuple[tuple[Piece, ...], ...]:
    owners, sets = received.texts("owners") or [], received.texts("columns") or []
    try:
        columns = [frozenset(map(int, one.split())) for one in sets]
        pieces = iter(
            [
                Piece(
                    owners[owner],
                    None if batch == NOT_THERE else Token(epoch, batch),
                    *(keys, time_ms, columns[of], end),
                )
                for owner, epoch, batch, keys, time_ms, end, of in received.rows(name, 7)
            ]
        )
    except (ValueError, IndexError) as exc:
        raise BadRequest(f"an answer whose `{name}` name what is not in it") from exc
    return tuple(tuple(islice(pieces, count)) for count in received.integers("counts"))


_PIECES = Kind[Sequence[Sequence[Piece]]](_write_pieces, _read_pieces)


@dataclass(frozen=True, kw_only=True)
class ChangedPiecesAnswer(BucketsAnswer[tuple[Piece, ...]]):
    """What the changes of each bucket are made of."""

    results: Annotated[tuple[tuple[Piece, ...], ...], _PIECES.called("pieces")]


@dataclass(frozen=True, kw_only=True)
class ChangedPieces(BucketsCall[ChangedPiecesAnswer]):
    """Ask which batches are between two cuts, and how large they are."""

    name = "changed_pieces"
    answer = ChangedPiecesAnswer
    since: Annotated[Cut, _CUT]
    until: Annotated[Cut, _CUT]

    def only(self, buckets: Sequence[BucketId]) -> Self:
        since, until = self.since.only(buckets), self.until.only(buckets)
        return replace(super().only(buckets), since=since, until=until)


# --- Streams ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StreamCall(TableCall[Told_co]):
    """A ticket: asks for batches of a bucket, each of which comes with a message."""

    def to_fields(self) -> dict[str, Any]:
        return {"call": self.name, **super().to_fields()}

    @classmethod
    def read_message(cls, received: Fields) -> Told_co:
        """Return the message that came with a batch."""
        return cast(Told_co, cls.answer.from_fields(received))


def stream_name(received: Fields) -> str:
    """Return which stream a ticket asks for, or which exchange a command."""
    return received.get("call", str)


@dataclass(frozen=True, kw_only=True)
class ScanMessage(Message):
    """What comes with the batches of a scan: `ScanBegun`, then `ScanBatch`es, then `ScanDone`."""


@dataclass(frozen=True, kw_only=True)
class ScanBegun(ScanMessage):
    """The first, without rows: which scanner it is, and where its rows stand in the log."""

    scanner: Annotated[str, TEXT]
    offset: Annotated[int, NUMBER]


@dataclass(frozen=True, kw_only=True)
class ScanBatch(ScanMessage):
    """With rows: the last of their keys, after which a scan can be taken up again."""

    last_key: Annotated[bytes, OCTETS]


@dataclass(frozen=True, kw_only=True)
class ScanDone(ScanMessage):
    """The last, without rows: this was all."""

    done: Annotated[bool, FLAG] = True


@dataclass(frozen=True, kw_only=True)
class Scan(StreamCall[ScanMessage]):
    """Begin a scan of a bucket or, with a scanner, go on with it after a key.

    `limit`: of rows, of this stream. `batch_rows`: in a batch, if fewer than the server would send.
    `cut`: where committed rows stand; without one, the server takes its own.
    """

    name = "scan"
    answer = ScanMessage
    bucket: Annotated[BucketId, one_bucket("a scan").called("buckets")]
    columns: Annotated[tuple[int, ...], NUMBERS]
    isolation: Annotated[Isolation, _ISOLATION]
    limit: Annotated[int | None, NUMBER] = None
    batch_rows: Annotated[int | None, NUMBER] = None
    scanner: Annotated[str | None, TEXT] = None
    after: Annotated[bytes | None, OCTETS] = None
    cut: Annotated[Cut | None, _CUT] = None

    @classmethod
    def read_message(cls, received: Fields) -> ScanMessage:
        if "done" in received:
            return ScanDone.from_fields(received)
        kind = ScanBatch if "last_key" in received else ScanBegun
        return kind.from_fields(received)


@dataclass(frozen=True, kw_only=True)
class ChangelogBatch(Message):
    """Where the changelog goes on after this batch.

    `schema_version`: of the table's schema under which its records are shown. Earlier releases did
    not send it.
    """

    next_offset: Annotated[int, NUMBER]
    schema_version: Annotated[int | None, NUMBER] = None


@dataclass(frozen=True, kw_only=True)
class ReadChangelog(StreamCall[ChangelogBatch]):
    """Ask for a bucket's changes in [from, to); without an end, for all that there are."""

    name = "changelog"
    answer = ChangelogBatch
    bucket: Annotated[BucketId, one_bucket("a changelog").called("buckets")]
    from_offset: Annotated[int, NUMBER]
    to_offset: Annotated[int | None, NUMBER] = None
    isolation: Annotated[Isolation, _ISOLATION]


@dataclass(frozen=True, kw_only=True)
class ReadChanges(StreamCall[ChangelogBatch]):
    """Ask for a bucket's changes from one cut to another; `after`: those from this offset on."""

    name = "changes"
    answer = ChangelogBatch
    bucket: Annotated[BucketId, one_bucket("changes").called("buckets")]
    since: Annotated[Cut, _CUT]
    until: Annotated[Cut, _CUT]
    after: Annotated[int, NUMBER] = 0


@dataclass(frozen=True, kw_only=True)
class CloseScanners(Call[Nothing]):
    """End scanners; those that are no more have ended already."""

    name = "close_scanners"
    answer = Nothing
    scanners: Annotated[tuple[str, ...], TEXTS] = ()
