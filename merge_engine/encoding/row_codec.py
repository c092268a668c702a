"""Stored rows as bytes, and back: what RocksDB holds under a key.

    version        u16, little-endian: the schema version that the row was written with
    touched bits   ceil(k / 8) bytes: bit j of byte j // 8, counted from the lowest, is set iff a
                     write has reached value column j
    states         the k column states as one struct, see `codec`: null bits, fixed
                     part and variable lengths, variable data

The state of an untouched column is null. Two rows of one version are equal iff their bytes are.

This layout, and those of `codec` and `keys`, are part of the view's format (see `view`).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from merge_engine.encoding import ragged
from merge_engine.encoding.codec import StructLayout
from merge_engine.encoding.ragged import Bytes, Flags

_VERSION_WIDTH = 2
LAST_VERSION = (1 << 8 * _VERSION_WIDTH) - 1


class RowCodec:
    """Encodes and decodes rows of one schema version, whole batches at a time."""

    def __init__(self, version: int, types: Sequence[pa.DataType]) -> None:
        if not 0 <= version <= LAST_VERSION:
            raise ValueError(f"schema version {version} does not fit 16 bits")
        self.version = version
        self._version_bytes = version.to_bytes(_VERSION_WIDTH, "little")
        self.types = tuple(types)
        self._layout = StructLayout(types, prefix=_VERSION_WIDTH + (len(self.types) + 7) // 8)

    def encode(self, touched: Flags, states: Sequence[pa.Array]) -> pa.BinaryArray:
        """Return one value per row. What stands in an untouched state does not matter.

        `touched` has a row per row and a column per value column, in the order of the types.
        """
        count = len(touched)
        if touched.shape != (count, len(self.types)) or len(states) != len(self.types):
            raise ValueError(f"expected {len(self.types)} columns")
        for expected, state in zip(self.types, states, strict=True):
            if state.type != expected or len(state) != count:
                raise ValueError(f"expected {count} x {expected}, got {len(state)} x {state.type}")
        prefix = np.zeros((count, self._layout.prefix), np.uint8)
        prefix[:, :_VERSION_WIDTH] = np.array([self.version], "<u2").view(np.uint8)
        for j in range(len(self.types)):
            prefix[:, _VERSION_WIDTH + j // 8] |= touched[:, j].view(np.uint8) << (j % 8)
        states = [ragged.only_where(touched[:, j], state) for j, state in enumerate(states)]
        return self._layout.encode(states, prefix)

    def decode(
        self, values: pa.BinaryArray, columns: Sequence[int] | None = None
    ) -> tuple[Flags, list[pa.Array]]:
        """Return the touched bits of all columns, and the states of the chosen ones (None: all).

        Raises `ValueError` for rows of another version, and for bytes that are no row.
        """
        if (versions(values) != self.version).any():
            raise ValueError(f"not every row is of schema version {self.version}")
        return self.decode_checked(values, columns)

    def decode_checked(
        self, values: pa.BinaryArray, columns: Sequence[int] | None = None
    ) -> tuple[Flags, list[pa.Array]]:
        """The same for rows that are known to be of this version."""
        return self._with_touched(*self._layout.decode(values, columns))

    def decode_few(self, values: Sequence[bytes]) -> tuple[Flags, list[pa.Array]] | None:
        """The same for the few rows of a look-up; None if one of them is of another version."""
        if any(value[:_VERSION_WIDTH] != self._version_bytes for value in values):
            return None
        return self._with_touched(*self._layout.decode_few(values, range(len(self.types))))

    def _with_touched(self, matrix: Bytes, states: list[pa.Array]) -> tuple[Flags, list[pa.Array]]:
        bits = np.unpackbits(
            matrix[:, _VERSION_WIDTH : self._layout.prefix],
            axis=1,
            count=len(self.types),
            bitorder="little",
        )
        return bits.view(np.bool_), states


def versions(values: pa.BinaryArray) -> npt.NDArray[np.uint16]:
    """Return the schema version of each row, without looking at the rest."""
    if (ragged.lengths(values) < _VERSION_WIDTH).any():
        raise ValueError("a value too short for a row")
    buffer: Bytes = ragged.data(values)
    bounds = ragged.offsets(values)
    starts = bounds[:-1] - bounds[0]
    result: npt.NDArray[np.uint16] = buffer[starts] | buffer[starts + 1].astype(np.uint16) << 8
    return result
