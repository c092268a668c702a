"""What all that is kept in ZooKeeper shares: its frame, and how it is taken apart.

    format (1 byte), xxh3_64 of all that follows (8 bytes, little-endian), the record's fields

Integers and arrays are those of `integers`, text is its UTF-8 length and bytes, a document is JSON
to the end. A record of another format, a damaged one and one with bytes left over are
CorruptRecord, each with its own message.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from locks.errors import CorruptRecord
from locks.integers import Signed, decode_array, decode_one, encode_one
from locks.offsets import Offsets

_CHECKSUM_BYTES = 8
_COUNTER_FORMAT = 1
_TEXT_FORMAT = 1


def frame(version: int, parts: Iterable[bytes]) -> bytes:
    """Return the fields' bytes with format and checksum before them."""
    body = b"".join(parts)
    return b"".join([bytes([version]), _checksum(body), body])


def frame_document(version: int, fields: Mapping[str, Any]) -> bytes:
    """Return a document, framed."""
    return frame(version, [json.dumps(fields).encode()])


def frame_counter(value: int) -> bytes:
    """Return a counter, framed."""
    return frame(_COUNTER_FORMAT, [encode_one(value)])


def read_counter(path: str, data: bytes) -> int:
    """Return what a counter says; CorruptRecord if it is none."""
    reader = Reader(data, _COUNTER_FORMAT, f"the counter {path}")
    value = reader.integer()
    reader.end()
    return value


def frame_text(value: str) -> bytes:
    """Return a text, framed."""
    return frame(_TEXT_FORMAT, [encode_text(value)])


def read_text(path: str, data: bytes) -> str:
    """Return what a node says that has nothing but a text; CorruptRecord if it is none."""
    reader = Reader(data, _TEXT_FORMAT, f"the text of {path}")
    value = reader.text()
    reader.end()
    return value


def encode_integers(values: Iterable[int]) -> bytes:
    """Return the numbers one after the other, none of them negative."""
    return b"".join(map(encode_one, values))


def encode_text(value: str) -> bytes:
    """Return the text with its length before it."""
    data = value.encode()
    return encode_one(len(data)) + data


class Reader:
    """Takes a record apart, from the front. `what` it is, for the messages: "a lock record"."""

    def __init__(self, data: bytes, version: int, what: str) -> None:
        """Check the frame; CorruptRecord if the bytes are no such record, or of another format."""
        self._data = data
        self._at = 0
        self._what = what
        found = self.octet()
        if found != version:
            raise CorruptRecord(
                f"{what} of format {found}, this release reads {version}; it was written by "
                "another release, or is damaged"
            )
        if self.take(_CHECKSUM_BYTES) != _checksum(self.rest):
            raise CorruptRecord(f"{what} is damaged: its checksum does not match")

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


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(body).to_bytes(_CHECKSUM_BYTES, "little")
