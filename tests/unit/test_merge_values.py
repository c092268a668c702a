"""What a bucket makes of two values: every type, nulls, NaN, overflow, damaged states."""

import datetime
import math
from decimal import Decimal, localcontext
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import InvalidValue, Overflow
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.segment import AggMode
from merge_engine.encoding.keys import KeyCodec
from merge_engine.schema.builder import SchemaBuilder
from tests.conftest import BucketFactory, batch, rows_of, schema_of
from tests.support.buckets import put

INT64_MAX = 2**63 - 1


def merged(
    bucket_factory: BucketFactory, column: tuple[pa.DataType, str], *writes: list[Any]
) -> Any:
    """Return what key 1 holds after these writes, each a batch of values."""
    bucket = bucket_factory(schema_of(v=column))
    for values in writes:
        bucket.put(batch(k=[1] * len(values), v=pa.array(values, bucket_input(bucket))))
    return rows_of(bucket)[1][0]


def bucket_input(bucket: Bucket) -> pa.DataType:
    return bucket.history.current.column("v").input_type


ORDERED: list[tuple[pa.DataType, Any, Any]] = [
    (pa.bool_(), False, True),
    (pa.int8(), -128, 127),
    (pa.int16(), -5, 300),
    (pa.int32(), -5, 70_000),
    (pa.int64(), -(2**63), INT64_MAX),
    (pa.float32(), -1.5, 2.25),
    (pa.float64(), -1e300, 1e300),
    (pa.decimal128(38, 4), Decimal("-1.2345"), Decimal("9" * 34 + ".0001")),
    (pa.string(), "a", "ä"),
    (pa.binary(), b"\x00", b"\xff"),
    (pa.date32(), datetime.date(1969, 12, 31), datetime.date(2026, 1, 1)),
    (pa.timestamp("us"), datetime.datetime(1, 1, 1), datetime.datetime(2026, 1, 1)),
]
NESTED: list[tuple[pa.DataType, Any, Any]] = [
    (pa.list_(pa.int64()), [], [1, None]),
    (pa.map_(pa.string(), pa.int64()), [("a", 1)], []),
    (pa.struct([("x", pa.int64())]), {"x": None}, {"x": 1}),
]
TYPES = [pytest.param(*case, id=str(case[0])) for case in ORDERED]
ALL_TYPES = [pytest.param(*case, id=str(case[0])) for case in [*ORDERED, *NESTED]]


@pytest.mark.parametrize(("data_type", "low", "high"), TYPES)
def test_min_and_max_keep_the_extreme_of_every_type_and_skip_nulls(
    bucket_factory: BucketFactory, data_type: pa.DataType, low: Any, high: Any
) -> None:
    bucket = bucket_factory(schema_of(least=(data_type, "min"), most=(data_type, "max")))
    for values in ([low, high], [high, None], [None, low], [None, None]):
        array = pa.array(values, data_type)
        bucket.put(batch(k=[1, 2], least=array, most=array))
    assert rows_of(bucket) == {1: (low, high), 2: (low, high)}


@pytest.mark.parametrize(("data_type", "older", "newer"), ALL_TYPES)
def test_first_and_last_keep_values_of_every_type(
    bucket_factory: BucketFactory, data_type: pa.DataType, older: Any, newer: Any
) -> None:
    functions = ["first_value", "last_value", "first_value_ignore_nulls", "last_value_ignore_nulls"]
    bucket = bucket_factory(schema_of(**{name: (data_type, name) for name in functions}))
    for values in ([None, older], [older, newer], [newer, None]):
        array = pa.array(values, data_type)
        bucket.put(batch(k=[1, 2], **dict.fromkeys(functions, array)))
    assert rows_of(bucket) == {1: (None, newer, older, newer), 2: (older, None, older, newer)}


@pytest.mark.parametrize(
    ("data_type", "values", "total"),
    [
        (pa.int8(), [100, 27], 127),
        (pa.int16(), [-32768], -32768),
        (pa.int32(), [2**31 - 2, 1], 2**31 - 1),
        (pa.int64(), [INT64_MAX, -1], INT64_MAX - 1),
        (pa.float32(), [0.5, 0.25], 0.75),
        (pa.float64(), [1e300, 1e300], 2e300),
        (pa.decimal128(38, 2), [Decimal("0.10"), Decimal("0.20")], Decimal("0.30")),
    ],
)
def test_sum_adds_every_type_of_number(
    bucket_factory: BucketFactory, data_type: pa.DataType, values: list[Any], total: Any
) -> None:
    one_by_one = [[value] for value in [None, *values, None]]
    assert merged(bucket_factory, (data_type, "sum"), *one_by_one) == total


@pytest.mark.parametrize(
    ("writes", "total"),
    [
        ([[None], [5]], 5),
        ([[5], [None]], 5),
        ([[None], [None]], None),
        ([[None, 5]], 5),
        ([[0], [None]], 0),
    ],
)
def test_a_null_on_either_side_of_a_sum_is_skipped(
    bucket_factory: BucketFactory, writes: list[list[int | None]], total: int | None
) -> None:
    assert merged(bucket_factory, (pa.int64(), "sum"), *writes) == total


@pytest.mark.parametrize(
    ("data_type", "function", "value", "first"),
    [
        (pa.int64(), "count", 99, 1),
        (pa.int64(), "count", None, 0),
        (pa.float64(), "avg", 3.0, 3.0),
        (pa.list_(pa.string()), "array_agg", "x", ["x"]),
        (pa.list_(pa.string()), "collect_set", "x", ["x"]),
        (pa.string(), "string_agg", None, None),
        (pa.int64(), "rbm32", 7, 1),
        (pa.int64(), "hll_sketch", 7, 1),
    ],
)
def test_the_first_write_of_a_key_goes_through_the_function_too(
    bucket_factory: BucketFactory, data_type: pa.DataType, function: str, value: Any, first: Any
) -> None:
    bucket = bucket_factory(schema_of(v=(data_type, function)))
    kind = bucket_input(bucket) or pa.int64()
    bucket.put(batch(k=[1], v=pa.array([value], kind)))
    assert rows_of(bucket) == {1: (first,)}


@pytest.mark.parametrize(
    ("data_type", "most", "one"),
    [
        (pa.int8(), 127, 1),
        (pa.int64(), INT64_MAX, 1),
        (pa.int64(), -(2**63), -1),
        (pa.decimal128(5, 2), Decimal("999.99"), Decimal("0.01")),
        (pa.decimal128(38, 0), Decimal("9" * 38), Decimal(1)),
    ],
)
def test_a_sum_that_overflows_is_an_error_that_names_column_and_key_and_changes_nothing(
    bucket_factory: BucketFactory, data_type: pa.DataType, most: Any, one: Any
) -> None:
    bucket = bucket_factory(schema_of(v=(data_type, "sum")))
    bucket.put(batch(k=[1, 7], v=pa.array([one, most], data_type)))
    end = bucket.end_offset
    stored = pa.array([one, one], data_type)
    with pytest.raises(Overflow, match=r"column 'v', key k=7: .*nothing was written"):
        bucket.put(batch(k=[1, 7], v=stored))
    within = pa.array([one, most, one], data_type)
    with pytest.raises(Overflow, match=r"column 'v', key k=8: .*nothing was written"):
        bucket.put(batch(k=[9, 8, 8], v=within))
    assert rows_of(bucket) == {1: (one,), 7: (most,)}
    assert bucket.end_offset == end
    bucket.put(batch(k=[7], v=pa.array([-one], data_type)))
    with localcontext(prec=50):
        assert rows_of(bucket)[7] == (most - one,)


def test_nan_is_the_greatest_number_and_poisons_a_sum_as_in_spark(
    bucket_factory: BucketFactory,
) -> None:
    kind = pa.float64()
    bucket = bucket_factory(schema_of(lo=(kind, "min"), hi=(kind, "max"), total=(kind, "sum")))
    for value in (1.0, math.nan, math.inf):
        put(bucket, k=[1], lo=[value], hi=[value], total=[value])
    lo, hi, total = rows_of(bucket)[1]
    assert lo == 1.0
    assert math.isnan(hi)
    assert math.isnan(total)


def test_an_empty_string_is_a_value_and_not_a_null(bucket_factory: BucketFactory) -> None:
    kind = pa.string()
    bucket = bucket_factory(
        schema_of(
            hi=(kind, "max"), last=(kind, "last_value_ignore_nulls"), all=(kind, "string_agg")
        )
    )
    for value in ("", None, ""):
        column = pa.array([value], kind)
        put(bucket, k=[1], hi=column, last=column, all=column)
    assert rows_of(bucket) == {1: ("", "", ",")}


def test_a_delimiter_stands_between_values_of_one_batch_and_of_several(
    bucket_factory: BucketFactory,
) -> None:
    schema = (
        SchemaBuilder()
        .column("k", pa.int64())
        .agg_column("tags", pa.string(), "string_agg", delimiter=" | ")
        .primary_key("k")
        .build()
    )
    bucket = bucket_factory(schema)
    put(bucket, k=[1, 1], tags=["a", "b"])
    put(bucket, k=[1], tags=pa.array([None], pa.string()))
    put(bucket, k=[1, 1], tags=["c", " | "])
    assert rows_of(bucket) == {1: ("a | b | c |  | ",)}


@pytest.mark.parametrize("function", ["rbm32", "rbm64", "hll_sketch", "theta_sketch"])
@pytest.mark.parametrize("mode", [AggMode.REPLACE, AggMode.MERGE_STATE])
def test_corrupt_bytes_of_a_bitmap_or_sketch_are_refused_with_column_and_key(
    bucket_factory: BucketFactory, function: str, mode: AggMode
) -> None:
    bucket = bucket_factory(schema_of(v=(pa.int64(), function)))
    put(bucket, k=[1], v=[5])
    state = next(bucket.read_log(1)).changes[2].after[0].as_py()
    put(bucket, mode=mode, k=[1, 3], v=[state, state])
    before = (rows_of(bucket), bucket.end_offset)
    for corrupt in (b"", b"garbage", state[:-1]):
        with pytest.raises(InvalidValue, match=r"column 'v', key k=2: .*nothing was written"):
            put(bucket, mode=mode, k=[1, 2], v=[state, corrupt])
    assert (rows_of(bucket), bucket.end_offset) == before


def test_a_null_first_value_stays_first(bucket_factory: BucketFactory) -> None:
    assert merged(bucket_factory, (pa.int64(), "first_value"), [None], [5]) is None


def test_all_keys_that_a_merge_refuses_are_told_each_with_its_column(
    bucket_factory: BucketFactory,
) -> None:
    sums = (pa.int64(), "sum")
    bucket = bucket_factory(schema_of(a=sums, b=sums))
    keys = list(range(500))
    bucket.put(batch(k=keys, a=[INT64_MAX] * 500, b=[INT64_MAX] * 500))
    before = bucket.end_offset
    a = [int(key % 100 == 0) for key in keys]
    b = [int(key % 70 == 0) for key in keys]
    with pytest.raises(Overflow, match=r"^column 'a', key k=0: .*nothing was written") as refused:
        bucket.put(batch(k=keys, a=a, b=b))
    told = refused.value.refused
    codec = KeyCodec([pa.int64()])
    assert refused.value.encoded_key in told
    assert {
        codec.decode(pa.array([key], pa.binary()))[0][0].as_py(): why.partition(",")[0]
        for key, why in told.items()
    } == {
        **{key: "column 'b'" for key in keys if key % 70 == 0},
        **{key: "column 'a'" for key in keys if key % 100 == 0},
    }
    assert bucket.end_offset == before


@pytest.mark.parametrize("shuffled", [False, True])
def test_all_keys_that_a_fold_refuses_are_told(
    bucket_factory: BucketFactory, shuffled: bool
) -> None:
    bucket = bucket_factory(schema_of(a=(pa.int64(), "sum"), c=(pa.int64(), "count")))
    keys = [key for key in range(300) for _ in range(2)]
    if shuffled:
        keys = keys[1::2] + keys[::2]
    a = [INT64_MAX if key % 50 == 0 else 1 for key in keys]
    before = bucket.end_offset
    with pytest.raises(Overflow, match=r"^column 'a', key k=0: .*nothing was written") as refused:
        bucket.put(batch(k=keys, a=a, c=a))
    codec = KeyCodec([pa.int64()])
    told = pa.array(refused.value.refused, pa.binary())
    assert codec.decode(told)[0].to_pylist() == list(range(0, 300, 50))
    assert bucket.end_offset == before
