"""A bucket whose schema changes: columns that are added, dropped and renamed."""

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from foundation.errors import UnknownColumn, UnknownSchema
from merge_engine.bucket.changelog import change_records
from merge_engine.bucket.database import Database
from merge_engine.bucket.masks import load_mask
from merge_engine.bucket.options import BucketOptions
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.merging.batch import read_batch
from merge_engine.merging.fold import fold
from merge_engine.schema.schema import Schema
from tests.conftest import SUMS, BucketFactory, batch, rows_of, undo
from tests.support.buckets import ADDED, DROPPED, EAGER, RENAMED, add, evolved


def test_a_column_added_between_writes_is_untouched_in_the_rows_before(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1, 2], [1, 2])
    bucket.evolve(SchemaHistory(ADDED))
    assert rows_of(bucket) == {1: (1, None, None), 2: (2, None, None)}
    bucket.put(batch(k=[1, 3], a=[10, 30], c=[5, 6]))
    assert rows_of(bucket) == {1: (11, None, 5), 2: (2, None, None), 3: (30, None, 6)}


def test_a_dropped_column_takes_its_values_and_rows_of_nothing_else_with_it(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1, 2], [1, 2])
    bucket.put(batch(k=[2, 3], b=[20, 30]))
    bucket.evolve(SchemaHistory(DROPPED))
    assert rows_of(bucket) == {2: (20,), 3: (30,)}
    bucket.put(batch(k=[1], b=[10]))
    assert rows_of(bucket) == {1: (10,), 2: (20,), 3: (30,)}
    assert bucket.lookup(batch(k=[2])).to_pylist() == [{"k": 2, "b": 20}]


def test_a_column_dropped_and_added_again_under_its_name_is_a_new_one(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1], [1])
    versions = [*DROPPED, DROPPED[-1].add_column("a", pa.int64(), "sum")]
    bucket.put(batch(k=[1], b=[5]))
    bucket.evolve(SchemaHistory(versions))
    assert rows_of(bucket) == {1: (5, None)}
    add(bucket, [1], [7])
    assert rows_of(bucket) == {1: (5, 7)}


def test_a_renamed_column_keeps_its_values(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    add(bucket, [1], [1])
    bucket.evolve(SchemaHistory(RENAMED))
    bucket.put(batch(k=[1], total=[10]))
    assert bucket.lookup(batch(k=[1])).to_pylist() == [{"k": 1, "total": 11, "b": None}]
    with pytest.raises(UnknownColumn, match="no column 'a'"):
        add(bucket, [1], [1])


def test_a_renamed_key_column_is_still_the_key(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    add(bucket, [1], [1])
    bucket.evolve(SchemaHistory(evolved(lambda schema: schema.rename_column("k", "id"))))
    bucket.put(batch(id=[1, 2], a=[10, 20]))
    assert rows_of(bucket) == {1: (11, None), 2: (20, None)}


def test_rows_of_many_versions_read_as_one_and_are_upgraded_when_written(
    bucket_factory: BucketFactory,
) -> None:
    versions = evolved(
        lambda schema: schema.add_column("c", pa.string(), "string_agg"),
        lambda schema: schema.rename_column("b", "other"),
        lambda schema: schema.drop_column("a"),
    )
    bucket = bucket_factory(options=EAGER)
    bucket.put(batch(k=[1, 4], a=[1, 4], b=[10, 40]))
    bucket.evolve(SchemaHistory(versions[:2]))
    bucket.put(batch(k=[2, 4], b=[20, 400], c=["two", "four"]))
    bucket.evolve(SchemaHistory(versions[:3]))
    bucket.put(batch(k=[3], a=[3], other=[30]))
    bucket.evolve(SchemaHistory(versions))
    expected = {1: (10, None), 2: (20, "two"), 3: (30, None), 4: (440, "four")}
    assert rows_of(bucket) == expected
    keys = bucket.history.row_keys(bucket.history.key_codec.encode([K123]))
    stored = bucket._view._database.get(keys)
    assert [int.from_bytes((value or b"")[:2], "little") for value in stored] == [1, 2, 3]
    bucket.put(batch(k=[1, 2, 3], c=["!", "!", "!"]))
    stored = bucket._view._database.get(keys)
    assert [int.from_bytes((value or b"")[:2], "little") for value in stored] == [4, 4, 4]
    assert rows_of(bucket) == expected | {1: (10, "!"), 2: (20, "two,!"), 3: (30, "!")}


K123 = pa.array([1, 2, 3], pa.int64())


@pytest.mark.parametrize("versions", [ADDED, DROPPED, RENAMED], ids=["added", "dropped", "renamed"])
def test_the_log_of_an_old_schema_is_replayed_under_the_new_one(
    bucket_factory: BucketFactory, versions: list[Schema]
) -> None:
    bucket = bucket_factory()
    add(bucket, [1, 2], [1, 2])
    bucket.put(batch(k=[2, 3], b=[20, 30]))
    bucket_factory.crash(into="copy")
    bucket.evolve(SchemaHistory(versions))
    copy = bucket_factory(versions, name="copy")
    assert rows_of(copy) == rows_of(bucket)
    assert len(rows_of(copy)) == (2 if versions is DROPPED else 3)


def test_undo_ignores_the_changes_of_a_column_that_was_dropped_since(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    bucket.put(batch(k=[1], b=[5]), owner="me")
    start = bucket.end_offset
    bucket.put(batch(k=[1, 2], a=[1, 2], b=[10, 20]), owner="me")
    bucket.put(batch(k=[3], a=[3]), owner="me")
    bucket.evolve(SchemaHistory(DROPPED))
    assert undo(bucket, "me", ["b"], start).changed == 2
    assert rows_of(bucket) == {1: (5,)}


def test_undo_goes_back_over_a_rename_and_an_added_column(bucket_factory: BucketFactory) -> None:
    versions = [*RENAMED, RENAMED[-1].add_column("c", pa.int64(), "sum")]
    bucket = bucket_factory()
    add(bucket, [1], [1], owner="me")
    start = bucket.end_offset
    add(bucket, [1], [10], owner="me")
    bucket.evolve(SchemaHistory(versions))
    bucket.put(batch(k=[1, 2], total=[100, 200], c=[1, 1]), owner="me")
    undo(bucket, "me", ["total", "c"], start)
    assert rows_of(bucket) == {1: (1, None, None)}


def test_a_batch_read_before_its_column_was_dropped_is_refused_by_name(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    rows = read_batch(batch(k=[1], a=[1]), SUMS, BucketOptions())
    update = fold(rows, bucket.history.key_codec)
    bucket.evolve(SchemaHistory(DROPPED))
    with bucket.exclusive(), pytest.raises(UnknownColumn, match="column 'a' was dropped"):
        bucket.plan(update)


# A column that is not known is not a column that was dropped


@pytest.mark.parametrize("written", ["in the log", "in the view"])
def test_what_was_written_under_a_later_schema_is_read_under_it(
    bucket_factory: BucketFactory, written: str
) -> None:
    bucket = bucket_factory(ADDED)
    bucket.put(batch(k=[1, 2], a=[1, 2], c=[10, 20]))
    if written == "in the view":
        bucket.flush()
    bucket_factory.crash(into="copy")
    stale = bucket_factory(SUMS, name="copy", later=ADDED)
    assert stale.history.current == ADDED[-1]
    assert rows_of(stale) == {1: (1, None, 10), 2: (2, None, 20)}


@pytest.mark.parametrize("later", [(), [SUMS]], ids=["no way to ask", "no answer"])
@pytest.mark.parametrize("written", ["in the log", "in the view"])
def test_what_nobody_knows_the_schema_of_is_refused_and_nothing_is_led(
    bucket_factory: BucketFactory, written: str, later: list[Schema]
) -> None:
    bucket = bucket_factory(ADDED)
    bucket.put(batch(k=[1], c=[10]))
    if written == "in the view":
        bucket.flush()
    bucket_factory.crash(into="copy")
    segments = bucket_factory.storage("copy").names()
    for _ in range(3):
        with pytest.raises(UnknownSchema, match=r"schema version 2; the versions known here are"):
            bucket_factory(SUMS, name="copy", later=later)
    assert bucket_factory.storage("copy").names() == segments
    assert rows_of(bucket_factory(ADDED, name="copy")) == {1: (None, None, 10)}


def test_a_put_of_a_column_that_the_bucket_has_not_heard_of_is_written(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory(SUMS, later=ADDED)
    rows = read_batch(batch(k=[1], c=[5]), ADDED[-1], BucketOptions())
    with bucket.exclusive():
        bucket.commit(bucket.plan(fold(rows, bucket.history.key_codec)))
    assert rows_of(bucket) == {1: (None, None, 5)}


def test_masks_and_change_records_of_a_later_schema_are_not_made_under_an_earlier_one(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory(ADDED)
    bucket.put(batch(k=[1], c=[5]))
    [_, segment] = bucket.read_log(0)
    earlier = SchemaHistory([SUMS])
    with pytest.raises(UnknownSchema):
        change_records(segment, earlier, 1)
    with pytest.raises(UnknownSchema):
        load_mask([segment], earlier)


def test_a_look_up_beside_an_alteration_and_a_put_sees_either(
    bucket_factory: BucketFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_factory(options=EAGER)
    add(bucket, [1], [1])
    bucket.close()
    bucket = bucket_factory(options=EAGER)
    real = Database.get
    meanwhile: Iterator[Callable[[], object]] = iter(
        [lambda: bucket.evolve(SchemaHistory(ADDED)), lambda: add(bucket, [1], [1])]
    )

    def read(database: Database, keys: list[bytes]) -> list[bytes | None]:
        for happens in meanwhile:
            happens()
        return real(database, keys)

    monkeypatch.setattr(Database, "get", read)
    assert bucket.lookup(batch(k=[1])).to_pylist() == [{"k": 1, "a": 2, "b": None}]
