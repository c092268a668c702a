"""What a write does to a row: partial writes, deletes, and what counts as a change."""

import math

import pyarrow as pa

from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.segment import AggMode
from tests.conftest import BucketFactory, batch, rows_of, schema_of
from tests.support.buckets import delete, put


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


def test_a_value_in_a_column_that_is_not_being_written_is_not_stored(bucket: Bucket) -> None:
    bucket.put(batch(k=[1, 2], a=[1, 2], b=[100, 200]), columns=["a"])
    assert rows_of(bucket) == {1: (1, None), 2: (2, None)}
    bucket.put(batch(k=[1], b=[7]), columns=["b"])
    assert rows_of(bucket)[1] == (1, 7)


def test_an_empty_batch_changes_nothing_and_writes_nothing(bucket: Bucket) -> None:
    put(bucket, k=[1], a=[1])
    end = bucket.end_offset
    empty = batch(k=pa.array([], pa.int64()), a=pa.array([], pa.int64()))
    for mode in AggMode:
        result = bucket.put(empty, mode=mode)
        assert (result.changed, result.base_offset, bucket.end_offset) == (0, end, end)
    assert rows_of(bucket) == {1: (1, None)}


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
    delete(bucket, 3)
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
