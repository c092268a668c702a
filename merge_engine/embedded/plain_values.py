"""Rows as Python has them, without types of Arrow: made into columns of the table's types.

What Arrow makes of a Python value is a guess: of 7 a BIGINT, of Decimal("1.5") a DECIMAL(2, 1), of
a dictionary a STRUCT. Nobody chose that, so where the column is declared otherwise, the value is
taken as the column has it, if it fits as it is: whole numbers that are narrower, or DOUBLE or
DECIMAL; decimals of other digits; dictionaries, and lists of pairs, as maps; and so inside lists,
maps and structs. Nothing is rounded, and a number never becomes a date. What does not fit keeps the
guess, and is refused as any such column is.

The guess is made of the first value, and Arrow bends others to it: a date with a time loses it
after one without. So the values of a column are of one kind, or refused (`value_kinds`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from merge_engine.embedded.value_kinds import check_one_kind, without_missing
from merge_engine.schema.schema import Schema
from merge_engine.schema.types import narrower

Types: TypeAlias = Mapping[str, pa.DataType | None]


def types_of(schema: Schema, *, states: bool) -> Types:
    """Return the type that a batch of values, or of states, has for each column; None: any."""
    if states:
        return {
            column.name: column.type if column.function is None else column.function.state_type
            for column in schema.columns
        }
    types = dict(schema.input_types)
    for column in schema.value_columns:
        function = column.function
        if function is not None and function.order_by is not None:
            declared = types.get(function.order_by)
            order_type = function.order_type
            assert order_type is not None
            types[function.order_by] = (
                order_type if declared is None else narrower(declared, order_type)
            )
    return types


def read_columns(columns: Mapping[str, Any], types: Types) -> pa.Table:
    """Return a table of a list per column or, of one row, a value per column."""
    single = [name for name, value in columns.items() if _is_single(value)]
    if single and len(single) < len(columns):
        raise TypeError(f"column {single[0]!r} has one value, and others have lists of them")
    return pa.table(
        {
            name: _column_of(name, [values] if single else values, types)
            for name, values in columns.items()
        }
    )


def read_rows(rows: Sequence[Mapping[str, Any]], types: Types) -> pa.Table:
    """Return a table of a dictionary per row; what a row does not have is null in it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table(
        {name: _column_of(name, [row.get(name) for row in rows], types) for name in names}
    )


def _column_of(name: str, values: Any, types: Types) -> Any:
    """Return a column of Arrow; what cannot be one is named."""
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values
    try:
        if _has_type(values):
            check_one_kind(values)
            return pa.array(values)
        return _array_of(values if isinstance(values, list) else list(values), types.get(name))
    except OverflowError as exc:
        raise TypeError(f"column {name!r} has a number that no type of Arrow holds") from exc
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as exc:
        raise TypeError(f"column {name!r}: {exc}") from exc


def _has_type(values: Any) -> bool:
    """Whether this has a type that somebody chose, as arrays of NumPy and series of pandas have."""
    names = ("dtype", "__array__", "__arrow_array__", "__arrow_c_array__", "__arrow_c_stream__")
    return any(hasattr(values, name) for name in names)


def _array_of(values: list[Any], declared: pa.DataType | None) -> pa.Array:
    values = without_missing(values)
    if declared is not None:
        kinds = {type(value) for value in values if value is not None}
        if pa.types.is_map(declared):
            return _maps_of(values, declared)
        if pa.types.is_list(declared) and kinds <= {list, tuple}:
            return _lists_of(values, declared)
        if pa.types.is_struct(declared) and all(issubclass(kind, Mapping) for kind in kinds):
            structs = _structs_of(values, declared)
            if structs is not None:
                return structs
    return _flat_array_of(values, declared)


def _flat_array_of(values: list[Any], declared: pa.DataType | None) -> pa.Array:
    check_one_kind(values)
    try:
        guessed = pa.array(values)
    except OverflowError:  # Whole numbers beyond 63 bits, of which Arrow guesses no type.
        takes = declared if declared is not None else pa.uint64()
        if not (pa.types.is_decimal(takes) or pa.types.is_uint64(takes)):
            raise
        return pa.array(values, takes)
    if declared is None or guessed.type == declared or not _may_be(guessed.type, declared):
        return guessed
    try:
        return pa.array(values, type=declared)
    except (pa.ArrowException, OverflowError):  # Too large, or too many digits.
        return guessed


def _may_be(guessed: pa.DataType, declared: pa.DataType) -> bool:
    """Whether values of the one type are of the other, too, wherever that holds them."""
    if pa.types.is_null(guessed):
        return True
    if pa.types.is_integer(guessed):
        kinds = (pa.types.is_integer, pa.types.is_float64, pa.types.is_decimal)
        return any(is_kind(declared) for is_kind in kinds)
    return bool(pa.types.is_decimal(guessed) and pa.types.is_decimal(declared))


def _lists_of(values: Sequence[Any], declared: pa.ListType) -> pa.Array:
    """Return lists; their elements are a column of their own."""
    elements = _array_of([element for one in values for element in one or ()], declared.value_type)
    return pa.ListArray.from_arrays(_offsets(values), elements, mask=_nulls(values))


def _structs_of(values: Sequence[Any], declared: pa.StructType) -> pa.Array | None:
    """Return structs, each field of which is a column of its own; None if they have others."""
    names = [field.name for field in declared]
    if {name for one in values for name in one or ()} != set(names):
        return None
    fields = [
        _array_of([None if one is None else one.get(field.name) for one in values], field.type)
        for field in declared
    ]
    return pa.StructArray.from_arrays(fields, names, mask=_nulls(values))


def _maps_of(values: Sequence[Any], declared: pa.MapType) -> pa.Array:
    """Return maps, of dictionaries or lists of pairs; keys and items are columns of their own."""
    pairs = [None if one is None else list(_pairs(one)) for one in values]
    flat = [pair for one in pairs for pair in one or ()]
    keys = _array_of([key for key, _ in flat], declared.key_type)
    items = _array_of([item for _, item in flat], declared.item_type)
    return pa.MapArray.from_arrays(_offsets(pairs), keys, items, mask=_nulls(pairs))


def _offsets(lists: Iterable[Any]) -> pa.Array:
    offsets = [0]
    for one in lists:
        offsets.append(offsets[-1] + len(one or ()))
    return pa.array(offsets, pa.int32())


def _nulls(values: Iterable[Any]) -> pa.Array:
    return pa.array([one is None for one in values], pa.bool_())


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
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping | pa.Scalar):
        return True
    return not (hasattr(value, "__iter__") or hasattr(value, "__arrow_c_array__"))
