"""The types that a table has, and how values of other types become them.

    bool  int8 int16 int32 int64  float32 float64  decimal128(p, s), 0 <= s <= p <= 38
    string  binary  date32  timestamp('us') with no time zone or 'UTC'
    list<T>  map<K, V>  struct<name: T, ...>

The system is closed: whatever else Arrow has either means the same as one of these and becomes it
(large and view variants, dictionaries, runs, other time zones), or is refused with a word on what
to use instead. So every other module has to know these types only.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import SchemaError, WrongType
from merge_engine.schema import ddl

_PLAIN = frozenset(
    [
        pa.bool_(),
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.float32(),
        pa.float64(),
        pa.string(),
        pa.binary(),
        pa.date32(),
    ]
)

_SAME_AS = {
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
}

_USE_INSTEAD = (
    (pa.types.is_uint8, "SMALLINT"),
    (pa.types.is_uint16, "INT"),
    (pa.types.is_uint32, "BIGINT"),
    (pa.types.is_uint64, "DECIMAL(20,0), or BIGINT if it is wide enough"),
    (pa.types.is_float16, "FLOAT"),
    (pa.types.is_time, "BIGINT with the microseconds since midnight"),
    (pa.types.is_duration, "BIGINT with the number of microseconds"),
    (pa.types.is_interval, "INT with the months, and BIGINT with the microseconds"),
    (pa.types.is_timestamp, "timestamp('us')"),
    (pa.types.is_date64, "DATE"),
    (pa.types.is_decimal, "DECIMAL(p,s) with 0 <= s <= p <= 38"),
    (pa.types.is_null, "the type that the values will have"),
    (pa.types.is_fixed_size_binary, "BINARY"),
    (pa.types.is_fixed_size_list, "ARRAY"),
)

# Bits of the significand: integers of so many bits are exact.
_EXACT_BITS = {16: 11, 32: 24, 64: 53}


def parse_type(data_type: pa.DataType | str) -> pa.DataType:
    """Return the table type of an Arrow type or of a Spark DDL name such as "DECIMAL(18,2)".

    SchemaError if there is none; the message has the offending text and what to use instead.
    """
    if isinstance(data_type, str):
        return _table_type(ddl.read_type(data_type))
    if isinstance(data_type, pa.DataType):
        return _table_type(data_type)
    raise SchemaError(
        f"{data_type!r} is not a type; give a pyarrow type or a Spark name such as 'BIGINT'"
    )


def type_name(data_type: pa.DataType) -> str:
    """Return the Spark DDL name: `parse_type(type_name(t)) == t` for every table type.

    A type that no table has gets Arrow's name, so that error messages can show it.
    """
    return ddl.write_type(data_type)


def _table_type(data_type: pa.DataType) -> pa.DataType:
    if _is_encoded(data_type):
        return _table_type(data_type.value_type)
    if pa.types.is_map(data_type):
        return pa.map_(_map_key_type(data_type), _table_type(data_type.item_type))
    if _is_list(data_type):
        return pa.list_(_table_type(data_type.value_type))
    if pa.types.is_struct(data_type):
        _check_field_names(data_type)
        return pa.struct([(field.name, _table_type(field.type)) for field in data_type])
    return _plain_type(data_type)


def _plain_type(data_type: pa.DataType) -> pa.DataType:
    if data_type in _PLAIN:
        return data_type
    if data_type in _SAME_AS:
        return _SAME_AS[data_type]
    if pa.types.is_timestamp(data_type) and data_type.unit == "us":
        # Arrow stores instants in UTC whatever the zone says, so only the label changes.
        return pa.timestamp("us", tz="UTC" if data_type.tz else None)
    if _is_narrow_decimal(data_type):
        return pa.decimal128(data_type.precision, data_type.scale)
    instead = next((use for matches, use in _USE_INSTEAD if matches(data_type)), None)
    hint = f"; use {instead}" if instead else ""
    raise SchemaError(f"type {data_type} is not supported{hint}")


def _is_narrow_decimal(data_type: pa.DataType) -> bool:
    return (
        pa.types.is_decimal(data_type)
        and not pa.types.is_decimal256(data_type)
        and 0 <= data_type.scale <= data_type.precision
    )


def _is_encoded(data_type: pa.DataType) -> bool:
    """Tell whether values stand for others: they are numbers of a dictionary's, or runs."""
    return bool(pa.types.is_dictionary(data_type) or pa.types.is_run_end_encoded(data_type))


def _is_list(data_type: pa.DataType) -> bool:
    return any(
        matches(data_type)
        for matches in (
            pa.types.is_list,
            pa.types.is_large_list,
            pa.types.is_list_view,
            pa.types.is_large_list_view,
        )
    )


def _map_key_type(data_type: pa.DataType) -> pa.DataType:
    key_type = _table_type(data_type.key_type)
    if _has_map(key_type):
        raise SchemaError(f"type {data_type} is not supported: a map's key cannot have a map in it")
    return key_type


def _has_map(data_type: pa.DataType) -> bool:
    if pa.types.is_map(data_type):
        return True
    return any(_has_map(data_type.field(i).type) for i in range(data_type.num_fields))


def _check_field_names(data_type: pa.DataType) -> None:
    names = [field.name for field in data_type]
    if not names or "" in names or len(set(names)) < len(names):
        raise SchemaError(
            f"type {data_type} is not supported: a struct needs fields, each with a name of its own"
        )


def conform(
    values: pa.Array | pa.ChunkedArray,
    target: pa.DataType,
    *,
    column: str,
    allow_rounding: bool = False,
    takes: str = "is",
) -> pa.Array:
    """Return the values as one array of the declared type, without losing anything.

    Widening by type is allowed, whatever the values; narrowing is not, whatever the values. The one
    rule that looks at values is for nanoseconds: they become microseconds if all divide. Lists,
    maps and structs are taken element by element, fields of a struct by name.

    With `allow_rounding`, any number may become a DOUBLE as well: an average rounds anyway.

    WrongType if it cannot be, naming the column and both types. `takes`: the word between the
    column and its type, where that is what a batch has for it and not what it reads as.
    """
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    try:
        return _as_one([_convert(chunk, target, allow_rounding) for chunk in chunks], target)
    except _NoLosslessCast as error:
        raise WrongType(
            f"column '{column}' {takes} {type_name(target)}, but the batch has"
            f" {_batch_type_name(values.type)}; cast it first"
        ) from error
    except pa.ArrowInvalid as error:
        # The types allow the cast and a value does not: digits below a microsecond, a time stamp
        # out of range, or more than 2 GB of text.
        raise WrongType(
            f"column '{column}' {takes} {type_name(target)}, but the batch has"
            f" {_batch_type_name(values.type)} with values that do not fit ({error});"
            " truncate or filter them first"
        ) from error
    except pa.ArrowNotImplementedError as error:
        raise WrongType(
            f"column '{column}' {takes} {type_name(target)}, but the batch has {values.type}, which"
            f" Arrow cannot convert ({error}); cast it first"
        ) from error


def in_table_type(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return the values as one array, in the table type that means the same if there is one.

    For functions that take values of any type: large strings, views and dictionaries of strings are
    strings to them. What no table has, or would not fit one array of such a type, stays as it is.
    """
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    kind = values.type
    while _is_encoded(kind):
        kind = kind.value_type
        chunks = [decoded(chunk) for chunk in chunks]
        kind = _SAME_AS.get(kind, kind)
    try:
        target = _table_type(kind)
        return _as_one([_convert(chunk, target) for chunk in chunks], target)
    except (SchemaError, pa.ArrowInvalid):
        return _as_one(chunks, kind)


def decoded(array: pa.Array) -> pa.Array:
    """Return the values that a dictionary or runs stand for; another array is returned as it is.

    Arrow takes no values from views, so they become what they are views of.
    """
    if pa.types.is_dictionary(array.type):
        values, positions = array.dictionary, array.indices
    elif pa.types.is_run_end_encoded(array.type):
        rows = np.arange(array.offset, array.offset + len(array))
        ends = array.run_ends.to_numpy()
        values, positions = array.values, pa.array(np.searchsorted(ends, rows, side="right"))
    else:
        return array
    plain = _SAME_AS.get(values.type, values.type)
    if not plain.equals(values.type):
        values = values.cast(plain)
    return values.take(positions)


def _as_one(chunks: Sequence[pa.Array], data_type: pa.DataType) -> pa.Array:
    if len(chunks) == 1:
        return chunks[0]
    return pa.chunked_array(chunks, data_type).combine_chunks()


class _NoLosslessCast(Exception):
    """The types of a value and of its column do not go together."""


def _batch_type_name(data_type: pa.DataType) -> str:
    try:
        return type_name(_table_type(data_type))
    except SchemaError:
        return str(data_type)


def _convert(array: pa.Array, target: pa.DataType, allow_rounding: bool = False) -> pa.Array:
    if array.type.equals(target, check_metadata=True):
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), target)
    if _is_encoded(array.type):
        return _convert(decoded(array), target, allow_rounding)
    if pa.types.is_nested(target):
        return _convert_nested(array, target)
    if allow_rounding and pa.types.is_float64(target) and _is_number(array.type):
        return array.cast(target, safe=False)
    if not _is_lossless(array.type, target):
        raise _NoLosslessCast
    return array.cast(target)


def _convert_nested(array: pa.Array, target: pa.DataType) -> pa.Array:
    if pa.types.is_map(target) and pa.types.is_map(array.type):
        return _convert_maps(array, target)
    if pa.types.is_struct(target) and pa.types.is_struct(array.type):
        return _convert_structs(array, target)
    if pa.types.is_list(target) and (
        _is_list(array.type) or pa.types.is_fixed_size_list(array.type)
    ):
        elements = _convert(array.flatten(), target.value_type)
        return pa.ListArray.from_arrays(
            _offsets(array), elements, type=target, mask=array.is_null()
        )
    raise _NoLosslessCast


def _convert_maps(array: pa.Array, target: pa.DataType) -> pa.Array:
    # Unlike a map's, a list's parts can be had without those of its null and sliced-off entries.
    entries = array.cast(pa.list_(pa.struct([array.type.key_field, array.type.item_field])))
    keys, items = entries.flatten().flatten()
    return pa.MapArray.from_arrays(
        _offsets(entries),
        _convert(keys, target.key_type),
        _convert(items, target.item_type),
        type=target,
        mask=entries.is_null(),
    )


def _convert_structs(array: pa.Array, target: pa.DataType) -> pa.Array:
    fields = {field.name: child for field, child in zip(array.type, array.flatten(), strict=True)}
    if len(fields) != array.type.num_fields or set(fields) != {field.name for field in target}:
        raise _NoLosslessCast
    children = [_convert(fields[field.name], field.type) for field in target]
    return pa.StructArray.from_arrays(children, fields=list(target), mask=array.is_null())


def _offsets(lists: pa.Array) -> pa.Array:
    """Return where each list begins in `lists.flatten()`, which leaves the null ones out."""
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy()
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pa.int32())


def _is_lossless(source: pa.DataType, target: pa.DataType) -> bool:
    """Tell whether every value of one plain type is a value of the other."""
    if pa.types.is_timestamp(source) and pa.types.is_timestamp(target):
        # Without a time zone it is unknown which instant is meant, so zones are never made up. The
        # cast itself refuses nanoseconds that do not divide.
        return (source.tz is None) == (target.tz is None)
    if pa.types.is_decimal(source) and pa.types.is_decimal(target):
        more_places = target.scale - source.scale
        return bool(0 <= more_places <= target.precision - source.precision)
    if pa.types.is_integer(source):
        return _integer_fits(source, target)
    if pa.types.is_floating(source) and pa.types.is_floating(target):
        return bool(source.bit_width <= target.bit_width)
    if pa.types.is_fixed_size_binary(source):
        return bool(target == pa.binary())
    return bool(_SAME_AS.get(source, source) == target)


def narrower(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return that of two types whose values all are of the other, too; the first if neither is."""
    return other if _is_lossless(other, one) else one


def go_together(one: pa.DataType, other: pa.DataType, *, rounding: bool = False) -> bool:
    """Tell whether a column of a batch can be taken as both: the narrower one becomes the wider.

    `rounding`: the first one takes numbers of any kind.
    """
    if rounding and _is_number(one) and _is_number(other):
        return True
    return one.equals(other) or _is_lossless(one, other) or _is_lossless(other, one)


def _integer_fits(source: pa.DataType, target: pa.DataType) -> bool:
    bits = source.bit_width - pa.types.is_signed_integer(source)
    if pa.types.is_signed_integer(target):
        return bool(bits < target.bit_width)
    if pa.types.is_floating(target):
        return bool(bits <= _EXACT_BITS[target.bit_width])
    if pa.types.is_decimal(target):
        return bool(len(str(2**bits)) <= target.precision - target.scale)
    return False


def _is_number(data_type: pa.DataType) -> bool:
    return any(
        matches(data_type)
        for matches in (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    )
