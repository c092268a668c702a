"""Exact distinct counts of whole numbers, as Roaring bitmaps in the portable format.

The format stores 65,536 values per container, as a sorted array, a bitset or a list of runs. After
`run_optimize` pyroaring has the smallest of the three in each, except that a list of runs as large
as an array stays what it was. We store the array then, so that equal sets have equal bytes; see
`_tied_values`. The layout, little-endian, as far as it is read here:

    32 bits:  u16 12347, u16 containers - 1, a bit per container: has it runs?,
              per container u16 key, u16 cardinality - 1; per container u32 position, if there are
              four or more; then the containers; one of runs is: u16 runs, per run u16 start,
              u16 length - 1.  Without any runs it begins with u32 12346, u32 containers.
    64 bits:  u64 count, per part: u32 upper half, then a bitmap of 32 bits
"""

import struct
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap, BitMap64

from merge_engine.aggregates.arrays import count_in_runs, first_true, valid_mask
from merge_engine.aggregates.base import Fault, Starts
from merge_engine.aggregates.serialized import Damaged, SerializedSet
from merge_engine.schema.types import type_name

_WITH_RUNS = 12347
_ARRAY_LIMIT = 4096
_BITSET_BYTES = 8192


class _Bitmap(SerializedSet):
    """A Roaring bitmap; the two widths differ in constants and in how many parts they have.

    pyroaring checks sizes and invariants of bytes that it reads, so damaged ones raise.
    """

    bitmap: ClassVar[Any]
    word: ClassVar[type[np.unsignedinteger[Any]]]

    def check_input(self, input_type: pa.DataType) -> str | None:
        if pa.types.is_integer(input_type) or pa.types.is_null(input_type):
            return None
        return f"{self.name} takes whole numbers, not {type_name(input_type)}"

    @staticmethod
    @abstractmethod
    def _end(data: bytes) -> int:
        """Return how many of the bytes a bitmap takes."""

    @staticmethod
    @abstractmethod
    def _parts(data: bytes) -> list[tuple[int, int]]:
        """Return, per 32-bit bitmap, what its values are offset by and where it begins."""

    def accumulate(self, values: pa.Array, order: pa.Array | None, starts: Starts) -> pa.Array:  # noqa: ARG002
        if pa.types.is_null(values.type):
            return pa.nulls(len(starts), self.state_type)
        lengths = count_in_runs(valid_mask(values), starts)
        ends = np.cumsum(lengths)
        try:
            numbers = self._numbers(values.drop_null())
        except Fault as fault:
            fault.index = int(np.searchsorted(ends, fault.index, side="right"))
            raise
        return pa.array(
            [
                self._to_bytes(self.bitmap(numbers[end - length : end])) if length else None
                for length, end in zip(lengths.tolist(), ends.tolist(), strict=True)
            ],
            self.state_type,
        )

    def _numbers(self, values: pa.Array) -> npt.NDArray[Any]:
        """Return values as words; raise Fault with the position of one that is none."""
        numbers: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
        highest = int(np.iinfo(self.word).max)
        # Compared with its own type's bounds, no number is converted to one that it is not.
        outside = numbers < 0
        if np.iinfo(numbers.dtype).max > highest:
            outside |= numbers > highest
        culprit = first_true(outside)
        if culprit is not None:
            reason = f"{numbers[culprit]} is outside 0..{highest}, the range of {self.name}"
            raise Fault(culprit, reason)
        return numbers.astype(self.word)

    def _merge(self, states: Sequence[bytes]) -> bytes:
        union = self._from_bytes(states[0])
        for state in states[1:]:
            union |= self._from_bytes(state)
        return self._to_bytes(union)

    def _in_our_form(self, state: bytes) -> bytes | None:
        bitmap = self._from_bytes(state)
        as_it_is = bitmap.serialize() == state
        if as_it_is and bitmap and not bitmap.run_optimize():
            return state
        junk = 0 if as_it_is else len(state) - self._end(state)
        if junk:
            raise Damaged(f"{junk} bytes follow it")
        return self._to_bytes(bitmap) if bitmap else None

    def _size(self, state: bytes) -> int:
        return len(self._from_bytes(state))

    def _from_bytes(self, state: bytes) -> Any:
        try:
            return self.bitmap.deserialize(state)
        except (ValueError, IndexError, OverflowError) as error:
            raise Damaged(str(error)) from error

    def _to_bytes(self, bitmap: Any) -> bytes:
        if bitmap.run_optimize():
            data: bytes = bitmap.serialize()
            tied = [
                value
                for offset, at in self._parts(data)
                for value in _tied_values(data, offset, at)
            ]
            if not tied:
                return data
            # Taking the values out drops their containers; put back, they are stored as arrays.
            as_arrays = self.bitmap(np.array(tied, dtype=self.word))
            bitmap -= as_arrays
            bitmap |= as_arrays
        return bytes(bitmap.serialize())


class RoaringBitmap32(_Bitmap):
    """The set of whole numbers from 0 to 2^32 - 1 that were seen.

    lift(x) = {x}; lift(null) = null
    combine(a, b) = a | b; a null is the identity
    finish(a) = |a| as BIGINT, or the bitmap's bytes as BINARY
    """

    name = "rbm32"
    bitmap = BitMap
    word = np.uint32

    @staticmethod
    def _end(data: bytes) -> int:
        return _run_containers(data, 0)[1]

    @staticmethod
    def _parts(data: bytes) -> list[tuple[int, int]]:  # noqa: ARG004
        return [(0, 0)]


class RoaringBitmap64(_Bitmap):
    """The set of whole numbers from 0 to 2^64 - 1 that were seen.

    lift(x) = {x}; lift(null) = null
    combine(a, b) = a | b; a null is the identity
    finish(a) = |a| as BIGINT, or the bitmap's bytes as BINARY
    """

    name = "rbm64"
    bitmap = BitMap64
    word = np.uint64

    @staticmethod
    def _end(data: bytes) -> int:
        return _parts_of_64_bits(data)[1]

    @staticmethod
    def _parts(data: bytes) -> list[tuple[int, int]]:
        return _parts_of_64_bits(data)[0]


def _parts_of_64_bits(data: bytes) -> tuple[list[tuple[int, int]], int]:
    (count,) = struct.unpack_from("<Q", data)
    parts, at = [], 8
    for _ in range(count):
        (upper,) = struct.unpack_from("<I", data, at)
        parts.append((upper << 32, at + 4))
        _, at = _run_containers(data, at + 4)
    return parts, at


def _tied_values(data: bytes, offset: int, at: int) -> list[int]:
    """Return the values, plus `offset`, of run containers that would be as small as arrays.

    A container of c values in r runs takes 2 + 4 r bytes as runs and 2 c as an array.
    """
    values: list[int] = []
    for key, cardinality, position in _run_containers(data, at)[0]:
        (runs,) = struct.unpack_from("<H", data, position)
        if cardinality == 2 * runs + 1:
            pairs = struct.unpack_from(f"<{2 * runs}H", data, position + 2)
            for start, more in zip(pairs[::2], pairs[1::2], strict=True):
                first = offset + (key << 16) + start
                values.extend(range(first, first + more + 1))
    return values


def _run_containers(data: bytes, at: int) -> tuple[list[tuple[int, int, int]], int]:
    """Return (key, cardinality, position) of the containers of runs, and the bitmap's end."""
    first_word, second_word = struct.unpack_from("<II", data, at)
    if first_word & 0xFFFF == _WITH_RUNS:
        count = (first_word >> 16) + 1
        flags = data[at + 4 : at + 4 + (count + 7) // 8]
        header = at + 4 + (count + 7) // 8
        has_positions = count >= 4
    else:
        count, header, has_positions = second_word, at + 8, True
        flags = bytes((count + 7) // 8)
    words = struct.unpack_from(f"<{2 * count}H", data, header)
    position = header + 4 * count + (4 * count if has_positions else 0)
    found = []
    for index, (key, last) in enumerate(zip(words[::2], words[1::2], strict=True)):
        if flags[index // 8] >> index % 8 & 1:
            found.append((key, last + 1, position))
            (runs,) = struct.unpack_from("<H", data, position)
            position += 2 + 4 * runs
        else:
            position += 2 * (last + 1) if last < _ARRAY_LIMIT else _BITSET_BYTES
    return found, position
