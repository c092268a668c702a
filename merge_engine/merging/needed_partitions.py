"""Which partitions rows need, and what becomes of them there, before these are created.

A row needs its partition, unless it is a delete: where there is none, there is nothing to delete.
"""

from collections.abc import Callable, Container, Sequence

import numpy as np
import pyarrow as pa

from merge_engine.bucket.options import MEBIBYTE
from merge_engine.bucket.segment import AggMode
from merge_engine.merging.batch import read_deletes, read_keys
from merge_engine.merging.local_aggregation import OPERATION, fold_locally, with_operations
from merge_engine.merging.routing import Route, route
from merge_engine.schema.schema import Schema
from merge_engine.schema.types import in_table_type

_KEPT_BYTES = 64 * MEBIBYTE


class EmptyBuckets:
    """Tries rows where nothing is stored: raises what the buckets of a new partition would.

    Rows may come in pieces; what one key has in several of them is found as far as memory goes:
    beyond `kept_bytes` of folded states, these are forgotten.
    """

    def __init__(self, schema: Schema, *, kept_bytes: int = _KEPT_BYTES) -> None:
        self._schema = schema
        self._kept_bytes = kept_bytes
        self._kept: list[pa.Table] = []
        self._columns: tuple[str, ...] = ()

    def add(
        self,
        rows: pa.Table,
        *,
        columns: Sequence[str] | None,
        mode: AggMode,
        operation_column: str | None,
    ) -> None:
        """Try these rows, after those before them; how they are read is as for a put."""
        folded = fold_locally(
            rows, self._schema, columns=columns, operation_column=operation_column, mode=mode
        )
        if mode is AggMode.REPLACE:
            return
        self._columns = folded.columns
        self._kept.append(with_operations(folded.data, OPERATION))
        if sum(table.nbytes for table in self._kept) > self._kept_bytes:
            self.finish()

    def finish(self) -> None:
        """Try all rows together."""
        if len(self._kept) < 2:
            return
        folded = fold_locally(
            pa.concat_tables(self._kept),
            self._schema,
            columns=self._columns,
            operation_column=OPERATION,
            mode=AggMode.MERGE_STATE,
        )
        is_small = folded.data.nbytes <= self._kept_bytes // 2
        self._kept = [with_operations(folded.data, OPERATION)] if is_small else []


def written_partitions(
    data: pa.RecordBatch | pa.Table, schema: Schema, operation_column: str | None
) -> set[bytes]:
    """Return the keys of the partitions that have a row which is no delete."""
    targets = route(schema, read_keys(data, schema), 1)
    if operation_column is None:
        return {target.partition_key for target in targets}
    deletes = read_deletes(data, operation_column)
    return {target.partition_key for target in targets if not bool(deletes[target.positions].all())}


def rows_of_partitions(
    data: pa.Table, schema: Schema, are_wanted: Callable[[bytes], bool]
) -> pa.Table:
    """Return the rows of these partitions, in their order."""
    return _rows_of(data, schema, lambda target: are_wanted(target.partition_key))


def without_vain_deletes(
    data: pa.Table, schema: Schema, operation_column: str | None, there: Container[bytes]
) -> pa.Table:
    """Leave out what would be deleted from partitions that do not exist."""
    if operation_column is None or not schema.partition_by:
        return data
    deletes = read_deletes(data, operation_column)
    return _rows_of(
        data,
        schema,
        lambda target: target.partition_key in there or not bool(deletes[target.positions].all()),
    )


def _rows_of(data: pa.Table, schema: Schema, are_wanted: Callable[[Route], bool]) -> pa.Table:
    targets = route(schema, read_keys(data, schema), 1)
    wanted = [target.positions for target in targets if are_wanted(target)]
    if len(wanted) == len(targets):
        return data
    positions = np.sort(np.concatenate([np.zeros(0, np.int64), *wanted]))
    plain = [in_table_type(column) for column in data.columns]  # Views cannot be split.
    return pa.table(plain, names=data.schema.names).take(pa.array(positions))
