"""A batch on its way into a bucket: checked, and brought into the table's types.

Everything a caller can get wrong about a batch by itself is found here, before any bucket is asked.
That includes values that are not what their types say (`merge_engine.encoding.soundness`), in
whatever column of the batch they stand.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foundation.arguments import names_of, text_of
from foundation.errors import (
    BatchTooLarge,
    InvalidInput,
    InvalidKey,
    InvalidValue,
    MissingColumn,
    Overflow,
    UnknownColumn,
    WrongType,
)
from foundation.suggestions import did_you_mean
from merge_engine.aggregates.base import AggregateFunction, Fault
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.segment import AggMode, Operation
from merge_engine.encoding.keys import KeyCodec
from merge_engine.encoding.ragged import Flags
from merge_engine.encoding.soundness import complaint, is_sound, show, unsound_rows
from merge_engine.schema.schema import Column, Schema
from merge_engine.schema.types import conform, decoded, in_table_type

_TEXTS = (pa.string(), pa.large_string(), pa.string_view(), pa.null())


@dataclass(frozen=True, kw_only=True)
class BatchRows:
    """A checked batch: key columns, and per written column the values (or states) and orders."""

    key_names: tuple[str, ...]
    keys: Sequence[pa.Array]
    columns: tuple[Column, ...]
    values: Sequence[pa.Array]
    orders: Sequence[pa.Array | None]
    deletes: Flags | None
    mode: AggMode

    def __len__(self) -> int:
        return len(self.keys[0])


def describe_key(names: Sequence[str], keys: Sequence[pa.Array], row: int) -> str:
    """Return a key as people read it: `customer_id=7, day='2026-01-01'`."""
    pairs = zip(names, keys, strict=True)
    return ", ".join(f"{name}={show(array, row)!r}" for name, array in pairs)


def read_batch(
    data: pa.RecordBatch | pa.Table,
    schema: Schema,
    options: BucketOptions,
    *,
    columns: Sequence[str] | None = None,
    mode: AggMode = AggMode.ACCUMULATE,
    operation_column: str | None = None,
) -> BatchRows:
    """Check a batch against the schema and bring it into the table's types.

    `columns`: the value columns to write; None: those that the batch has. Other table columns in
    the batch are left alone; a column that the table does not know is an error.
    """
    _check_size(data, options)
    mode = known_mode(mode)
    _check_names(data, schema, operation_column)
    _check_sound(data, schema)
    keys = _typed_keys(data, schema)
    key_names = tuple(column.name for column in schema.key_columns)
    deletes = None if operation_column is None else read_deletes(data, operation_column)
    written = _written_columns(data, schema, columns, deletes)
    values: list[pa.Array] = []
    orders: list[pa.Array | None] = []
    for column in written:
        if column.name not in data.schema.names:  # Only when every row deletes.
            values.append(pa.nulls(data.num_rows, value_function(column).state_type))
            orders.append(None)
        elif mode is AggMode.ACCUMULATE:
            values.append(_read_values(data, column))
            orders.append(_read_order(data, column))
        else:
            values.append(_read_states(data, column, key_names, keys, deletes))
            orders.append(None)
    return BatchRows(
        key_names=key_names,
        keys=keys,
        columns=written,
        values=values,
        orders=orders,
        deletes=deletes if deletes is not None and deletes.any() else None,
        mode=mode,
    )


def read_keys(data: pa.RecordBatch | pa.Table, schema: Schema) -> list[pa.Array]:
    """Return the key columns, typed and without nulls; the other columns are not looked at."""
    if isinstance(data, pa.RecordBatch) and data.schema.equals(schema.key_schema):
        keys: list[pa.Array] = data.columns  # As a client sends them: there is little to look at.
        if all(key.null_count == 0 and is_sound(key) for key in keys):
            return keys
    for column in schema.key_columns:
        if column.name in data.schema.names and not is_sound(data.column(column.name)):
            _refuse_unsound_keys(data.column(column.name), column.name)
    return _typed_keys(data, schema)


def _typed_keys(data: pa.RecordBatch | pa.Table, schema: Schema) -> list[pa.Array]:
    keys = []
    for column in schema.key_columns:
        if column.name not in data.schema.names:
            raise MissingColumn(f"key column '{column.name}' is not in the batch; add it")
        array = conform(data.column(column.name), column.type, column=column.name)
        if array.null_count:
            row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise InvalidKey(
                f"key column '{column.name}' is null in {array.null_count} of {len(array)} rows, "
                f"first in row {row}; filter them out, or give them a key"
            )
        keys.append(array)
    return keys


def _check_sound(data: pa.RecordBatch | pa.Table, schema: Schema) -> None:
    """Raise an error that names the first value that is not what its type says."""
    if is_sound(data):
        return
    # Now the keys are good, or one of them is what is wrong.
    keys = read_keys(data, schema)
    for name in data.schema.names:
        values = data.column(name)
        unsound = np.flatnonzero(unsound_rows(values, column=name))
        if len(unsound):
            row = int(unsound[0])
            fault = Fault(row, complaint(values, row))
            key_names = [column.name for column in schema.key_columns]
            raise value_error(fault, name, key_names, keys, row)


def _refuse_unsound_keys(values: pa.Array | pa.ChunkedArray, name: str) -> None:
    unsound = np.flatnonzero(unsound_rows(values, column=name))
    if len(unsound):
        row = int(unsound[0])
        raise InvalidKey(
            f"key column '{name}' cannot be read in {len(unsound)} of {len(values)} rows, first in "
            f"row {row} ({complaint(values, row)}); filter them out, or give them a key"
        )


def value_error(
    fault: Fault, column: str, key_names: Sequence[str], keys: Sequence[pa.Array], row: int
) -> InvalidValue:
    """Return the error that names column and key."""
    kind = Overflow if fault.overflow else InvalidValue
    key = describe_key(key_names, keys, row)
    error = kind(f"column '{column}', key {key}: {fault.reason}; nothing was written")
    codec = KeyCodec([array.type for array in keys])
    error.encoded_key = codec.encode([array.slice(row, 1) for array in keys])[0].as_py()
    return error


def value_function(column: Column) -> AggregateFunction:
    """Return the function of a value column."""
    if column.function is None:
        raise InvalidInput(f"column '{column.name}' is part of the key and cannot be written")
    return column.function


def known_mode(mode: AggMode) -> AggMode:
    """Return the agg mode that a caller named; InvalidInput if there is none such."""
    try:
        return AggMode(mode)
    except ValueError:
        names = ", ".join(f"{known.name} = {known.value}" for known in AggMode)
        raise InvalidInput(f"unknown agg mode {mode!r}; use one of {names}") from None


def _check_size(data: pa.RecordBatch | pa.Table, options: BucketOptions) -> None:
    if data.num_rows > options.put_max_rows:
        raise BatchTooLarge(
            f"the batch has {data.num_rows:,} rows, the limit is {options.put_max_rows:,} "
            "(put_max_rows); split it"
        )
    if data.nbytes > options.put_max_bytes:
        raise BatchTooLarge(
            f"the batch has {data.nbytes:,} bytes, the limit is {options.put_max_bytes:,} "
            "(put_max_bytes); split it"
        )


def read_deletes(data: pa.RecordBatch | pa.Table, name: str) -> Flags:
    """Return which rows delete."""
    if name not in data.schema.names:
        raise MissingColumn(f"operation column '{name}' is not in the batch; add it")
    operations = data.column(name)
    if isinstance(operations, pa.ChunkedArray):
        operations = operations.combine_chunks()
    operations = decoded(operations)
    if pa.types.is_integer(operations.type):
        upserts = pc.equal(operations, Operation.UPSERT.value)
        deletes = pc.equal(operations, Operation.DELETE.value)
    elif operations.type in _TEXTS:
        words = pc.utf8_lower(operations.cast(pa.string()))
        upserts, deletes = pc.equal(words, "upsert"), pc.equal(words, "delete")
    else:
        raise WrongType(
            f"operation column '{name}' is {operations.type}; it takes the texts 'upsert' and "
            "'delete'"
        )
    known = np.asarray(pc.or_(upserts, deletes).fill_null(False))
    if not known.all():
        row = int(np.flatnonzero(~known)[0])
        raise InvalidInput(
            f"operation column '{name}' has {show(operations, row)!r} in row {row}; "
            "it takes 'upsert' and 'delete'"
        )
    return np.asarray(deletes.to_numpy(zero_copy_only=False))


def _written_columns(
    data: pa.RecordBatch | pa.Table,
    schema: Schema,
    columns: Sequence[str] | None,
    deletes: Flags | None,
) -> tuple[Column, ...]:
    only_deletes = deletes is not None and bool(deletes.all())
    if columns is None:
        present = tuple(c for c in schema.value_columns if c.name in data.schema.names)
        if present:
            return present
        if only_deletes:
            return schema.value_columns
        names = ", ".join(column.name for column in schema.value_columns)
        raise MissingColumn(f"the batch has no value column; the table has {names}")
    named = names_of(columns)
    if not named:
        raise InvalidInput(f"columns must be a list of column names, not {columns!r}")
    written = tuple(schema.column(name) for name in named)
    for column in written:
        value_function(column)
        if column.name not in data.schema.names and not only_deletes:
            raise MissingColumn(f"column '{column.name}' is to be written, but not in the batch")
    return written


def _check_names(
    data: pa.RecordBatch | pa.Table, schema: Schema, operation_column: str | None
) -> None:
    if operation_column is not None:
        text_of(operation_column, "the operation column")
    names = data.schema.names
    orders = {column.function.order_by for column in schema.value_columns if column.function}
    known = {*schema.names, *orders, operation_column}
    if operation_column in schema.names:
        raise InvalidInput(
            f"operation column '{operation_column}' is a column of the table; "
            "give the operations a column of their own"
        )
    for name in names:
        if name not in known:
            hint = did_you_mean(name, schema.names) or f"; it has {', '.join(schema.names)}"
            raise UnknownColumn(f"the table has no column '{name}'{hint}")
        if names.count(name) > 1:
            raise InvalidInput(f"the batch has column '{name}' more than once")


def _read_values(data: pa.RecordBatch | pa.Table, column: Column) -> pa.Array:
    function = value_function(column)
    values = data.column(column.name)
    if function.input_type is not None:
        same = function.input_type.equals(column.type)
        return conform(
            values,
            function.input_type,
            column=column.name,
            allow_rounding=function.rounds_input,
            takes="is" if same else f"is {function.name} and takes",
        )
    values = in_table_type(values)
    refusal = function.check_input(values.type)
    if refusal is not None:
        raise WrongType(f"column '{column.name}' is {function.name}: {refusal}")
    return values


def _read_order(data: pa.RecordBatch | pa.Table, column: Column) -> pa.Array | None:
    function = value_function(column)
    if function.order_by is None:
        return None
    if function.order_by not in data.schema.names:
        raise MissingColumn(
            f"column '{column.name}' is ordered by '{function.order_by}', which is not in the batch"
        )
    values = data.column(function.order_by)
    return conform(values, function.order_type, column=function.order_by)


def _read_states(
    data: pa.RecordBatch | pa.Table,
    column: Column,
    key_names: Sequence[str],
    keys: Sequence[pa.Array],
    deletes: Flags | None,
) -> pa.Array:
    function = value_function(column)
    states = conform(data.column(column.name), function.state_type, column=column.name)
    # What stands beside a delete is never read; most likely it is a null, which is not a state of
    # every function.
    rows = np.arange(len(states)) if deletes is None else np.flatnonzero(~deletes)
    try:
        if deletes is None:
            return function.accept(states)
        accepted = function.accept(states.take(pa.array(rows)))
    except Fault as fault:
        row = int(rows[fault.index])
        raise value_error(fault, column.name, key_names, keys, row) from None
    return accepted.take(pa.array(np.cumsum(~deletes) - 1, mask=deletes))
