"""Messages as values: frozen dataclasses whose fields say how they travel.

    @dataclass(frozen=True, kw_only=True)
    class Seal(Message):
        table_id: Annotated[int, NUMBER.called("table")]
        batch: Annotated[int, NUMBER]
        wait_s: Annotated[int | None, NUMBER] = None

So the name of a field on the wire, and what may be in it, is said once, for those who write it and
for those who read it. What is None is not sent; a field with a default may be missing, so one can
be added without breaking those who do not know it. One that an older reader must not ignore needs
another format: see `wire.FORMATS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Generic, NamedTuple, Self, TypeVar, get_type_hints

import pyarrow as pa

from foundation.errors import BadRequest
from foundation.ids import BucketId, Token
from merge_engine.bucket.segment import AggMode
from recovery.leader.fenced_writers import Writer
from server.protocol import wire
from server.protocol.wire import Fields

Value = TypeVar("Value")
NOT_THERE = -1
"""A term or an offset, among numbers, that there is not."""


class Kind(NamedTuple, Generic[Value]):
    """How a value travels: the fields that it is under a name, and how they are read back.

    `name`: on the wire, if it is not the attribute's.
    """

    write: Callable[[str, Value], dict[str, Any]]
    read: Callable[[Fields, str], Value]
    name: str | None = None

    def called(self, name: str) -> "Kind[Value]":
        """Return the kind of a field that has another name on the wire."""
        return self._replace(name=name)


class _Sent(NamedTuple):
    """A field of a message class, as the codec needs it."""

    attribute: str
    name: str
    kind: Kind[Any]
    required: bool


_known: dict[type, tuple[_Sent, ...]] = {}


def _sent_by(message: type["Message"]) -> tuple[_Sent, ...]:
    """Return the fields of a message class that travel: those whose annotation has a kind.

    A subclass must not declare a field again without its default: dataclasses would keep that.
    """
    if message not in _known:
        hints = get_type_hints(message, include_extras=True)
        _known[message] = tuple(
            _Sent(one.name, kind.name or one.name, kind, required=one.default is MISSING)
            for one in fields(message)
            for kind in getattr(hints[one.name], "__metadata__", ())
        )
    return _known[message]


@dataclass(frozen=True, kw_only=True)
class Message:
    """What one side tells the other."""

    def to_fields(self) -> dict[str, Any]:
        """Return the message as JSON has it."""
        written: dict[str, Any] = {}
        for attribute, name, kind, _ in _sent_by(type(self)):
            value = getattr(self, attribute)
            if value is not None:
                written.update(kind.write(name, value))
        return written

    @classmethod
    def from_fields(cls, received: Fields) -> Self:
        """Return what `to_fields` was asked for; BadRequest for anything else."""
        return cls(
            **{
                attribute: kind.read(received, name)
                for attribute, name, kind, required in _sent_by(cls)
                if required or name in received
            }
        )

    def to_body(self) -> bytes | pa.Buffer:
        """Return the message as bytes."""
        return wire.encode(self.to_fields())

    @classmethod
    def from_body(cls, body: bytes | pa.Buffer) -> Self:
        """Return what `to_body` was asked for; BadRequest for anything else.

        A message that says nothing may be no bytes at all.
        """
        if not len(body) and not _sent_by(cls):
            return cls()
        return cls.from_fields(wire.decode(body))


# --- Kinds of one field -------------------------------------------------------------------------


def _as_it_is(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


def _as_list(name: str, values: Sequence[Any]) -> dict[str, Any]:
    return {name: list(values)}


NUMBER = Kind[int](_as_it_is, lambda received, name: received.get(name, int))
TEXT = Kind[str](_as_it_is, lambda received, name: received.get(name, str))
FLAG = Kind[bool](_as_it_is, lambda received, name: received.get(name, bool))
NUMBERS = Kind[Sequence[int]](_as_list, lambda received, name: tuple(received.integers(name)))
TEXTS = Kind[Sequence[str]](_as_list, lambda received, name: tuple(received.texts(name) or ()))
OCTETS = Kind[bytes](
    lambda name, value: {name: value.hex()}, lambda received, name: received.octets(name) or b""
)


def _read_token(received: Fields, name: str) -> Token:
    numbers = received.integers(name)
    if len(numbers) != len(Token._fields):
        raise BadRequest("a token that is not an epoch and a batch")
    return Token(*numbers)


def _read_mode(received: Fields, name: str) -> AggMode:
    mode = received.get(name, int)
    if mode not in set(AggMode):
        raise BadRequest(f"a put of agg mode {mode}, which there is not")
    return AggMode(mode)


TOKEN = Kind[Token](_as_list, _read_token)
MODE = Kind[AggMode](lambda name, mode: {name: int(mode)}, _read_mode)
# Of two fields: the owner has the name, and the epoch its own.
WRITER = Kind[Writer](
    lambda name, writer: {name: writer.owner, "epoch": writer.epoch},
    lambda received, name: Writer(received.get(name, str), received.get("epoch", int)),
)


# --- Kinds of rows of numbers -------------------------------------------------------------------


class Row(NamedTuple, Generic[Value]):
    """How a value is a row of numbers, always of this width."""

    width: int
    write: Callable[[Value], Sequence[int]]
    read: Callable[[Sequence[int]], Value]


BUCKET = Row[BucketId](2, lambda bucket: bucket, lambda row: BucketId(row[0], row[1]))


def listed(row: Row[Value]) -> Kind[Sequence[Value]]:
    """Return the kind of values that are a row each, in order."""

    def write(name: str, values: Sequence[Value]) -> dict[str, Any]:
        return {name: [list(row.write(value)) for value in values]}

    def read(received: Fields, name: str) -> Sequence[Value]:
        return tuple(row.read(found) for found in received.rows(name, row.width))

    return Kind(write, read)


def by_bucket(row: Row[Value]) -> Kind[Mapping[BucketId, Value]]:
    """Return the kind of values by bucket: a row has the bucket first, then the value."""
    both = Row[tuple[BucketId, Value]](
        BUCKET.width + row.width,
        lambda pair: (*pair[0], *row.write(pair[1])),
        lambda found: (BUCKET.read(found), row.read(found[BUCKET.width :])),
    )
    pairs = listed(both)

    def write(name: str, values: Mapping[BucketId, Value]) -> dict[str, Any]:
        return pairs.write(name, tuple(values.items()))

    def read(received: Fields, name: str) -> Mapping[BucketId, Value]:
        found = pairs.read(received, name)
        _check_once([bucket for bucket, _ in found])
        return dict(found)

    return Kind(write, read)


_LISTED_BUCKETS = listed(BUCKET)


def _read_buckets(received: Fields, name: str) -> Sequence[BucketId]:
    buckets = _LISTED_BUCKETS.read(received, name)
    _check_once(buckets)
    return buckets


def _check_once(buckets: Sequence[BucketId]) -> None:
    if len(set(buckets)) != len(buckets):
        raise BadRequest("a request that names a bucket twice")


BUCKETS = Kind[Sequence[BucketId]](_LISTED_BUCKETS.write, _read_buckets)


def one_bucket(call: str) -> Kind[BucketId]:
    """Return the kind of a list that has one bucket; `call`: what is refused otherwise."""

    def read(received: Fields, name: str) -> BucketId:
        buckets = BUCKETS.read(received, name)
        if len(buckets) != 1:
            raise BadRequest(f"{call} of {len(buckets)} buckets; they are read one by one")
        return buckets[0]

    return Kind(lambda name, bucket: BUCKETS.write(name, [bucket]), read)


def or_none(number: int) -> int | None:
    """Return a number that may stand for none, as it is among others."""
    return None if number < 0 else number


def or_not_there(number: int | None) -> int:
    """Return the reverse of `or_none`."""
    return NOT_THERE if number is None else number


TERM = Row[int](1, lambda term: (term,), lambda row: row[0])
OPTIONAL_TERM = Row[int | None](1, lambda term: (or_not_there(term),), lambda row: or_none(row[0]))
