"""The model of the table machine: what a table should hold, and batches to put into it.

Per key and column it keeps every raw input that the column's state stands for; a column without an
entry is untouched, and a key without columns does not exist.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from foundation.errors import StorageUnavailable, UnknownOutcome
from foundation.failpoints import arm
from foundation.ids import BucketId, Token
from merge_engine.aggregates.registry import AggFunction
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.segment import AggMode
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.merging.batch import read_batch, value_function
from merge_engine.merging.fold import fold
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Column, Schema
from recovery.embedded.table import Table
from tests.fault.killed_writer import failpoint_names
from tests.property.models import EPOCH, Row, input_type_of, model_fold, same

FAILPOINTS = failpoint_names()
KEY_NAMES = ("day", "id")
OPERATION = "_operation"

Key = tuple[str, int]
ALL_KEYS: list[Key] = [(day, number) for day in ("mo", "tu") for number in range(3)]
Inputs = tuple[Row, ...]
Cells = dict[Key, dict[int, Inputs]]
Visible = dict[Key, dict[int, Any]]

INITIAL_OWNERS = {
    "orders": ("revenue", "orders", "mean", "note", "status", "tags", "items", "sketch"),
    "visits": ("seen", "lowest", "origin", "place", "kinds", "attributes", "pages", "paid", "low"),
}


def bucket_options() -> st.SearchStrategy[BucketOptions]:
    """Return limits so small, often, that rows are dropped and written behind, and undo takes
    passes."""
    return st.builds(
        BucketOptions,
        working_set_bytes=st.sampled_from([1, 80_000, 1 << 29]),
        behind_max_bytes=st.sampled_from([1, 300, 1 << 20]),
        behind_max_offsets=st.sampled_from([1, 2, 3, 6, 1 << 20]),
        behind_few_rows=st.sampled_from([0, 3, 1 << 20]),
        undo_max_bytes=st.sampled_from([1, 400, 1 << 20]),
        roll_up_segments=st.sampled_from([2, 3, 5]),
        block_cache_bytes=st.just(1 << 20),
    )


def build_schema(*, partitioned: bool = False) -> Schema:
    """Return a schema with a function of every kind; `place` is ordered by another column."""
    strings = pa.list_(pa.string())
    builder = (
        SchemaBuilder()
        .column("day", pa.string())
        .agg_column("revenue", pa.int64(), AggFunction.SUM)
        .agg_column("orders", pa.int64(), AggFunction.COUNT)
        .agg_column("seen", pa.timestamp("us", tz="UTC"), AggFunction.MAX)
        .agg_column("mean", pa.float64(), AggFunction.AVG)
        .column("id", pa.int64())
        .agg_column("note", pa.string(), AggFunction.LAST_VALUE)
        .agg_column("lowest", pa.decimal128(9, 2), AggFunction.MIN)
        .agg_column("status", pa.string(), AggFunction.LAST_VALUE_IGNORE_NULLS, order_by="at")
        .agg_column("origin", pa.map_(pa.string(), pa.int64()), AggFunction.FIRST_VALUE)
        .agg_column("place", pa.float64(), AggFunction.LAST_VALUE, order_by="seen")
        .agg_column("tags", pa.string(), AggFunction.STRING_AGG, delimiter="|")
        .agg_column("items", strings, AggFunction.ARRAY_AGG, limit=2)
        .agg_column("kinds", strings, AggFunction.COLLECT_SET)
        .agg_column("attributes", pa.map_(pa.string(), pa.int64()), AggFunction.MERGE_MAP)
        .agg_column("pages", pa.int64(), AggFunction.RBM32)
        .agg_column("paid", pa.bool_(), AggFunction.BOOL_OR)
        .agg_column("low", pa.float32(), AggFunction.MIN)
        .agg_column("sketch", pa.binary(), AggFunction.THETA_SKETCH, lg_k=5)
        .primary_key(*KEY_NAMES)
    )
    return (builder.partitioned_by("day") if partitioned else builder).build()


ADDABLE: list[tuple[pa.DataType, AggFunction, dict[str, Any]]] = [
    (pa.int32(), AggFunction.SUM, {}),
    (pa.string(), AggFunction.FIRST_VALUE_IGNORE_NULLS, {"order_by": "at"}),
    (pa.bool_(), AggFunction.BOOL_AND, {}),
    (pa.list_(pa.int64()), AggFunction.ARRAY_AGG, {}),
]


@dataclass(frozen=True)
class ModelRow:
    """One row of a batch: for each column the raw inputs that its value, or state, stands for."""

    key: Key
    deletes: bool
    inputs: Mapping[int, Inputs]


@dataclass(frozen=True)
class Put:
    """A batch as the table gets it, and as the model does."""

    data: pa.Table
    columns: tuple[Column, ...]
    mode: AggMode
    rows: Sequence[ModelRow]
    names_columns: bool = True

    def apply_to(self, cells: Cells) -> Cells:
        """Return what the cells are after this put."""
        after = {key: dict(row) for key, row in cells.items()}
        for row in self.rows:
            columns = after.setdefault(row.key, {})
            for column in self.columns:
                if row.deletes:
                    columns.pop(column.id, None)
                elif self.mode is AggMode.REPLACE:
                    columns[column.id] = row.inputs[column.id]
                else:
                    columns[column.id] = columns.get(column.id, ()) + row.inputs[column.id]
        return {key: columns for key, columns in after.items() if columns}


@dataclass(frozen=True)
class RawRow:
    """A raw row: a value per input column, whether that is to be written or only to order by."""

    key: Key
    deletes: bool
    values: Mapping[str, Any]


# Few values, so that they repeat: test_aggregates.py has the others.
VALUES: dict[pa.DataType, Sequence[Any]] = {
    pa.bool_(): [False, True],
    pa.int32(): [0, 1, -2],
    pa.int64(): [0, 1, 7, 65536],
    pa.float32(): [0.5, -0.0, 0.0, math.nan],
    pa.float64(): [0.5, -2.0, -0.0, math.inf, math.nan],
    pa.string(): ["", "a", "b", "ä" * 30],
    pa.decimal128(9, 2): [Decimal("0.01"), Decimal(-7)],
    pa.timestamp("us", tz="UTC"): [EPOCH, EPOCH + timedelta(seconds=1), EPOCH - timedelta(days=1)],
    pa.map_(pa.string(), pa.int64()): [[], [("a", 1)], [("b", None), ("a", 2)]],
    pa.list_(pa.string()): [[]],
}


def raw_row(columns: Sequence[Column], key: Key, deletes: bool, seed: int) -> RawRow:
    """Return a row for these columns. One seed, since Hypothesis cannot draw very much."""
    chance = random.Random(seed)
    types: dict[str, pa.DataType] = {}
    for column in columns:
        function = value_function(column)
        types[column.name] = input_type_of(function)
        if function.order_by is not None:
            types[function.order_by] = function.order_type
    values = {name: chance.choice([None, *VALUES[kind]]) for name, kind in types.items()}
    return RawRow(key, deletes, values)


def raw_rows(
    columns: Sequence[Column], *, max_size: int = 8, deletes: bool = True
) -> st.SearchStrategy[list[RawRow]]:
    """Return batches of rows: few keys, so that they repeat."""
    row = st.builds(
        partial(raw_row, columns),
        keys(),
        st.sampled_from([False, False, False, deletes]),
        st.integers(0, 9999),
    )
    return st.lists(row, max_size=max_size)


def keys() -> st.SearchStrategy[Key]:
    """Return keys of two partitions."""
    return st.sampled_from(ALL_KEYS)


def key_arrays(schema: Schema, of: Sequence[Key]) -> dict[str, pa.Array]:
    """Return keys as columns of a batch."""
    return {
        column.name: pa.array([key[at] for key in of], column.type)
        for at, column in enumerate(schema.key_columns)
    }


def raw_put(
    schema: Schema, columns: Sequence[Column], rows: Sequence[RawRow], *, operations: bool = True
) -> Put:
    """Return a put of raw rows."""
    batch = key_arrays(schema, [row.key for row in rows])
    model: list[dict[int, Inputs]] = [{} for _ in rows]
    for column in columns:
        function = value_function(column)
        values = [row.values[column.name] for row in rows]
        batch[column.name] = pa.array(values, input_type_of(function))
        orders: list[Any] = [None] * len(rows)
        if function.order_by is not None:
            orders = [row.values[function.order_by] for row in rows]
            batch[function.order_by] = pa.array(orders, function.order_type)
        for at, pair in enumerate(zip(values, orders, strict=True)):
            model[at][column.id] = (pair,)
    if operations:
        names = ["delete" if row.deletes else "upsert" for row in rows]
        batch[OPERATION] = pa.array(names, pa.string())
    model_rows = [
        ModelRow(row.key, row.deletes, inputs) for row, inputs in zip(rows, model, strict=True)
    ]
    return Put(pa.table(batch), tuple(columns), AggMode.ACCUMULATE, model_rows)


def folded_put(
    schema: Schema, columns: Sequence[Column], chunks: Sequence[Sequence[RawRow]], mode: AggMode
) -> Put:
    """Return a put of states: each chunk is folded as a writer does before the network.

    A key that was deleted within its chunk becomes a delete, and an upsert if rows came after it.
    """
    tables, model_rows = [], []
    history = SchemaHistory([schema])
    for chunk in chunks:
        raw = raw_put(schema, columns, chunk)
        names = [column.name for column in columns]
        rows = read_batch(
            raw.data, schema, BucketOptions(), columns=names, operation_column=OPERATION
        )
        update = fold(rows, history.key_codec)
        of_update = list(zip(*(array.to_pylist() for array in update.keys), strict=True))
        inputs = raw.apply_to({})
        for deletes, chosen in (
            (True, update.resets[:, 0]),
            (False, update.touches[:, 0]),
        ):
            at = np.flatnonzero(chosen)
            of = [of_update[position] for position in at]
            states = [
                pa.nulls(len(at), state.type) if deletes else state.take(pa.array(at))
                for state in update.states
            ]
            operation = pa.array(["delete" if deletes else "upsert"] * len(at), pa.string())
            values = dict(zip(names, states, strict=True))
            tables.append(pa.table({**key_arrays(schema, of), **values, OPERATION: operation}))
            model_rows += [ModelRow(key, deletes, {} if deletes else inputs[key]) for key in of]
    data = pa.concat_tables(tables) if tables else raw_put(schema, columns, []).data
    return Put(data, tuple(columns), mode, model_rows)


def visible(cells: Cells, schema: Schema) -> Visible:
    """Return what a reader should see, by key and column id."""
    return {
        key: {
            column.id: same(model_fold(value_function(column), inputs[column.id]))
            if column.id in inputs
            else same(None)
            for column in schema.value_columns
        }
        for key, inputs in cells.items()
    }


def as_visible(rows: pa.Table | pa.RecordBatch, schema: Schema) -> Visible:
    """Return rows of the table in the form of the model."""
    names = [column.name for column in schema.key_columns]
    seen: Visible = {}
    for row in rows.to_pylist():
        key = (row[names[0]], row[names[1]])
        assert key not in seen, f"{key} is there twice"
        seen[key] = {column.id: same(row[column.name]) for column in schema.value_columns}
    return seen


def only(cells: Cells, columns: set[int]) -> Cells:
    """Return the cells of these columns."""
    kept = {
        key: {column: inputs for column, inputs in row.items() if column in columns}
        for key, row in cells.items()
    }
    return {key: row for key, row in kept.items() if row}


def merged(left: Cells, right: Cells) -> Cells:
    """Return the cells of both, which have no column in common."""
    return {key: {**left.get(key, {}), **right.get(key, {})} for key in {**left, **right}}


class Crash(Exception):
    """The process dies here: from now on every failpoint raises it."""


@dataclass(frozen=True)
class Failure:
    """What goes wrong at a failpoint: from the given visit on, so many times."""

    failpoint: str
    visit: int
    error: Callable[[], Exception]
    times: int = 1

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Let it happen within the block."""
        visits, crashed = 0, False

        def visit(name: str) -> None:
            nonlocal visits, crashed
            if crashed:
                raise Crash
            visits += name == self.failpoint
            if name == self.failpoint and self.visit <= visits < self.visit + self.times:
                error = self.error()
                crashed = isinstance(error, Crash)
                raise error

        with ExitStack() as stack:
            for name in FAILPOINTS:
                stack.enter_context(arm(name, partial(visit, name)))
            yield


def failures(*groups: str) -> st.SearchStrategy[Failure]:
    """Return crashes at the failpoints of these groups, and failures of the storage."""
    visits = st.sampled_from([1, 1, 2, 3])
    crashes = st.builds(
        Failure,
        st.sampled_from(groups).flatmap(lambda group: st.sampled_from(named(group))),
        visits,
        st.just(Crash),
    )
    unwritten = [partial(StorageUnavailable, "test"), partial(UnknownOutcome, "test")]
    in_doubt = partial(UnknownOutcome, "test")
    times = st.integers(1, 3)
    return st.one_of(
        crashes,
        crashes,
        st.builds(Failure, st.just("storage.written"), visits, st.sampled_from(unwritten), times),
        st.builds(Failure, st.just("storage.linked"), visits, st.just(in_doubt), times),
    )


FAILED = (Crash, StorageUnavailable, UnknownOutcome)
WRITING = ("put", "log", "storage", "view")


def named(*groups: str) -> list[str]:
    """Return the failpoints of these groups."""
    return [name for name in FAILPOINTS if name.partition(".")[0] in groups]


def abandon(table: Table) -> None:
    """Let go of a table as a killed process does: what is in memory is not written."""
    for bucket in table._buckets._buckets.values():
        bucket._closed = True
        bucket._view._database.close()
    table.close()


@dataclass
class Owner:
    """A writer: its last put, what it committed, and the log ends at that time."""

    epoch: int = 1
    batch: int = 0
    last: Put | None = None
    committed: Cells = field(default_factory=dict)
    offsets: dict[BucketId, int] = field(default_factory=dict)

    @property
    def token(self) -> Token:
        return Token(self.epoch, self.batch)
