"""Writes that replace, and writes of states: what they do to the values before them."""

import uuid

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.segment import AggMode
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.merging.batch import read_batch
from merge_engine.merging.fold import fold
from merge_engine.schema.schema import Schema
from tests.conftest import BucketFactory, batch, rows_of, schema_of
from tests.support.buckets import put


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
