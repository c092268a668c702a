"""Events of three queries on one table, and what the table must hold when all were counted once.

A batch is a function of seed, query and number. Each query has columns of its own; together they
have every aggregate function. What is expected comes from the plain models of the functions, which
see all rows of a key at once.
"""

import datetime as dt
import os
import random
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

from merge_engine.aggregates.registry import AggFunction
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from server.client.remote_table import RemoteTable
from tests.property.models import model_fold, same
from tests.support.sinks import write_file

ROWS = 30
DAYS = [dt.date(2026, 5, day) for day in (1, 2, 3)]
MAP = pa.map_(pa.string(), pa.int64())
Key = tuple[dt.date, int]

QUERIES: list[dict[str, tuple[str | pa.DataType, AggFunction, dict[str, Any]]]] = [
    {
        "orders": ("BIGINT", AggFunction.COUNT, {}),
        "revenue": ("DECIMAL(18, 2)", AggFunction.SUM, {}),
        "mean": ("DOUBLE", AggFunction.AVG, {}),
        "sign": ("BIGINT", AggFunction.PRODUCT, {}),
        "lowest": ("BIGINT", AggFunction.MIN, {}),
        "highest": ("TIMESTAMP", AggFunction.MAX, {}),
        "paid": ("BOOLEAN", AggFunction.BOOL_AND, {}),
        "late": ("BOOLEAN", AggFunction.BOOL_OR, {}),
    },
    {
        "last": ("STRING", AggFunction.LAST_VALUE, {}),
        "first": ("STRING", AggFunction.FIRST_VALUE, {}),
        "newest": ("STRING", AggFunction.LAST_VALUE_IGNORE_NULLS, {"order_by": "at"}),
        "oldest": ("STRING", AggFunction.FIRST_VALUE_IGNORE_NULLS, {"order_by": "at"}),
        "tags": ("STRING", AggFunction.STRING_AGG, {"delimiter": "|"}),
    },
    {
        "items": (pa.list_(pa.string()), AggFunction.ARRAY_AGG, {"limit": 9}),
        "kinds": (pa.list_(pa.int64()), AggFunction.COLLECT_SET, {}),
        "settings": (MAP, AggFunction.MERGE_MAP, {}),
        "users": ("BIGINT", AggFunction.RBM32, {}),
        "visits": ("BIGINT", AggFunction.RBM64, {}),
        "pages": ("BIGINT", AggFunction.HLL_SKETCH, {}),
        "hosts": ("BIGINT", AggFunction.THETA_SKETCH, {}),
    },
]


def wide_schema() -> Schema:
    """Return the table of all three."""
    builder = SchemaBuilder().column("day", "DATE").column("k", "BIGINT")
    for query in QUERIES:
        for name, (kind, function, parameters) in query.items():
            builder.agg_column(name, kind, function, **parameters)
    return builder.primary_key("day", "k").partitioned_by("day").build()


SCHEMA = wide_schema()


def rows_of(seed: int, query: int, number: int) -> list[dict[str, Any]]:
    """Return the rows of a batch: some nulls, and days that appear as the numbers rise."""
    chance = random.Random(f"{seed} {query} {number}")
    days = DAYS[: 1 + min(number // 2, len(DAYS) - 1)]
    return [_row(chance, chance.choice(days), number * ROWS + at, query) for at in range(ROWS)]


def _row(chance: random.Random, day: dt.date, seen: int, query: int) -> dict[str, Any]:
    at = dt.datetime(2026, 5, 1, tzinfo=dt.UTC) + dt.timedelta(
        seconds=chance.randrange(100_000), microseconds=seen
    )
    columns = QUERIES[query]
    row: dict[str, Any] = {"day": day, "k": chance.randrange(8)}
    for name in columns:
        row[name] = None if chance.random() < 0.15 else _value(name, chance, at, seen)
    return {**row, "at": at} if query == 1 else row


def _value(name: str, chance: random.Random, at: dt.datetime, seen: int) -> Any:
    function, kind = QUERIES_BY_COLUMN[name]
    if name == "sign":
        return chance.choice((1, -1))
    if function is AggFunction.MERGE_MAP:
        return [(f"s{seen % 4}", seen)]
    number = chance.randrange(1000)
    values = {
        pa.timestamp("us", tz="UTC"): at,
        pa.bool_(): number < 800,
        pa.string(): f"{name}-{seen}",
        pa.float64(): float(number),
        pa.decimal128(18, 2): Decimal(number).scaleb(-1).quantize(Decimal("0.01")),
    }
    return values.get(kind, number)


def _columns() -> dict[str, tuple[AggFunction, pa.DataType]]:
    found = {}
    for query in QUERIES:
        for name, (_, function, _) in query.items():
            implementation = SCHEMA.column(name).function
            assert implementation is not None
            found[name] = (function, implementation.input_type or pa.int64())
    return found


QUERIES_BY_COLUMN = _columns()


def batch_of(seed: int, query: int, number: int) -> pa.Table:
    """Return a batch in the types of the table."""
    kinds = {name: kind for name, (_, kind) in QUERIES_BY_COLUMN.items()}
    kinds |= {"day": pa.date32(), "k": pa.int64(), "at": pa.timestamp("us", tz="UTC")}
    rows = rows_of(seed, query, number)
    return pa.Table.from_pylist(rows, pa.schema([(name, kinds[name]) for name in rows[0]]))


def write_source(directory: Path, seed: int, query: int, batches: int) -> None:
    """Write the batches as files whose order is that of their times."""
    for number in range(batches):
        write_file(directory, number, batch_of(seed, query, number))
        at = 1_700_000_000 + number
        os.utime(directory / f"{number:05}.parquet", (at, at))


def check_exact(table: RemoteTable, seed: int, batches: dict[int, int]) -> None:
    """Compare every column of every key with what the batches of the queries come to."""
    rows = {
        query: [row for number in range(count) for row in rows_of(seed, query, number)]
        for query, count in batches.items()
    }
    keys = sorted({(row["day"], row["k"]) for found in rows.values() for row in found})
    assert keys
    asked = {"day": [day for day, _ in keys], "k": [k for _, k in keys]}
    stored = table.lookup(asked).to_pylist()
    for query, found in rows.items():
        wrong = [
            difference
            for key, values in zip(keys, stored, strict=True)
            for difference in _differences(query, key, values, found)
        ]
        assert not wrong, wrong[:5]


def _differences(
    query: int, key: Key, stored: dict[str, Any], rows: Iterable[dict[str, Any]]
) -> Iterable[str]:
    own = [row for row in rows if (row["day"], row["k"]) == key]
    for name in QUERIES[query]:
        function = SCHEMA.column(name).function
        assert function is not None
        expected = None
        if own:
            order = function.order_by or ""
            expected = model_fold(function, [(row[name], row.get(order)) for row in own])
        if same(stored[name]) != same(expected):
            yield f"{key}: {name} is {stored[name]!r}, not {expected!r}"
