"""What filters say of keys: only what is certain, and nothing that Spark would decide otherwise."""

from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    In,
    IsNotNull,
    Not,
    StringStartsWith,
)

from foundation.errors import InvalidInput
from merge_engine.merging.routing import partition_key
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from sink.source.pruning import MOST_KEYS, allowed_values, both, prune, wanted_values
from tests.conftest import SUMS
from tests.support.day_tables import DAYS


def keyed(data_type: pa.DataType | str) -> Schema:
    builder = SchemaBuilder().column("k", data_type).agg_column("a", "BIGINT", "sum")
    return builder.primary_key("k").build()


def equal(name: str, value: Any) -> Filter:
    return EqualTo((name,), value)


def one_of(name: str, *values: Any) -> Filter:
    return In((name,), list(values))


def keys_of(schema: Schema, *filters: Filter) -> list[Any] | None:
    """Return the keys that are left, as tuples; None: they are not known."""
    keys = prune(schema, allowed_values(filters)).keys
    return None if keys is None else [tuple(row.values()) for row in keys.to_pylist()]


@pytest.mark.parametrize(
    ("filters", "allowed"),
    [
        ([], {}),
        ([equal("k", 1)], {"k": [1]}),
        ([EqualNullSafe(("k",), 1)], {"k": [1]}),
        ([one_of("k", 1, 2)], {"k": [1, 2]}),
        ([one_of("k", 1, 2), one_of("k", 2, 3)], {"k": [2]}),
        ([equal("k", 1), equal("k", 2)], {"k": []}),
        ([equal("k", 1), equal("a", 5)], {"k": [1], "a": [5]}),
        ([IsNotNull(("k",)), GreaterThan(("k",), 3)], {}),
        ([Not(equal("k", 1))], {}),
        ([Not(one_of("k", 1))], {}),
        ([StringStartsWith(("k",), "a")], {}),
        ([EqualTo(("struct", "k"), 1)], {}),
    ],
)
def test_only_equality_and_lists_say_which_values_pass(
    filters: list[Filter], allowed: dict[str, list[Any]]
) -> None:
    assert allowed_values(filters) == allowed


@pytest.mark.parametrize(
    ("data_type", "value", "key"),
    [
        ("TINYINT", -128, -128),
        ("BIGINT", 2**63 - 1, 2**63 - 1),
        ("STRING", "", ""),
        ("STRING", "Zoë\0", "Zoë\0"),
        ("BINARY", b"\0\xff", b"\0\xff"),
        ("BOOLEAN", False, False),
        ("DATE", date(1, 1, 1), date(1, 1, 1)),
        ("DECIMAL(10,2)", Decimal("1.5"), Decimal("1.50")),
        ("DECIMAL(38,0)", Decimal(10**38 - 1), Decimal(10**38 - 1)),
    ],
)
def test_a_value_of_the_keys_own_type_is_looked_up(data_type: str, value: Any, key: Any) -> None:
    assert keys_of(keyed(data_type), equal("k", value)) == [(key,)]


@pytest.mark.parametrize(
    ("data_type", "value"),
    [
        ("BIGINT", "1"),
        ("BIGINT", 1.0),
        ("BIGINT", True),
        ("BIGINT", Decimal(1)),
        ("BIGINT", 2**63),
        ("TINYINT", 300),
        ("BOOLEAN", 1),
        ("STRING", 1),
        ("STRING", b"x"),
        ("STRING", "\ud800"),
        ("BINARY", bytearray(b"x")),
        ("DATE", datetime(2024, 1, 1)),
        ("DATE", "2024-01-01"),
        ("DECIMAL(10,2)", Decimal("1.555")),
        ("DECIMAL(10,2)", Decimal(10**9)),
        ("DECIMAL(10,2)", Decimal("NaN")),
        ("DECIMAL(10,2)", 1),
        ("TIMESTAMP", datetime(2024, 1, 1)),
        ("TIMESTAMP_NTZ", datetime(2024, 1, 1)),
    ],
)
def test_a_value_of_another_type_or_that_no_key_has_is_left_to_spark(
    data_type: str, value: Any
) -> None:
    assert keys_of(keyed(data_type), equal("k", value)) is None


def test_nulls_are_no_keys_and_values_count_once() -> None:
    assert keys_of(SUMS, one_of("k", 2, None, 1, 2)) == [(2,), (1,)]
    assert keys_of(SUMS, one_of("k", None)) == []
    assert keys_of(SUMS, EqualNullSafe(("k",), None)) == []


def test_what_contradicts_itself_has_no_keys_whatever_else_is_known() -> None:
    assert keys_of(SUMS, equal("k", 1), one_of("k", 2, 3)) == []
    assert keys_of(DAYS, equal("k", 1), equal("k", 2)) == []
    assert prune(DAYS, {"k": []}).keys.schema.names == ["day", "k"]  # type: ignore[union-attr]


def test_aggregated_columns_say_nothing_of_keys() -> None:
    assert prune(SUMS, allowed_values([equal("a", 1), equal("b", 2)])) == (None, None)
    assert prune(SUMS, {"a": []}) == (None, None)


def test_parts_of_a_key_are_combined_in_the_order_of_the_key() -> None:
    found = keys_of(DAYS, one_of("k", 1, 2), one_of("day", "mon", "tue"))
    assert found == [("mon", 1), ("mon", 2), ("tue", 1), ("tue", 2)]


def test_some_parts_of_a_key_are_not_a_key() -> None:
    assert prune(DAYS, {"k": [1]}) == (None, None)


def test_the_partitions_of_part_of_a_key_are_known() -> None:
    pruned = prune(DAYS, {"day": ["mon", "sun"]})
    assert pruned.keys is None
    expected = frozenset(partition_key(DAYS, {"day": day}) for day in ("mon", "sun"))
    assert pruned.partitions == expected


def test_very_many_keys_are_not_looked_up_and_their_partitions_are_still_known() -> None:
    most = list(range(MOST_KEYS))
    assert prune(SUMS, {"k": most}).keys is not None
    assert prune(SUMS, {"k": [*most, -1]}) == (None, None)
    pruned = prune(DAYS, {"k": most, "day": ["mon", "tue"]})
    assert pruned.keys is None
    assert pruned.partitions is not None
    assert len(pruned.partitions) == 2


# --- Keys that a query names by itself ----------------------------------------------------------


TYPED = (
    SchemaBuilder()
    .column("day", "DATE")
    .column("price", "DECIMAL(9, 2)")
    .column("name", "STRING")
    .agg_column("a", "BIGINT", "sum")
    .primary_key("day", "price", "name")
    .partitioned_by("day")
    .build()
)


def test_keys_are_read_as_their_columns_have_them() -> None:
    found = wanted_values(TYPED, {"day": ["2026-11-17"], "price": [1.5, "2"], "name": ["x"]})
    assert found == {
        "day": [date(2026, 11, 17)],
        "price": [Decimal("1.5"), Decimal(2)],
        "name": ["x"],
    }
    assert wanted_values(TYPED, {"day": []}) == {"day": []}


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"dya": ["2026-11-17"]}, "names 'dya', which is no column of the key.*did you mean 'day'"),
        ({"a": [1]}, "names 'a', which is no column of the key"),
        ({"name": ["x"]}, "has values of day, price, name or of day, not of name"),
        ({}, "not of nothing"),
        ({"day": ["yesterday"]}, "has 'yesterday' for 'day', which is DATE"),
        ({"day": [17]}, "has 17 for 'day', which is DATE"),
        ({"day": ["2026-11-17"], "price": ["much"], "name": ["x"]}, "has 'much' for 'price'"),
        ({"day": ["2026-11-17"], "price": [1], "name": [7]}, "has 7 for 'name', which is STRING"),
        (
            {"day": ["2026-11-17"], "price": [10**9], "name": ["x"]},
            r"'price', which is DECIMAL\(9,2\) and has no such value",
        ),
        (
            {"day": ["2026-11-17"], "price": [1], "name": ["\ud800"]},
            "'name', which is STRING and has no such value",
        ),
        (
            {"day": ["2026-11-17"] * 2, "price": [1], "name": list(map(str, range(10_001)))},
            "10,000",
        ),
    ],
)
def test_keys_that_cannot_be_looked_up_are_refused(keys: dict[str, list[Any]], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        wanted_values(TYPED, keys)


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1])
def test_a_key_that_is_out_of_range_is_told_so(value: int) -> None:
    assert wanted_values(SUMS, {"k": [(1 << 63) - 1]}) == {"k": [(1 << 63) - 1]}
    with pytest.raises(InvalidInput, match=r"for 'k', which is BIGINT and has no such value"):
        wanted_values(SUMS, {"k": [1, value]})


def test_what_passes_both_is_wanted() -> None:
    assert both({"k": [1, 2]}, {"k": [2, 3], "a": [7]}) == {"k": [2], "a": [7]}
    assert both({}, {"k": [2]}) == {"k": [2]}
