"""Numbers that are equal exactly where values are, for arrays of any type.

Values are compared by their bits, so 0.0 and -0.0 differ; all NaNs are one value, and all nulls. A
nested value is compared as the bytes that a row would store, where its NaNs are one, too.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from merge_engine.aggregates.arrays import to_numbers, valid_mask
from merge_engine.aggregates.lists import Lists
from merge_engine.encoding.codec import encode
from merge_engine.encoding.ragged import validity, with_validity

Codes = npt.NDArray[np.int32]

_NULL = -1


def identity_codes(array: pa.Array) -> Codes:
    """Return small numbers that are equal iff the values are; -1 for null.

    They are dense from 0 on, in the order of first appearance, and mean nothing beyond this array.
    """
    if pa.types.is_nested(array.type):
        array = with_validity(encode(_with_one_nan(array)), validity(array))
    elif pa.types.is_floating(array.type):
        array = _float_bits(array)
    return to_numbers(array.dictionary_encode().indices, _NULL).astype(np.int32, copy=False)


def _with_one_nan(array: pa.Array) -> pa.Array:
    """Return the values with all NaNs inside them alike, bit for bit."""
    kind = array.type
    if pa.types.is_floating(kind):
        numbers = to_numbers(array, 0.0)
        if not np.isnan(numbers).any():
            return array
        return pa.array(np.where(np.isnan(numbers), np.nan, numbers), kind, mask=~valid_mask(array))
    if pa.types.is_struct(kind):
        fields = [_with_one_nan(field) for field in array.flatten()]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    if pa.types.is_nested(kind):
        rows = Lists.of(array)
        mapped = None if rows.mapped is None else _with_one_nan(rows.mapped)
        return replace(rows, items=_with_one_nan(rows.items), mapped=mapped).to_array(kind)
    return array


def _float_bits(array: pa.Array) -> pa.Array:
    numbers = to_numbers(array, 0.0).copy()
    numbers[np.isnan(numbers)] = np.nan
    return pa.array(numbers.view(f"i{numbers.itemsize}"), mask=~valid_mask(array))
