"""Whether values are what their types say: a text is UTF-8, a decimal has no more than its digits.

Arrow and Spark take an array's word for that: `cast(binary as string)` makes a text of any bytes,
and nobody asks until a reader decodes it. A row that was stored with one could never be read again.
So a batch is looked through once, where it comes in. As long as all is well, that is one call of
Arrow's; where it is not, the rows are looked for here.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import InvalidInput
from merge_engine.encoding.ragged import Flags

Values: TypeAlias = pa.Array | pa.ChunkedArray

# Every character of Unicode but the surrogates, which are halves of characters.
_UTF_8 = r"\A[\x{0}-\x{D7FF}\x{E000}-\x{10FFFF}]*\z"
_BYTES_OF = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
_SHOWN_CHARACTERS = 60


def is_text(value: object) -> TypeGuard[str]:
    """Tell whether this is a text that can be written down: Python's may have half characters."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # A lone surrogate.
        return False
    return True


def is_sound(data: Values | pa.RecordBatch | pa.Table) -> bool:
    """Tell whether all values are what their types say, also those that a null or a slice hides."""
    try:
        data.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def unsound_rows(values: Values, *, column: str) -> Flags:
    """Return which values are not what their type says, or have a part that is not.

    What a null hides, or a slice leaves out, is no part of a value. InvalidInput, naming the
    column, if the array is damaged beyond its values: offsets that lead nowhere.
    """
    if is_sound(values):
        return np.zeros(len(values), bool)
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    for chunk in chunks:
        _check_layout(chunk, f"column '{column}'")
    return np.concatenate([_unsound(chunk) for chunk in chunks])


def complaint(values: Values, row: int) -> str:
    """Return what is wrong with an unsound value; it completes "column 'x', key 7: ..."."""
    try:
        as_bytes(_one(values, row)).validate(full=True)
    except pa.ArrowInvalid as error:
        return str(error)
    shown = repr(show(values, row))
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]}..."
    return f"text that is not UTF-8: {shown}"


def show(values: Values, row: int) -> object:
    """Return a value for a message, whatever it is: what is no text as bytes.

    Dates and time stamps beyond those of Python come as Arrow writes them.
    """
    try:
        value = _one(values, row)
        return (value if is_sound(value) else as_bytes(value))[0].as_py()
    except (OverflowError, ValueError):
        return " ".join(value.to_string().split())
    except InvalidInput as error:
        return f"<{error}>"


def readable_rows(data: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as dicts, as `to_pylist` does, also those with dates that Python does not have.

    Dates and time stamps beyond Python's years come as Arrow writes them: `12024-01-01`.
    """
    try:
        rows: list[dict[str, Any]] = data.to_pylist()
    except (OverflowError, ValueError):
        columns = [readable_values(column) for column in data.columns]
        names = data.schema.names
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    return rows


def readable_values(values: Values) -> list[Any]:
    """Return the values of a column, as `to_pylist` does, with texts for dates beyond Python's."""
    try:
        found: list[Any] = values.to_pylist()
    except (OverflowError, ValueError):
        return [_readable(value) for value in values]
    return found


def _readable(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        if isinstance(value, pa.MapScalar):
            pairs = ((pair["key"], pair["value"]) for pair in map(dict, value.values))
            return [(_readable(key), _readable(item)) for key, item in pairs]
        if isinstance(value, pa.StructScalar):
            return {name: _readable(value[name]) for name in value}
        if pa.types.is_nested(value.type):
            return readable_values(value.values)
        return value.cast(pa.string()).as_py()


def as_bytes(values: Values) -> Values:
    """Return the same values with bytes for texts, also in lists, maps and structs."""
    data_type = _with_leaves(values.type, lambda leaf: _BYTES_OF.get(leaf, leaf))
    if isinstance(values, pa.ChunkedArray):
        return pa.chunked_array([chunk.view(data_type) for chunk in values.chunks], data_type)
    return values.view(data_type)


def readable(data: pa.Table) -> pa.Table:
    """Return the table with bytes for texts in those columns that have any that are not UTF-8."""
    for position, name in enumerate(data.column_names):
        column = data.column(position)
        if not is_sound(column):
            data = data.set_column(position, name, as_bytes(column))
    return data


def _one(values: Values, row: int) -> pa.Array:
    """Return one value as an array that has none of the others in its buffers."""
    taken = values.slice(row, 1)
    if isinstance(taken, pa.ChunkedArray):
        taken = taken.combine_chunks()
    if not is_sound(taken):
        _check_layout(taken, "this")
    # Not by `take`, which does not know every type.
    return pa.concat_arrays([taken, taken.slice(1)])


def _check_layout(array: pa.Array, what: str) -> None:
    """Raise if the array cannot even be read as bytes: nothing below does more than that."""
    try:
        array.validate()
        array.view(_with_leaves(array.type, _layout)).validate(full=True)
    except pa.ArrowInvalid as error:
        raise InvalidInput(f"{what} is damaged: {error}") from error


def _layout(leaf: pa.DataType) -> pa.DataType:
    """Return a type of the same layout that any bytes are values of."""
    if pa.types.is_decimal(leaf) or pa.types.is_date64(leaf) or pa.types.is_time(leaf):
        return pa.binary(leaf.bit_width // 8)
    return _BYTES_OF.get(leaf, leaf)


def _with_leaves(
    data_type: pa.DataType, change: Callable[[pa.DataType], pa.DataType]
) -> pa.DataType:
    """Return the type with another one for each that has no parts."""

    def inside(field: pa.Field) -> pa.Field:
        return field.with_type(_with_leaves(field.type, change))

    if pa.types.is_dictionary(data_type):
        changed = _with_leaves(data_type.value_type, change)
        return pa.dictionary(data_type.index_type, changed, data_type.ordered)
    if pa.types.is_struct(data_type):
        return pa.struct([inside(field) for field in data_type])
    if pa.types.is_map(data_type):
        key, item = inside(data_type.key_field), inside(data_type.item_field)
        return pa.map_(key, item, data_type.keys_sorted)
    if pa.types.is_fixed_size_list(data_type):
        return pa.list_(inside(data_type.value_field), data_type.list_size)
    for matches, build in _LISTS:
        if matches(data_type):
            return build(inside(data_type.value_field))
    return change(data_type)


_LISTS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Field], pa.DataType]], ...] = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


def _unsound(array: pa.Array) -> Flags:
    """The same for one array whose layout is good."""
    if is_sound(array):
        return np.zeros(len(array), bool)
    if pa.types.is_dictionary(array.type):
        return _in_dictionary(array)
    if pa.types.is_struct(array.type):
        # Flattened, the fields are null where the struct is: what that hides is no text of theirs.
        fields = np.stack([_unsound(field) for field in array.flatten()])
        return np.asarray(fields.any(axis=0))
    if pa.types.is_nested(array.type):
        return _in_lists(array)
    if array.type in _BYTES_OF:
        good = pc.match_substring_regex(array.cast(pa.large_string()), _UTF_8).fill_null(True)
        return ~np.asarray(good.to_numpy(zero_copy_only=False), bool)
    # Nothing that Spark or a cast of Arrow's makes, so one by one will do.
    return np.array([not is_sound(array.slice(row, 1)) for row in range(len(array))], bool)


def _in_dictionary(array: pa.DictionaryArray) -> Flags:
    indices = array.indices
    unsound = _unsound(array.dictionary)[indices.fill_null(0).to_numpy(zero_copy_only=False)]
    found: Flags = unsound & indices.is_valid().to_numpy(zero_copy_only=False)
    return found


def _in_lists(array: pa.Array) -> Flags:
    if pa.types.is_map(array.type):
        array = array.cast(pa.list_(pa.struct([array.type.key_field, array.type.item_field])))
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    row_of_item = np.repeat(np.arange(len(array)), lengths)
    found = np.zeros(len(array), bool)
    found[row_of_item[_unsound(array.flatten())]] = True
    return found
