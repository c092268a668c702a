"""What a bucket's log tells its readers: segments, change records, and what cleaning keeps."""

from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import OffsetOutOfRange
from foundation.failpoints import arm
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.changelog import change_records, changelog_schema
from merge_engine.bucket.segment import SegmentKind, segment_name
from merge_engine.encoding.stored_rows import SchemaHistory
from tests.conftest import BucketFactory, batch, rows_of, schema_of, undo
from tests.support.buckets import DROPPED, add, delete
from tests.support.faulty_storage import interrupt


def test_reading_the_log_cuts_the_segments_at_the_ends_of_the_range(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1, 2, 3], [1, 2, 3])
    add(bucket, [4, 5], [4, 5])

    def keys(start: int, stop: int | None = None) -> list[list[int]]:
        segments = bucket.read_log(start, stop)
        return [s.keys[1].to_pylist() for s in segments if s.header.kind is SegmentKind.WRITE]

    assert keys(0) == keys(1) == keys(1, 100) == [[1, 2, 3], [4, 5]]
    assert keys(2) == [[2, 3], [4, 5]]
    assert keys(2, 3) == [[2]]
    assert keys(3, 5) == [[3], [4]]
    assert keys(5, 6) == [[5]]
    assert keys(0, 1) == keys(6) == keys(3, 3) == []
    with pytest.raises(OffsetOutOfRange, match=r"offset 7 is not in the log, which has \[0, 6\)"):
        keys(7)
    for segment in bucket.read_log(2, 3):
        [change] = segment.changes.values()
        assert (change.after.to_pylist(), len(change.touched_after)) == ([2], 1)


def records(bucket: Bucket, start: int = 0) -> list[tuple[Any, ...]]:
    """Return change type, offset, owner, changed columns and values of every record."""
    found = []
    for segment in bucket.read_log(start):
        if segment.changes:
            part = change_records(segment, bucket.history, max(start, segment.header.base_offset))
            assert part.schema == changelog_schema(bucket.history.current)
            for row in part.to_pylist():
                kind, offset, _, owner, _, columns, *values = row.values()
                found.append((kind, offset, owner, columns, *values))
    return found


def test_the_changelog_speaks_of_its_owners_columns_only(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(clock_ms=lambda: 1_700_000_000_123)
    add(bucket, [1], [1], owner="me")
    bucket.put(batch(k=[1, 2], b=[10, 20]), owner="you")
    add(bucket, [1], [5], owner="me")
    delete(bucket, 1, columns=["a"], owner="me")
    assert records(bucket) == [
        ("insert", 1, "me", ["a"], 1, 1, None),
        ("insert", 2, "you", ["b"], 1, None, 10),
        ("insert", 3, "you", ["b"], 2, None, 20),
        ("update_preimage", 4, "me", ["a"], 1, 1, None),
        ("update_postimage", 4, "me", ["a"], 1, 6, None),
        ("delete", 5, "me", ["a"], 1, 6, None),
    ]
    [segment] = bucket.read_log(1, 2)
    [stamp] = change_records(segment, bucket.history, 1).column("_commit_timestamp").to_pylist()
    assert stamp.isoformat() == "2023-11-14T22:13:20.123000+00:00"


def test_the_changelog_has_finished_values_and_not_states(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(schema_of(mean=(pa.float64(), "avg")))
    bucket.put(batch(k=[1, 1], mean=[1.0, 2.0]))
    assert records(bucket) == [("insert", 1, "", ["mean"], 1, 1.5)]


def test_the_changelog_from_the_middle_of_a_segment_has_the_right_offsets(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1, 2, 3], [1, 2, 3])
    assert [(row[1], row[4]) for row in records(bucket, 2)] == [(2, 2), (3, 3)]


def test_the_changelog_reads_under_the_current_schema_and_leaves_dropped_columns_out(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1], [1])
    bucket.put(batch(k=[1, 2], a=[2, 2], b=[3, 3]))
    add(bucket, [3], [3])
    bucket.put(batch(k=[1, 2], a=[2, 2], b=[0, 1]))
    delete(bucket, 1, 3)
    bucket.evolve(SchemaHistory(DROPPED))
    assert records(bucket) == [
        ("insert", 2, "", ["b"], 1, 3),
        ("insert", 3, "", ["b"], 2, 3),
        # Key 1, at 5, changed in the dropped column only.
        ("update_preimage", 6, "", ["b"], 2, 3),
        ("update_postimage", 6, "", ["b"], 2, 4),
        # Key 3 never had a column that the table still has, so its delete at 8 is none.
        ("delete", 7, "", ["b"], 1, 3),
    ]


def test_the_changelog_from_an_offset_and_the_table_at_it_add_up(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1, 2, 3], [1, 2, 3])
    at = bucket.end_offset
    rows = {key: value for key, (value, _) in rows_of(bucket).items()}
    add(bucket, [2, 4], [20, 40])
    delete(bucket, 1)
    undo(bucket, "", ["a"], at + 2)
    for kind, _, _, _, key, value, _ in records(bucket, at):
        if kind == "delete":
            del rows[key]
        else:
            rows[key] = value
    assert rows == {key: value for key, (value, _) in rows_of(bucket).items()}


# Cleaning


def test_cleaning_keeps_what_the_view_on_disk_does_not_have_out_of_danger(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1, 2], [1, 2])
    add(bucket, [1], [10])
    assert bucket.clean(2) == 1, "half a segment is not dropped"
    assert bucket.clean(bucket.end_offset) == bucket.end_offset == bucket.start_offset
    copy = bucket_factory(name=bucket_factory.crash(into="copy"))
    assert rows_of(copy) == rows_of(bucket) == {1: (11, None), 2: (2, None)}
    with pytest.raises(OffsetOutOfRange, match=r"has \[4, 4\)"):
        list(bucket.read_log(0))


def test_cleaning_keeps_what_is_younger_than_the_time_to_live(
    bucket_factory: BucketFactory,
) -> None:
    now = 100
    bucket = bucket_factory(clock_ms=lambda: now)
    add(bucket, [1], [1])
    now = 200
    add(bucket, [2], [2])
    assert bucket.clean(bucket.end_offset, older_than_ms=200) == 2
    assert [row[4] for row in records(bucket, 2)] == [2]


def test_a_clean_that_was_killed_between_mark_and_delete_is_harmless(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1], [1])
    with arm("clean.marked", interrupt), pytest.raises(KeyboardInterrupt):
        bucket.clean(bucket.end_offset)
    copy = bucket_factory(name=bucket_factory.crash(into="copy"))
    assert rows_of(copy) == {1: (1, None)}
    copy.clean(2)
    assert segment_name(1) not in bucket_factory.storage("copy").names()
