"""The table of the writer tests: three sums, in two buckets per partition."""

from typing import Any

import pyarrow as pa

from locks.catalog.definitions import TableDefinition
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from recovery.writer.rows import Rows
from tests.support.writer_model import Content

COLUMNS = "xyz"
BUCKETS = 2
KEYS = range(4)
PARTITIONS = range(3)
MOST = (1 << 63) - 1
"""What a column can hold."""


def rows_of(content: Content, *, partitioned: bool) -> Rows:
    """Return a batch; a key whose columns have no amount is deleted."""
    columns = sorted({column for amounts in content.values() for column in amounts})
    deletes = {key for key, amounts in content.items() if None in amounts.values()}
    data: dict[str, Any] = {
        **({"p": pa.array([p for p, _ in content], pa.int64())} if partitioned else {}),
        "k": pa.array([k for _, k in content], pa.int64()),
        **{
            column: pa.array([amounts[column] for amounts in content.values()], pa.int64())
            for column in columns
        },
        "op": ["delete" if key in deletes else "upsert" for key in content],
    }
    return Rows(data=pa.table(data), columns=columns, operation_column="op")


def contents_of(rows: Rows, partitioned: bool) -> Content:
    """Return what a batch does, as the model has it."""
    if rows.data == []:
        return {}
    assert isinstance(rows.data, pa.Table)
    columns = rows.columns or ()
    return {
        (row["p"] if partitioned else 0, row["k"]): {column: row[column] for column in columns}
        for row in rows.data.to_pylist()
    }


def definition(partitioned: bool) -> TableDefinition:
    schema = _schema(partitioned)
    return TableDefinition(
        schema=schema.to_json(),
        columns={column.name: column.id for column in schema.value_columns},
        key_columns=tuple(column.name for column in schema.key_columns),
        buckets=BUCKETS,
    )


def _schema(partitioned: bool) -> Schema:
    builder = SchemaBuilder()
    keys = ["p", "k"] if partitioned else ["k"]
    for key in keys:
        builder.column(key, pa.int64())
    builder.primary_key(*keys)
    if partitioned:
        builder.partitioned_by("p")
    for column in COLUMNS:
        builder.agg_column(column, pa.int64(), "sum")
    return builder.build()
