"""Columns of a Spark frame, under the table's names: for tasks, or collected in the driver."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa


def renamed(frame: Any, names: Mapping[str, str]) -> Any:
    """Return the frame with these columns only, under the table's names."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    return frame.select([F.col(f"`{of_input}`").alias(name) for name, of_input in names.items()])


def collected(frame: Any, names: Mapping[str, str]) -> pa.Table:
    """Return these columns of the frame in the driver, under the table's names."""
    if sorted(frame.columns) != sorted(set(names.values())):
        return _with_nullable_fields(renamed(frame, names)).toArrow()
    # Nothing to leave out: naming the columns here saves Spark planning a projection.
    table = _with_nullable_fields(frame).toArrow()
    return pa.table({name: table.column(of_input) for name, of_input in names.items()})


def _with_nullable_fields(frame: Any) -> Any:
    """Return the frame with structs whose fields may be null.

    PySpark cannot collect a null struct whose fields are declared NOT NULL: Arrow has a null in
    each of them then. What a column takes is for the table to say.
    """
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    changed = {
        field.name: kind
        for field in frame.schema.fields
        if (kind := _nullable(field.dataType)) != field.dataType
    }
    if not changed:
        return frame
    return frame.withColumns({name: F.col(f"`{name}`").cast(to) for name, to in changed.items()})


def _nullable(kind: Any) -> Any:
    from pyspark.sql import types as spark  # noqa: PLC0415

    if isinstance(kind, spark.StructType):
        fields = [(field.name, _nullable(field.dataType)) for field in kind.fields]
        return spark.StructType([spark.StructField(name, inner) for name, inner in fields])
    if isinstance(kind, spark.ArrayType):
        return spark.ArrayType(_nullable(kind.elementType), kind.containsNull)
    if isinstance(kind, spark.MapType):
        key, value = _nullable(kind.keyType), _nullable(kind.valueType)
        return spark.MapType(key, value, kind.valueContainsNull)
    return kind
