"""Exact sums of integers and decimals, and quotients, on 32-bit limbs held in 64-bit columns.

A value is the sum of its limbs, limb i weighing 2^(32 i); the top limb has the sign. 64-bit
integers have two limbs and 128-bit decimals four. Since each limb has 31 spare bits, two billion
rows can be added limb by limb before any carry is due: a sum is exact however large it grows in
between, and only what it ends up as has to fit the column. Integers that cannot reach 64 bits even
if all were as large as the largest are added as they are.

Arrow divides decimals, too, but cannot be relied on: where the divisor has more than 32 bits, its
quotients of numbers like 2^80 - 1 are wrong.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from merge_engine.aggregates.arrays import (
    Mask,
    from_numbers,
    run_lengths,
    to_numbers,
    valid_mask,
    validity_buffer,
)
from merge_engine.aggregates.base import Starts

Limbs = npt.NDArray[np.int64]

_LOW_32 = 0xFFFFFFFF
_LOW_64 = 0xFFFFFFFFFFFFFFFF
_HIGHEST_64 = 2**63 - 1


def add_pairs(older: pa.Array, newer: pa.Array, valid: Mask) -> tuple[pa.Array, Mask]:
    """Return older + newer, null taken as zero, and where that does not fit the type."""
    if pa.types.is_decimal(older.type):
        return _join(_split(older) + _split(newer), older.type, valid)
    left, right = _integers(older), _integers(newer)
    sums = left + right
    # It wrapped around iff both operands have the other sign than the sum.
    wrapped = ((left ^ sums) & (right ^ sums)) < 0
    array, outside = _narrow(sums, older.type, valid)
    return array, (wrapped | outside) & valid


def add_runs(array: pa.Array, starts: Starts, valid: Mask) -> tuple[pa.Array, Mask]:
    """Return the sum of each run, null taken as zero, and where that does not fit the type."""
    if len(array) and not pa.types.is_decimal(array.type):
        numbers = _integers(array)
        longest = int(run_lengths(starts, len(array)).max())
        largest = max(int(numbers.max()), -int(numbers.min()))
        if longest * largest <= _HIGHEST_64:
            narrowed, outside = _narrow(np.add.reduceat(numbers, starts), array.type, valid)
            return narrowed, outside & valid
    return _join(np.add.reduceat(_split(array), starts, axis=1), array.type, valid)


def divide(
    sums: pa.Array, counts: npt.NDArray[np.int64], data_type: pa.DataType, valid: Mask
) -> tuple[pa.Array, Mask]:
    """Return decimals / counts, rounded half up (away from zero), and where that does not fit.

    `data_type` has the scale of the sums. Where it is valid, a count is at least one.
    """
    limbs = _split_decimals(sums)
    negative = limbs[3] < 0
    magnitudes = _carry(np.where(negative, -limbs, limbs)).astype(np.uint64)
    divisors = np.where(valid, counts, 1).astype(np.uint64)
    quotients, remainders = _divide(magnitudes, divisors)
    # The remainder is at least half the divisor; twice the remainder might not fit 64 bits.
    quotients[0] += remainders >= divisors - remainders
    rounded = quotients.astype(np.int64)
    return _join(np.where(negative, -rounded, rounded), data_type, valid)


def _divide(
    limbs: npt.NDArray[np.uint64], divisors: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Divide from the top down, as many bits at a time as 64 have room for beside a remainder."""
    room = 64 - int(divisors.max(initial=1)).bit_length()
    bits = max(width for width in (1, 2, 4, 8, 16, 32) if width <= room)
    quotients, remainders = np.zeros_like(limbs), np.zeros_like(divisors)
    for position in reversed(range(len(limbs))):
        for shift in range(32 - bits, -1, -bits):
            digits = (limbs[position] >> np.uint64(shift)) & np.uint64((1 << bits) - 1)
            remainders = (remainders << np.uint64(bits)) | digits
            parts = remainders // divisors
            remainders -= parts * divisors
            quotients[position] |= parts << np.uint64(shift)
    return quotients, remainders


def _integers(array: pa.Array) -> npt.NDArray[np.int64]:
    return to_numbers(array, 0).astype(np.int64, copy=False)


def _split(array: pa.Array) -> Limbs:
    """Return one row per limb and one column per value, lowest limb first; a null is zero."""
    if pa.types.is_decimal(array.type):
        return _split_decimals(array)
    numbers = _integers(array)
    return np.stack([numbers & _LOW_32, numbers >> 32])


def _join(limbs: Limbs, data_type: pa.DataType, valid: Mask) -> tuple[pa.Array, Mask]:
    """Return the sums as an array, and where they do not fit `data_type`.

    `limbs` is used up. What the array has where a sum does not fit is undefined, here and above.
    """
    limbs = _carry(limbs)
    too_wide = (limbs[-1] != limbs[-1].astype(np.int32)) & valid
    if pa.types.is_decimal(data_type):
        array, outside = _join_decimals(limbs, data_type, valid)
    else:
        array, outside = _narrow((limbs[1] << 32) | limbs[0], data_type, valid)
    return array, too_wide | (outside & valid)


def _carry(limbs: Limbs) -> Limbs:
    """Bring all limbs but the top one into 32 bits, in place."""
    for position in range(len(limbs) - 1):
        limbs[position + 1] += limbs[position] >> 32
        limbs[position] &= _LOW_32
    return limbs


def _split_decimals(array: pa.Array) -> Limbs:
    if len(array) == 0:
        return np.zeros((4, 0), dtype=np.int64)
    words = np.frombuffer(
        array.buffers()[1], dtype="<u4", count=4 * len(array), offset=16 * array.offset
    ).reshape(-1, 4)
    limbs = np.ascontiguousarray(words.T).astype(np.int64)
    limbs[3] = limbs[3].astype(np.int32)
    if array.null_count:
        limbs[:, ~valid_mask(array)] = 0
    return limbs


def _narrow(
    sums: npt.NDArray[np.int64], data_type: pa.DataType, valid: Mask
) -> tuple[pa.Array, Mask]:
    narrow = sums.astype(data_type.to_pandas_dtype(), copy=False)
    outside: Mask = narrow != sums
    return from_numbers(narrow, data_type, valid), outside


def _join_decimals(limbs: Limbs, data_type: pa.DataType, valid: Mask) -> tuple[pa.Array, Mask]:
    words = np.empty((limbs.shape[1], 2), dtype=np.uint64)
    low, high = words[:, 0], words[:, 1].view(np.int64)
    low[:] = (limbs[1].astype(np.uint64) << np.uint64(32)) | limbs[0].astype(np.uint64)
    high[:] = (limbs[3] << 32) | limbs[2]
    bound = 10**data_type.precision
    above = _reaches(high, low, bound)
    # v <= -bound is the same as not v >= 1 - bound.
    below = ~_reaches(high, low, 1 - bound)
    buffers = [validity_buffer(valid), pa.py_buffer(words)]
    return pa.Array.from_buffers(data_type, len(words), buffers), above | below


def _reaches(high: npt.NDArray[np.int64], low: npt.NDArray[np.uint64], bound: int) -> Mask:
    """Return where the 128-bit value is at least `bound`."""
    bound_high, bound_low = np.int64(bound >> 64), np.uint64(bound & _LOW_64)
    reaches: Mask = (high > bound_high) | ((high == bound_high) & (low >= bound_low))
    return reaches
