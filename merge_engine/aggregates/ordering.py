"""Which of two values, or which of a run, comes first in a column's order.

Numbers, booleans, dates and timestamps are compared as 64-bit integers that sort the same way;
everything else by its rank among the values at hand. NaN is the greatest, as in Spark, and -0.0
equals 0.0. A null never beats a value.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from merge_engine.aggregates.arrays import Indices, Mask, run_lengths, to_numbers, valid_mask
from merge_engine.aggregates.base import Starts

SortKeys = npt.NDArray[np.int64]

ORDERED_TYPES = "BOOLEAN, numbers, DECIMAL, STRING, BINARY, DATE and TIMESTAMP"

_LOWEST, _HIGHEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max


def is_ordered(data_type: pa.DataType) -> bool:
    """Whether values of this type can be compared."""
    return _sorts_as_integer(data_type) or (
        pa.types.is_decimal(data_type)
        or pa.types.is_string(data_type)
        or pa.types.is_binary(data_type)
    )


@dataclass(frozen=True)
class Preference:
    """Which of several wins: the largest or the smallest; among equals, the oldest or the newest.

    It is a choice by a total order of (has a value, value, arrival), so choosing among winners of
    parts is the same as choosing among all: `combine` by preference is associative.
    """

    largest: bool
    newest: bool

    def newer_wins(self, older: pa.Array, newer: pa.Array) -> Mask:
        """Return, element by element, whether `newer` is preferred to `older`."""
        low, high = (older, newer) if self.largest else (newer, older)
        better = _is_less(low, high)
        if self.newest:
            better = ~_is_less(high, low)
        if older.null_count == 0 and newer.null_count == 0:
            return better
        older_valid, newer_valid = valid_mask(older), valid_mask(newer)
        wins: Mask = np.where(older_valid, newer_valid & better, newer_valid | self.newest)
        return wins

    def pick(self, order: pa.Array, starts: Starts, eligible: Mask | None = None) -> Indices:
        """Return the position of each run's winner by `order`.

        Positions that are not eligible win only in a run that has no other.
        """
        positions = np.arange(len(order))
        if len(order) == 0:
            return positions
        lengths = run_lengths(starts, len(order))
        keys = sort_keys(order)
        candidates = np.ones(len(order), dtype=bool)
        if eligible is not None or order.null_count:
            eligible = candidates if eligible is None else eligible
            has_key = valid_mask(order) & eligible
            level = eligible.astype(np.int8) + has_key
            candidates = level == np.repeat(np.maximum.reduceat(level, starts), lengths)
        best = _extreme(keys, candidates, starts, self.largest)
        candidates = candidates & (keys == np.repeat(best, lengths))
        return _extreme(positions, candidates, starts, self.newest)


def pick_end(count: int, starts: Starts, *, newest: bool, eligible: Mask | None = None) -> Indices:
    """Return the position of each run's oldest or newest eligible item, or of any if none is."""
    ends = starts + run_lengths(starts, count) - 1 if newest else starts
    if eligible is None or count == 0:
        return ends
    found = _extreme(np.arange(count), eligible, starts, newest)
    return np.where((found >= 0) & (found < count), found, ends)


def sort_keys(array: pa.Array) -> SortKeys:
    """Return integers that sort as the values do, in this array; all nulls are one number."""
    if _sorts_as_integer(array.type):
        return _integer_keys(array)
    encoded = array.dictionary_encode()
    rank = np.empty(len(encoded.dictionary), dtype=np.int64)
    rank[pc.array_sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(rank))
    if len(rank) == 0:
        return np.zeros(len(array), dtype=np.int64)
    keys: SortKeys = rank[to_numbers(encoded.indices, 0)]
    return keys


def _sorts_as_integer(data_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_boolean(data_type)
        or pa.types.is_integer(data_type)
        or pa.types.is_floating(data_type)
        or pa.types.is_date32(data_type)
        or pa.types.is_timestamp(data_type)
    )


def _integer_keys(array: pa.Array) -> SortKeys:
    if pa.types.is_floating(array.type):
        return _float_keys(to_numbers(array, 0.0))
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    elif pa.types.is_date32(array.type):
        array = array.view(pa.int32())
    elif pa.types.is_timestamp(array.type):
        array = array.view(pa.int64())
    return to_numbers(array, 0).astype(np.int64, copy=False)


def _float_keys(numbers: npt.NDArray[Any]) -> SortKeys:
    # Adding zero turns -0.0 into 0.0. IEEE bits sort like integers if those of negative numbers are
    # flipped below the sign; a NaN with a clear sign bit is then above infinity.
    with np.errstate(invalid="ignore"):
        wide = numbers.astype(np.float64) + 0.0
    wide[np.isnan(wide)] = np.nan
    bits = wide.view(np.int64)
    return bits ^ ((bits >> 63) & _HIGHEST)


def _is_less(left: pa.Array, right: pa.Array) -> Mask:
    """Return where left < right; anything where either is null."""
    if _sorts_as_integer(left.type):
        less: Mask = _integer_keys(left) < _integer_keys(right)
        return less
    return to_numbers(pc.less(left, right), False)


def _extreme(keys: SortKeys, candidates: Mask, starts: Starts, largest: bool) -> SortKeys:
    """Return, per run, the largest or smallest key of a candidate; beyond all if it has none."""
    if largest:
        return np.maximum.reduceat(np.where(candidates, keys, _LOWEST), starts)
    return np.minimum.reduceat(np.where(candidates, keys, _HIGHEST), starts)
