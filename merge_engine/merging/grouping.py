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

from merge_engine.encoding import ragged
from merge_engine.encoding.key_hashes import Hashes

# Rows in no order are mostly found out by so many of them.
_FEW = 8

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Groups:
    """Rows by key: group i is the rows order[starts[i] : starts[i + 1]], oldest first."""

    order: Positions
    starts: Positions
    in_order: bool = False
    """Whether `order` is 0, 1, 2 ...: rows come sorted, and each has a key of its own."""

    @property
    def first_rows(self) -> Positions:
        """One row of each group, to take its key from."""
        return self.order[self.starts]

    @property
    def last_rows(self) -> Positions:
        """The newest row of each group."""
        rows: Positions = self.order[np.append(self.starts, len(self.order))[1:] - 1]
        return rows

    def between(self, start: int, stop: int) -> "Groups":
        """Return those groups only, with their rows."""
        ends = np.append(self.starts, len(self.order))
        starts = self.starts[start:stop] - ends[start]
        return Groups(self.order[ends[start] : ends[stop]], starts)

    @property
    def of_row(self) -> Positions:
        """The group of each position in `order`."""
        lengths = np.diff(self.starts, append=len(self.order))
        return np.repeat(np.arange(len(self.starts)), lengths)


def group_by_key(keys: pa.BinaryArray) -> Groups:
    """Return the groups of equal keys, in key order."""
    integers = _as_integers(keys)
    if integers is not None:
        return group_numbers(integers)
    return _in_order(len(keys)) if _is_rising(keys) else _grouped(_ranks(keys))


def group_numbers(keys: npt.NDArray[np.uint64]) -> Groups:
    """Return the groups of equal keys of 8 bytes, given as numbers of the same order."""
    if _is_rising(keys):
        return _in_order(len(keys))
    return _grouped(_integer_ranks(keys, len(keys)))


def _in_order(count: int) -> Groups:
    return Groups(np.arange(count), np.arange(count), in_order=True)


def group_rows(keys: pa.BinaryArray, hashes: Hashes | None) -> Groups:
    """Return the groups of equal keys, in key order or, where `hashes` are given, by these."""
    if hashes is None or _is_rising(keys):
        return group_by_key(keys)
    size = len(keys)
    groups = _grouped((hashes >> np.uint64(size.bit_length() + 1)).view(np.int64))
    # Of two keys with one hash, the groups would be mixed: that is found out, and hardly ever is.
    repeated = np.ones(size, bool)
    repeated[groups.starts] = False
    again = np.flatnonzero(repeated)
    one, other = groups.order[again], groups.order[again - 1]
    equal = pc.equal(keys.take(pa.array(one)), keys.take(pa.array(other)))
    return groups if pc.all(equal, min_count=0).as_py() else group_by_key(keys)


def key_order(keys: pa.BinaryArray) -> Positions:
    """Return the rows in key order; their keys are all different."""
    integers = _as_integers(keys)
    if integers is None:
        by_key: Positions = pc.sort_indices(keys).to_numpy().astype(np.int64)
        return by_key
    return np.argsort(integers)


def _is_rising(keys: pa.BinaryArray | npt.NDArray[np.uint64]) -> bool:
    """Tell whether each key is above the one before it; so it is where rows come folded."""
    if len(keys) < 2:
        return True
    if isinstance(keys, np.ndarray):
        return bool(keys[0] < keys[1]) and bool((keys[:-1] < keys[1:]).all())
    few = keys[:_FEW]
    if not pc.all(pc.less(few[:-1], few[1:])).as_py():
        return False
    return bool(pc.all(pc.less(keys[:-1], keys[1:])).as_py())


def _grouped(ranks: Positions) -> Groups:
    """Sort rows by rank, which needs 63 bits together with the row number.

    In one integer, that is: NumPy sorts integers many times faster than it argsorts them.
    """
    size = len(ranks)
    row_bits = size.bit_length()
    if row_bits < 31 and int(ranks.max()) >> (31 - row_bits) == 0:
        ranks = ranks.astype(np.int32)  # Half as wide: twice as fast.
    packed = (ranks << row_bits) | np.arange(size, dtype=ranks.dtype)
    packed.sort()
    ordered = packed >> row_bits
    order = (packed & ((1 << row_bits) - 1)).astype(np.int64)
    is_first = np.empty(size, bool)
    is_first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return Groups(order, np.flatnonzero(is_first))


def _ranks(keys: pa.BinaryArray) -> Positions:
    """Return each key's rank among the distinct keys."""
    encoded = keys.dictionary_encode()
    by_key = pc.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(by_key), np.int64)
    rank[by_key] = np.arange(len(by_key))
    ranks: Positions = rank[encoded.indices.to_numpy()]
    return ranks


def _integer_ranks(keys: npt.NDArray[np.uint64], size: int) -> Positions:
    """Return numbers that are ordered like the keys and small enough to be packed."""
    lowest, highest = keys.min(), keys.max()
    if int(highest - lowest) >> (63 - size.bit_length()) == 0:
        small: Positions = (keys - lowest).view(np.int64)
        return small
    by_key = np.argsort(keys)
    rank = np.empty(size, np.int64)
    rank[by_key] = np.cumsum(np.diff(keys[by_key], prepend=keys[by_key[0]]) != 0)
    return rank


def _as_integers(keys: pa.BinaryArray) -> npt.NDArray[np.uint64] | None:
    """Return keys of 8 bytes as integers of the same order, which sort faster."""
    if len(keys) == 0 or (ragged.lengths(keys) != 8).any():
        return None
    return ragged.data(keys).view(">u8").astype(np.uint64)
