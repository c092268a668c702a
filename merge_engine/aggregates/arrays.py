"""Between Arrow and NumPy: validity, numbers, runs, and the choice between two arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from merge_engine.aggregates.base import Starts

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


def may_have_nulls(array: pa.Array) -> bool:
    """Tell whether a value may be null; Arrow counts none in unions and in runs."""
    kind = array.type
    hidden = pa.types.is_union(kind) or pa.types.is_run_end_encoded(kind)
    return bool(hidden or array.null_count)


def valid_mask(array: pa.Array) -> Mask:
    """Return True where the array has a value."""
    if not may_have_nulls(array):
        return np.ones(len(array), dtype=bool)
    mask: Mask = array.is_valid().to_numpy(zero_copy_only=False)
    return mask


def to_numbers(array: pa.Array, fill: Any) -> npt.NDArray[Any]:
    """Return the values of a numeric or boolean array, `fill` where it has none."""
    if array.null_count:
        array = pc.fill_null(array, pa.scalar(fill, array.type))
    numbers: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return numbers


def from_numbers(numbers: npt.NDArray[Any], data_type: pa.DataType, valid: Mask) -> pa.Array:
    """Return an Arrow array of a numeric type that is null where `valid` is False."""
    return pa.array(numbers, type=data_type, mask=None if valid.all() else ~valid)


def validity_buffer(valid: Mask) -> pa.Buffer | None:
    """Return Arrow's validity bitmap, or None if all are valid."""
    return None if valid.all() else pa.array(valid).buffers()[1]


def run_lengths(starts: Starts, count: int) -> Indices:
    """Return how many of `count` items each run has."""
    return np.diff(starts, append=count)


def rows_of_runs(starts: Starts, count: int) -> Indices:
    """Return, for each of `count` items, the number of its run."""
    return np.repeat(np.arange(len(starts)), run_lengths(starts, count))


def any_in_runs(mask: Mask, starts: Starts) -> Mask:
    """Return, per run, whether any of it is True."""
    if mask.all():
        return np.ones(len(starts), bool)
    return np.logical_or.reduceat(mask, starts) if len(starts) else mask[:0]


def count_in_runs(mask: Mask, starts: Starts) -> Indices:
    """Return, per run, how many are True."""
    return np.add.reduceat(mask, starts, dtype=np.int64)


def first_true(mask: Mask) -> int | None:
    """Return the first position that is True, or None."""
    position = int(np.argmax(mask)) if len(mask) else 0
    return position if len(mask) and mask[position] else None


def choose(newer_wins: Mask, older: pa.Array, newer: pa.Array) -> pa.Array:
    """Return `newer` where it wins and `older` elsewhere, for arrays of any one type."""
    if newer_wins.all():
        return newer
    if pa.types.is_nested(older.type):
        # if_else copies nested values one by one; take is vectorised for every type.
        index = np.arange(len(older)) + np.where(newer_wins, len(older), 0)
        return pa.concat_arrays([older, newer]).take(pa.array(index))
    return pc.if_else(pa.array(newer_wins), newer, older)
