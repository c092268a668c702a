"""The partitions of a batch that tasks put: only the driver creates them, before the tasks start.

To find them the batch is read once more. A source that does not give the same rows twice may have
others when the tasks read it: they report those, and the batch is written anew, with them.
"""

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from foundation.errors import InvalidInput
from merge_engine.encoding.soundness import readable_rows
from merge_engine.merging.routing import partition_rows
from merge_engine.schema.schema import Schema
from recovery.writer.rows import Rows
from sink.frames import renamed, to_arrow
from sink.rows import InputColumns, without_deletes, without_unsound_rows


class PartitionsMissing(InvalidInput):
    """Tasks met partitions that the driver has not created. Create them and run the batch again."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self.keys = sorted(keys)
        super().__init__(f"the batch has rows of {len(self.keys)} partitions that do not exist")


def partitions_of(frame: Any, columns: InputColumns) -> Rows | None:
    """Read the frame and return rows that name its partitions; None if the table has none."""
    partitioned = {column.name for column in columns.schema.partition_columns}
    if not partitioned:
        return None
    wanted = {*partitioned, columns.operation}
    names = {name: of for name, of in columns.names().items() if name in wanted}
    values = to_arrow(renamed(frame, names).distinct().dropna())
    if columns.operation is not None:
        values = without_deletes(values, columns.operation).drop_columns([columns.operation])
    # What is no text names no partition. Like nulls, such rows are judged where they are read.
    return _naming(without_unsound_rows(values)[0], columns.schema)


def partitions_named(keys: Iterable[bytes], schema: Schema) -> Rows:
    """Return rows that name the partitions of these keys."""
    return _naming(partition_rows(schema, keys), schema)


def never_settles(batch: int, reads: int, keys: Iterable[bytes], schema: Schema) -> InvalidInput:
    """Return the error of a batch that has other partitions whenever it is read."""
    names = ", ".join(f"'{column.name}'" for column in schema.partition_columns)
    sample = readable_rows(partition_rows(schema, keys).slice(0, 1))
    return InvalidInput(
        f"the partition column {names} had new values in each of {reads} reads of batch {batch}, "
        f"the last time {sample}: this source does not give the same rows twice. Take rand(), "
        "uuid() and the like out of the partition, or use route='driver', which reads a batch once"
    )


def _naming(values: pa.Table, schema: Schema) -> Rows:
    """The other key columns do not matter for a partition; any value of their type does."""
    for column in schema.key_columns:
        if column.name not in values.column_names:
            values = values.append_column(column.name, _any_value(column.type, values.num_rows))
    return Rows(data=values)


def _any_value(data_type: pa.DataType, rows: int) -> pa.Array:
    """Return valid values of a key's type, one per row: zero bytes are one of every type."""
    width = 4 if _has_offsets(data_type) else -(-data_type.bit_width // 8)
    zeros = pa.py_buffer(bytes(width * (rows + 1)))
    buffers = [None, zeros, pa.py_buffer(b"")] if _has_offsets(data_type) else [None, zeros]
    return pa.Array.from_buffers(data_type, rows, buffers)


def _has_offsets(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type))
