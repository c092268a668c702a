"""Integers as bytes: single ones, and arrays of thousands.

A single one is an unsigned LEB128 varint: 7 bits per byte, lowest first; all bytes but the last
have the top bit. An array is its length and its smallest value as varints, one byte that says how
wide the rest is (1, 2, 4 or 8), and the differences to the smallest value in so many bytes each,
little-endian. A record of 10,000 offsets is encoded on every commit: packing them takes a tenth of
the time that varints do.
"""

import numpy as np
import numpy.typing as npt

from foundation.errors import CorruptRecord

Signed = npt.NDArray[np.int64]

_LONGEST = 10
_WIDTHS = (1, 2, 4, 8)
_FEW = 32
_HIGHEST = 2**63 - 1
_SMALL = [bytes([value]) for value in range(0x80)]


def encode_one(value: int) -> bytes:
    """Return one number, of at most 64 bits and not negative."""
    if value <= 0x7F:
        return _SMALL[value]
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def decode_one(data: bytes, start: int) -> tuple[int, int]:
    """Return the number that begins at `start`, and where it ends; CorruptRecord if it does not."""
    value = 0
    for position, octet in enumerate(data[start : start + _LONGEST]):
        value |= (octet & 0x7F) << (7 * position)
        if octet < 0x80:
            if value >> 64:
                break
            return value, start + position + 1
    raise CorruptRecord(f"no integer of 64 bits at byte {start}")


def encode_array(values: Signed) -> bytes:
    """Return an array of numbers, none of them negative."""
    return b"".join(array_parts(values))


def array_parts(values: Signed) -> list[bytes]:
    """Return the same in parts, for whoever joins more than one array."""
    if len(values) == 0:
        return [encode_one(0)]
    if len(values) <= _FEW:  # Every call of NumPy costs as much as a dozen integers.
        few = values.tolist()
        lowest = min(few)
        width = _width(max(few) - lowest)
        body = b"".join([(value - lowest).to_bytes(width, "little") for value in few])
    else:
        lowest = int(values.min())
        width = _width(int(values.max()) - lowest)
        body = (values - lowest).astype(f"<u{width}").tobytes()
    return [encode_one(len(values)), encode_one(lowest), _SMALL[width], body]


def decode_array(data: bytes, start: int) -> tuple[Signed, int]:
    """Return the array that begins at `start`, and where it ends; CorruptRecord if it does not."""
    count, start = decode_one(data, start)
    if count == 0:
        return np.zeros(0, np.int64), start
    lowest, start = decode_one(data, start)
    width = data[start] if start < len(data) else 0
    start += 1
    size = count * width
    if width not in _WIDTHS or lowest > _HIGHEST or start + size > len(data):
        raise CorruptRecord(f"no array of {count} integers of {width} bytes at byte {start}")
    values: Signed = np.frombuffer(data, f"<u{width}", count, start).astype(np.int64) + lowest
    if (values < lowest).any():  # It wrapped, or the difference had the sign bit.
        raise CorruptRecord("an integer of more than 63 bits")
    return values, start + size


def _width(highest: int) -> int:
    return next(width for width in _WIDTHS if highest < 1 << (8 * width))
