"""What a bucket does with writes, modes and undo: the cases that the field's own tests cover."""

import datetime
import math
import uuid
from decimal import Decimal, localcontext
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from merge_engine.batch import read_batch
from merge_engine.bucket import Bucket, PutResult
from merge_engine.errors import InvalidValue, OffsetOutOfRange, Overflow, UnknownColumn
from merge_engine.failpoints import arm
from merge_engine.fold import fold
from merge_engine.hashing import spark_xxhash64
from merge_engine.options import BucketOptions
from merge_engine.schema import Schema
from merge_engine.schema_builder import SchemaBuilder
from merge_engine.segment import AggMode, SegmentKind, Token
from merge_engine.stored import SchemaHistory
from tests.conftest import SUMS, BucketFactory, batch, rows_of, schema_of

INT64_MAX = 2**63 - 1


@pytest.fixture
def bucket(bucket_factory: BucketFactory) -> Bucket:
    """A bucket with the key `k` and the sums `a` and `b`."""
    return bucket_factory(SUMS)


def put(
    bucket: Bucket, *, owner: str = "", mode: AggMode = AggMode.ACCUMULATE, **columns: Any
) -> PutResult:
    return bucket.put(batch(**columns), owner=owner, mode=mode)


def delete(bucket: Bucket, *keys: int, columns: list[str], owner: str = "") -> PutResult:
    data = batch(k=list(keys), op=["delete"] * len(keys))
    return bucket.put(data, columns=columns, operation_column="op", owner=owner)


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


# Merge

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


def test_a_partial_write_leaves_the_other_columns_alone(bucket: Bucket) -> None:
    put(bucket, k=[1], a=[10])
    put(bucket, k=[1, 2], b=[5, 6])
    assert rows_of(bucket) == {1: (10, 5), 2: (None, 6)}


def test_the_order_of_the_columns_in_a_batch_does_not_matter(bucket: Bucket) -> None:
    put(bucket, k=[1], a=[1], b=[10])
    put(bucket, b=[20], a=[2], k=[1])
    bucket.put(batch(b=[40], k=[1], a=[4]), columns=["b", "a"])
    assert rows_of(bucket) == {1: (7, 70)}


def test_the_same_key_twice_in_a_batch_merges_in_the_order_of_the_batch(
    bucket_factory: BucketFactory,
) -> None:
    schema = schema_of(
        total=(pa.int64(), "sum"), last=(pa.int64(), "last_value"), all=(pa.string(), "string_agg")
    )
    bucket = bucket_factory(schema)
    result = put(
        bucket, k=[2, 1, 2, 1], total=[1, 2, 3, 4], last=[1, 2, 3, 4], all=["a", "b", "c", "d"]
    )
    assert rows_of(bucket) == {1: (6, 4, "b,d"), 2: (4, 3, "a,c")}
    assert result.changed == 2


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


def test_a_value_in_a_column_that_is_not_being_written_is_not_stored(bucket: Bucket) -> None:
    bucket.put(batch(k=[1, 2], a=[1, 2], b=[100, 200]), columns=["a"])
    assert rows_of(bucket) == {1: (1, None), 2: (2, None)}
    bucket.put(batch(k=[1], b=[7]), columns=["b"])
    assert rows_of(bucket)[1] == (1, 7)


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


def test_writing_nan_over_nan_is_no_change(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(schema_of(v=(pa.float64(), "last_value")))
    put(bucket, k=[1], v=[math.nan])
    assert put(bucket, k=[1], v=[math.nan]).changed == 0


def test_a_negative_zero_is_a_value_of_its_own_when_it_is_only_kept(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory(schema_of(v=(pa.float64(), "last_value")))
    put(bucket, k=[1], v=[0.0])
    assert put(bucket, k=[1], v=[-0.0]).changed == 1
    assert math.copysign(1, rows_of(bucket)[1][0]) == -1


def test_an_empty_batch_changes_nothing_and_writes_nothing(bucket: Bucket) -> None:
    put(bucket, k=[1], a=[1])
    end = bucket.end_offset
    empty = batch(k=pa.array([], pa.int64()), a=pa.array([], pa.int64()))
    for mode in AggMode:
        result = bucket.put(empty, mode=mode)
        assert (result.changed, result.base_offset, bucket.end_offset) == (0, end, end)
    assert rows_of(bucket) == {1: (1, None)}


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


def test_deleting_some_columns_leaves_the_row_with_the_others(bucket: Bucket) -> None:
    put(bucket, k=[1, 2], a=[1, 2], b=[10, 20])
    delete(bucket, 1, columns=["a"])
    assert rows_of(bucket) == {1: (None, 10), 2: (2, 20)}
    put(bucket, k=[1], a=[5])
    assert rows_of(bucket)[1] == (5, 10), "the deleted value must not come back"


def test_deleting_all_columns_at_once_or_one_by_one_removes_the_row(bucket: Bucket) -> None:
    put(bucket, k=[1, 2, 3], a=[1, 2, 3], b=[10, 20, 30])
    delete(bucket, 1, columns=["a", "b"])
    delete(bucket, 2, columns=["a"])
    delete(bucket, 2, columns=["b"])
    assert rows_of(bucket) == {3: (3, 30)}
    bucket.put(batch(k=[3], op=["delete"]), operation_column="op")
    assert rows_of(bucket) == {}


def test_deleting_a_missing_key_changes_nothing(bucket: Bucket) -> None:
    put(bucket, k=[1], a=[1])
    end = bucket.end_offset
    assert delete(bucket, 1, 2, columns=["b"]).changed == 0
    assert bucket.end_offset == end
    assert rows_of(bucket) == {1: (1, None)}


def test_deletes_and_upserts_of_one_batch_take_effect_in_its_order(bucket: Bucket) -> None:
    put(bucket, k=[1, 2, 3], a=[100, 200, 300])
    result = bucket.put(
        batch(
            k=[1, 1, 1, 2, 2, 3, 4, 4],
            a=[1, 2, 4, 8, 16, 32, 64, 128],
            op=["upsert", "DELETE", "upsert", "delete", "delete", "upsert", "upsert", "delete"],
        ),
        operation_column="op",
    )
    assert rows_of(bucket) == {1: (4, None), 3: (332, None)}
    assert result.changed == 3, "key 4 came and went within the batch"


def test_an_unchanged_row_produces_no_change_record(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(schema_of(hi=(pa.int64(), "max"), total=(pa.int64(), "sum")))
    put(bucket, k=[1, 2, 3], hi=[5, 5, 5], total=[1, 1, 1])
    end = bucket.end_offset
    assert put(bucket, k=[1, 2], hi=[5, 4], total=[0, None]).changed == 0
    assert bucket.end_offset == end
    result = put(bucket, k=[1, 2, 3], hi=[5, 6, 1], total=[0, 0, 0])
    assert result.changed == 1
    [segment] = bucket.read_log(end)
    assert segment.keys[1].to_pylist() == [2]


def test_writing_a_null_to_an_untouched_column_is_a_change_once(bucket: Bucket) -> None:
    put(bucket, k=[1], a=[1])
    null = pa.array([None], pa.int64())
    assert put(bucket, k=[1], b=null).changed == 1
    assert put(bucket, k=[1], b=null).changed == 0
    delete(bucket, 1, columns=["a"])
    assert rows_of(bucket) == {1: (None, None)}, "written as null is not never written"


# Modes


def test_replace_bypasses_merging(bucket: Bucket) -> None:
    put(bucket, k=[1, 2], a=[10, 20], b=[1, 1])
    put(bucket, mode=AggMode.REPLACE, k=[1, 1], a=[99, 3])
    assert rows_of(bucket) == {1: (3, 1), 2: (20, 1)}
    put(bucket, mode=AggMode.REPLACE, k=[1], a=pa.array([None], pa.int64()))
    assert rows_of(bucket)[1] == (None, 1)


def test_accumulate_after_replace_builds_on_the_replaced_value(bucket: Bucket) -> None:
    put(bucket, k=[1], a=[10])
    put(bucket, mode=AggMode.REPLACE, k=[1], a=[3])
    put(bucket, k=[1], a=[4])
    assert rows_of(bucket) == {1: (7, None)}


def test_replace_of_a_new_key_inserts_it(bucket: Bucket) -> None:
    assert put(bucket, mode=AggMode.REPLACE, k=[5], a=[3]).changed == 1
    assert rows_of(bucket) == {5: (3, None)}


def test_replace_takes_states_and_not_raw_values(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(schema_of(n=(pa.int64(), "count")))
    put(bucket, k=[1], n=["x"])
    put(bucket, mode=AggMode.REPLACE, k=[1], n=[41])
    put(bucket, k=[1], n=["y"])
    assert rows_of(bucket) == {1: (42,)}


def test_the_same_values_replaced_again_are_no_change(bucket: Bucket) -> None:
    put(bucket, k=[1], a=[3])
    assert put(bucket, mode=AggMode.REPLACE, k=[1], a=[3]).changed == 0


EVERYTHING = schema_of(
    total=(pa.int64(), "sum"),
    mean=(pa.float64(), "avg"),
    n=(pa.int64(), "count"),
    hi=(pa.int64(), "max"),
    first=(pa.int64(), "first_value"),
    last=(pa.int64(), "last_value"),
    all=(pa.list_(pa.int64()), "array_agg"),
    seen=(pa.int64(), "rbm64"),
)
VALUE_NAMES = [column.name for column in EVERYTHING.value_columns]
ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.none() | st.integers(0, 100)), min_size=1, max_size=12
)


def as_batch(rows: list[tuple[int, int | None]]) -> pa.RecordBatch:
    values = pa.array([value for _, value in rows], pa.int64())
    return batch(k=[key for key, _ in rows], **dict.fromkeys(VALUE_NAMES, values))


def folded(schema: Schema, data: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch aggregated locally: one row of states per key."""
    codec = SchemaHistory([schema]).key_codec
    update = fold(read_batch(data, schema, BucketOptions()), codec)
    names = [*update.key_names, *(column.name for column in update.columns)]
    return pa.RecordBatch.from_arrays([*update.keys, *update.states], names=names)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=ROWS, parts=st.lists(ROWS, min_size=1, max_size=4))
def test_merge_state_of_folded_batches_equals_accumulate_of_the_rows_for_any_split(
    bucket_factory: BucketFactory,
    before: list[tuple[int, int | None]],
    parts: list[list[tuple[int, int | None]]],
) -> None:
    run = uuid.uuid4().hex
    raw = bucket_factory(EVERYTHING, name=f"raw-{run}")
    partial = bucket_factory(EVERYTHING, name=f"partial-{run}")
    for bucket in (raw, partial):
        bucket.put(as_batch(before))
    raw.put(as_batch([row for part in parts for row in part]))
    for part in parts:
        partial.put(folded(EVERYTHING, as_batch(part)), mode=AggMode.MERGE_STATE)
    assert rows_of(partial) == rows_of(raw)
    raw.close()
    partial.close()


# Undo


def test_undo_of_an_insert_the_row_is_gone(bucket: Bucket) -> None:
    start = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[1])
    assert bucket.undo("me", ["a"], start).changed == 1
    assert rows_of(bucket) == {}


def test_undo_of_an_update_the_old_value_is_back(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[5])
    start = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[10])
    bucket.undo("me", ["a"], start)
    assert rows_of(bucket) == {1: (5, None)}
    put(bucket, owner="me", k=[1], a=[1])
    assert rows_of(bucket) == {1: (6, None)}


def test_undo_of_a_delete_the_row_is_back(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1, 2], a=[5, 6], b=[7, 8])
    start = bucket.end_offset
    delete(bucket, 1, columns=["a", "b"], owner="me")
    bucket.undo("me", ["a", "b"], start)
    assert rows_of(bucket) == {1: (5, 7), 2: (6, 8)}


def test_undo_of_a_first_null_the_column_is_untouched_again(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory(schema_of(v=(pa.int64(), "first_value"), n=(pa.int64(), "count")))
    put(bucket, owner="other", k=[1], n=[1])
    start = bucket.end_offset
    put(bucket, owner="me", k=[1], v=pa.array([None], pa.int64()))
    bucket.undo("me", ["v"], start)
    put(bucket, owner="me", k=[1], v=[9])
    assert rows_of(bucket) == {1: (9, 1)}


def test_undo_of_several_changes_of_a_key_takes_the_first_before_image(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    start = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[10])
    put(bucket, owner="me", k=[1], b=[3])
    delete(bucket, 1, columns=["a", "b"], owner="me")
    put(bucket, owner="me", k=[1], a=[100], b=[4])
    assert bucket.undo("me", ["a", "b"], start).changed == 1
    assert rows_of(bucket) == {1: (1, None)}


def test_undo_begins_at_its_offset_and_not_before(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1, 2], a=[1, 2])
    put(bucket, owner="me", k=[1], a=[10])
    start = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[100])
    bucket.undo("me", ["a"], start)
    assert rows_of(bucket) == {1: (11, None), 2: (2, None)}


def test_undo_of_a_range_without_changes_of_ours_writes_nothing(bucket: Bucket) -> None:
    put(bucket, owner="other", k=[1], a=[1])
    end = bucket.end_offset
    for offset in (0, end):
        result = bucket.undo("me", ["a", "b"], offset)
        assert (result.changed, bucket.end_offset) == (0, end)


def test_undo_twice_is_the_same_table_and_writes_nothing_more(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1, 2], a=[1, 2])
    start = bucket.end_offset
    put(bucket, owner="me", k=[2, 3], a=[20, 30])
    bucket.undo("me", ["a"], start)
    rows, end = rows_of(bucket), bucket.end_offset
    assert bucket.undo("me", ["a"], start).changed == 0
    assert (rows_of(bucket), bucket.end_offset) == (rows, end)
    assert rows == {1: (1, None), 2: (2, None)}


def test_undo_leaves_other_owners_columns_rows_and_deletes(bucket: Bucket) -> None:
    put(bucket, owner="other", k=[1, 4], b=[1, 1])
    start = bucket.end_offset
    put(bucket, owner="me", k=[1, 2, 4], a=[1, 2, 4])
    put(bucket, owner="other", k=[2, 3], b=[20, 30])
    put(bucket, owner="me", k=[1], a=[5])
    delete(bucket, 4, columns=["b"], owner="other")
    bucket.undo("me", ["a"], start)
    assert rows_of(bucket) == {1: (None, 1), 2: (None, 20), 3: (None, 30)}


def test_undo_touches_the_named_columns_only(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1], b=[10])
    bucket.undo("me", ["b"], 0)
    assert rows_of(bucket) == {1: (1, None)}


def test_an_undo_is_logged_with_its_debtor_and_the_offset_it_undoes_from(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    result = bucket.undo("me", ["a"], 1)
    [segment] = bucket.read_log(result.base_offset)
    header = segment.header
    assert (header.kind, header.owner, header.undo_from) == (SegmentKind.UNDO, "me", 1)
    assert (header.agg_mode, header.token) == (AggMode.REPLACE, None)


@pytest.mark.parametrize("offset", [-1, 3, 1000])
def test_undo_from_an_offset_ahead_of_the_log_is_an_error_and_changes_nothing(
    bucket: Bucket, offset: int
) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    with pytest.raises(OffsetOutOfRange, match=rf"offset {offset}: the log ends at 2; .*another"):
        bucket.undo("me", ["a"], offset)
    assert (rows_of(bucket), bucket.end_offset) == ({1: (1, None)}, 2)


def test_undo_of_an_unknown_column_is_an_error(bucket: Bucket) -> None:
    with pytest.raises(UnknownColumn, match="no column 'aa'"):
        bucket.undo("me", ["aa"], 0)


TINY_UNDO = BucketOptions(undo_max_bytes=200)


def write_many(bucket: Bucket) -> int:
    """Write a committed state and then a tail of many keys and columns; return where it begins."""
    keys = list(range(60))
    put(bucket, owner="me", k=keys[::2], a=keys[::2])
    put(bucket, owner="other", k=keys, b=keys)
    start = bucket.end_offset
    put(bucket, owner="me", k=keys, a=keys)
    delete(bucket, *keys[::3], columns=["a"], owner="me")
    put(bucket, owner="me", k=keys[::5], a=keys[::5])
    return start


def test_an_undo_of_several_passes_gives_the_same_table_as_one_of_one_pass(
    bucket_factory: BucketFactory,
) -> None:
    whole = bucket_factory(name="whole")
    tiny = bucket_factory(name="tiny", options=TINY_UNDO)
    expected = {key: (key if key % 2 == 0 else None, key) for key in range(60)}
    for bucket in (whole, tiny):
        start = write_many(bucket)
        bucket.undo("me", ["a"], start)
        assert rows_of(bucket) == expected
    kinds = [segment.header.kind for segment in tiny.read_log(0)]
    assert kinds.count(SegmentKind.UNDO) > 3
    assert [s.header.kind for s in whole.read_log(0)].count(SegmentKind.UNDO) == 1
    assert tiny.undo("me", ["a"], start).changed == 0


def test_an_undo_of_more_than_the_limit_in_one_key_comes_to_an_end(
    bucket_factory: BucketFactory,
) -> None:
    schema = schema_of(text=(pa.string(), "last_value"))
    bucket = bucket_factory(schema, options=BucketOptions(undo_max_bytes=10))
    put(bucket, owner="me", k=[1, 2], text=["x" * 1000, "y" * 1000])
    start = bucket.end_offset
    put(bucket, owner="me", k=[1, 2], text=["-", "-"])
    bucket.undo("me", ["text"], start)
    assert rows_of(bucket) == {1: ("x" * 1000,), 2: ("y" * 1000,)}


def test_keys_that_no_hash_can_tell_apart_are_undone_together(
    bucket_factory: BucketFactory,
) -> None:
    # The bits of their hashes that undo splits the keys by are the same.
    hashes: dict[int, int] = {}
    keys = pa.array(range(20_000), pa.int64())
    pair: tuple[int, int] | None = None
    for key, value in enumerate(spark_xxhash64([keys]).view("u8") >> 40):
        if int(value) in hashes:
            pair = (hashes[int(value)], key)
            break
        hashes[int(value)] = key
    assert pair is not None
    bucket = bucket_factory(options=BucketOptions(undo_max_bytes=1))
    put(bucket, owner="me", k=list(pair), a=[1, 2])
    assert bucket.undo("me", ["a"], 0).changed == 2
    assert rows_of(bucket) == {}


def test_an_undo_that_failed_in_the_middle_is_finished_by_doing_it_again(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory(options=TINY_UNDO)
    start = write_many(bucket)
    passes = 0

    def fail_in_the_third() -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise KeyboardInterrupt

    with arm("undo.planned", fail_in_the_third), pytest.raises(KeyboardInterrupt):
        bucket.undo("me", ["a"], start)
    expected = {key: (key if key % 2 == 0 else None, key) for key in range(60)}
    assert rows_of(bucket) != expected
    bucket.close()
    bucket = bucket_factory(options=TINY_UNDO)
    bucket.undo("me", ["a"], start)
    assert rows_of(bucket) == expected


def test_where_the_log_was_cleaned_undo_begins_at_its_start(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    kept = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[10])
    assert bucket.clean(kept) == kept
    bucket.undo("me", ["a"], 0)
    assert rows_of(bucket) == {1: (1, None)}


def test_an_undo_can_be_undone_by_nobody_else(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    start = bucket.end_offset
    bucket.undo("me", ["a"], 0)
    bucket.undo("other", ["a"], start)
    assert rows_of(bucket) == {}


def test_the_same_batch_written_again_after_an_undo_has_a_token_of_its_own(
    bucket: Bucket,
) -> None:
    data = batch(k=[1], a=[1])
    bucket.put(data, owner="me", token=Token(1, 7))
    bucket.undo("me", ["a"], 0)
    assert not bucket.put(data, owner="me", token=Token(2, 7)).repeated
    assert rows_of(bucket) == {1: (1, None)}
