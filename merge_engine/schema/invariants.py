"""What holds for every schema, whether it was built, evolved or read: plain checks that raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from foundation.errors import SchemaError
from merge_engine.encoding.row_codec import LAST_VERSION
from merge_engine.encoding.soundness import is_text
from merge_engine.schema.types import parse_type, type_name

if TYPE_CHECKING:
    from merge_engine.schema.schema import Column, Schema


def check_schema(schema: Schema) -> None:
    """Raise SchemaError at the first invariant that does not hold."""
    check_names(schema.names)
    _check_ids(schema)
    _check_key(schema)
    if not schema.value_columns:
        raise SchemaError("there is no value column; add one with an aggregate function")
    for column in schema.columns:
        if column.id in schema.primary_key:
            check_key_type(column.type, column=column.name)
        else:
            _check_value_column(column)


def check_names(names: Sequence[str]) -> None:
    """Names are not empty, not reserved, and differ in more than upper and lower case."""
    taken: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise SchemaError(f"a column is named {name!r}; give it a name that is not empty")
        if not is_text(name):
            raise SchemaError(f"a column is named {name!r}, which has half a character in it")
        if name.startswith("_"):
            raise SchemaError(
                f"column '{name}': names that start with '_' are reserved for columns that"
                " Tallybook adds, such as _change_type; choose another name"
            )
        folded = name.casefold()
        if folded in taken:
            _raise_clash(name, taken[folded])
        taken[folded] = name


def check_key_type(data_type: pa.DataType, *, column: str) -> None:
    """A key's values have one encoding each and an order."""
    if pa.types.is_floating(data_type):
        raise SchemaError(
            f"column '{column}' is {type_name(data_type)} and in the primary key, but equal numbers"
            " may differ in their last bits; use DECIMAL or BIGINT"
        )
    if pa.types.is_nested(data_type):
        raise SchemaError(
            f"column '{column}' is {type_name(data_type)} and cannot be in the primary key;"
            " use one column for each of its parts"
        )


def _raise_clash(name: str, other: str) -> None:
    if name == other:
        raise SchemaError(f"column '{name}' is declared twice; rename one of them")
    raise SchemaError(
        f"columns '{other}' and '{name}' differ in upper and lower case only, which Spark does"
        " not tell apart; rename one of them"
    )


def _check_ids(schema: Schema) -> None:
    ids = [column.id for column in schema.columns]
    if len(set(ids)) < len(ids):
        raise SchemaError(f"column ids {ids} are not unique")
    if min(ids, default=1) < 1 or max(ids, default=0) >= schema.next_column_id:
        raise SchemaError(
            f"column ids {ids} are not between 1 and next_column_id ({schema.next_column_id})"
        )
    if schema.version < 1:
        raise SchemaError(f"the schema's version is {schema.version}; versions start at 1")
    if schema.version > LAST_VERSION:
        raise SchemaError(
            f"the schema's version is {schema.version}, and stored rows can name {LAST_VERSION:,}"
            " at most: copy the table to a new one to alter it further"
        )


def _check_key(schema: Schema) -> None:
    key, partition_by = schema.primary_key, schema.partition_by
    known = [column.id for column in schema.columns]
    if not key:
        raise SchemaError("there is no primary key; name its columns with primary_key(...)")
    if not _are_ids(key, known):
        raise SchemaError(f"the primary key {list(key)} has ids of no column")
    if not _are_ids(partition_by, key):
        raise SchemaError(f"partition columns {list(partition_by)} are not all in the primary key")
    if len(set(key)) < len(key) or len(set(partition_by)) < len(partition_by):
        raise SchemaError(
            f"a column stands twice in the primary key {list(key)}"
            f" or in the partition columns {list(partition_by)}"
        )
    for column in schema.columns:
        if column.id in key and column.function is not None:
            raise SchemaError(
                f"column '{column.name}' is in the primary key and has the function"
                f" {column.function.name}; a key takes none"
            )


def _are_ids(given: Sequence[object], known: Sequence[int]) -> bool:
    # What was read from JSON may be anything, and True equals 1.
    return all(type(each) is int and each in known for each in given)


def _check_value_column(column: Column) -> None:
    if column.function is None:
        raise SchemaError(
            f"column '{column.name}' has no aggregate function and is not in the primary key;"
            " say how it merges, or make it a part of the key"
        )
    if parse_type(column.type) != column.type or column.function.result_type != column.type:
        raise SchemaError(
            f"column '{column.name}' is {type_name(column.type)}, but its function"
            f" {column.function.name} gives {type_name(column.function.result_type)}"
        )
