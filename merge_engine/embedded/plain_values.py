"""Rows as Python has them, without types of Arrow: made into columns of the table's types.

What Arrow makes of a Python value is a guess: of 7 a BIGINT, of Decimal("1.5") a DECIMAL(2, 1), of
a dictionary a STRUCT. Nobody chose that, so where the column is declared otherwise, the value is
taken as the column has it, if it fits as it is: whole numbers that are narrower, or DOUBLE or
DECIMAL; decimals of other digits; dictionaries, and lists of pairs, as maps. Nothing is rounded,
and a number never becomes a date. What does not fit keeps the guess, and is refused as any such
column is.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from merge_engine.schema.schema import Schema


def read_columns(columns: Mapping[str, Any], schema: Schema) -> pa.Table:
    """Return a table of a list per column or, of one row, a value per column."""
    single = [name for name, value in columns.items() if _is_single(value)]
    if single and len(single) < len(columns):
        raise TypeError(f"column {single[0]!r} has one value, and others have lists of them")
    return pa.table(
        {
            name: _column_of(name, [values] if single else values, schema)
            for name, values in columns.items()
        }
    )


def read_rows(rows: Sequence[Mapping[str, Any]], schema: Schema) -> pa.Table:
    """Return a table of a dictionary per row; what a row does not have is null in it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table(
        {name: _column_of(name, [row.get(name) for row in rows], schema) for name in names}
    )


def _column_of(name: str, values: Any, schema: Schema) -> Any:
    """Return a column of Arrow; what cannot be one is named."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    try:
        return _array_of(values, schema.input_types.get(name))
    except OverflowError as exc:
        raise TypeError(f"column {name!r} has a number that no type of Arrow holds") from exc
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as exc:
        raise TypeError(f"column {name!r}: {exc}") from exc


def _array_of(values: Any, declared: pa.DataType | None) -> pa.Array:
    # Arrays of NumPy and series of pandas have types that somebody chose.
    plain = declared is not None and isinstance(values, list | tuple)
    if plain and pa.types.is_map(declared):
        return _maps_of(values, declared)
    guessed = pa.array(values)
    if not plain or guessed.type == declared or not _may_be(guessed.type, declared):
        return guessed
    try:
        return pa.array(values, type=declared)
    except (pa.ArrowException, OverflowError):  # Too large, or too many digits.
        return guessed


def _may_be(guessed: pa.DataType, declared: pa.DataType) -> bool:
    """Whether values of the one type are of the other, too, wherever that holds them."""
    if guessed == declared or pa.types.is_null(guessed):
        return True
    if pa.types.is_integer(guessed):
        kinds = (pa.types.is_integer, pa.types.is_float64, pa.types.is_decimal)
        return any(is_kind(declared) for is_kind in kinds)
    if pa.types.is_decimal(guessed):
        return bool(pa.types.is_decimal(declared))
    if pa.types.is_list(guessed) and pa.types.is_list(declared):
        return _may_be(guessed.value_type, declared.value_type)
    if pa.types.is_struct(guessed) and pa.types.is_struct(declared):
        there = {field.name: field.type for field in guessed}
        return there.keys() == {field.name for field in declared} and all(
            _may_be(there[field.name], field.type) for field in declared
        )
    return False


def _maps_of(values: Sequence[Any], declared: pa.MapType) -> pa.Array:
    """Return maps, of dictionaries or lists of pairs; keys and items are columns of their own."""
    pairs = [None if one is None else list(_pairs(one)) for one in values]
    flat = [pair for one in pairs for pair in one or ()]
    keys = _array_of([key for key, _ in flat], declared.key_type)
    items = _array_of([item for _, item in flat], declared.item_type)
    offsets = [0]
    for one in pairs:
        offsets.append(offsets[-1] + len(one or ()))
    return pa.MapArray.from_arrays(
        pa.array(offsets, pa.int32()),
        keys,
        items,
        mask=pa.array([one is None for one in pairs], pa.bool_()),
    )


def _pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, Mapping) else value
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise TypeError(f"a map is a dictionary or a list of pairs, not {value!r}")
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"a map is a dictionary or a list of pairs, not {value!r}")
        yield pair[0], pair[1]


def _is_single(value: Any) -> bool:
    """Whether this is one value, and not a column of them."""
    if isinstance(value, str | bytes | bytearray | Mapping | pa.Scalar):
        return True
    return not (hasattr(value, "__iter__") or hasattr(value, "__arrow_c_array__"))
