"""Calls that every table makes of its others: deletes are puts, alterations change the schema."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from foundation.errors import InvalidInput
from foundation.ids import Token
from merge_engine.aggregates.registry import AggFunction
from merge_engine.bucket.results import PutResult
from merge_engine.bucket.segment import AggMode, Operation
from merge_engine.merging.batch import read_keys
from merge_engine.merging.local_aggregation import OPERATION
from merge_engine.schema.schema import Schema

Data: TypeAlias = pa.RecordBatch | pa.Table | Mapping[str, Any] | Sequence[Mapping[str, Any]]


class DerivedCalls(ABC):
    """A table in one process, or on servers, as far as it is the same for both."""

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """The schema, as it is known here."""

    @abstractmethod
    def put(
        self,
        data: Data,
        *,
        columns: Sequence[str] | None = None,
        mode: AggMode = AggMode.ACCUMULATE,
        operation_column: str | None = None,
        owner: str = "",
        token: Token | None = None,
    ) -> PutResult:
        """Merge a batch."""

    @abstractmethod
    def _evolve(self, change: Callable[[Schema], Schema], *, force: bool = False) -> None:
        """Alter the table as it is now."""

    def delete(
        self,
        keys: Data,
        *,
        columns: Sequence[str] | None = None,
        owner: str = "",
        token: Token | None = None,
    ) -> PutResult:
        """Clear these columns (None: all) of the keys; a row with none left is gone."""
        return self.put(
            as_deletes(keys, self.schema),
            columns=columns,
            operation_column=OPERATION,
            owner=owner,
            token=token,
        )

    def add_column(
        self,
        name: str,
        data_type: pa.DataType | str,
        function: AggFunction | str,
        **parameters: Any,
    ) -> None:
        """Add a value column; rows that exist have it untouched."""
        self._evolve(lambda schema: schema.add_column(name, data_type, function, **parameters))

    def drop_column(self, name: str, *, force: bool = False) -> None:
        """Drop a value column, with its values; refused while a live lock pins it, unless forced.

        Whoever writes it is told so with its next batch.
        """
        self._evolve(lambda schema: schema.drop_column(name), force=force)

    def rename_column(self, old: str, new: str) -> None:
        """Give a column another name; its values stay."""
        self._evolve(lambda schema: schema.rename_column(old, new))


def as_arrow(data: Data, schema: Schema) -> pa.RecordBatch | pa.Table:
    """Return data as Arrow; dictionaries of columns and lists of rows are for small inputs."""
    if isinstance(data, pa.RecordBatch | pa.Table):
        return data
    try:
        if isinstance(data, Mapping):
            return pa.table(dict(data))
        rows = list(data)
        if not rows:  # Which says nothing of its columns.
            return pa.schema([(key.name, key.type) for key in schema.key_columns]).empty_table()
        return pa.Table.from_pylist(rows)
    except (pa.ArrowException, TypeError, AttributeError, UnicodeError, OverflowError) as exc:
        raise InvalidInput(f"cannot read this as a table: {exc}") from exc


def as_deletes(keys: Data, schema: Schema) -> pa.Table:
    """Return rows that delete these keys, to put with `OPERATION` as the operation column."""
    key_columns = read_keys(as_arrow(keys, schema), schema)
    names = [column.name for column in schema.key_columns]
    deletes = pa.array(np.full(len(key_columns[0]), Operation.DELETE, np.int8))
    return pa.table([*key_columns, deletes], names=[*names, OPERATION])
