"""Batches on their way to a server: plain Arrow, in messages of a handy size."""

from collections.abc import Sequence

import pyarrow as pa

from merge_engine.merging.routing import Route
from merge_engine.schema.types import in_table_type

_ROWS_PER_MESSAGE = 1 << 16


def as_one_table(data: pa.RecordBatch | pa.Table) -> pa.Table:
    """Return the data in one chunk per column, in types that a table has.

    Dictionaries do not travel well, and views cannot be split by bucket.
    """
    columns = [in_table_type(column) for column in data.columns]
    return pa.table(columns, names=data.schema.names)


def rows_of(columns: Sequence[pa.Array], target: Route, *, whole: bool) -> list[pa.Array]:
    """Return the rows of one bucket; `whole`: all rows are."""
    if whole:
        return list(columns)
    index = pa.array(target.positions)
    return [array.take(index) for array in columns]


def to_messages(data: pa.Table, target: Route, *, whole: bool) -> list[pa.RecordBatch]:
    """Return the rows of one bucket; `whole`: all rows are."""
    rows = data if whole else data.take(pa.array(target.positions))
    batches: list[pa.RecordBatch] = rows.combine_chunks().to_batches(_ROWS_PER_MESSAGE)
    return batches
