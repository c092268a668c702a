"""A bucket over time: tokens, reopening, crashes, doubt, evolution, scans, changelog, retention."""

import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from merge_engine.batch import read_batch
from merge_engine.bucket import Bucket
from merge_engine.changelog import change_records, changelog_schema
from merge_engine.errors import (
    CorruptView,
    Deposed,
    InUse,
    InvalidInput,
    LogGap,
    OffsetOutOfRange,
    StorageFull,
    StorageUnavailable,
    UnknownColumn,
    UnknownOutcome,
)
from merge_engine.failpoints import arm
from merge_engine.fold import fold
from merge_engine.options import BucketOptions
from merge_engine.schema import Schema
from merge_engine.segment import SegmentKind, Token, segment_name
from merge_engine.stored import SchemaHistory
from merge_engine.view import View
from tests.conftest import SUMS, BucketFactory, batch, rows_of, schema_of
from tests.unit.test_log import (
    FaultyStorage,
    done_but_unknown,
    no_room,
    not_done_and_unknown,
    sent_twice,
    still_on_its_way,
    unreachable,
)

ROOT = Path(__file__).parents[2]
# Every put goes to RocksDB at once.
EAGER = BucketOptions(behind_max_offsets=1)


def put(bucket: Bucket, keys: list[int], values: list[int], **arguments: Any) -> int:
    """Add to the column `a`; return how many keys changed."""
    return bucket.put(batch(k=keys, a=values), **arguments).changed


def interrupt() -> None:
    raise KeyboardInterrupt


# Tokens


def test_a_repeated_token_changes_nothing_and_returns_the_first_result(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    token = Token(epoch=3, batch=8)
    first = bucket.put(batch(k=[1, 2], a=[1, 2]), owner="me", token=token)
    assert (first.base_offset, first.end_offset, first.repeated) == (1, 3, False)
    bucket.put(batch(k=[1], b=[9]), owner="other", token=Token(4, 8))
    for data in (batch(k=[1, 2], a=[1, 2]), batch(k=[7], a=[100]), batch(k=[1], b=[100])):
        again = bucket.put(data, owner="me", token=token)
        assert (again.base_offset, again.end_offset, again.repeated) == (1, 3, True)
    assert rows_of(bucket) == {1: (1, 9), 2: (2, None)}
    assert bucket.end_offset == 4


@pytest.mark.parametrize("options", [None, EAGER])
@pytest.mark.parametrize("crash", [False, True])
def test_a_token_is_remembered_when_the_bucket_is_opened_again(
    bucket_factory: BucketFactory, options: BucketOptions | None, crash: bool
) -> None:
    bucket = bucket_factory(options=options)
    put(bucket, [1], [1], owner="me", token=Token(1, 1))
    put(bucket, [1], [1], owner="you", token=Token(2, 1))
    name = bucket_factory.crash(into="copy") if crash else "bucket"
    bucket.close()
    bucket = bucket_factory(name=name)
    last = bucket.last_token("me")
    assert last is not None
    assert (last.token, last.base_offset, last.end_offset) == (Token(1, 1), 1, 2)
    assert bucket.put(batch(k=[1], a=[5]), owner="me", token=Token(1, 1)).repeated
    assert bucket.put(batch(k=[1], a=[5]), owner="you", token=Token(2, 1)).repeated
    assert bucket.last_token("nobody") is None
    assert rows_of(bucket) == {1: (2, None)}


def test_the_token_reaches_rocksdb_in_the_same_write_as_the_offset(
    bucket_factory: BucketFactory,
) -> None:
    """Else a crash between the two would have the rows without the token, and count twice."""
    bucket = bucket_factory(options=EAGER)

    def crash() -> None:
        bucket._view._database.flush()  # RocksDB does so by itself when its memory is full.
        bucket_factory.crash(into="copy")

    with arm("view.written", crash):
        put(bucket, [1], [1], owner="me", token=Token(1, 1))
    copy = bucket_factory(name="copy")
    assert copy.put(batch(k=[1], a=[1]), owner="me", token=Token(1, 1)).repeated
    assert rows_of(copy) == {1: (1, None)}


def test_the_token_reaches_rocksdb_with_the_offset_in_a_replay_too(
    bucket_factory: BucketFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_factory()
    put(bucket, [1], [1], owner="me", token=Token(1, 1))
    bucket_factory.crash(into="copy")
    copies: list[str] = []
    write_behind = View.write_behind

    def write_and_crash(view: View) -> None:
        write_behind(view)
        view._database.flush()
        copies.append(bucket_factory.crash("copy", into=f"copy-{len(copies)}"))

    with monkeypatch.context() as patch:
        patch.setattr(View, "write_behind", write_and_crash)
        bucket_factory(name="copy", options=EAGER).close()
    assert len(copies) > 2
    for name in copies:
        reopened = bucket_factory(name=name)
        assert reopened.put(batch(k=[1], a=[1]), owner="me", token=Token(1, 1)).repeated


@pytest.mark.parametrize("failpoint", ["put.logged", "put.applied", "view.before_write"])
def test_a_put_that_is_interrupted_after_its_commit_is_repeated_when_called_again(
    bucket_factory: BucketFactory, failpoint: str
) -> None:
    bucket = bucket_factory(options=EAGER)
    with arm(failpoint, interrupt), pytest.raises(KeyboardInterrupt):
        put(bucket, [1], [1], owner="me", token=Token(1, 1))
    assert bucket.put(batch(k=[1], a=[1]), owner="me", token=Token(1, 1)).repeated
    assert rows_of(bucket) == {1: (1, None)}


def test_an_older_token_is_not_taken_for_a_repeated_one(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    put(bucket, [1], [1], owner="me", token=Token(1, 1))
    put(bucket, [1], [1], owner="me", token=Token(1, 2))
    assert not bucket.put(batch(k=[1], a=[1]), owner="me", token=Token(1, 1)).repeated
    assert rows_of(bucket) == {1: (3, None)}


def test_the_same_token_of_another_owner_is_another_one(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    put(bucket, [1], [1], owner="me", token=Token(1, 1))
    assert not bucket.put(batch(k=[1], a=[1]), owner="you", token=Token(1, 1)).repeated
    assert not bucket.put(batch(k=[1], a=[1])).repeated
    assert rows_of(bucket) == {1: (3, None)}


def test_a_batch_that_changed_nothing_is_remembered_without_a_segment(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1], [1])
    names = bucket_factory.storage().names()
    result = bucket.put(batch(k=[1], a=[0]), owner="me", token=Token(1, 1))
    assert (result.changed, result.repeated) == (0, False)
    assert bucket_factory.storage().names() == names
    again = bucket.put(batch(k=[1], a=[7]), owner="me", token=Token(1, 1))
    assert (again.changed, again.repeated) == (0, True)
    bucket.close()
    assert bucket_factory().put(batch(k=[1], a=[7]), owner="me", token=Token(1, 1)).repeated


# Opening again


def test_a_bucket_that_was_closed_and_opened_again_is_the_same(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1, 2], [1, 2])
    bucket.close()
    bucket.close()
    reopened = bucket_factory()
    assert rows_of(reopened) == {1: (1, None), 2: (2, None)}
    assert reopened.term == 3
    assert put(reopened, [1], [1]) == 1
    assert rows_of(reopened)[1] == (2, None)


def test_a_closed_bucket_says_so(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    bucket.close()
    calls: list[Callable[[], object]] = [
        lambda: put(bucket, [1], [1]),
        lambda: bucket.lookup(batch(k=[1])),
        lambda: list(bucket.scan()),
        lambda: list(bucket.read_log(0)),
        lambda: bucket.undo("me", ["a"], 0),
        bucket.flush,
    ]
    for call in calls:
        with pytest.raises(InvalidInput, match="the bucket is closed; open it again"):
            call()


@pytest.mark.parametrize("flushed", [False, True])
def test_what_a_crash_leaves_is_the_whole_table(
    bucket_factory: BucketFactory, flushed: bool
) -> None:
    bucket = bucket_factory()
    put(bucket, [1, 2, 3], [1, 2, 3])
    if flushed:
        bucket.flush()
    put(bucket, [1], [10])
    bucket.put(batch(k=[2], op=["delete"]), operation_column="op")
    copy = bucket_factory(name=bucket_factory.crash(into="copy"))
    assert rows_of(copy) == rows_of(bucket) == {1: (11, None), 3: (3, None)}
    assert copy.lookup(batch(k=[2, 1])).to_pylist() == [
        {"k": 2, "a": None, "b": None},
        {"k": 1, "a": 11, "b": None},
    ]


def test_a_view_that_was_deleted_is_rebuilt_from_the_log(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    put(bucket, [1, 2], [1, 2], owner="me", token=Token(1, 1))
    bucket.put(batch(k=[1, 3], b=[10, 30]), owner="you")
    bucket.put(batch(k=[2], op=["delete"]), operation_column="op")
    bucket.undo("you", ["b"], 3)
    put(bucket, [1], [5])
    before = rows_of(bucket)
    bucket.close()
    shutil.rmtree(bucket_factory.view_path())
    rebuilt = bucket_factory()
    assert rows_of(rebuilt) == before == {1: (6, None)}
    last = rebuilt.last_token("me")
    assert last is not None
    assert last.token == Token(1, 1)


def test_a_replay_writes_what_was_merged_and_does_not_merge_again(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1], [1])
    bucket.flush()
    for name in ("first", "second", "third"):
        bucket_factory.crash(into=name)
        put(bucket, [1], [1])
    assert [rows_of(bucket_factory(name=name))[1] for name in ("first", "second", "third")] == [
        (1, None),
        (2, None),
        (3, None),
    ]


def test_a_view_that_is_needed_but_gone_is_a_gap_and_the_leader_is_left_alone(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1], [1])
    bucket.clean(bucket.end_offset)
    end = bucket.end_offset
    with pytest.raises(LogGap, match=r"view .* is at offset 0, .* log starts at 2; restore .*"):
        bucket_factory(view="another-view")
    assert put(bucket, [1], [1]) == 1, "an open that failed must not depose"
    assert bucket.end_offset == end + 1


def test_the_view_of_another_table_is_refused(bucket_factory: BucketFactory) -> None:
    bucket_factory().close()
    with pytest.raises(CorruptView, match=r"belongs to test, not to other; remove the directory"):
        bucket_factory(identity="other")
    bucket_factory().close()


def test_a_view_ahead_of_its_log_is_refused_and_says_which_and_why(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1], [1])
    bucket.close()
    names = bucket_factory.storage().names()
    bucket_factory.storage().delete([segment_name(1)])
    with pytest.raises(CorruptView) as caught:
        bucket_factory()
    assert str(bucket_factory.view_path()) in str(caught.value)
    assert "is at offset 2, but the log ends at 1: segments are gone" in str(caught.value)
    assert bucket_factory.storage().names() == names[:1], "an open that failed must not write"


def test_a_second_handle_on_the_same_view_is_refused_and_harms_nobody(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    with pytest.raises(InUse, match=r"view is open in another process or handle; close that one"):
        bucket_factory()
    assert put(bucket, [1], [1]) == 1


def test_a_second_leader_with_a_view_of_its_own_deposes_the_first(
    bucket_factory: BucketFactory,
) -> None:
    first = bucket_factory()
    put(first, [1], [1])
    second = bucket_factory(view="second")
    with pytest.raises(Deposed, match="open it again"):
        put(first, [1], [100])
    put(second, [1], [2])
    assert rows_of(second) == {1: (3, None)}
    first.close()
    second.close()
    assert rows_of(bucket_factory()) == {1: (3, None)}


# Doubt


@pytest.fixture
def faulty(bucket_factory: BucketFactory) -> FaultyStorage:
    return FaultyStorage(bucket_factory.log_path())


@pytest.mark.parametrize("fault", [done_but_unknown, sent_twice])
def test_a_put_whose_segment_is_there_after_all_is_a_put(
    bucket_factory: BucketFactory, faulty: FaultyStorage, fault: Callable[..., None]
) -> None:
    bucket = bucket_factory(storage=faulty)
    faulty.faults = [fault]
    result = bucket.put(batch(k=[1], a=[1]), owner="me", token=Token(1, 1))
    assert (result.base_offset, result.end_offset, result.repeated) == (1, 2, False)
    assert bucket.put(batch(k=[1], a=[1]), owner="me", token=Token(1, 1)).repeated
    assert rows_of(bucket) == {1: (1, None)}


def test_a_put_of_unknown_outcome_is_found_out_by_the_next_call(
    bucket_factory: BucketFactory, faulty: FaultyStorage
) -> None:
    bucket = bucket_factory(storage=faulty)
    faulty.faults = [done_but_unknown, unreachable]
    with pytest.raises(UnknownOutcome):
        put(bucket, [1], [1], owner="me", token=Token(1, 1))
    again = bucket.put(batch(k=[1], a=[1]), owner="me", token=Token(1, 1))
    assert (again.base_offset, again.end_offset, again.repeated) == (1, 2, True)
    assert rows_of(bucket) == {1: (1, None)}


def test_a_put_whose_request_never_arrives_is_done_once_when_tried_again(
    bucket_factory: BucketFactory, faulty: FaultyStorage
) -> None:
    bucket = bucket_factory(storage=faulty)
    faulty.faults = [still_on_its_way]
    with pytest.raises(StorageUnavailable, match="nothing was written; try again"):
        put(bucket, [1], [1], owner="me", token=Token(1, 1))
    assert rows_of(bucket) == {}
    faulty.deliver_late()
    assert not bucket.put(batch(k=[1], a=[1]), owner="me", token=Token(1, 1)).repeated
    assert rows_of(bucket) == {1: (1, None)}
    copy = bucket_factory(name=bucket_factory.crash(into="copy"))
    assert rows_of(copy) == {1: (1, None)}


@pytest.mark.parametrize("fault", [no_room, unreachable, not_done_and_unknown])
def test_a_put_that_failed_for_certain_changes_nothing_and_the_bucket_goes_on(
    bucket_factory: BucketFactory, faulty: FaultyStorage, fault: Callable[..., None]
) -> None:
    bucket = bucket_factory(storage=faulty)
    put(bucket, [1], [1])
    faulty.faults = [fault]
    with pytest.raises((StorageFull, StorageUnavailable)):
        put(bucket, [1, 2], [10, 10], owner="me", token=Token(1, 1))
    assert bucket.last_token("me") is None
    assert rows_of(bucket) == {1: (1, None)}
    assert bucket.lookup(batch(k=[1])).column("a").to_pylist() == [1]
    put(bucket, [1], [2])
    assert rows_of(bucket) == {1: (3, None)}


def test_a_lookup_beside_a_doubt_shows_the_rows_before_it_or_after_it(
    bucket_factory: BucketFactory, faulty: FaultyStorage
) -> None:
    bucket = bucket_factory(storage=faulty)
    put(bucket, [1, 2], [1, 2])
    faulty.faults = [done_but_unknown, unreachable]
    with pytest.raises(UnknownOutcome):
        put(bucket, [1, 2], [10, 10])
    found = bucket.lookup(batch(k=[1, 2])).column("a").to_pylist()
    assert found in ([1, 2], [11, 12])
    assert rows_of(bucket) == {1: (11, None), 2: (12, None)}


# Evolution


def evolved(*changes: Callable[[Schema], Schema], start: Schema = SUMS) -> list[Schema]:
    """Return all versions that these changes make, the first included."""
    schemas = [start]
    for change in changes:
        schemas.append(change(schemas[-1]))
    return schemas


ADDED = evolved(lambda schema: schema.add_column("c", pa.int64(), "max"))
DROPPED = evolved(lambda schema: schema.drop_column("a"))
RENAMED = evolved(lambda schema: schema.rename_column("a", "total"))


def test_a_column_added_between_writes_is_untouched_in_the_rows_before(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1, 2], [1, 2])
    bucket.evolve(SchemaHistory(ADDED))
    assert rows_of(bucket) == {1: (1, None, None), 2: (2, None, None)}
    bucket.put(batch(k=[1, 3], a=[10, 30], c=[5, 6]))
    assert rows_of(bucket) == {1: (11, None, 5), 2: (2, None, None), 3: (30, None, 6)}


def test_a_dropped_column_takes_its_values_and_rows_of_nothing_else_with_it(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1, 2], [1, 2])
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
    put(bucket, [1], [1])
    versions = [*DROPPED, DROPPED[-1].add_column("a", pa.int64(), "sum")]
    bucket.put(batch(k=[1], b=[5]))
    bucket.evolve(SchemaHistory(versions))
    assert rows_of(bucket) == {1: (5, None)}
    put(bucket, [1], [7])
    assert rows_of(bucket) == {1: (5, 7)}


def test_a_renamed_column_keeps_its_values(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    put(bucket, [1], [1])
    bucket.evolve(SchemaHistory(RENAMED))
    bucket.put(batch(k=[1], total=[10]))
    assert bucket.lookup(batch(k=[1])).to_pylist() == [{"k": 1, "total": 11, "b": None}]
    with pytest.raises(UnknownColumn, match="no column 'a'"):
        put(bucket, [1], [1])


def test_a_renamed_key_column_is_still_the_key(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    put(bucket, [1], [1])
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
    stored = bucket._view.get(bucket.history.row_keys(bucket.history.key_codec.encode([K123])))
    assert [int.from_bytes((value or b"")[:2], "little") for value in stored] == [1, 2, 3]
    bucket.put(batch(k=[1, 2, 3], c=["!", "!", "!"]))
    stored = bucket._view.get(bucket.history.row_keys(bucket.history.key_codec.encode([K123])))
    assert [int.from_bytes((value or b"")[:2], "little") for value in stored] == [4, 4, 4]
    assert rows_of(bucket) == expected | {1: (10, "!"), 2: (20, "two,!"), 3: (30, "!")}


K123 = pa.array([1, 2, 3], pa.int64())


@pytest.mark.parametrize("versions", [ADDED, DROPPED, RENAMED], ids=["added", "dropped", "renamed"])
def test_the_log_of_an_old_schema_is_replayed_under_the_new_one(
    bucket_factory: BucketFactory, versions: list[Schema]
) -> None:
    bucket = bucket_factory()
    put(bucket, [1, 2], [1, 2])
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
    assert bucket.undo("me", ["b"], start).changed == 2
    assert rows_of(bucket) == {1: (5,)}


def test_undo_goes_back_over_a_rename_and_an_added_column(bucket_factory: BucketFactory) -> None:
    versions = [*RENAMED, RENAMED[-1].add_column("c", pa.int64(), "sum")]
    bucket = bucket_factory()
    put(bucket, [1], [1], owner="me")
    start = bucket.end_offset
    put(bucket, [1], [10], owner="me")
    bucket.evolve(SchemaHistory(versions))
    bucket.put(batch(k=[1, 2], total=[100, 200], c=[1, 1]), owner="me")
    bucket.undo("me", ["total", "c"], start)
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


# Scans


def test_a_scan_of_an_empty_bucket_has_no_rows(bucket_factory: BucketFactory) -> None:
    assert list(bucket_factory().scan()) == []


def test_a_scan_gives_all_rows_in_key_order_in_batches(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(options=EAGER)
    keys = [5, -3, 0, 2**62, -(2**62), 7, 1]
    put(bucket, keys, list(range(7)))
    put(bucket, [0, 8], [10, 10])
    batches = list(bucket.scan(batch_size=3))
    assert [part.num_rows for part in batches] == [3, 3, 2]
    found = pa.Table.from_batches(batches)
    assert found.column("k").to_pylist() == sorted([*keys, 8])
    assert found.schema.names == ["k", "a", "b"]


def test_a_scan_shows_only_the_columns_asked_for(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    put(bucket, [1], [1])
    [only] = bucket.scan(["b"])
    assert only.to_pylist() == [{"k": 1, "b": None}]
    with pytest.raises(UnknownColumn, match="no column 'aa'; did you mean 'a'"):
        list(bucket.scan(["aa"]))


def test_a_scan_stands_still_while_the_bucket_is_written(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(options=EAGER)
    put(bucket, [1, 2, 3], [1, 2, 3])
    scan = bucket.scan(batch_size=1)
    seen = next(scan).to_pylist()
    put(bucket, [2, 4, 5], [100, 100, 100])
    bucket.put(batch(k=[3], op=["delete"]), operation_column="op")
    bucket.flush()
    seen += [row for part in scan for row in part.to_pylist()]
    assert [(row["k"], row["a"]) for row in seen] == [(1, 1), (2, 2), (3, 3)]
    assert list(rows_of(bucket)) == [1, 2, 4, 5]


def test_a_scan_goes_on_under_the_schema_it_began_with(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    put(bucket, [1, 2], [1, 2])
    scan = bucket.scan(batch_size=1)
    next(scan)
    bucket.evolve(SchemaHistory(DROPPED))
    assert [part.to_pylist() for part in scan] == [[{"k": 2, "a": 2, "b": None}]]


def test_a_bucket_can_be_opened_again_after_a_scan_was_left_in_the_middle(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1, 2], [1, 2])
    scan = bucket.scan(batch_size=1)
    next(scan)
    del scan
    bucket.close()
    assert len(rows_of(bucket_factory())) == 2


# Look-ups


def test_a_lookup_answers_in_the_order_asked_with_nulls_where_there_is_no_row(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1, 2], [1, 2])
    found = bucket.lookup(batch(k=[2, 9, 1, 2]), ["a"])
    assert found.to_pydict() == {"k": [2, 9, 1, 2], "a": [2, None, 1, 2]}
    nothing = bucket.lookup(batch(k=pa.array([], pa.int64())))
    assert (nothing.num_rows, nothing.schema.names) == (0, ["k", "a", "b"])


def test_lookups_beside_puts_see_each_row_whole(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(options=BucketOptions(behind_max_offsets=7))
    keys = list(range(5))
    bucket.put(batch(k=keys, a=[0] * 5, b=[0] * 5))
    torn: list[Any] = []
    done = threading.Event()

    def look() -> None:
        last = 0
        while not done.is_set():
            for row in bucket.lookup(batch(k=keys)).to_pylist():
                if row["a"] is None or row["a"] != row["b"]:
                    torn.append(row)
            now = bucket.lookup(batch(k=[4])).column("a")[0].as_py()
            if now < last:
                torn.append((last, now))
            last = now

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(look) for _ in range(2)]
        try:
            for _ in range(60):
                bucket.put(batch(k=keys, a=[1] * 5, b=[1] * 5))
        finally:
            done.set()
        for future in futures:
            future.result()
    assert torn == []
    assert rows_of(bucket) == dict.fromkeys(keys, (60, 60))


def test_puts_from_several_threads_all_count(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(put, bucket, [1, n % 3 + 2], [1, 1]) for n in range(60)]:
            future.result()
    assert rows_of(bucket) == {1: (60, None), 2: (20, None), 3: (20, None), 4: (20, None)}
    assert bucket.end_offset == 1 + 2 * 60


# The log, the changelog and retention


def test_reading_the_log_cuts_the_segments_at_the_ends_of_the_range(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1, 2, 3], [1, 2, 3])
    put(bucket, [4, 5], [4, 5])

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
                kind, offset, _, owner, columns, *values = row.values()
                found.append((kind, offset, owner, columns, *values))
    return found


def test_the_changelog_speaks_of_its_owners_columns_only(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(clock_ms=lambda: 1_700_000_000_123)
    put(bucket, [1], [1], owner="me")
    bucket.put(batch(k=[1, 2], b=[10, 20]), owner="you")
    put(bucket, [1], [5], owner="me")
    bucket.put(batch(k=[1], op=["delete"]), columns=["a"], operation_column="op", owner="me")
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
    put(bucket, [1, 2, 3], [1, 2, 3])
    assert [(row[1], row[4]) for row in records(bucket, 2)] == [(2, 2), (3, 3)]


def test_the_changelog_reads_under_the_current_schema_and_leaves_dropped_columns_out(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1], [1])
    bucket.put(batch(k=[1, 2], a=[2, 2], b=[3, 3]))
    put(bucket, [3], [3])
    bucket.put(batch(k=[1, 3], op=["delete", "delete"]), operation_column="op")
    bucket.evolve(SchemaHistory(DROPPED))
    assert records(bucket) == [
        ("insert", 2, "", ["b"], 1, 3),
        ("insert", 3, "", ["b"], 2, 3),
        # Key 3 never had a column that the table still has, so its delete at 6 is none.
        ("delete", 5, "", ["b"], 1, 3),
    ]


def test_the_changelog_from_an_offset_and_the_table_at_it_add_up(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1, 2, 3], [1, 2, 3])
    at = bucket.end_offset
    rows = {key: value for key, (value, _) in rows_of(bucket).items()}
    put(bucket, [2, 4], [20, 40])
    bucket.put(batch(k=[1], op=["delete"]), operation_column="op")
    bucket.undo("", ["a"], at + 2)
    for kind, _, _, _, key, value, _ in records(bucket, at):
        if kind == "delete":
            del rows[key]
        else:
            rows[key] = value
    assert rows == {key: value for key, (value, _) in rows_of(bucket).items()}


def test_cleaning_keeps_what_the_view_on_disk_does_not_have_out_of_danger(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1, 2], [1, 2])
    put(bucket, [1], [10])
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
    put(bucket, [1], [1])
    now = 200
    put(bucket, [2], [2])
    assert bucket.clean(bucket.end_offset, older_than_ms=200) == 2
    assert [row[4] for row in records(bucket, 2)] == [2]


def test_a_clean_that_was_killed_between_mark_and_delete_is_harmless(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    put(bucket, [1], [1])
    with arm("clean.marked", interrupt), pytest.raises(KeyboardInterrupt):
        bucket.clean(bucket.end_offset)
    copy = bucket_factory(name=bucket_factory.crash(into="copy"))
    assert rows_of(copy) == {1: (1, None)}
    copy.clean(2)
    assert segment_name(1) not in bucket_factory.storage("copy").names()


# A table of several buckets


def run_alone(script: str, directory: Path) -> None:
    """Run a script that may wait for ever in a process of its own, which can be ended."""
    command = [sys.executable, "-c", textwrap.dedent(script), str(directory)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr


def test_a_put_is_not_held_up_by_calls_that_wait_for_its_buckets(tmp_path: Path) -> None:
    run_alone(
        """
        import os, sys, threading
        from concurrent.futures import ThreadPoolExecutor
        from contextlib import contextmanager
        from merge_engine.bucket import Bucket
        from merge_engine.table import Table
        from tests.conftest import SUMS, rows_of

        keys, taken, flushes = list(range(64)), [], []
        waiting = threading.Semaphore(0)
        exclusive, flush = Bucket.exclusive, Bucket.flush

        @contextmanager
        def flush_when_all_are_taken(bucket):
            with exclusive(bucket):
                taken.append(bucket)
                if len(taken) == 8:
                    flushes.append(pool.submit(table.flush))
                    for _ in range(min(8, os.cpu_count())):
                        waiting.acquire()
                yield

        def signal_and_flush(bucket):
            waiting.release()
            flush(bucket)

        Bucket.exclusive, Bucket.flush = flush_when_all_are_taken, signal_and_flush
        with Table.create(sys.argv[1], SUMS, buckets=8) as table, ThreadPoolExecutor(1) as pool:
            table.put({"k": keys, "a": [1] * 64})
            [flushed] = flushes
            flushed.result()
            assert rows_of(table) == dict.fromkeys(keys, (1, None))
        """,
        tmp_path / "table",
    )


def test_closing_a_table_beside_lookups_ends_them_with_a_clear_error(tmp_path: Path) -> None:
    run_alone(
        """
        import sys, threading
        from concurrent.futures import ThreadPoolExecutor
        from merge_engine.errors import InvalidInput
        from merge_engine.table import Table
        from tests.conftest import SUMS

        keys = list(range(32))
        table = Table.create(sys.argv[1], SUMS, buckets=4)
        table.put({"k": keys, "a": keys})
        started = threading.Barrier(3)

        def look():
            started.wait()
            try:
                while True:
                    table.lookup({"k": keys})
            except InvalidInput as exc:
                return str(exc)

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(look) for _ in range(2)]
            started.wait()
            table.close()
            for future in futures:
                assert "closed; open it again" in future.result(), future.result()
        """,
        tmp_path / "table",
    )
