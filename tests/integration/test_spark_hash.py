"""Our hash is Spark's: every process finds a key in the same bucket."""

import decimal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from merge_engine.merging.hashing import bucket_of, spark_xxhash64
from tests.support.spark_session import quiet_spark

pytestmark = pytest.mark.spark

ROWS = 500


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with quiet_spark() as session:
        yield session


def random_integers(generator: np.random.Generator, bits: int) -> list[int]:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    edges = [low, low + 1, -1, 0, 1, high - 1, high]
    return [*edges, *generator.integers(low, high, ROWS - len(edges), endpoint=True).tolist()]


def random_bytes(generator: np.random.Generator) -> list[bytes]:
    """Lengths on both sides of the 4, 8 and 32 bytes at which XXH64 changes its ways."""
    lengths = [0, 1, 3, 4, 5, 7, 8, 9, 12, 31, 32, 33, 63, 64, 65, 1000]
    return [generator.bytes(lengths[i % len(lengths)]) for i in range(ROWS)]


def random_decimals(
    generator: np.random.Generator, precision: int, scale: int
) -> list[decimal.Decimal]:
    largest = 10**precision - 1
    bounds = [2**bits for bits in range(0, 127, 7)] + [2**bits - 1 for bits in range(0, 128, 8)]
    edges = [0, 1, -1, largest, -largest, *bounds, *(-bound for bound in bounds), -(2**64) - 1]
    numbers = [number for number in edges if abs(number) <= largest]
    while len(numbers) < ROWS:
        digits = int(generator.integers(1, precision, endpoint=True))
        number = int("".join(map(str, generator.integers(0, 10, digits))))
        numbers.append(number if generator.random() < 0.5 else -number)
    with decimal.localcontext(prec=60):
        return [decimal.Decimal(number).scaleb(-scale) for number in numbers]


def key_table() -> pa.Table:
    """A column of every key type, without nulls."""
    generator = np.random.default_rng(20240229)
    first_day, last_day = -719162, 2932896  # the years 1 to 9999, as Spark has them
    day = 86_400_000_000
    days = generator.integers(first_day, last_day, ROWS).tolist()
    days[:3] = [first_day, 0, last_day]
    times = generator.integers(first_day * day, last_day * day, ROWS).tolist()
    times[:3] = [-1, 0, 1]
    texts = [value.decode("latin-1") for value in random_bytes(generator)]
    return pa.table(
        {
            "boolean": pa.array([i % 3 == 0 for i in range(ROWS)]),
            "tinyint": pa.array(random_integers(generator, 8), pa.int8()),
            "smallint": pa.array(random_integers(generator, 16), pa.int16()),
            "int": pa.array(random_integers(generator, 32), pa.int32()),
            "bigint": pa.array(random_integers(generator, 64), pa.int64()),
            "date": pa.array(days, pa.date32()),
            "timestamp": pa.array(times, pa.timestamp("us", tz="UTC")),
            "timestamp_ntz": pa.array(times, pa.timestamp("us")),
            "decimal_9_2": pa.array(random_decimals(generator, 9, 2), pa.decimal128(9, 2)),
            "decimal_18_0": pa.array(random_decimals(generator, 18, 0), pa.decimal128(18, 0)),
            "decimal_19_4": pa.array(random_decimals(generator, 19, 4), pa.decimal128(19, 4)),
            "decimal_38_10": pa.array(random_decimals(generator, 38, 10), pa.decimal128(38, 10)),
            "string": pa.array(texts),
            "binary": pa.array(random_bytes(generator), pa.binary()),
        }
    )


def with_nulls(table: pa.Table) -> pa.Table:
    generator = np.random.default_rng(7)
    rows = np.arange(table.num_rows)
    columns = [
        column.combine_chunks().take(pa.array(rows, mask=generator.random(len(rows)) < 0.3))
        for column in table.columns
    ]
    return pa.table(columns, names=table.column_names)


@pytest.fixture(scope="module")
def hashed(spark: Any) -> tuple[pa.Table, pa.Table]:
    """The keys and what Spark makes of them: one pass for every column and combination."""
    table = key_table()
    return table, hash_in_spark(spark, table)


COMPOSITES = [
    ["bigint", "string"],
    ["string", "bigint"],
    ["string", "binary", "decimal_38_10"],
    ["int", "smallint", "tinyint", "boolean"],
    ["date", "timestamp", "decimal_9_2", "bigint"],
]


def combinations(table: pa.Table) -> list[list[str]]:
    everything = list(table.column_names)
    return [*([name] for name in everything), *COMPOSITES, everything]


def frame_of(spark: Any, table: pa.Table) -> Any:
    # Spark reads every Arrow timestamp as TIMESTAMP; in UTC, this cast keeps the microseconds.
    without_zone = {"timestamp_ntz": "CAST(timestamp_ntz AS TIMESTAMP_NTZ) AS timestamp_ntz"}
    columns = [without_zone.get(name, f"`{name}`") for name in table.column_names]
    return spark.createDataFrame(table).selectExpr(*columns)


def hash_in_spark(spark: Any, table: pa.Table) -> pa.Table:
    frame = frame_of(spark, table)
    wanted = []
    for number, names in enumerate(combinations(table)):
        arguments = ", ".join(f"`{name}`" for name in names)
        wanted.append(f"xxhash64({arguments}) AS hash_{number}")
        wanted.append(f"pmod(xxhash64({arguments}), 7) AS bucket_{number}")
    return frame.selectExpr(*wanted).toArrow()


def columns_of(table: pa.Table, names: list[str]) -> list[pa.Array]:
    return [table[name].combine_chunks() for name in names]


def assert_all_agree(table: pa.Table, expected: pa.Table) -> None:
    for number, names in enumerate(combinations(table)):
        columns = columns_of(table, names)
        assert spark_xxhash64(columns).tolist() == expected[f"hash_{number}"].to_pylist(), names
        assert bucket_of(columns, 7).tolist() == expected[f"bucket_{number}"].to_pylist(), names


def test_keys_of_every_type_and_composites_hash_as_in_spark(
    hashed: tuple[pa.Table, pa.Table],
) -> None:
    table, expected = hashed
    assert_all_agree(table, expected)


def test_nulls_hash_as_in_spark(spark: Any) -> None:
    table = with_nulls(key_table())
    assert_all_agree(table, hash_in_spark(spark, table))


def test_spark_sees_the_types_that_the_columns_are_named_for(spark: Any) -> None:
    """Else the comparison would prove less than it says."""
    for name, kind in frame_of(spark, key_table()).dtypes:
        expected = name if "decimal" not in name else "decimal({1},{2})".format(*name.split("_"))
        assert kind == expected


def test_slices_hash_like_the_whole(hashed: tuple[pa.Table, pa.Table]) -> None:
    table, expected = hashed
    for number, names in enumerate(combinations(table)):
        columns = [column.slice(13, 100) for column in columns_of(table, names)]
        hashes = expected[f"hash_{number}"].slice(13, 100)
        assert spark_xxhash64(columns).tolist() == hashes.to_pylist()
