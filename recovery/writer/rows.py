"""Rows of a batch, and how they are to be read."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from foundation.arguments import names_of, text_of
from foundation.errors import InvalidInput
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.segment import AggMode
from merge_engine.embedded.derived_calls import Data, as_arrow, is_stream, read_stream
from merge_engine.merging.batch import read_batch
from merge_engine.schema.schema import Schema

Pieces = Callable[[], Iterator[pa.Table]]
"""Gives the rows of a batch piece by piece, each time the same, for what memory does not hold."""
_OF_ANY_SIZE = BucketOptions(put_max_rows=sys.maxsize, put_max_bytes=sys.maxsize)


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
            arrow = as_arrow(self.data, schema)
            yield pa.Table.from_batches([arrow]) if isinstance(arrow, pa.RecordBatch) else arrow

    def check(self, schema: Schema, *, keys_suffice: bool = False) -> None:
        """Raise what a bucket would raise of these rows, whatever it has and however many.

        `keys_suffice`: rows of keys only name partitions, and whoever has their values reads them.
        """
        keys = {column.name for column in schema.key_columns}
        for piece in self.pieces(schema):
            if keys_suffice and keys.issuperset(piece.column_names):
                continue
            read_batch(
                piece,
                schema,
                _OF_ANY_SIZE,
                columns=self.columns,
                mode=self.mode,
                operation_column=self.operation_column,
            )


def _pieces_of(give: Pieces) -> Iterator[pa.Table]:
    given = give()
    if not isinstance(given, Iterable):
        raise InvalidInput(f"a function gives the rows as Arrow tables, one by one, not {given!r}")
    for piece in given:
        if not isinstance(piece, pa.Table):
            raise InvalidInput(f"a function gives the rows as Arrow tables, and gave {piece!r}")
        yield piece
