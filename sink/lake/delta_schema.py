"""The schema of a copy as a Delta table has it, and what its readers must know."""

import json
from typing import Any

import pyarrow as pa
from pyarrow import types

from foundation.errors import SchemaError
from sink.lake.state import Layout

_PLAIN = {
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "binary",
    pa.date32(): "date",
    pa.timestamp("us", "UTC"): "timestamp",
    pa.timestamp("us"): "timestamp_ntz",
}
_VECTORS, _NTZ = "deletionVectors", "timestampNtz"


def schema_text(fields: pa.Schema) -> str:
    """Return the schema as a Delta table's metadata has it."""
    return json.dumps({"type": "struct", "fields": [_field(one) for one in fields]})


def needed_features(fields: pa.Schema, layout: Layout) -> frozenset[str]:
    """Return the features of Delta that a reader must have."""
    found = {_VECTORS} if layout is Layout.VECTORS else set()
    if any(_has(field.type, pa.timestamp("us")) for field in fields):
        found.add(_NTZ)
    return frozenset(found)


def _has(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a type is another one, or has it somewhere within."""
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return bool(kind == wanted or any(_has(one, wanted) for one in inner))


def protocol_of(features: frozenset[str]) -> dict[str, Any]:
    """Return the protocol: without any features, one that every reader of Delta has."""
    if not features:
        return {"minReaderVersion": 1, "minWriterVersion": 2}
    return {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": sorted(features),
        # Key columns are never null: Delta's Spark refuses a table that has such and not this.
        "writerFeatures": sorted({*features, "invariants"}),
    }


def _field(field: pa.Field) -> dict[str, Any]:
    return {
        "name": field.name,
        "type": _type(field.type, field.name),
        "nullable": field.nullable,
        "metadata": {},
    }


def _type(kind: pa.DataType, column: str) -> Any:
    if kind in _PLAIN:
        return _PLAIN[kind]
    if types.is_decimal128(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if types.is_list(kind):
        return {
            "type": "array",
            "elementType": _type(kind.value_type, column),
            "containsNull": True,
        }
    if types.is_map(kind):
        return {
            "type": "map",
            "keyType": _type(kind.key_type, column),
            "valueType": _type(kind.item_type, column),
            "valueContainsNull": True,
        }
    if types.is_struct(kind):
        return {"type": "struct", "fields": [_field(one) for one in kind]}
    raise SchemaError(
        f"column '{column}' is {kind}, which a Delta table cannot have; leave its state out, "
        "or make a copy of the format parquet"
    )
