"""Sketches of others: what the DataSketches libraries and Spark write, taken apart without them.

The C++ library trusts what is inside a sketch, so bytes from outside never reach it: their hashes
or registers are read here, with every bound checked, and written again in the one form that
`sketch_layout` describes. Taken are:

    HLL    of the column's lg_k and 4, 6 or 8 bits (HLL_4, HLL_6, HLL_8), compact or updatable: as a
           list, a set, or registers
    theta  compact, ordered or not, or compressed (as Spark writes it), of any number of hashes:
           those beyond 2^lg_k are dropped, as the union of the libraries does

Beside what is told there:

    HLL    what is updatable has unused words among its hashes, which are zero. Byte 5: flag 4
           empty, 32 sums not kept up. Byte 7, the mode: the lower two bits are 0 a list, 1 a set, 2
           registers, the next two 0, 1, 2 for 4, 6, 8 bits. Registers of 4 bits count from a
           minimum (byte 6) on, and 15 stands for an exception, in a table after them: u32 words,
           the value in the upper six bits, the register in the lower
    theta  byte 5: flag 1 big-endian, 4 empty; bytes 3, 4 and 12 to 15 do not matter here
           compressed: byte 0 is 1, or 2 if there is a theta at 8; byte 1 version 4; byte 3 the bits
           of a difference; byte 4 the bytes of the count, which comes next; then the differences of
           ascending hashes, highest bit first
"""

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from merge_engine.aggregates.hash_sets import Words
from merge_engine.aggregates.serialized import Damaged

NO_THETA = 2**63 - 1

_EMPTY, _SUMS_NOT_KEPT_UP = 4, 32
_LIST, _SET, _REGISTERS = 0, 1, 2
_BIG_ENDIAN = 1
_PLAIN, _COMPRESSED = 3, 4
# Differences of a compressed sketch: so many of them are taken apart in a megabyte or two.
_AT_ONCE = 1 << 12
_BITS_OF_REGISTER = 26
_HIGHEST_REGISTER = 63
_EXCEPTION = 15
_OTHER_FAMILIES = {1: "a union", 2: "an update sketch", 3: "a theta sketch", 7: "an HLL sketch"}

Registers = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Theta:
    """The hashes of a theta sketch, in ascending order, all of them below theta."""

    hashes: Words
    theta: int


def read_hll(data: bytes, lg_k: int) -> Words | Registers:
    """Return the hashes of an HLL sketch (32 bits each), or its registers (8 bits each)."""
    if len(data) < 8 or data[1] != 1 or data[2] != 7:
        raise Damaged(_what_else(data, "an HLL sketch", 7))
    if data[3] != lg_k:
        raise Damaged(f"it has lg_k = {data[3]}, its column {lg_k}")
    mode, kind = data[7] & 3, data[7] >> 2
    if kind > 2:
        raise Damaged("its parts do not fit together")
    if data[5] & _EMPTY:
        return np.zeros(0, np.uint32)
    if mode == _LIST and data[0] == 2:
        return _hll_hashes(data, 8, data[6])
    if mode == _SET and data[0] == 3 and len(data) >= 12:
        return _hll_hashes(data, 12, *struct.unpack_from("<I", data, 8))
    if mode == _REGISTERS and data[0] == 10 and len(data) >= 40:
        return _hll_registers(data, lg_k, kind)
    raise Damaged("its parts do not fit together")


def _hll_hashes(data: bytes, start: int, count: int) -> Words:
    """Return the hashes of a list or a set, each once."""
    hashes = _words(data, start)
    if len(hashes) != count or len(np.unique(hashes)) != count:
        raise Damaged("its parts do not fit together")
    if (hashes >> np.uint32(_BITS_OF_REGISTER) == 0).any():
        raise Damaged("it has a hash that no value has")
    return hashes


def _words(data: bytes, start: int) -> Words:
    """Return the words from `start` to the end that are in use: those that are not zero."""
    if (len(data) - start) % 4:
        raise Damaged("its parts do not fit together")
    words = np.frombuffer(data, "<u4", offset=start)
    return words[words > 0]


def _hll_registers(data: bytes, lg_k: int, kind: int) -> Registers:
    size = 1 << lg_k
    zeros, exceptions = struct.unpack_from("<II", data, 32)
    stored = (size // 2, size * 3 // 4 + 1, size)[kind]
    if len(data) < 40 + stored or (kind and (len(data) > 40 + stored or exceptions)):
        raise Damaged("its parts do not fit together")
    packed = np.frombuffer(data, np.uint8, stored, 40)
    if kind == 0:
        registers = _of_four_bits(packed, data[6], _words(data, 40 + stored), exceptions)
    elif kind == 1:
        bits = np.unpackbits(packed, bitorder="little")[: 6 * size].reshape(size, 6)
        registers = np.packbits(bits, axis=1, bitorder="little")[:, 0]
    else:
        registers = packed
    kept_up = not data[5] & _SUMS_NOT_KEPT_UP
    if int(registers.max()) > _HIGHEST_REGISTER or (
        kept_up and int((registers == data[6]).sum()) != zeros
    ):
        raise Damaged("its parts do not fit together")
    return registers


def _of_four_bits(packed: Registers, least: int, table: Words, exceptions: int) -> Registers:
    nibbles = np.stack([packed & 15, packed >> 4], axis=1).ravel()
    slots = table & np.uint32((1 << _BITS_OF_REGISTER) - 1)
    excepted = np.flatnonzero(nibbles == _EXCEPTION)
    known = len(table) == exceptions and np.array_equal(np.sort(slots), excepted)
    if not known or least > _HIGHEST_REGISTER:
        raise Damaged("its parts do not fit together")
    registers = np.minimum(nibbles.astype(np.int64) + least, 255).astype(np.uint8)
    registers[slots] = (table >> np.uint32(_BITS_OF_REGISTER)).astype(np.uint8)
    return registers


def read_theta(data: bytes, lg_k: int) -> Theta:
    """Return the hashes of a theta sketch, those that a sketch of 2^lg_k keeps."""
    if len(data) < 8 or data[2] != 3:
        raise Damaged(_what_else(data, "a compact theta sketch", 3))
    if data[1] not in (_PLAIN, _COMPRESSED) or data[5] & _BIG_ENDIAN:
        raise Damaged("it is of another version; serialize it as version 3 or 4")
    if data[5] & _EMPTY:
        return Theta(np.zeros(0, np.uint64), NO_THETA)
    if data[6:8] != b"\xcc\x93":
        raise Damaged("it was made with another seed")
    try:
        hashes, theta = (_plain if data[1] == _PLAIN else _compressed)(data)
    except struct.error as error:
        raise Damaged("it is too short") from error
    if not len(hashes):
        raise Damaged("it is not empty, but has no hash left")
    if theta > NO_THETA or hashes[0] == 0 or hashes[-1] >= theta or (np.diff(hashes) == 0).any():
        raise Damaged("its parts do not fit together")
    if len(hashes) > 1 << lg_k:
        theta = int(hashes[1 << lg_k])
    return Theta(hashes[: 1 << lg_k], theta)


def _plain(data: bytes) -> tuple[Words, int]:
    """Return the hashes in ascending order, and theta."""
    words, count, theta = data[0] & 63, 1, NO_THETA
    if words > 1:
        (count,) = struct.unpack_from("<I", data, 8)
    if words > 2:
        (theta,) = struct.unpack_from("<Q", data, 16)
    if not 1 <= words <= 3 or len(data) != 8 * (words + count):
        raise Damaged("its parts do not fit together")
    return np.sort(np.frombuffer(data, "<u8", count, 8 * words)), theta


def _compressed(data: bytes) -> tuple[Words, int]:
    """Do the same with hashes that are told by their differences, of so many bits each."""
    words, bits, bytes_of_count, theta = data[0] & 63, data[3], data[4], NO_THETA
    if words == 2:
        (theta,) = struct.unpack_from("<Q", data, 8)
    start = 8 * words + bytes_of_count
    count = int.from_bytes(data[8 * words : start], "little")
    if words not in (1, 2) or bytes_of_count > 4 or not 1 <= bits <= 63:
        raise Damaged("its parts do not fit together")
    if len(data) != start + -(-count * bits // 8):
        raise Damaged("its parts do not fit together")
    packed = np.frombuffer(data, np.uint8, offset=start)
    differences = np.empty(count, np.uint64)
    weights = np.uint64(1) << np.arange(bits - 1, -1, -1, dtype=np.uint64)
    for first in range(0, count, _AT_ONCE):  # Eight values end with a byte.
        some = packed[first * bits // 8 : (first + _AT_ONCE) * bits // 8 + 1]
        size = min(_AT_ONCE, count - first)
        digits = np.unpackbits(some, count=size * bits).reshape(size, bits)
        differences[first : first + size] = digits @ weights
    hashes = np.cumsum(differences, dtype=np.uint64)
    if (hashes[1:] < hashes[:-1]).any():
        raise Damaged("its parts do not fit together")
    return hashes, theta


def _what_else(data: bytes, wanted: str, family: int) -> str:
    other = _OTHER_FAMILIES.get(data[2]) if len(data) >= 8 and data[2] != family else None
    return f"it is {other}, not {wanted}" if other else f"it is no {wanted.split(' ', 1)[1]}"
