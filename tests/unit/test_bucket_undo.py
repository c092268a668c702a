"""Undo: what an owner wrote from an offset on is taken back, and nothing else."""

import threading

import pyarrow as pa
import pytest

from foundation.errors import OffsetOutOfRange, UnknownColumn
from foundation.failpoints import arm
from foundation.ids import Token
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.segment import AggMode, SegmentKind
from merge_engine.encoding.stored_rows import SchemaHistory
from tests.conftest import SUMS, BucketFactory, batch, rows_of, schema_of, undo
from tests.support.buckets import delete, put


def test_undo_of_an_insert_the_row_is_gone(bucket: Bucket) -> None:
    start = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[1])
    assert undo(bucket, "me", ["a"], start).changed == 1
    assert rows_of(bucket) == {}


def test_undo_of_an_update_the_old_value_is_back(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[5])
    start = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[10])
    undo(bucket, "me", ["a"], start)
    assert rows_of(bucket) == {1: (5, None)}
    put(bucket, owner="me", k=[1], a=[1])
    assert rows_of(bucket) == {1: (6, None)}


def test_undo_of_a_delete_the_row_is_back(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1, 2], a=[5, 6], b=[7, 8])
    start = bucket.end_offset
    delete(bucket, 1, columns=["a", "b"], owner="me")
    undo(bucket, "me", ["a", "b"], start)
    assert rows_of(bucket) == {1: (5, 7), 2: (6, 8)}


def test_undo_of_a_first_null_the_column_is_untouched_again(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory(schema_of(v=(pa.int64(), "first_value"), n=(pa.int64(), "count")))
    put(bucket, owner="other", k=[1], n=[1])
    start = bucket.end_offset
    put(bucket, owner="me", k=[1], v=pa.array([None], pa.int64()))
    undo(bucket, "me", ["v"], start)
    put(bucket, owner="me", k=[1], v=[9])
    assert rows_of(bucket) == {1: (9, 1)}


def test_undo_of_several_changes_of_a_key_takes_the_first_before_image(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    start = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[10])
    put(bucket, owner="me", k=[1], b=[3])
    delete(bucket, 1, columns=["a", "b"], owner="me")
    put(bucket, owner="me", k=[1], a=[100], b=[4])
    assert undo(bucket, "me", ["a", "b"], start).changed == 1
    assert rows_of(bucket) == {1: (1, None)}


def test_undo_begins_at_its_offset_and_not_before(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1, 2], a=[1, 2])
    put(bucket, owner="me", k=[1], a=[10])
    start = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[100])
    undo(bucket, "me", ["a"], start)
    assert rows_of(bucket) == {1: (11, None), 2: (2, None)}


def test_undo_of_a_range_without_changes_of_ours_writes_nothing(bucket: Bucket) -> None:
    put(bucket, owner="other", k=[1], a=[1])
    end = bucket.end_offset
    for offset in (0, end):
        result = undo(bucket, "me", ["a", "b"], offset)
        assert (result.changed, bucket.end_offset) == (0, end)


def test_undo_twice_is_the_same_table_and_writes_nothing_more(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1, 2], a=[1, 2])
    start = bucket.end_offset
    put(bucket, owner="me", k=[2, 3], a=[20, 30])
    undo(bucket, "me", ["a"], start)
    rows, end = rows_of(bucket), bucket.end_offset
    assert undo(bucket, "me", ["a"], start).changed == 0
    assert (rows_of(bucket), bucket.end_offset) == (rows, end)
    assert rows == {1: (1, None), 2: (2, None)}


def test_undo_leaves_other_owners_columns_rows_and_deletes(bucket: Bucket) -> None:
    put(bucket, owner="other", k=[1, 4], b=[1, 1])
    start = bucket.end_offset
    put(bucket, owner="me", k=[1, 2, 4], a=[1, 2, 4])
    put(bucket, owner="other", k=[2, 3], b=[20, 30])
    put(bucket, owner="me", k=[1], a=[5])
    delete(bucket, 4, columns=["b"], owner="other")
    undo(bucket, "me", ["a"], start)
    assert rows_of(bucket) == {1: (None, 1), 2: (None, 20), 3: (None, 30)}


def test_undo_touches_the_named_columns_only(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1], b=[10])
    undo(bucket, "me", ["b"], 0)
    assert rows_of(bucket) == {1: (1, None)}


def test_an_undo_is_logged_with_its_debtor_and_the_offset_it_undoes_from(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    result = undo(bucket, "me", ["a"], 1)
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
        undo(bucket, "me", ["a"], offset)
    assert (rows_of(bucket), bucket.end_offset) == ({1: (1, None)}, 2)


def test_undo_of_an_unknown_column_is_an_error(bucket: Bucket) -> None:
    with pytest.raises(UnknownColumn, match="no column 'aa'"):
        undo(bucket, "me", ["aa"], 0)


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
        undo(bucket, "me", ["a"], start)
        assert rows_of(bucket) == expected
    kinds = [segment.header.kind for segment in tiny.read_log(0)]
    assert kinds.count(SegmentKind.UNDO) == 3, "one for each batch"
    assert [s.header.kind for s in whole.read_log(0)].count(SegmentKind.UNDO) == 1
    assert undo(tiny, "me", ["a"], start).changed == 0


def test_a_step_of_an_undo_has_so_many_rows_at_most(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(options=BucketOptions(undo_max_rows=25))
    start = bucket.end_offset
    for key in range(5):
        put(bucket, owner="me", k=list(range(key, key + 10)), a=[1] * 10)
    undo(bucket, "me", ["a"], start)
    assert rows_of(bucket) == {}
    undos = [one for one in bucket.headers(start) if one.kind is SegmentKind.UNDO]
    assert [one.rows for one in undos] == [11, 11, 10], "two batches each, and one"


def test_an_undo_of_more_than_the_limit_in_one_key_comes_to_an_end(
    bucket_factory: BucketFactory,
) -> None:
    schema = schema_of(text=(pa.string(), "last_value"))
    bucket = bucket_factory(schema, options=BucketOptions(undo_max_bytes=10))
    put(bucket, owner="me", k=[1, 2], text=["x" * 1000, "y" * 1000])
    start = bucket.end_offset
    put(bucket, owner="me", k=[1, 2], text=["-", "-"])
    undo(bucket, "me", ["text"], start)
    assert rows_of(bucket) == {1: ("x" * 1000,), 2: ("y" * 1000,)}


def test_an_undo_that_was_cut_off_is_not_itself_undone_by_the_next(
    bucket_factory: BucketFactory,
) -> None:
    """Else the next one would first write again what the last one has taken back."""
    bucket = bucket_factory(options=TINY_UNDO)
    start = write_many(bucket)

    def fail() -> None:
        raise KeyboardInterrupt

    steps = 0
    with arm("put.applied", fail), pytest.raises(KeyboardInterrupt):
        undo(bucket, "me", ["a"], start)
    expected = {key: (key if key % 2 == 0 else None, key) for key in range(60)}
    again = bucket.end_offset
    undo(bucket, "me", ["a"], start)
    assert rows_of(bucket) == expected
    for segment in bucket.read_log(again):
        steps += 1
        for change in segment.changes.values():
            assert not change.after.equals(change.before)
    written = sum(segment.header.rows for segment in bucket.read_log(start, again))
    assert bucket.end_offset - again <= written
    assert steps


def test_an_undo_of_one_column_leaves_the_other_to_be_undone(bucket: Bucket) -> None:
    start = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[5], b=[6])
    undo(bucket, "me", ["a"], start)
    assert rows_of(bucket) == {1: (None, 6)}
    undo(bucket, "me", ["b"], start)
    assert rows_of(bucket) == {}


def test_an_undo_of_an_undo_that_goes_back_further_than_it(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[5])
    middle = bucket.end_offset
    undo(bucket, "me", ["a"], 0)
    put(bucket, owner="me", k=[1], a=[7])
    undo(bucket, "me", ["a"], middle)
    assert rows_of(bucket) == {1: (5, None)}, "that is where it was at that offset"


def test_others_write_between_the_steps_of_an_undo(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(options=TINY_UNDO)
    start = write_many(bucket)
    steps: list[threading.Thread] = []

    def beside() -> None:
        if len(steps) < 50:
            thread = threading.Thread(target=lambda: put(bucket, owner="other", k=[1000], b=[1]))
            thread.start()
            steps.append(thread)

    with arm("undo.planned", beside):
        undone = undo(bucket, "me", ["a"], start)
    for thread in steps:
        thread.join()
    found = rows_of(bucket)
    assert found.pop(1000) == (None, len(steps))
    assert found == {key: (key if key % 2 == 0 else None, key) for key in range(60)}
    owners = [segment.header.owner for segment in bucket.read_log(undone.base_offset)]
    last_step = len(owners) - 1 - owners[::-1].index("me")
    assert "other" in owners[:last_step], "one of them came in between"


def test_a_column_that_is_dropped_between_the_steps_of_an_undo_is_left_out(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory(options=TINY_UNDO)
    put(bucket, owner="me", k=list(range(60)), a=[1] * 60, b=[1] * 60)
    start = bucket.end_offset
    for _ in range(3):
        put(bucket, owner="me", k=list(range(60)), a=[1] * 60, b=[1] * 60)
    dropped = SUMS.drop_column("b")

    def drop() -> None:
        bucket.evolve(SchemaHistory([SUMS, dropped]))

    with arm("put.applied", drop):
        undo(bucket, "me", ["a", "b"], start)
    assert rows_of(bucket) == dict.fromkeys(range(60), (1,))


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
        undo(bucket, "me", ["a"], start)
    expected = {key: (key if key % 2 == 0 else None, key) for key in range(60)}
    assert rows_of(bucket) != expected
    bucket.close()
    bucket = bucket_factory(options=TINY_UNDO)
    undo(bucket, "me", ["a"], start)
    assert rows_of(bucket) == expected


def test_where_the_log_was_cleaned_undo_begins_at_its_start(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    kept = bucket.end_offset
    put(bucket, owner="me", k=[1], a=[10])
    assert bucket.clean(kept) == kept
    undo(bucket, "me", ["a"], 0)
    assert rows_of(bucket) == {1: (1, None)}


def test_an_undo_can_be_undone_by_nobody_else(bucket: Bucket) -> None:
    put(bucket, owner="me", k=[1], a=[1])
    start = bucket.end_offset
    undo(bucket, "me", ["a"], 0)
    undo(bucket, "other", ["a"], start)
    assert rows_of(bucket) == {}


def test_the_same_batch_written_again_after_an_undo_has_a_token_of_its_own(
    bucket: Bucket,
) -> None:
    data = batch(k=[1], a=[1])
    bucket.put(data, owner="me", token=Token(1, 7))
    undo(bucket, "me", ["a"], 0)
    assert not bucket.put(data, owner="me", token=Token(2, 7)).repeated
    assert rows_of(bucket) == {1: (1, None)}
