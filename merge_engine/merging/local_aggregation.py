"""Local aggregation: a batch folded where it is, before it goes over the network as states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.segment import AggMode, Operation
from merge_engine.encoding.keys import KeyCodec
from merge_engine.merging.batch import read_batch
from merge_engine.merging.fold import Update, fold
from merge_engine.schema.schema import Schema

OPERATION = "__tallybook_operation"
# Fewer rows cost little either way.
_MANY_ROWS = 10_000
_SAMPLED_ROWS = 2048
# What is folded is not put as it is: only what comes out has to fit a put.
_UNLIMITED = replace(BucketOptions(), put_max_rows=2**62, put_max_bytes=2**62)


@dataclass(frozen=True)
class Folded:
    """Partial states, one row per key, for a put with `MERGE_STATE`.

    A key that was deleted becomes a delete, and an upsert after it if rows came after that.
    """

    data: pa.Table
    columns: tuple[str, ...]
    operation_column: str | None


def fold_locally(
    data: pa.RecordBatch | pa.Table,
    schema: Schema,
    *,
    columns: Sequence[str] | None = None,
    operation_column: str | None = None,
    mode: AggMode = AggMode.ACCUMULATE,
) -> Folded:
    """Fold a batch of raw rows, or of states, to one row of states per key."""
    rows = read_batch(
        data, schema, _UNLIMITED, columns=columns, mode=mode, operation_column=operation_column
    )
    update = fold(rows, KeyCodec([column.type for column in schema.key_columns]))
    names = tuple(column.name for column in update.columns)
    if rows.deletes is None:
        return Folded(_table(update, names, np.arange(len(update)), None), names, None)
    deleted = _table(update, names, np.flatnonzero(update.resets[:, 0]), Operation.DELETE)
    written = _table(update, names, np.flatnonzero(update.touches[:, 0]), Operation.UPSERT)
    return Folded(pa.concat_tables([deleted, written]), names, OPERATION)


def is_worth_folding(data: pa.Table, schema: Schema) -> bool:
    """Tell, from a sample of the keys, whether there are at least about two rows per key."""
    if data.num_rows < _MANY_ROWS:
        return False
    names = [column.name for column in schema.key_columns]
    if not set(names) <= set(data.column_names):
        return False
    step = data.num_rows // _SAMPLED_ROWS
    sample = data.select(names).take(pa.array(np.arange(0, step * _SAMPLED_ROWS, step)))
    if len(names) == 1:  # A fraction of what groups take.
        different = pc.count_distinct(sample.column(0), mode="all").as_py()
    else:
        different = sample.group_by(names, use_threads=False).aggregate([]).num_rows
    repeated = _SAMPLED_ROWS - different
    # Of s rows drawn from n keys, about s * s / 2n have a key that came before.
    return bool(repeated * data.num_rows >= _SAMPLED_ROWS**2)


def with_operations(table: pa.Table, name: str | None) -> pa.Table:
    """Return the table with a column of operations: where there is none, all are upserts."""
    if name is None or name in table.column_names:
        return table
    upserts = np.full(table.num_rows, Operation.UPSERT, np.int8)
    return table.append_column(name, pa.array(upserts))


def _table(
    update: Update, names: Sequence[str], rows: "np.typing.NDArray[np.int64]", operation: int | None
) -> pa.Table:
    whole = len(rows) == len(update)
    index = pa.array(rows)
    arrays = [array if whole else array.take(index) for array in (*update.keys, *update.states)]
    columns = dict(zip((*update.key_names, *names), arrays, strict=True))
    if operation is not None:
        columns[OPERATION] = pa.array(np.full(len(rows), operation, np.int8))
    return pa.table(columns)
