"""Python's own values, which have no type of Arrow: a column takes those that fit as they are."""

from collections.abc import Iterator
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pytest

from foundation.errors import InvalidInput, InvalidValue, WrongType
from merge_engine.bucket.segment import AggMode
from merge_engine.schema.builder import SchemaBuilder
from recovery.embedded.table import Table
from recovery.writer.rows import Rows

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
    "wide": ("DECIMAL(38, 0)", "max"),
    "at": ("TIMESTAMP", "max"),
    "local": ("TIMESTAMP_NTZ", "max"),
    "data": ("BINARY", "max"),
    "maps": ("ARRAY<MAP<STRING, INT>>", "last_value"),
    "deep": ("STRUCT<m: MAP<DATE, INT>, l: ARRAY<DECIMAL(38, 0)>>", "last_value"),
    "set": ("BIGINT", "rbm64"),
    "seen": ("BIGINT", "count"),
}
DAY, NOON = date(2026, 11, 19), datetime(2026, 11, 19, 12)
AWARE = NOON.replace(tzinfo=timezone(timedelta(hours=5)))


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
        ("wide", 2**70, Decimal(2**70)),
        ("maps", [{"a": 1}, None, [("b", 2)]], [[("a", 1)], None, [("b", 2)]]),
        (
            "deep",
            {"m": {DAY: 1}, "l": [2**64, None]},
            {"m": [(DAY, 1)], "l": [Decimal(2**64), None]},
        ),
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


MIXED: dict[str, tuple[str, list[Any]]] = {
    "a date and a time": ("day", [DAY, NOON]),
    "a time and a date": ("local", [NOON, DAY]),
    "with a zone and without": ("at", [AWARE, NOON]),
    "without a zone and with": ("local", [NOON, AWARE]),
    "bytes and text": ("data", [b"a", "ä"]),
    "text and bytes": ("data", ["ä", b"a"]),
    "NumPy's boolean and a number": ("narrow", [np.bool_(True), 1]),
    "a small float and a number": ("price", [np.float16(1.5), 2**40]),
    "more digits than a microsecond": ("local", [pd.Timestamp("2026-11-19 12:00:00.000000001")]),
    "counted": ("seen", [DAY, NOON]),
}


@pytest.mark.parametrize("name", MIXED)
def test_values_that_would_be_bent_to_the_first_one_are_refused(table: Table, name: str) -> None:
    column, values = MIXED[name]
    keys = [*range(len(values))]
    series = pd.Series(values, dtype=object)
    for data in (
        {"k": keys, column: values},
        {"k": keys, column: series},
        {"k": keys, column: np.array(values, object)},
        {"k": iter(keys), column: iter(values)},
        [{"k": key, column: value} for key, value in zip(keys, values, strict=True)],
        pd.DataFrame({"k": keys, column: series}),
    ):
        with pytest.raises(InvalidInput, match=f"column '{column}': .*(kind|round|floats)"):
            table.put(data)
    assert table.to_arrow().num_rows == 0


def test_two_days_are_not_made_one_key(tmp_path: Path) -> None:
    schema = SchemaBuilder().column("k", "DATE").agg_column("n", "BIGINT", "sum").primary_key("k")
    with Table.create(tmp_path / "days", schema.build()) as table:
        with pytest.raises(
            InvalidInput, match=r"column 'k': values of several kinds \(dates, time"
        ):
            table.put({"k": [DAY, NOON], "n": [1, 2]})
        with pytest.raises(InvalidInput, match="several kinds"):
            table.lookup({"k": [DAY, NOON]})


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("items", [1, True]),
        ("pair", [{"a": 1, "b": "x"}, {"a": True, "b": "x"}]),
        ("maps", [{"a": 1, b"b": 2}]),
        ("deep", {"m": {DAY: 1, NOON: 2}, "l": []}),
    ],
)
def test_nor_are_those_inside_lists_maps_and_structs(table: Table, column: str, value: Any) -> None:
    values = value if column == "pair" else [value]
    with pytest.raises(InvalidInput, match=f"column '{column}': values of several kinds"):
        table.put({"k": [*range(len(values))], column: values})


def test_what_pandas_has_for_nothing_is_null(table: Table) -> None:
    table.put({"k": [1, 2], "local": [NOON, pd.NaT], "narrow": [pd.NA, 5], "items": [pd.NA, [1]]})
    assert read(table) == dict.fromkeys(COLUMNS) | {"k": 1, "local": NOON}
    assert (read(table, 2)["local"], read(table, 2)["narrow"]) == (None, 5)
    keys = np.array([3, 4], np.int32)
    frame = pd.DataFrame({"k": keys, "data": pd.Series([float("nan"), b"x"], dtype=object)})
    table.put(frame)
    assert [read(table, key)["data"] for key in (3, 4)] == [None, b"x"]


def test_whole_numbers_of_64_bits_are_taken_where_the_function_takes_them(table: Table) -> None:
    table.put({"k": [1, 1, 1], "set": [2**64 - 1, 5, 5], "seen": [2**63, None, 1]})
    assert (read(table)["set"], read(table)["seen"]) == (2, 2)
    with pytest.raises(InvalidInput, match="'other' has a number that no type of Arrow holds"):
        table.put({"k": [1], "other": [2**63]})


def test_states_and_orders_are_taken_as_their_types(tmp_path: Path) -> None:
    schema = (
        SchemaBuilder()
        .column("k", "BIGINT")
        .agg_column("mean", "DOUBLE", "avg")
        .agg_column(
            "last", "MAP<STRING, INT>", "last_value", order_by="step", order_type="SMALLINT"
        )
        .agg_column("step", "INT", "max")
        .agg_column("all", "STRING", "string_agg")
        .primary_key("k")
        .build()
    )
    with Table.create(tmp_path / "states", schema) as table:
        table.put({"k": [1, 1], "step": [7, 5], "last": [{"a": 1}, {"a": 2}]})
        states: dict[str, Any] = {
            "mean": [{"sum": 5, "count": 2}],
            "last": [{"value": {"b": 3}, "order": 6}],
            "all": [["x", "y"]],
            "step": [8],
        }
        table.put({"k": [1]} | states, mode=AggMode.MERGE_STATE)
        expected = {"k": 1, "mean": 2.5, "last": [("a", 1)], "step": 8, "all": "x,y"}
        assert read(table) == expected
        with table.writer(owner_id="o", columns=[*states]) as writer:
            put = Rows(data={"k": [1]} | states, mode=AggMode.REPLACE)
            writer.write(0, put)
        assert read(table) == expected | {"last": [("b", 3)]}
        with pytest.raises(
            InvalidValue, match=r"'last', key k=1: a state of last_value .* is null"
        ):
            table.put({"k": [1], "last": [None]}, mode=AggMode.MERGE_STATE)


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
