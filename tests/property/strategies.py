"""Hypothesis strategies for every type that a column can have, and for arrays of them."""

import decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st
from pyarrow import types as arrow_types

Strategy = st.SearchStrategy[Any]

_INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
_TIMES = [pa.date32(), pa.timestamp("us"), pa.timestamp("us", tz="UTC")]


def decimals() -> Strategy:
    """Decimal types of every size, on both sides of the 18 digits that fit a long."""
    return st.builds(
        lambda precision, scale: pa.decimal128(precision, min(precision, scale)),
        st.sampled_from([1, 9, 18, 19, 38]),
        st.sampled_from([0, 2, 38]),
    )


def key_types() -> Strategy:
    """Types that a key column can have."""
    flat = [pa.bool_(), *_INTEGERS, *_TIMES, pa.string(), pa.binary()]
    return st.sampled_from(flat) | decimals()


def flat_types() -> Strategy:
    """Types without children."""
    return key_types() | st.sampled_from([pa.float32(), pa.float64()])


def data_types() -> Strategy:
    """Types that a value column, or its state, can have, nested too."""

    def nested(inner: Strategy) -> Strategy:
        fields = st.lists(inner, min_size=1, max_size=4)
        return st.one_of(
            inner.map(pa.list_),
            st.builds(pa.map_, key_types(), inner),
            fields.map(lambda kinds: pa.struct([(f"f{i}", kind) for i, kind in enumerate(kinds)])),
        )

    return st.recursive(flat_types(), nested, max_leaves=5)


def values_of(data_type: pa.DataType) -> Strategy:
    """Values of the type, never null outside, as `pa.array` takes them."""
    if arrow_types.is_nested(data_type):
        return _nested_values_of(data_type)
    if arrow_types.is_decimal(data_type):
        largest = 10**data_type.precision - 1
        return st.integers(-largest, largest).map(lambda number: _scaled(number, data_type.scale))
    if arrow_types.is_floating(data_type):
        special = [0.0, -0.0, float("nan"), float("inf"), float("-inf")]
        return st.sampled_from(special) | st.floats(width=data_type.bit_width)
    if data_type in (pa.string(), pa.binary()):
        text = st.text("\0\x01aé\uffff\U0001f600", max_size=5) | st.text(max_size=9)
        is_text = data_type == pa.string()
        return text if is_text else text.map(str.encode) | st.binary(max_size=40)
    bits = data_type.bit_width
    return st.booleans() if bits == 1 else st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _nested_values_of(data_type: pa.DataType) -> Strategy:
    if arrow_types.is_map(data_type):
        entries = st.tuples(values_of(data_type.key_type), _or_none(data_type.item_type))
        return st.lists(entries, max_size=3)
    if arrow_types.is_list(data_type):
        return st.lists(_or_none(data_type.value_type), max_size=3)
    return st.fixed_dictionaries({field.name: _or_none(field.type) for field in data_type})


@st.composite
def arrays_of(
    draw: st.DrawFn, data_type: pa.DataType, size: int, *, nullable: bool = True
) -> pa.Array:
    """An array of so many values, which is a slice of a longer one as often as not."""
    before, after = draw(st.sampled_from([(0, 0), (1, 0), (0, 1), (9, 2)]))
    count = before + size + after
    element = _or_none(data_type) if nullable else values_of(data_type)
    values = draw(st.lists(element, min_size=count, max_size=count))
    return pa.array(values, data_type).slice(before, size)


def plain(array: pa.Array) -> list[Any]:
    """The values as Python objects that are equal iff the states are identical.

    Floats become their bits, times the number behind them, structs and lists become tuples. This is
    the model that the codecs are compared with, and goes its own way on purpose.
    """
    kind = array.type
    if arrow_types.is_floating(kind) or arrow_types.is_temporal(kind):
        return list(array.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist())
    present = array.is_valid().to_pylist()
    if arrow_types.is_struct(kind):
        rows = list(zip(*(plain(field) for field in array.flatten()), strict=True))
    elif arrow_types.is_nested(kind):
        scalars = [array[i].values if there else None for i, there in enumerate(present)]
        rows = [() if one is None else tuple(plain(one)) for one in scalars]
    else:
        return list(array.to_pylist())
    return [row if there else None for row, there in zip(rows, present, strict=True)]


def flags(draw: st.DrawFn, rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """A matrix of random booleans."""
    count = rows * columns
    drawn = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return np.array(drawn, np.bool_).reshape(rows, columns)


def _or_none(data_type: pa.DataType) -> Strategy:
    return st.none() | values_of(data_type)


def _scaled(number: int, scale: int) -> decimal.Decimal:
    digits = tuple(int(digit) for digit in str(abs(number)))
    return decimal.Decimal((int(number < 0), digits, -scale))
