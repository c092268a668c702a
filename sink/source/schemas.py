"""What Spark sees of a table: the schema of its rows, of its changes, and batches that fit it."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import pyarrow as pa

from foundation.errors import InvalidInput
from foundation.suggestions import did_you_mean
from merge_engine.bucket.changelog import ABOUT_CHANGES, changelog_schema
from merge_engine.schema.schema import Column, Schema
from merge_engine.schema.types import type_name
from recovery.reader.table_changes import BUCKET
from sink.source.options import CHANGES

CHANGE_TYPE, CHANGED, TIMESTAMP = "_change_type", "_changed_columns", "_commit_timestamp"
INSERT, UPSERT, DELETE = "insert", "upsert", "delete"


def row_fields(schema: Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the key and the value columns, or just those of both that are named, in this order."""
    by_name = {column.name: column for column in (*schema.key_columns, *schema.value_columns)}
    if columns is None:
        return _arrow(by_name.values())
    if isinstance(columns, str):
        raise InvalidInput(f"`columns` is a list of names, not {columns!r}")
    if not columns:
        raise InvalidInput("`columns` names none; name at least one, or leave it")
    _check_names("`columns`", columns, by_name)
    return _arrow([by_name[name] for name in columns])


def change_fields(schema: Schema, columns: Sequence[str] | None, mode: str) -> pa.Schema:
    """Return what a stream has: the columns of rows, and before them what is said of a change."""
    rows = row_fields(schema, columns)
    if mode != CHANGES:
        return pa.schema([pa.field(CHANGE_TYPE, pa.string()), *rows])
    about = [field for field in changelog_schema(schema) if field.name in ABOUT_CHANGES]
    return pa.schema([*about, pa.field(BUCKET, pa.string()), *rows])


def to_spark(fields: pa.Schema) -> Any:
    """Return a schema as Spark has it.

    Not as text: what a TIMESTAMP is in a text depends on `spark.sql.timestampType`.
    """
    from pyspark.sql.pandas.types import from_arrow_type  # noqa: PLC0415
    from pyspark.sql.types import StructField, StructType  # noqa: PLC0415

    types = [from_arrow_type(field.type, prefer_timestamp_ntz=True) for field in fields]
    return StructType(list(map(StructField, fields.names, types)))


def chosen_fields(known: pa.Schema, wanted: Any) -> pa.Schema:
    """Return the fields that a Spark schema names; InvalidInput for one that there is not."""
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415

    _check_names("the schema", wanted.names, known.names)
    asked = to_arrow_schema(wanted, timezone="UTC")
    return pa.schema([_same(known.field(field.name), field) for field in asked])


def _same(own: pa.Field, asked: pa.Field) -> pa.Field:
    """Return a field of the table; InvalidInput if a schema says something else of it."""
    if type_name(own.type) != type_name(asked.type):
        raise InvalidInput(
            f"'{own.name}' is {type_name(own.type)} in the table, and {type_name(asked.type)} in "
            "the schema; name its own type, and cast what was read"
        )
    if own.nullable > asked.nullable or not own.type.equals(asked.type):
        # Spark believes it, and fails on a null or leaves out the checks for one.
        raise InvalidInput(
            f"'{own.name}' is NOT NULL in the schema, or something within it is, and the table may "
            "have nulls there; leave NOT NULL"
        )
    return own


def _check_names(where: str, names: Sequence[str], known: Collection[str]) -> None:
    """InvalidInput for a name that there is not, and for one that comes twice."""
    for at, name in enumerate(names):
        if name not in known:
            near = did_you_mean(name, known) or f"; it has {', '.join(known)}"
            raise InvalidInput(f"{where} names '{name}', which the table does not have{near}")
        if name in names[:at]:
            raise InvalidInput(f"{where} names '{name}' twice")


def caster(wanted: Any, timezone: str = "UTC") -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Return what makes batches be exactly of a Spark schema: columns, their order, types.

    Columns that a batch does not have are null.
    """
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415

    arrow = to_arrow_schema(wanted, timezone=timezone)

    def cast(batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [
            batch.column(field.name).cast(field.type)
            if field.name in names
            else pa.nulls(batch.num_rows, field.type)
            for names in [frozenset(batch.schema.names)]
            for field in arrow
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=arrow)

    return cast


def _arrow(columns: Iterable[Column]) -> pa.Schema:
    """Return fields; those of the key are never null."""
    return pa.schema(
        [pa.field(column.name, column.type, column.function is not None) for column in columns]
    )
