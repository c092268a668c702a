"""What Spark sees of a table: the schema of its rows, of its changes, and batches that fit it."""

from collections.abc import Callable, Iterable, Sequence
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
    """Return the key and these value columns (None: all), or just what is named of both."""
    if columns is None:
        return _arrow((*schema.key_columns, *schema.value_columns))
    by_name = {column.name: column for column in (*schema.key_columns, *schema.value_columns)}
    for name in columns:
        if name not in by_name:
            known = did_you_mean(name, by_name)
            raise InvalidInput(f"`columns` names '{name}', which the table does not have{known}")
    return _arrow([by_name[name] for name in columns])


def change_fields(schema: Schema, columns: Sequence[str] | None, mode: str) -> pa.Schema:
    """Return what a stream has: the columns of rows, and before them what is said of a change."""
    rows = row_fields(schema, columns)
    if mode != CHANGES:
        return pa.schema([pa.field(CHANGE_TYPE, pa.string()), *rows])
    about = [field for field in changelog_schema(schema) if field.name in ABOUT_CHANGES]
    return pa.schema([*about, pa.field(BUCKET, pa.string()), *rows])


def to_ddl(fields: pa.Schema) -> str:
    """Return a schema as Spark reads it."""
    return ", ".join(
        f"`{field.name.replace('`', '``')}` {type_name(field.type)}" for field in fields
    )


def chosen_fields(known: pa.Schema, wanted: Any) -> pa.Schema:
    """Return the fields that a Spark schema names; InvalidInput for one that there is not."""
    from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415

    fields = []
    for asked, field in zip(wanted.fields, to_arrow_schema(wanted, timezone="UTC"), strict=True):
        name = asked.name
        if name not in known.names:
            near = did_you_mean(name, known.names)
            raise InvalidInput(f"the schema names '{name}', which the table does not have{near}")
        own = known.field(name)
        if not own.type.equals(field.type):
            raise InvalidInput(
                f"'{name}' is {type_name(own.type)} in the table, and "
                f"{asked.dataType.simpleString().upper()} in the schema; name its own type, and "
                "cast what was read"
            )
        fields.append(own)
    return pa.schema(fields)


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
    return pa.schema([(column.name, column.type) for column in columns])
