"""Rows of a batch, brought together by key.

Keys come encoded (`keys.py`), so that any key is one byte string and its order is that of RocksDB.
The groups are sorted, because RocksDB reads sorted keys faster; the rows of a group keep their
order.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from merge_engine import ragged

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Groups:
    """Rows by key: group i is the rows order[starts[i] : starts[i + 1]], oldest first."""

    order: Positions
    starts: Positions

    @property
    def first_rows(self) -> Positions:
        """One row of each group, to take its key from."""
        return self.order[self.starts]

    @property
    def of_row(self) -> Positions:
        """The group of each position in `order`."""
        lengths = np.diff(self.starts, append=len(self.order))
        return np.repeat(np.arange(len(self.starts)), lengths)


def group_by_key(keys: pa.BinaryArray) -> Groups:
    """Return the groups of equal keys, in key order."""
    rank, distinct = _ranks(keys)
    size = len(keys)
    if distinct == size:
        order = np.empty(size, np.int64)
        order[rank] = np.arange(size)
        return Groups(order, np.arange(size))
    # Rank and row number in one integer: NumPy sorts those many times faster than it argsorts.
    packed = rank * size + np.arange(size)
    packed.sort()
    order = packed % max(size, 1)
    ordered_rank = packed // max(size, 1)
    starts = np.flatnonzero(np.diff(ordered_rank, prepend=-1))
    return Groups(order, starts)


def _ranks(keys: pa.BinaryArray) -> tuple[Positions, int]:
    """Return each key's rank among the distinct keys, and how many there are."""
    encoded = (_as_integers(keys) or keys).dictionary_encode()
    dictionary = encoded.dictionary
    by_key = pc.sort_indices(dictionary).to_numpy()
    rank = np.empty(len(dictionary), np.int64)
    rank[by_key] = np.arange(len(dictionary))
    return rank[encoded.indices.to_numpy()], len(dictionary)


def _as_integers(keys: pa.BinaryArray) -> pa.Array | None:
    """Return keys of 8 bytes as integers of the same order, which hash and sort faster."""
    if len(keys) == 0 or (ragged.lengths(keys) != 8).any():
        return None
    return pa.array(ragged.to_matrix(keys, 8).view(">u8")[:, 0].astype(np.uint64))
