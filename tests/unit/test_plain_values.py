"""Python's own values, which have no type of Arrow: a column takes those that fit as they are."""

from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from foundation.errors import InvalidInput, WrongType
from merge_engine.schema.builder import SchemaBuilder
from recovery.embedded.table import Table

COLUMNS = {
    "narrow": ("INT", "sum"),
    "byte": ("TINYINT", "max"),
    "money": ("DECIMAL(18, 2)", "sum"),
    "price": ("DOUBLE", "max"),
    "small": ("FLOAT", "max"),
    "day": ("DATE", "max"),
    "places": ("MAP<STRING, INT>", "merge_map"),
    "pair": ("STRUCT<a: INT, b: STRING>", "last_value"),
    "items": ("ARRAY<INT>", "last_value"),
    "other": ("BIGINT", "max"),
}


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    builder = SchemaBuilder().column("k", "INT")
    for name, (kind, function) in COLUMNS.items():
        builder.agg_column(name, kind, function)
    with Table.create(tmp_path / "plain", builder.primary_key("k").build()) as table:
        yield table


def read(table: Table, key: int = 1) -> dict[str, Any]:
    """Return the row of one key."""
    [row] = table.lookup({"k": key}).to_pylist()
    return dict(row)


@pytest.mark.parametrize(
    ("column", "value", "result"),
    [
        ("narrow", 7, 7),
        ("byte", -128, -128),
        ("money", Decimal("1.5"), Decimal("1.50")),
        ("money", 3, Decimal("3.00")),
        ("price", 3, 3.0),
        ("places", {"a": 1}, [("a", 1)]),
        ("places", [("a", 1), ("b", None)], [("a", 1), ("b", None)]),
        ("places", {}, []),
        ("pair", {"b": "x", "a": 1}, {"a": 1, "b": "x"}),
        ("items", [1, None], [1, None]),
    ],
)
def test_what_fits_a_column_as_it_is_is_taken(
    table: Table, column: str, value: Any, result: Any
) -> None:
    table.put({"k": [1, 2], column: [value, None]})
    assert read(table)[column] == result
    assert read(table, 2)[column] is None
    table.put([{"k": 3, column: value}])
    assert read(table, 3)[column] == result


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("narrow", 1 << 40),
        ("narrow", 1.0),
        ("narrow", True),
        ("narrow", "7"),
        ("byte", 128),
        ("money", Decimal("1.555")),
        ("money", 10**17),
        ("money", 1.5),
        ("price", (1 << 53) + 1),
        ("small", 1.1),
        ("day", 20_000),
        ("day", datetime(2026, 11, 18, 5)),
        ("pair", {"a": 1}),
        ("pair", {"a": 1, "b": "x", "c": 2}),
        ("places", {"a": 1 << 40}),
        ("places", {"a": "x"}),
    ],
)
def test_what_would_lose_something_is_refused_and_changes_nothing(
    table: Table, column: str, value: Any
) -> None:
    with pytest.raises(WrongType, match=column):
        table.put({"k": [1], column: [value]})
    assert table.to_arrow().num_rows == 0


@pytest.mark.parametrize("value", [7, "ab", [("a", 1, 2)], [3]])
def test_what_is_no_map_is_told_so(table: Table, value: Any) -> None:
    with pytest.raises(InvalidInput, match="column 'places': a map is a dictionary or a list of"):
        table.put({"k": [1], "places": [value]})


def test_a_column_that_takes_other_values_than_it_reads_as_says_so(tmp_path: Path) -> None:
    builder = SchemaBuilder().column("k", "INT").agg_column("all", "ARRAY<INT>", "array_agg")
    with Table.create(tmp_path / "gathered", builder.primary_key("k").build()) as table:
        table.put({"k": [1, 1], "all": [5, 6]})
        assert read(table)["all"] == [5, 6]
        with pytest.raises(WrongType, match=r"'all' is array_agg and takes INT, but the batch has"):
            table.put({"k": [1], "all": [[5, 6]]})


def test_types_that_somebody_chose_are_not_narrowed(table: Table) -> None:
    for values in (np.array([1]), pa.array([1]), pa.chunked_array([[1]])):
        with pytest.raises(WrongType, match=r"'narrow' is INT, .* BIGINT; cast it first"):
            table.put({"k": [1], "narrow": values})


def test_rows_need_not_have_the_same_columns_and_lose_none(table: Table) -> None:
    table.put([{"k": 1, "narrow": 5}, {"k": 2, "other": 6, "day": date(2026, 1, 31)}])
    assert [read(table, key)["narrow"] for key in (1, 2)] == [5, None]
    assert [read(table, key)["other"] for key in (1, 2)] == [None, 6]
    assert read(table, 2)["day"] == date(2026, 1, 31)
