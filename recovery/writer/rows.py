"""Rows of a batch, and how they are to be read."""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from foundation.arguments import names_of, text_of
from foundation.errors import InvalidInput
from merge_engine.bucket.segment import AggMode
from merge_engine.embedded.derived_calls import Data, as_arrow, is_stream, read_stream
from merge_engine.merging.needed_partitions import (
    EmptyBuckets,
    rows_of_partitions,
    without_vain_deletes,
    written_partitions,
)
from merge_engine.schema.schema import Schema

Pieces = Callable[[], Iterator[pa.Table]]
"""Gives the rows of a batch piece by piece, each time the same, for what memory does not hold."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows to put, and how to read them: as for `Table.put`.

    `data` may be a function that gives the rows in pieces, all of one schema, in order; the same
    ones each time. `schema`: whose names the columns have, whatever they are called by now; None:
    the writer's, as it was when that started. What can be read only once, as a stream, is read when
    this is made: a batch that is tried again is the same.
    """

    data: Data | Pieces
    columns: Sequence[str] | None = None
    mode: AggMode = AggMode.ACCUMULATE
    operation_column: str | None = None
    schema: Schema | None = None

    def __post_init__(self) -> None:
        if self.columns is not None:
            names_of(self.columns)
        if self.operation_column is not None:
            text_of(self.operation_column, "the operation column")
        if is_stream(self.data):
            object.__setattr__(self, "data", read_stream(self.data))

    def __repr__(self) -> str:
        """Without the rows: they may be many, and are nobody's business in a log."""
        what = "pieces" if callable(self.data) else type(self.data).__name__
        if not callable(self.data) and hasattr(self.data, "num_rows"):
            what = f"{self.data.num_rows} rows of {what}"
        columns = "" if self.columns is None else f", columns={list(self.columns)}"
        return f"Rows({what}{columns}, mode={self.mode.name.lower()})"

    def pieces(self, schema: Schema) -> Iterator[pa.Table]:
        """Yield the rows as Arrow tables, in order; none if there are no rows and no columns."""
        if callable(self.data):
            yield from _pieces_of(self.data)
        elif not (isinstance(self.data, Sequence) and not self.data):
            arrow = as_arrow(self.data, schema, self.mode)
            yield pa.Table.from_batches([arrow]) if isinstance(arrow, pa.RecordBatch) else arrow

    def find_partitions(self, schema: Schema, there: Container[bytes]) -> "NeededPartitions":
        """Return which partitions the rows need; `there`: the keys of those that exist.

        Of the rows of others it raises what an empty bucket would. Rows of keys only name
        partitions, and whoever has their values tries them.
        """
        keys = {column.name for column in schema.key_columns}
        empty = EmptyBuckets(schema)
        needed: set[bytes] = set()
        for piece in self.pieces(schema):
            if keys.issuperset(piece.column_names):
                needed |= written_partitions(piece, schema, None)
                continue
            needed |= written_partitions(piece, schema, self.operation_column)
            others = rows_of_partitions(piece, schema, lambda key: key not in there)
            if others.num_rows:
                empty.add(
                    others,
                    columns=self.columns,
                    mode=self.mode,
                    operation_column=self.operation_column,
                )
        empty.finish()
        missing = {key for key in needed if key not in there}
        return NeededPartitions(frozenset(needed), frozenset(missing))

    def of_partitions(self, schema: Schema, keys: Container[bytes]) -> "Rows":
        """Return the rows of these partitions only."""

        def pieces() -> Iterator[pa.Table]:
            for piece in self.pieces(schema):
                yield rows_of_partitions(piece, schema, lambda key: key in keys)

        return replace(self, data=pieces)

    def without_vain_deletes(self, schema: Schema, there: Container[bytes]) -> "Rows":
        """Leave out what would be deleted from partitions that do not exist."""
        if self.operation_column is None or not schema.partition_by:
            return self

        def pieces() -> Iterator[pa.Table]:
            for piece in self.pieces(schema):
                yield without_vain_deletes(piece, schema, self.operation_column, there)

        return replace(self, data=pieces)


@dataclass(frozen=True)
class NeededPartitions:
    """The keys of the partitions that rows are written to, and of those that do not exist yet."""

    keys: frozenset[bytes]
    missing: frozenset[bytes]


def _pieces_of(give: Pieces) -> Iterator[pa.Table]:
    given = give()
    if not isinstance(given, Iterable):
        raise InvalidInput(f"a function gives the rows as Arrow tables, one by one, not {given!r}")
    for piece in given:
        if not isinstance(piece, pa.Table):
            raise InvalidInput(f"a function gives the rows as Arrow tables, and gave {piece!r}")
        yield piece
