"""What all that is kept in ZooKeeper shares: its frame, and how it is taken apart.

    format (1 byte), xxh3_64 of all that follows (8 bytes, little-endian), the record's fields

Integers and arrays are those of `integers`, text is its UTF-8 length and bytes, a document is JSON
to the end. A record of a format that is not in its table of versions, a damaged one and one with
bytes left over are CorruptRecord, each with its own message.

Two records are no more than one field: a counter (format 1: an integer), and a text (format 1: a
text), which is a server's address, a leader's session name, or where the logs are.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import xxhash

from foundation.errors import CorruptRecord
from foundation.formats import Formats
from locks.encoding.integers import Signed, decode_array, decode_one, encode_one
from locks.encoding.offsets import Offsets

_CHECKSUM_BYTES = 8

Value = TypeVar("Value")


def frame(version: int, parts: Iterable[bytes]) -> bytes:
    """Return the fields' bytes with format and checksum before them."""
    body = b"".join(parts)
    return b"".join([bytes([version]), _checksum(body), body])


def frame_document(version: int, fields: Mapping[str, Any]) -> bytes:
    """Return a document, framed."""
    return frame(version, [json.dumps(fields).encode()])


def encode_integers(values: Iterable[int]) -> bytes:
    """Return the numbers one after the other, none of them negative."""
    return b"".join(map(encode_one, values))


def encode_text(value: str) -> bytes:
    """Return the text with its length before it."""
    data = value.encode()
    return encode_one(len(data)) + data


class Reader:
    """Takes a record apart, from the front: from its first field on, if nothing else is said."""

    def __init__(self, data: bytes, what: str, at: int = 1 + _CHECKSUM_BYTES) -> None:
        self._data = data
        self._at = at
        self._what = what

    @property
    def rest(self) -> bytes:
        """What was not taken yet."""
        return self._data[self._at :]

    def take(self, size: int) -> bytes:
        """Take so many bytes."""
        end = self._at + size
        if end > len(self._data):
            raise CorruptRecord(
                f"{self._what} is damaged: it ends {end - len(self._data)} bytes early"
            )
        taken, self._at = self._data[self._at : end], end
        return taken

    def octet(self) -> int:
        """Take a byte."""
        return self.take(1)[0]

    def integer(self) -> int:
        """Take a number."""
        value, self._at = decode_one(self._data, self._at)
        return value

    def count(self) -> int:
        """Take a number of things that take at least a byte each."""
        count = self.integer()
        if count > len(self._data) - self._at:
            raise CorruptRecord(
                f"{self._what} is damaged: {count} entries in {len(self.rest)} bytes"
            )
        return count

    def text(self) -> str:
        """Take a text."""
        try:
            return self.take(self.integer()).decode()
        except UnicodeDecodeError as exc:
            raise CorruptRecord(f"{self._what} is damaged: {exc}") from exc

    def array(self) -> Signed:
        """Take an array of numbers."""
        values, self._at = decode_array(self._data, self._at)
        return values

    def offsets(self) -> Offsets:
        """Take numbers by bucket."""
        offsets, self._at = Offsets.decode(self._data, self._at)
        return offsets

    def document(self) -> dict[str, Any]:
        """Take a document, which goes to the end."""
        fields = json.loads(self.take(len(self.rest)))
        if not isinstance(fields, dict):
            raise CorruptRecord(f"{self._what} is damaged: it is no JSON object")
        return fields

    def end(self) -> None:
        """Make sure that nothing is left."""
        if self.rest:
            raise CorruptRecord(f"{self._what} has more in it than this release knows")


RecordFormats: TypeAlias = Formats[Callable[[Reader], Value]]
"""The formats of a record: each is read by a function that takes its fields, all of them."""


def read_framed(formats: RecordFormats[Value], data: bytes, what: str) -> Value:
    """Return what a record says; CorruptRecord if it is none, or of no format that is read.

    `what` it is, for the messages: "a lock record".
    """
    reader = Reader(data, what, at=0)
    # The checksum does not cover the format: a damaged one looks like another release's.
    read = formats.reader(reader.octet(), what, ", or restore it if it is damaged")
    if reader.take(_CHECKSUM_BYTES) != _checksum(reader.rest):
        raise CorruptRecord(f"{what} is damaged: its checksum does not match")
    value = read(reader)
    reader.end()
    return value


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(body).to_bytes(_CHECKSUM_BYTES, "little")


COUNTER_FORMATS: RecordFormats[int] = Formats(
    name="counter", current=1, readers={1: Reader.integer}, error=CorruptRecord
)
TEXT_FORMATS: RecordFormats[str] = Formats(
    name="text", current=1, readers={1: Reader.text}, error=CorruptRecord
)


def frame_counter(value: int) -> bytes:
    """Return a counter, framed."""
    return frame(COUNTER_FORMATS.current, [encode_one(value)])


def read_counter(path: str, data: bytes) -> int:
    """Return what a counter says; CorruptRecord if it is none."""
    return read_framed(COUNTER_FORMATS, data, f"the counter {path}")


def frame_text(value: str) -> bytes:
    """Return a text, framed."""
    return frame(TEXT_FORMATS.current, [encode_text(value)])


def read_text(path: str, data: bytes) -> str:
    """Return what a node says that has nothing but a text; CorruptRecord if it is none."""
    return read_framed(TEXT_FORMATS, data, f"the text of {path}")
