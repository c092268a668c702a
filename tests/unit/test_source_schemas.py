"""What Spark sees of a table, and batches that fit it exactly."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from foundation.errors import InvalidInput
from merge_engine.schema.builder import SchemaBuilder
from sink.source.schemas import caster, change_fields, chosen_fields, row_fields, to_spark
from tests.conftest import SUMS
from tests.support.day_tables import DAYS

INSTANT = pa.timestamp("us", tz="UTC")
MIXED = (
    SchemaBuilder()
    .agg_column("names", pa.list_(pa.string()), "last_value")
    .agg_column("counts", pa.map_(pa.string(), pa.int64()), "last_value")
    .agg_column("at", INSTANT, "max")
    .agg_column("local", pa.timestamp("us"), "max")
    .column("k", "BIGINT")
    .agg_column("odd`name, x", "INT", "sum")
    .primary_key("k")
    .build()
)
OWN = row_fields(MIXED, None)


def spark_schema(*fields: tuple[Any, ...]) -> StructType:
    return StructType([StructField(*field) for field in fields])


def test_the_key_comes_first_and_what_is_named_comes_as_named() -> None:
    assert OWN.names == ["k", "names", "counts", "at", "local", "odd`name, x"]
    assert row_fields(DAYS, None).names == ["day", "k", "a"]
    assert row_fields(DAYS, ["a", "day"]).names == ["a", "day"]
    assert row_fields(DAYS, ["k"]).names == ["k"]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["k", "aa"], "`columns` names 'aa', which the table does not have; did you mean 'a'"),
        (["total"], "'total', which the table does not have; it has k, a, b"),
        (["K"], "'K'.*did you mean 'k'"),
        (["a", "k", "a"], "`columns` names 'a' twice"),
        ([], "`columns` names none; name at least one"),
        ("k", "`columns` is a list of names, not 'k'"),
    ],
)
def test_columns_that_cannot_be_read_are_refused(columns: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        row_fields(SUMS, columns)


def test_changes_say_first_what_they_are() -> None:
    assert change_fields(SUMS, ["k", "b"], "upserts").names == ["_change_type", "k", "b"]
    names = change_fields(SUMS, ["b"], "changes").names
    assert names[-2:] == ["_bucket", "b"]
    assert {"_change_type", "_log_offset", "_commit_timestamp", "_owner"} <= set(names)


def test_sparks_schema_is_that_of_the_table_whatever_a_timestamp_is_by_default() -> None:
    shown = to_spark(OWN)
    assert shown["at"].dataType == TimestampType()
    assert shown["local"].dataType == TimestampNTZType()
    assert shown["counts"].dataType == MapType(StringType(), LongType(), True)
    assert shown["odd`name, x"].dataType == IntegerType()
    assert chosen_fields(OWN, shown) == OWN


def test_a_users_schema_chooses_columns_and_their_order() -> None:
    names = ArrayType(StringType(), True)
    asked = spark_schema(("names", names), ("k", LongType(), False))
    assert chosen_fields(OWN, asked).names == ["names", "k"]


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (("K", LongType()), "the schema names 'K', .*did you mean 'k'"),
        (("k", IntegerType()), "'k' is BIGINT in the table, and INT in the schema; name its own"),
        (("at", TimestampNTZType()), "'at' is TIMESTAMP in the table, and TIMESTAMP_NTZ"),
        (("names", ArrayType(LongType())), "ARRAY<STRING> in the table, and ARRAY<BIGINT>"),
        (("at", TimestampType(), False), "'at' is NOT NULL in the schema"),
        (("names", ArrayType(StringType(), False)), "'names' is NOT NULL .*or something within"),
        (("counts", MapType(StringType(), LongType(), False)), "'counts' is NOT NULL"),
    ],
)
def test_a_users_schema_that_says_something_else_is_refused(
    field: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        chosen_fields(OWN, spark_schema(field))


def test_a_column_that_a_users_schema_names_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the schema names 'k' twice"):
        chosen_fields(OWN, spark_schema(("k", LongType()), ("k", LongType())))


def test_batches_become_exactly_what_spark_expects() -> None:
    noon = datetime(2024, 6, 1, 12, tzinfo=UTC)
    batch = pa.record_batch(
        {
            "k": pa.array([1, 2]),
            "names": pa.array([["a", None], None], pa.list_(pa.string())),
            "counts": pa.array([[("x", 1)], []], pa.map_(pa.string(), pa.int64())),
            "at": pa.array([noon, None], INSTANT),
        }
    )
    wanted = to_spark(pa.schema([OWN.field(name) for name in ("at", "counts", "local", "names")]))
    for zone in ("UTC", "Europe/Berlin"):
        cast = caster(wanted, zone)(batch)
        assert cast.schema.equals(to_arrow_schema(wanted, timezone=zone))
        assert cast.column("at").cast(INSTANT).to_pylist() == [noon, None]
        assert cast.column("local").to_pylist() == [None, None]
        assert cast.column("names").to_pylist() == [["a", None], None]
        assert cast.column("counts").to_pylist() == [[("x", 1)], []]
        empty = caster(wanted, zone)(batch.slice(0, 0))
        assert (empty.num_rows, empty.schema) == (0, cast.schema)
