"""The actions of our commits, as the log of a Delta table has them."""

import json
import math
from typing import Any

import pyarrow as pa

from sink.lake.delta_schema import schema_text
from sink.lake.delta_table import APPLICATION
from sink.lake.state import Change, LakeFile, Layout, Mark

# Where the table's configuration has our mark.
MARK = "tallybook.mark"


def about(change: Change, nonce: str) -> dict[str, Any]:
    """Return who commits, and what; `nonce`: by which it is known again."""
    return {
        "timestamp": change.time_ms,
        "operation": change.operation,
        "operationParameters": {"table": change.mark.name, "round": str(change.mark.round)},
        "engineInfo": "tallybook",
        "txnId": nonce,
    }


def metadata(mark: Mark, fields: pa.Schema, retention_s: float) -> dict[str, Any]:
    """Return what the table is from then on: its schema, its settings, and our mark."""
    kept = f"interval {math.ceil(retention_s)} seconds"
    configuration = {
        MARK: mark.to_json(),
        "delta.deletedFileRetentionDuration": kept,
        "delta.logRetentionDuration": kept,
    }
    if mark.layout is Layout.VECTORS:
        configuration["delta.enableDeletionVectors"] = "true"
    return {
        "id": mark.lake,
        "name": mark.name,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": schema_text(fields),
        "partitionColumns": [],
        "configuration": configuration,
        "createdTime": mark.created_ms,
    }


def transaction(change: Change) -> dict[str, Any]:
    """Return the number of our step, as the table counts the transactions of an application."""
    return {"appId": APPLICATION, "version": change.mark.step, "lastUpdated": change.time_ms}


def remove(file: LakeFile, change: Change) -> dict[str, Any]:
    """Return that a file is no more, as it was."""
    action = {
        "path": file.name,
        "deletionTimestamp": change.time_ms,
        "dataChange": change.changes_rows,
        "extendedFileMetadata": True,
        "partitionValues": {},
        "size": file.size,
    }
    # A file is told by its path and its vector: without it, what was there before would stay.
    return action if file.told is None else {**action, "deletionVector": file.told}


def add(file: LakeFile, change: Change, fields: pa.Schema) -> dict[str, Any]:
    """Return that there is a file, with its dead rows, and the bounds of its first key column."""
    stats: dict[str, Any] = {"numRecords": file.rows, "tightBounds": not file.dead}
    if file.bounds is not None:
        key = fields.names[0]
        stats |= {
            "minValues": {key: file.bounds[0]},
            "maxValues": {key: file.bounds[1]},
            "nullCount": {key: 0},
        }
    action = {
        "path": file.name,
        "partitionValues": {},
        "size": file.size,
        "modificationTime": change.time_ms,
        "dataChange": change.changes_rows,
        "stats": json.dumps(stats),
    }
    return action if file.told is None else {**action, "deletionVector": file.told}
