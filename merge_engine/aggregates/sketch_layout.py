"""The bytes of sketches: one form for equal ones, and a check before the library reads any.

The C++ library trusts what is inside a sketch: a flipped bit in the mode of an HLL sketch ends the
process when two are merged. So bytes are checked here first, in full: only the form that we write
passes. Little-endian, as far as it matters:

    HLL    byte 0 words of preamble, 1 version 1, 2 family 7, 3 lg_k, 5 flags (8 compact, 16 out of
           order), 7 mode (8 list, 9 set, 10 registers of eight bits)
           list: byte 4 is 3; byte 6 count; u32 hashes from byte 8 on
           set: byte 4 lg of the table in memory; u32 count at 8; u32 hashes from byte 12 on
           registers: f64 order-dependent estimate at 8; f64 sums of 2^-register at 16 (registers
           below 32) and 24 (others); u32 number of zeros at 32; one byte each from byte 40 on
    theta  byte 0 words of preamble: 1 a single hash, 2 exact, 3 estimating; bytes 1 to 7 constant;
           u32 count at 8; u64 theta at 16 if estimating; u64 hashes after the preamble, ascending
"""

import struct
from operator import lt

import numpy as np
import numpy.typing as npt

from merge_engine.aggregates.arrays import Indices
from merge_engine.aggregates.hash_sets import SmallForm, Words
from merge_engine.aggregates.serialized import Damaged

_LIST, _SET, _REGISTERS = 8, 9, 10
_COMPACT, _OUT_OF_ORDER = 8, 16
_MOST_LISTED = 7
_LEAST_LG_TABLE = 5
_HIGHEST_REGISTER = 63
_POWERS = 2.0 ** -np.arange(_HIGHEST_REGISTER + 1)

_THETA_CONSTANTS = bytes.fromhex("0303 0000 1a cc93")
_NO_THETA = 2**63 - 1


class SmallHll(SmallForm):
    """An HLL sketch that is a list or a set. A table in memory is at most three quarters full."""

    word = np.uint32
    below = 2**32

    def __init__(self, lg_k: int) -> None:
        self._lg_k = lg_k
        self._full = np.array([3 << lg >> 2 for lg in range(_LEAST_LG_TABLE, lg_k - 2)], np.int64)
        self.most = int(self._full[-1]) if len(self._full) else _MOST_LISTED

    def heads(self, counts: Indices) -> tuple[Words, Indices]:
        listed = counts <= _MOST_LISTED
        heads = np.zeros((len(counts), 12), np.uint8)
        heads[:, 0] = np.where(listed, 2, 3)
        heads[:, 1:4] = 1, 7, self._lg_k
        heads[:, 4] = np.where(listed, 3, _LEAST_LG_TABLE + np.searchsorted(self._full, counts))
        heads[:, 5] = _COMPACT
        heads[:, 6] = np.where(listed, counts, 0)
        heads[:, 7] = np.where(listed, _LIST, _SET)
        words = heads.view(np.uint32)
        words[:, 2] = counts
        return words, np.where(listed, 2, 3)

    def count(self, sizes: Indices) -> Indices:
        return sizes - np.where(sizes <= _MOST_LISTED + 2, 2, 3)


class SmallTheta(SmallForm):
    """A theta sketch that is exact, of one hash or of several."""

    word = np.uint64
    below = _NO_THETA

    def __init__(self, lg_k: int) -> None:
        self.most = 1 << lg_k

    def heads(self, counts: Indices) -> tuple[Words, Indices]:
        sizes = np.where(counts == 1, 1, 2)
        heads = np.zeros((len(counts), 16), np.uint8)
        heads[:, 0] = sizes
        heads[:, 1:8] = np.frombuffer(_THETA_CONSTANTS, np.uint8)
        words = heads.view(np.uint64)
        words[:, 1] = counts
        return words, sizes

    def count(self, sizes: Indices) -> Indices:
        return np.where(sizes == 2, 1, np.where(sizes == 3, 0, sizes - 2))


def hll_in_one_form(serialized: bytes) -> bytes:
    """Return the bytes of an equal HLL sketch that do not depend on the order of its values.

    Hashes may come in any order, so they are sorted. Registers come with an estimate that rests on
    the order of arrival; a union that cannot have it sets the flag "out of order", and so do we
    always: else a count would depend on how the rows were split.
    """
    data = bytearray(serialized)
    if data[7] == _REGISTERS:
        data[5] |= _OUT_OF_ORDER
        data[8:16] = bytes(8)
    else:
        start = 8 if data[7] == _LIST else 12
        count = (len(data) - start) // 4
        hashes = sorted(struct.unpack_from(f"<{count}I", data, start))
        struct.pack_into(f"<{count}I", data, start, *hashes)
    return bytes(data)


def hll_of_registers(registers: npt.NDArray[np.uint8], lg_k: int) -> bytes:
    """Return the bytes of the sketch with these registers, in the same form."""
    head = bytes([10, 1, 7, lg_k, 0, _COMPACT | _OUT_OF_ORDER, 0, _REGISTERS])
    sizes = np.bincount(registers, minlength=len(_POWERS))
    return head + struct.pack("<dddII", *_sums_of(sizes)) + registers.tobytes()


def _sums_of(sizes: Indices) -> tuple[float, float, float, int, int]:
    """Return what stands before registers, given how many there are of each value."""
    # Both sums are exact: they add less than 2^21 powers of two that are 31 binary digits apart.
    terms = sizes * _POWERS
    return 0.0, float(terms[:32].sum()), float(terms[32:].sum()), int(sizes[0]), 0


def theta_of_hashes(hashes: Words, theta: int) -> bytes:
    """Return the bytes of an estimating sketch of these ascending hashes, all below theta."""
    return bytes([3]) + _THETA_CONSTANTS + struct.pack("<QQ", len(hashes), theta) + hashes.tobytes()


def check_hll(data: bytes, lg_k: int) -> None:
    """Raise Damaged unless this is an HLL sketch as `hll_in_one_form` returns it."""
    if len(data) < 12 or data[1:3] != b"\x01\x07":
        raise Damaged("it is no HLL sketch")
    if data[3] != lg_k:
        raise Damaged(f"it has lg_k = {data[3]}, its column {lg_k}")
    check = _HLL_CHECKS.get(data[7])
    if check is None or not check(data, lg_k):
        raise Damaged("its parts do not fit together")


def _is_hll_list(data: bytes, lg_k: int) -> bool:  # noqa: ARG001
    head = (data[0], data[4], data[5])
    return head == (2, 3, 8) and data[6] < 8 and _are_hashes(data, 8, data[6], "I")


def _is_hll_set(data: bytes, lg_k: int) -> bool:
    (count,) = struct.unpack_from("<I", data, 8)
    head, lg_table = (data[0], data[5], data[6]), data[4]
    fits_table = 5 <= lg_table <= lg_k - 3 and 4 * count <= 3 << lg_table
    return head == (3, 8, 0) and fits_table and _are_hashes(data, 12, count, "I")


def _are_hll_registers(data: bytes, lg_k: int) -> bool:
    head = (data[0], data[4], data[5], data[6])
    if head != (10, 0, 8 | _OUT_OF_ORDER, 0) or len(data) != 40 + (1 << lg_k):
        return False
    sizes = np.bincount(np.frombuffer(data, dtype=np.uint8, offset=40), minlength=len(_POWERS))
    if len(sizes) > len(_POWERS):
        return False
    return struct.unpack_from("<dddII", data, 8) == _sums_of(sizes)


_HLL_CHECKS = {_LIST: _is_hll_list, _SET: _is_hll_set, _REGISTERS: _are_hll_registers}


def check_theta(data: bytes, lg_k: int) -> None:
    """Raise Damaged unless this is a theta sketch of at most 2^lg_k hashes, as we write it."""
    if len(data) < 16 or data[1:8] != _THETA_CONSTANTS or not 1 <= data[0] <= 3:
        raise Damaged("it is no theta sketch")
    count, theta = 1, _NO_THETA
    if data[0] > 1:
        count, unused = struct.unpack_from("<II", data, 8)
        if unused:
            raise Damaged("its parts do not fit together")
    if count > 1 << lg_k:
        raise Damaged(f"it has more than 2^{lg_k} hashes")
    if data[0] == 3 and len(data) >= 24:
        (theta,) = struct.unpack_from("<Q", data, 16)
    if theta > _NO_THETA or not _are_hashes(data, 8 * data[0], count, "Q", below=theta):
        raise Damaged("its parts do not fit together")


def _are_hashes(data: bytes, start: int, count: int, kind: str, below: int | None = None) -> bool:
    """Whether the rest is `count` ascending hashes, at least one, none of them zero."""
    if count == 0 or len(data) != start + count * struct.calcsize(f"<{kind}"):
        return False
    hashes = struct.unpack_from(f"<{count}{kind}", data, start)
    ascending = hashes[0] > 0 and all(map(lt, hashes, hashes[1:]))
    return ascending and (below is None or hashes[-1] < below)
