"""Calls that every table makes of its others: deletes are puts, alterations change the schema."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy as np
import pyarrow as pa

from foundation.errors import InvalidInput
from foundation.ids import Token
from merge_engine.aggregates.registry import AggFunction
from merge_engine.bucket.results import PutResult
from merge_engine.bucket.segment import AggMode, Operation
from merge_engine.embedded.plain_values import read_columns, read_rows, types_of
from merge_engine.embedded.value_kinds import check_objects
from merge_engine.merging.batch import read_keys
from merge_engine.merging.local_aggregation import OPERATION
from merge_engine.schema.schema import Schema


class ArrowStream(Protocol):
    """What gives its rows as Arrow does: a frame of pandas or Polars, a relation of DuckDB, ..."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> object:
        """Return a capsule that has the rows."""


Data: TypeAlias = (
    pa.RecordBatch | pa.Table | Mapping[str, Any] | Sequence[Mapping[str, Any]] | ArrowStream
)
FOUND = "_found"
"""The column of a look-up that says whether there is such a row."""
# What pandas calls an index that has no name; of no table's columns.
_UNNAMED_INDEX = re.compile(r"__index_level_\d+__")


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


def as_arrow(
    data: Data, schema: Schema, mode: AggMode = AggMode.ACCUMULATE
) -> pa.RecordBatch | pa.Table:
    """Return data as Arrow; dictionaries of columns and lists of rows are for small inputs.

    A dictionary has a list per column or, of one row, a value per column; Python's values become
    those of the column's type, if they fit as they are (`plain_values`). What is a stream is read
    whole, and perhaps cannot be read again.
    """
    if isinstance(data, pa.RecordBatch | pa.Table):
        return data
    types = types_of(schema, states=mode != AggMode.ACCUMULATE)
    try:
        if isinstance(data, Mapping):
            return read_columns(data, types)
        if is_stream(data):
            return read_stream(data)
        if isinstance(data, str | bytes) or not isinstance(data, Iterable):
            raise TypeError(f"it is {data!r}")
        rows: list[Any] = list(data)
        other = [row for row in rows if not isinstance(row, Mapping)]
        if other:
            raise TypeError(f"it has a row that is no dictionary: {other[0]!r}")
        if not rows:  # Which says nothing of its columns.
            return pa.schema([(key.name, key.type) for key in schema.key_columns]).empty_table()
        return read_rows(rows, types)
    except (pa.ArrowException, TypeError, AttributeError, UnicodeError, OverflowError) as exc:
        raise InvalidInput(
            f"cannot read this as a table: {exc}; give a dictionary of lists, a list of "
            "dictionaries, or a table of Arrow, pandas or Polars"
        ) from exc


def is_stream(data: object) -> TypeGuard[ArrowStream]:
    """Whether this gives rows as Arrow does, and is not Arrow's own table or batch."""
    return hasattr(data, "__arrow_c_stream__") and not isinstance(data, pa.RecordBatch | pa.Table)


def read_stream(data: Any) -> pa.Table:
    """Return the rows of a stream; an index of pandas that has no name is left out."""
    try:
        check_objects(data)
        table = pa.table(data)
    except (pa.ArrowException, TypeError, ValueError) as exc:
        raise InvalidInput(f"these rows cannot be read by Arrow: {exc}") from exc
    unnamed = [name for name in table.schema.names if _UNNAMED_INDEX.fullmatch(name)]
    return table.drop_columns(unnamed).replace_schema_metadata(None)


def as_deletes(keys: Data, schema: Schema) -> pa.Table:
    """Return rows that delete these keys, to put with `OPERATION` as the operation column."""
    key_columns = read_keys(as_arrow(keys, schema), schema)
    names = [column.name for column in schema.key_columns]
    deletes = pa.array(np.full(len(key_columns[0]), Operation.DELETE, np.int8))
    return pa.table([*key_columns, deletes], names=[*names, OPERATION])
