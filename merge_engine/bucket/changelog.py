"""The changelog as readers see it: finished values, one record per image of a changed key.

A record is about its owner's columns only: the others are null, and `_changed_columns` names those
that it speaks of. Full rows would show one owner's readers another's uncommitted values.
"""

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from merge_engine.bucket.segment import Change, Segment
from merge_engine.encoding.codec import same
from merge_engine.encoding.ragged import Flags
from merge_engine.encoding.stored_rows import SchemaHistory, finish
from merge_engine.schema.schema import Column, Schema

ABOUT_CHANGES = frozenset(
    {
        *("_change_type", "_log_offset", "_commit_timestamp"),
        *("_owner", "_batch", "_changed_columns"),
    }
)
CHANGE_TYPES = ("insert", "update_preimage", "update_postimage", "delete")
_INSERT, _BEFORE, _AFTER, _DELETE = range(4)


class ChangeBatch(NamedTuple):
    """Change records, and the version of the table's schema under which they are shown.

    Only that says which columns these are: a column that was dropped and another one, added in its
    place, may have the same name and type.
    """

    records: pa.RecordBatch
    schema_version: int


def changelog_schema(schema: Schema) -> pa.Schema:
    """Return the Arrow schema of change records."""
    return pa.schema(
        [
            ("_change_type", pa.string()),
            ("_log_offset", pa.int64()),
            ("_commit_timestamp", pa.timestamp("us", tz="UTC")),
            ("_owner", pa.string()),
            ("_batch", pa.int64()),
            ("_changed_columns", pa.list_(pa.string())),
            *((column.name, column.type) for column in schema.key_columns),
            *((column.name, column.type) for column in schema.value_columns),
        ]
    )


def change_records(segment: Segment, history: SchemaHistory, first_offset: int) -> pa.RecordBatch:
    """Return a segment's changes as records, in log order, under the current schema.

    An update is two records with one offset: the values before, and the values after.
    `first_offset` is that of the segment's first row, which may have been cut. Where the segment
    has lost columns, undone or dropped since, rows that changed in those alone are no records.
    """
    history.check_knows(segment.header.schema_version)
    schema = history.current
    written = [c for c in schema.value_columns if c.id in segment.changes]
    if not written:
        return pa.RecordBatch.from_pylist([], schema=changelog_schema(schema))
    changes = [segment.changes[column.id] for column in written]
    existed = np.logical_or.reduce([change.touched_before for change in changes])
    exists = np.logical_or.reduce([change.touched_after for change in changes])
    if len(written) < len(segment.header.column_ids):
        changed = np.logical_or.reduce([_changed(change) for change in changes])
        existed, exists = existed & changed, exists & changed
    rows, kinds = _images(existed, exists)
    index = pa.array(rows)
    source = rows + np.where(np.isin(kinds, (_BEFORE, _DELETE)), 0, len(existed))
    values: dict[int, pa.Array] = {}
    for column, change in zip(written, changes, strict=True):
        images = pa.concat_arrays([change.before, change.after])
        touched = np.concatenate([change.touched_before, change.touched_after])
        values[column.id] = finish(column, touched[source], images.take(pa.array(source)))
    timestamp, token = segment.header.timestamp_ms * 1000, segment.header.token
    names = [column.name for column in written]
    arrays = [
        pa.array(CHANGE_TYPES).take(pa.array(kinds)),
        pa.array(rows + first_offset),
        pa.array(np.full(len(rows), timestamp), pa.int64()).cast(pa.timestamp("us", tz="UTC")),
        _repeated(segment.header.owner, pa.string(), len(rows)),
        _repeated(None if token is None else token.batch, pa.int64(), len(rows)),
        _repeated(names, pa.list_(pa.string()), len(rows)),
        *(segment.keys[column.id].take(index) for column in schema.key_columns),
        *(_value(column, values, len(rows)) for column in schema.value_columns),
    ]
    return pa.record_batch(arrays, schema=changelog_schema(schema))


def _images(existed: Flags, exists: Flags) -> tuple["np.typing.NDArray[np.int64]", ...]:
    """Return, per record, its row and the number of its change type.

    A row that neither existed nor exists is none: only columns that are not shown changed.
    """
    rows = np.repeat(np.arange(len(existed)), existed.astype(np.int64) + exists)
    second = np.diff(rows, prepend=-1) == 0
    kinds = np.select(
        [~existed[rows], ~exists[rows], second], [_INSERT, _DELETE, _AFTER], default=_BEFORE
    )
    return rows, kinds


def _repeated(value: object, data_type: pa.DataType, count: int) -> pa.Array:
    return pa.array([value], data_type).take(pa.array(np.zeros(count, np.int64)))


def _changed(change: Change) -> Flags:
    before, after = change.touched_before, change.touched_after
    changed: Flags = (before != after) | (before & after & ~same(change.before, change.after))
    return changed


def _value(column: Column, values: dict[int, pa.Array], count: int) -> pa.Array:
    return values[column.id] if column.id in values else pa.nulls(count, column.type)
