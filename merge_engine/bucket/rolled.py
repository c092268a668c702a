"""A rolled object: neighbouring segments of a log in one, each of them byte for byte as it was.

Layout of the object, named `<first offset>-<end offset>.rolled`, both in 20 digits:

    segments          zstd: the bytes of the segments, one after the other
    index             zstd: JSON, of each segment its length in bytes and its header
    lengths           u64 each, little-endian: of the segments as stored and as they were, and
                      the same of the index
    body checksum     u64, little-endian: xxh3_64 of the segments as stored
    format version    u16, little-endian
    magic             b"TALLYROL"
    checksum          u64, little-endian: xxh3_64 of everything from the index on

The index stands at the end, so that whoever wants headers
only fetches no more than that. Its headers are those of segments of format 4, whatever the format
of the segments: a new field of a header takes a new format here, too. In format 1 they are those of
format 3.
"""

import io
import json
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import xxhash

from foundation.errors import CorruptSegment, UnknownFormat
from foundation.formats import Formats
from merge_engine.bucket.segment import (
    Segment,
    SegmentHeader,
    decode_segment,
    header_before_format_4,
    header_of,
    segment_name,
)

MAGIC = b"TALLYROL"
ROLLED_SUFFIX = ".rolled"
_CODEC = "zstd"
_TAIL = struct.Struct("<QQQQQH8sQ")
# So much is fetched at once of an object's end: mostly the whole index.
_END_BYTES = 64 << 10
_WAY_OUT = "restore it from a copy of the log"


class RolledRange(NamedTuple):
    """The offsets [first, end) of a log, whose segments are in one rolled object."""

    first: int
    end: int

    @property
    def name(self) -> str:
        """The name of the object."""
        return f"{self.first:020d}-{self.end:020d}{ROLLED_SUFFIX}"

    @classmethod
    def of(cls, name: str) -> "RolledRange":
        """Return the range that a name says."""
        first, _, end = name.removesuffix(ROLLED_SUFFIX).partition("-")
        try:
            return cls(int(first), int(end))
        except ValueError:
            raise CorruptSegment(f"{name!r} is not an object of a log; move it away") from None


class SegmentBytes(NamedTuple):
    """A segment's header, and the bytes of all of it."""

    header: SegmentHeader
    data: bytes


@dataclass(frozen=True)
class RolledIndex:
    """What a rolled object has. `bounds`: where each segment begins and ends, in bytes."""

    name: str
    headers: Sequence[SegmentHeader]
    bounds: Sequence[int]

    def at(self, offset: int) -> int:
        """Return which of the segments holds an offset."""
        return bisect_right(self.headers, offset, key=lambda header: header.base_offset) - 1


@dataclass(frozen=True)
class RolledSegments:
    """A rolled object, whole."""

    index: RolledIndex
    _data: memoryview

    def data(self, number: int) -> bytes:
        """Return the bytes of one of the segments."""
        start, end = self.index.bounds[number : number + 2]
        return bytes(self._data[start:end])

    def segment_at(self, offset: int) -> Segment:
        """Return the segment that holds an offset; CorruptSegment if it is damaged."""
        number = self.index.at(offset)
        header = self.index.headers[number]
        try:
            segment = decode_segment(segment_name(header.base_offset), self.data(number))
        except (CorruptSegment, UnknownFormat) as exc:
            raise type(exc)(f"{self.index.name}: {exc}") from exc
        if segment.header != header:
            raise _corrupt(self.index.name, "the index does not say what the segments do")
        return segment


def encode_rolled(segments: Sequence[SegmentBytes]) -> bytes:
    """Return the bytes of the object that has these segments, which follow each other."""
    whole = b"".join(one.data for one in segments)
    entries = [[len(one.data), vars(one.header)] for one in segments]
    listed = json.dumps(entries, separators=(",", ":")).encode()
    body: bytes = pa.compress(whole, _CODEC, asbytes=True)
    index: bytes = pa.compress(listed, _CODEC, asbytes=True)
    lengths = len(body), len(whole), len(index), len(listed)
    checksum = xxhash.xxh3_64_intdigest(body)
    end = index + _TAIL.pack(*lengths, checksum, FORMATS.current, MAGIC, 0)[:-8]
    return body + end + struct.pack("<Q", xxhash.xxh3_64_intdigest(end))


def decode_rolled(name: str, data: bytes) -> RolledSegments:
    """Read the object back; CorruptSegment or UnknownFormat if it is not what was written."""
    index = read_index(name, io.BytesIO(data))
    stored, length, _, _, checksum, *_ = _TAIL.unpack_from(data, len(data) - _TAIL.size)
    body = data[:stored]
    if xxhash.xxh3_64_intdigest(body) != checksum or length != index.bounds[-1]:
        raise _corrupt(name, "checksum mismatch")
    return RolledSegments(index, memoryview(_decompress(name, body, length)))


def read_index(name: str, file: BinaryIO) -> RolledIndex:
    """Read what the object has, and no more of it than that."""
    size = file.seek(0, io.SEEK_END)
    if size < _TAIL.size:
        raise _corrupt(name, f"only {size} bytes")
    end = _read_end(file, size, min(size, _END_BYTES))
    tail = _TAIL.unpack_from(end, len(end) - _TAIL.size)
    _, _, stored, length, _, version, magic, checksum = tail
    if magic != MAGIC:
        raise _corrupt(name, "truncated, or not a rolled object")
    needed = stored + _TAIL.size
    if needed > size:
        raise _corrupt(name, "checksum mismatch")
    end = end[-needed:] if needed <= len(end) else _read_end(file, size, needed)
    if xxhash.xxh3_64_intdigest(memoryview(end)[:-8]) != checksum:
        raise _corrupt(name, "checksum mismatch")
    read = FORMATS.reader(version, name)
    try:
        index = read(name, _decompress(name, end[: -_TAIL.size], length))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise _corrupt(name, f"the checksum holds, but {exc!r}") from exc
    _check_range(index)
    return index


def _read_end(file: BinaryIO, size: int, length: int) -> bytes:
    file.seek(size - length)
    return file.read(length)


def _check_range(index: RolledIndex) -> None:
    """Raise unless the segments are those that the name says, without a gap."""
    found = index.headers
    gaps = any(one.end_offset != other.base_offset for one, other in pairwise(found))
    expected = RolledRange.of(index.name)
    if gaps or not found or (found[0].base_offset, found[-1].end_offset) != expected:
        raise _corrupt(index.name, "its segments are other ones; it was renamed or swapped")


def _decompress(name: str, data: bytes, length: int) -> bytes:
    try:
        whole: bytes = pa.decompress(data, length, codec=_CODEC, asbytes=True)
    except (pa.ArrowException, OSError, MemoryError) as exc:
        raise _corrupt(name, str(exc)) from exc
    return whole


def _corrupt(name: str, what: str) -> CorruptSegment:
    return CorruptSegment(f"rolled segments {name}: {what}; {_WAY_OUT}")


def _read_format_1(name: str, listed: bytes) -> RolledIndex:
    return _to_index(name, listed, header_before_format_4)


def _read_format_2(name: str, listed: bytes) -> RolledIndex:
    return _to_index(name, listed, header_of)


def _to_index(
    name: str, listed: bytes, to_header: Callable[[dict[str, Any]], SegmentHeader]
) -> RolledIndex:
    entries = json.loads(listed)
    lengths = (length for length, _ in entries)
    headers = [to_header(fields) for _, fields in entries]
    return RolledIndex(name, headers, list(accumulate(lengths, initial=0)))


FORMATS: Formats[Callable[[str, bytes], RolledIndex]] = Formats(
    name="rolled", current=2, readers={1: _read_format_1, 2: _read_format_2}, error=UnknownFormat
)
