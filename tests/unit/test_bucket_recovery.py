"""A bucket that is opened again: after a close, a crash, a lost view, a second leader."""

import shutil
from collections.abc import Callable

import pytest
from rocksdict import Options, Rdict

from foundation.errors import (
    CorruptSegment,
    CorruptView,
    Deposed,
    InUse,
    InvalidInput,
    LogGap,
    OffsetOutOfRange,
)
from foundation.failpoints import arm
from foundation.ids import Token
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.segment import segment_name
from tests.conftest import BucketFactory, batch, rows_of, undo
from tests.support.buckets import add, delete


def test_a_bucket_that_was_closed_and_opened_again_is_the_same(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1, 2], [1, 2])
    bucket.close()
    bucket.close()
    reopened = bucket_factory()
    assert rows_of(reopened) == {1: (1, None), 2: (2, None)}
    assert reopened.term == 3
    assert add(reopened, [1], [1]) == 1
    assert rows_of(reopened)[1] == (2, None)


def test_a_closed_bucket_says_so(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    bucket.close()
    calls: list[Callable[[], object]] = [
        lambda: add(bucket, [1], [1]),
        lambda: bucket.lookup(batch(k=[1])),
        lambda: list(bucket.scan()),
        lambda: list(bucket.read_log(0)),
        lambda: undo(bucket, "me", ["a"], 0),
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
    add(bucket, [1, 2, 3], [1, 2, 3])
    if flushed:
        bucket.flush()
    add(bucket, [1], [10])
    delete(bucket, 2)
    copy = bucket_factory(name=bucket_factory.crash(into="copy"))
    assert rows_of(copy) == rows_of(bucket) == {1: (11, None), 3: (3, None)}
    assert copy.lookup(batch(k=[2, 1])).to_pylist() == [
        {"k": 2, "a": None, "b": None},
        {"k": 1, "a": 11, "b": None},
    ]


def test_a_view_that_was_deleted_is_rebuilt_from_the_log(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory()
    add(bucket, [1, 2], [1, 2], owner="me", token=Token(1, 1))
    bucket.put(batch(k=[1, 3], b=[10, 30]), owner="you")
    delete(bucket, 2)
    undo(bucket, "you", ["b"], 3)
    add(bucket, [1], [5])
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
    add(bucket, [1], [1])
    bucket.flush()
    for name in ("first", "second", "third"):
        bucket_factory.crash(into=name)
        add(bucket, [1], [1])
    assert [rows_of(bucket_factory(name=name))[1] for name in ("first", "second", "third")] == [
        (1, None),
        (2, None),
        (3, None),
    ]


def test_a_view_that_is_needed_but_gone_is_a_gap_and_the_leader_is_left_alone(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1], [1])
    bucket.clean(bucket.end_offset)
    end = bucket.end_offset
    with pytest.raises(LogGap, match=r"view .* is at offset 0, .* log starts at 2; restore .*"):
        bucket_factory(view="another-view")
    assert add(bucket, [1], [1]) == 1, "an open that failed must not depose"
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
    add(bucket, [1], [1])
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
    assert add(bucket, [1], [1]) == 1


def test_a_second_leader_with_a_view_of_its_own_deposes_the_first(
    bucket_factory: BucketFactory,
) -> None:
    first = bucket_factory()
    add(first, [1], [1])
    second = bucket_factory(view="second")
    with pytest.raises(Deposed, match="open it again"):
        add(first, [1], [100])
    add(second, [1], [2])
    assert rows_of(second) == {1: (3, None)}
    first.close()
    second.close()
    assert rows_of(bucket_factory()) == {1: (3, None)}


@pytest.mark.parametrize(
    "call",
    [lambda first: add(first, [1], [0]), lambda first: undo(first, "", ["a"], first.end_offset)],
    ids=["put", "undo"],
)
def test_a_deposed_leader_does_not_say_that_nothing_had_to_be_changed(
    bucket_factory: BucketFactory, call: Callable[[Bucket], object]
) -> None:
    first = bucket_factory()
    add(first, [1], [1])
    call(first)
    second = bucket_factory(view="second")
    delete(second, 1)
    second.clean(second.end_offset)
    with pytest.raises(Deposed, match="open it again"):
        call(first)


def test_an_open_that_fails_in_its_replay_leaves_nothing_in_the_log(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    add(bucket, [1], [1])
    bucket.close()
    [_, damaged] = bucket_factory.log_path().glob("*.seg")
    whole = damaged.read_bytes()
    shutil.rmtree(bucket_factory.view_path())
    damaged.write_bytes(whole[:-1])
    for _ in range(3):
        with pytest.raises(CorruptSegment):
            bucket_factory()
    assert len(bucket_factory.storage().names()) == 2
    damaged.write_bytes(whole)
    assert rows_of(bucket_factory()) == {1: (1, None)}


def read_all(bucket_factory: BucketFactory) -> None:
    """Read all meta of a view."""
    bucket = bucket_factory()
    bucket.last_token("me")
    bucket._view.meta.parts("me")


@pytest.mark.parametrize("name", [b"mapplied", b"mschema", b"mtoken:me", b"mparts:me"])
def test_meta_of_a_view_that_is_none_is_damage_and_says_what_to_do(
    bucket_factory: BucketFactory, name: bytes
) -> None:
    bucket_factory().close()
    database = Rdict(str(bucket_factory.view_path()), Options(raw_mode=True))
    database[name] = b"abc"
    database.close()
    with pytest.raises(CorruptView, match=r"meta of 3 bytes.*remove the directory"):
        read_all(bucket_factory)


# A leader that was deposed, does not know it, and is still cleaning


def restored(bucket_factory: BucketFactory, puts: int) -> Bucket:
    """Return a leader with so many puts of `a` in its log, and a copy of its view as `other`."""
    bucket = bucket_factory()
    for _ in range(puts):
        add(bucket, [1], [1], owner="a")
    bucket.flush()
    shutil.copytree(bucket_factory.view_path(), bucket_factory.view_path(view="other"))
    bucket.close()
    return bucket_factory()


def test_a_successor_that_opens_while_the_log_is_being_cleaned_cleans_on(
    bucket_factory: BucketFactory,
) -> None:
    zombie = restored(bucket_factory, 6)
    opened: list[Bucket] = []

    def open_once() -> None:
        if not opened:
            opened.append(bucket_factory(view="other"))

    with arm("clean.deleted", open_once):
        zombie.clean(5)
    [successor] = opened
    for before in (5, 6, 7):
        assert successor.clean(before) == before
    assert rows_of(successor) == {1: (6, None)}


@pytest.mark.parametrize("step", ["clean.before_mark", "clean.marked", "clean.deleted"])
def test_an_undo_goes_back_to_where_a_former_leader_has_cleaned_the_log(
    bucket_factory: BucketFactory, step: str
) -> None:
    zombie = restored(bucket_factory, 6)
    opened: list[Bucket] = []

    def succeed() -> None:
        if not opened:
            opened.append(bucket_factory(view="other"))
            add(opened[0], [1, 2], [10, 10], owner="b")

    with arm(step, succeed):
        zombie.clean(5)
    [successor] = opened
    assert undo(successor, "b", ["a"], 3).changed == 2
    assert rows_of(successor) == {1: (6, None)}
    with pytest.raises(OffsetOutOfRange, match=r"the log starts at 5|which has \[5"):
        list(successor.read_log(3))
    assert next(header.base_offset for header in successor.headers(0)) == 5


def test_a_leader_that_was_deposed_does_not_begin_to_clean(bucket_factory: BucketFactory) -> None:
    zombie = restored(bucket_factory, 6)
    successor = bucket_factory(view="other")
    names = bucket_factory.storage().names()
    with pytest.raises(Deposed):
        zombie.clean(5)
    assert bucket_factory.storage().names() == names
    assert rows_of(successor) == {1: (6, None)}
