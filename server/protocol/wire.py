"""What goes over the network, besides Arrow's own streams.

A request is a JSON object: the command of a Flight descriptor, a ticket, or the body of an action;
`calls.py` says where they are as values. It says its format, and is read by that (`FORMATS`).
Where batches go with it, in look-ups, both are framed: the length of the JSON (u32, little-endian),
the JSON, and an Arrow IPC stream. A put is a Flight stream: batches, each with the number of its
bucket in the request as metadata, and then a message without a batch, with row count and checksum.
Changelogs and scans are streams, too, and exchanges of look-ups: `reads.py` says what goes with a
batch.
An error is a Flight error whose `extra_info` names its class.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa
import xxhash
from pyarrow import flight

from foundation.errors import (
    AccessRefused,
    BadRequest,
    InvalidValue,
    Overloaded,
    ServerFailed,
    TallybookError,
)
from foundation.formats import Formats

LONGEST_REQUEST = 8 << 20
LONGEST_TEXT = 1_000
# Errors travel as HTTP headers, and gRPC drops answers whose headers are above 8 KiB.
_LONGEST_MESSAGE, _END_OF_MESSAGE, _LONGEST_KEY = 900, 250, 500
_MOST_REFUSED_BYTES = 4 << 20
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_LENGTH = struct.Struct("<I")

Kind = TypeVar("Kind")


def _errors() -> dict[str, type[Exception]]:
    """All our error classes by name; only those are made from what a peer says."""
    found: dict[str, type[Exception]] = {}
    waiting: list[type[Exception]] = [TallybookError]
    while waiting:
        kind = waiting.pop()
        found[kind.__name__] = kind
        waiting += kind.__subclasses__()
    return found


def to_fields(error: Exception) -> dict[str, Any]:
    """Return an error as fields of a message, which has room for all keys that a put refused."""
    fields: dict[str, Any] = {"error": type(error).__name__, "message": readable(str(error))}
    if isinstance(error, InvalidValue):
        if error.encoded_key is not None:
            fields["key"] = error.encoded_key.hex()
        refused, size = {}, 0
        for key, why in error.refused.items():
            size += 2 * len(key) + len(why)
            if size > _MOST_REFUSED_BYTES:
                break
            refused[key.hex()] = readable(why)
        fields["refused"] = refused
    return fields


def to_flight_error(error: Exception) -> flight.FlightError:
    """Return an error as Flight carries it; the class goes along by name."""
    message = readable(str(error))
    fields = {"error": type(error).__name__, "message": message}
    key = getattr(error, "encoded_key", None)
    if key is not None and len(key) <= _LONGEST_KEY:
        fields["key"] = key.hex()
    info = json.dumps(fields, ensure_ascii=False).encode()
    if isinstance(error, AccessRefused):
        return flight.FlightUnauthenticatedError(message, info)
    if isinstance(error, Overloaded):
        return flight.FlightUnavailableError(message, info)
    return flight.FlightServerError(message, info)


def readable(text: str) -> str:
    """Return a message for people, whatever a peer put into it: printable, and not too long.

    The middle goes first: what happened is at the beginning, what to do at the end.
    """
    data = "".join(sign if sign.isprintable() else "?" for sign in text).encode()
    if len(data) <= _LONGEST_MESSAGE:
        return data.decode()
    end = data[-_END_OF_MESSAGE:].decode(errors="ignore")
    return data[: _LONGEST_MESSAGE - _END_OF_MESSAGE].decode(errors="ignore") + " ... " + end


def from_flight_error(error: flight.FlightError) -> Exception | None:
    """Return the error that the server raised; None if it is not one of ours: the network's."""
    try:
        return error_of(json.loads(error.extra_info or b""))
    except (ValueError, KeyError, TypeError):
        return None


def error_of(fields: Mapping[str, Any]) -> Exception:
    """Return the error that these fields (error, message, perhaps key and refused) describe."""
    made = _errors().get(fields["error"], ServerFailed)(str(fields["message"]))
    if isinstance(made, InvalidValue) and "key" in fields:
        made.encoded_key = bytes.fromhex(fields["key"])
        refused = fields.get("refused", {}).items()
        made.refused = {bytes.fromhex(key): str(why) for key, why in refused}
    return made


def encode(fields: dict[str, Any]) -> bytes:
    """Return a request or an answer without batches."""
    return json.dumps({"format": FORMATS.current, **fields}, separators=(",", ":")).encode()


def decode(data: bytes | pa.Buffer) -> "Fields":
    """Return the fields; BadRequest for what is none."""
    if len(data) > LONGEST_REQUEST:
        raise BadRequest(f"a request of {len(data):,} bytes; the limit is {LONGEST_REQUEST:,}")
    try:
        fields = json.loads(bytes(data))
    except (ValueError, RecursionError) as exc:
        raise BadRequest(f"a request that is not JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise BadRequest("a request that is no JSON object")
    number = fields.get("format")
    # What is no number may be of any length, and is not repeated.
    read = FORMATS.reader(number if type(number) is int else None, "a request")
    return read(fields)


class Fields:
    """The fields of a request, each read with the type that it must have."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def __contains__(self, name: str) -> bool:
        return self._fields.get(name) is not None

    def to_dict(self) -> dict[str, Any]:
        """Return all of them, as they came."""
        return {name: value for name, value in self._fields.items() if name != "format"}

    def get(self, name: str, kind: type[Kind]) -> Kind:
        """Return a field; BadRequest if it is missing or of another type."""
        value = self._fields.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise BadRequest(f"a request without {_KINDS.get(kind, kind.__name__)} as `{name}`")
        if kind is int and not _is_number(value):
            raise BadRequest(f"a request whose `{name}` is no number of 64 bits")
        if kind is str and not _is_text(value):
            raise BadRequest(
                f"a request whose `{name}` is longer than {LONGEST_TEXT:,} or no Unicode text"
            )
        return value

    def octets(self, name: str) -> bytes | None:
        """Return bytes, such as a key, that travel as hexadecimal text; None if not there."""
        value = self._fields.get(name)
        if value is None:
            return None
        try:
            return bytes.fromhex(value)
        except (TypeError, ValueError) as exc:
            raise BadRequest(f"a request whose `{name}` is not hexadecimal") from exc

    def integers(self, name: str) -> list[int]:
        """Return a list of whole numbers."""
        values: list[Any] = self.get(name, list)
        if not all(map(_is_number, values)):
            raise BadRequest(f"a request whose `{name}` are not whole numbers of 64 bits")
        return values

    def rows(self, name: str, width: int) -> list[list[int]]:
        """Return a list of lists of so many whole numbers."""
        rows: list[Any] = self.get(name, list)
        for row in rows:
            good = isinstance(row, list) and len(row) == width
            if not good or not all(map(_is_number, row)):
                raise BadRequest(
                    f"a request whose `{name}` are not {width} whole numbers of 64 bits each"
                )
        return rows

    def texts(self, name: str) -> list[str] | None:
        """Return a list of texts, or None if it is not there."""
        if name not in self:
            return None
        values: list[Any] = self.get(name, list)
        if not all(map(_is_text, values)):
            raise BadRequest(f"a request whose `{name}` are not texts of at most {LONGEST_TEXT:,}")
        return values


FORMATS: Formats[Callable[[dict[str, Any]], Fields]] = Formats(
    name="wire", current=1, readers={1: Fields}, error=BadRequest
)

_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    list: "a list",
    str: "a text",
}


def _is_number(value: object) -> bool:
    """Whether this is a whole number that the formats of logs and records can hold."""
    return type(value) is int and _LEAST <= value <= _MOST


def _is_text(value: object) -> bool:
    """Whether this is a text that can be written down: JSON lets half of a character pass."""
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        return False
    return not any("\ud800" <= sign <= "\udfff" for sign in value)


def frame(
    fields: dict[str, Any], schema: pa.Schema, batches: Iterable[pa.RecordBatch]
) -> pa.Buffer:
    """Return fields and batches as one body."""
    header = _aligned(encode(fields))
    sink = pa.BufferOutputStream()
    sink.write(_LENGTH.pack(len(header)))
    sink.write(header)
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def unframe(body: pa.Buffer) -> tuple[Fields, Sequence[pa.RecordBatch]]:
    """Return the fields and batches of a body; BadRequest for what is none."""
    if len(body) < _LENGTH.size:
        raise BadRequest(f"a request of {len(body)} bytes is cut short")
    (length,) = _LENGTH.unpack(body[: _LENGTH.size].to_pybytes())
    if _LENGTH.size + length > len(body):
        raise BadRequest(f"a request of {len(body)} bytes whose header alone has {length:,}")
    fields = decode(body[_LENGTH.size : _LENGTH.size + length])
    try:
        with pa.ipc.open_stream(body[_LENGTH.size + length :]) as reader:
            batches = list(reader)
        for batch in batches:
            batch.validate(full=True)
    except (pa.ArrowException, OSError) as exc:
        raise BadRequest(f"a request whose batches cannot be read: {exc}") from exc
    return fields, batches


def answer(batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
    """Return batches for a client that knows their schema: without it, a look-up is faster."""
    parts = [batch.serialize() for batch in batches]
    header = _aligned(encode({"sizes": [part.size for part in parts]}))
    return pa.py_buffer(b"".join([_LENGTH.pack(len(header)), header, *parts]))


def _aligned(header: bytes) -> bytes:
    """Return the JSON with blanks after it, so that Arrow's data begin at a multiple of 8."""
    return header + b" " * (-(_LENGTH.size + len(header)) % 8)


def read_answer(body: pa.Buffer, schema: pa.Schema) -> list[pa.RecordBatch]:
    """Return the batches of an answer; a server is believed, so they are not looked through."""
    (length,) = _LENGTH.unpack(body[: _LENGTH.size].to_pybytes())
    at = _LENGTH.size + length
    batches = []
    for size in decode(body[_LENGTH.size : at]).integers("sizes"):
        batches.append(pa.ipc.read_record_batch(body[at : at + size], schema))
        at += size
    return batches


def check_plain(schema: pa.Schema) -> None:
    """Raise BadRequest for dictionaries: they come in messages that no limit of ours sees."""
    waiting = [field.type for field in schema]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, pa.BaseExtensionType):
            waiting.append(kind.storage_type)
        elif pa.types.is_dictionary(kind):
            raise BadRequest("a put of dictionaries; send their values")
        else:
            waiting += [kind.field(at).type for at in range(kind.num_fields)]


class Checksum:
    """Of the batches of a put, in order: the same on both sides of the network."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self.rows = 0

    def add(self, batch: pa.RecordBatch) -> pa.Buffer:
        """Take another batch in. Serialised, it is the same bytes whatever its buffers were."""
        data = batch.serialize()
        self._hash.update(data)
        self.rows += batch.num_rows
        return data

    def take(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
        """Take in a batch that arrived; return it in memory of its own, and how much that is.

        As it arrived, it may keep any amount: a message can have far more in it than its batch.
        Where the values are is checked here; what they are, by `validate(full=True)`.
        """
        data = self.keep(batch)
        return pa.ipc.read_record_batch(data, batch.schema), data.size

    def keep(self, batch: pa.RecordBatch) -> pa.Buffer:
        """Take in a batch that arrived; return its bytes, which hold nothing but its values."""
        try:
            batch.validate()
            return self.add(batch)
        except pa.ArrowException as exc:
            raise BadRequest(f"a put whose batches are damaged: {exc}") from exc

    def closing(self) -> bytes:
        """Return the closing message of a put."""
        return encode({"rows": self.rows, "checksum": self._hash.hexdigest()})

    def check(self, closing: Fields) -> None:
        """Raise BadRequest unless this is what the sender sent."""
        rows, checksum = closing.get("rows", int), closing.get("checksum", str)
        if (rows, checksum) != (self.rows, self._hash.hexdigest()):
            raise BadRequest(
                f"a put of {rows:,} rows of which {self.rows:,} arrived, or arrived damaged; "
                "nothing was written, send it again"
            )
