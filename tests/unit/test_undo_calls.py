"""An undo of several calls: each gets further, none does again what was done, and all add up."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from foundation.errors import OffsetOutOfRange
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.results import UndoResult
from merge_engine.bucket.segment import SegmentKind
from merge_engine.storage.objects import LocalStorage
from tests.conftest import BucketFactory, rows_of, undo
from tests.support.buckets import add, put
from tests.support.zookeeper_server import wait_until

PARTS = 6
KEYS = list(range(20))
BEFORE = dict.fromkeys(KEYS, (100, None))


class CountingStorage(LocalStorage):
    """Knows how often each object was read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads: Counter[str] = Counter()

    def read(self, name: str) -> bytes:
        self.reads[name] += 1
        return super().read(name)


def write_tail(bucket: Bucket) -> int:
    """Write a committed state, and a tail of several segments; return where the tail begins."""
    put(bucket, owner="me", k=KEYS, a=[100] * len(KEYS))
    start = bucket.end_offset
    for _ in range(PARTS):
        put(bucket, owner="me", k=KEYS, a=[1] * len(KEYS))
    return start


def never() -> bool:
    return False


def looks(number: int) -> Callable[[], bool]:
    """Return what says yes so often, and then no."""
    left = iter(range(number))
    return lambda: next(left, None) is not None


def undo_by_calls(
    bucket: Bucket,
    start: int,
    go_on: Callable[[], Callable[[], bool]] = lambda: never,
    between: Callable[[], object] = lambda: None,
) -> list[UndoResult]:
    """Call until nothing is left; `go_on` makes what each call asks."""
    results: list[UndoResult] = []
    until = None
    while not results or results[-1].rest is not None:
        assert len(results) < 100, "it does not get further"
        results.append(undo(bucket, "me", ["a"], start, until=until, go_on=go_on()))
        rest = results[-1].rest
        if rest is not None:
            assert rest.from_offset == start
            until = rest.until
            between()
    return results


def undos_of(bucket: Bucket) -> list[int]:
    return [one.undo_from for one in bucket.headers(0) if one.undo_from is not None]


def test_a_call_takes_one_step_at_least_and_the_calls_add_up(bucket: Bucket) -> None:
    start = write_tail(bucket)
    results = undo_by_calls(bucket, start)
    assert rows_of(bucket) == BEFORE
    assert [result.changed for result in results] == [len(KEYS)] * PARTS
    assert sorted(undos_of(bucket), reverse=True) == undos_of(bucket)
    assert undos_of(bucket)[-1] == start
    whole = results[0]
    for later in results[1:]:
        whole = whole.then(later)
    assert whole.changed == len(KEYS) * PARTS
    assert (whole.base_offset, whole.end_offset, whole.rest) == (
        results[0].base_offset,
        bucket.end_offset,
        None,
    )


def test_a_call_takes_as_many_steps_as_it_may(bucket: Bucket) -> None:
    start = write_tail(bucket)
    results = undo_by_calls(bucket, start, lambda: looks(2))
    assert rows_of(bucket) == BEFORE
    assert 1 < len(results) < PARTS


def test_no_segment_is_read_twice(bucket_factory: BucketFactory) -> None:
    storage = CountingStorage(bucket_factory.log_path())
    bucket = bucket_factory(storage=storage)
    start = write_tail(bucket)
    storage.reads.clear()
    undo_by_calls(bucket, start)
    written = [one for one in bucket.headers(start) if one.kind is SegmentKind.WRITE]
    names = {f"{one.base_offset:020d}.seg" for one in written}
    assert {name: storage.reads[name] for name in names} == dict.fromkeys(names, 1)


def test_windows_that_change_nothing_do_not_stop_it(bucket: Bucket) -> None:
    """They are logged all the same: by that the next call knows how far it is."""
    add(bucket, KEYS, [100] * len(KEYS), owner="me")
    start = bucket.end_offset
    for key in KEYS[:PARTS]:
        add(bucket, [key], [5], owner="me")
        add(bucket, [key], [-5], owner="me")
    results = undo_by_calls(bucket, start, lambda: looks(1))
    assert [result.changed for result in results] == [0] * PARTS
    assert rows_of(bucket) == BEFORE
    assert undos_of(bucket)[-1] == start, "readers of the log are told, however little it changed"
    assert len(undos_of(bucket)) == PARTS


def test_a_new_leader_looks_through_the_log_call_by_call(bucket_factory: BucketFactory) -> None:
    first = bucket_factory()
    start = write_tail(first)
    first.close()
    storage = CountingStorage(bucket_factory.log_path())
    bucket = bucket_factory(storage=storage)
    storage.reads.clear()
    read: list[int] = []
    results = undo_by_calls(bucket, start, between=lambda: read.append(storage.reads.total()))
    assert rows_of(bucket) == BEFORE
    assert [result.changed for result in results if result.changed] == [len(KEYS)] * PARTS
    assert max(later - sooner for sooner, later in zip([0, *read], read, strict=False)) <= 2


def test_others_and_the_debtor_itself_write_between_two_calls(bucket: Bucket) -> None:
    start = write_tail(bucket)

    def write() -> None:
        put(bucket, owner="other", k=KEYS[:2], b=[1, 1])
        put(bucket, owner="me", k=[1000], a=[1])

    undo_by_calls(bucket, start, between=write)
    times = PARTS - 1
    expected = {**BEFORE, 0: (100, times), 1: (100, times), 1000: (times, None)}
    assert rows_of(bucket) == expected


def test_a_bucket_that_is_opened_anew_goes_on_where_the_last_call_ended(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory()
    start = write_tail(bucket)
    first = undo(bucket, "me", ["a"], start, go_on=never)
    assert first.rest is not None
    bucket.close()
    bucket = bucket_factory()
    rest = undo(bucket, "me", ["a"], start, until=first.rest.until)
    assert (rest.rest, first.changed + rest.changed) == (None, 2 * len(KEYS))
    assert rows_of(bucket) == BEFORE


def test_whoever_comes_next_goes_on_without_knowing_of_the_calls(bucket: Bucket) -> None:
    start = write_tail(bucket)
    undo(bucket, "me", ["a"], start, go_on=never)
    undo(bucket, "me", ["a"], start, go_on=never)
    assert undo(bucket, "me", ["a"], start).changed == len(KEYS)
    assert rows_of(bucket) == BEFORE


def test_a_call_that_arrives_again_after_all_is_undone_changes_nothing(bucket: Bucket) -> None:
    start = write_tail(bucket)
    first = undo(bucket, "me", ["a"], start, go_on=never)
    assert first.rest is not None
    undo(bucket, "me", ["a"], start)
    end = bucket.end_offset
    late = undo(bucket, "me", ["a"], start, until=first.rest.until, go_on=never)
    assert (late.changed, late.rest, bucket.end_offset) == (0, None, end)


def test_two_at_once_do_not_mix_their_steps(bucket: Bucket) -> None:
    """The slow one would bring keys back to the middle that the other one has brought further."""
    start = write_tail(bucket)
    done = threading.Event()

    def undo_all() -> None:
        undo(bucket, "me", ["a"], start)
        done.set()

    other = threading.Thread(target=undo_all)

    def overtaken() -> bool:
        """Let another undo get as far as it can, when the first window is read."""
        if other.ident is None:
            other.start()
            waiting = bucket._undoing["me"]._waiting
            wait_until(lambda: done.is_set() or bool(waiting), "it ends, or waits for us")
        return False

    undo(bucket, "me", ["a"], start, go_on=overtaken)
    other.join()
    assert rows_of(bucket) == BEFORE


def test_an_undo_until_beyond_the_log_is_an_error(bucket: Bucket) -> None:
    start = write_tail(bucket)
    end = bucket.end_offset
    with pytest.raises(OffsetOutOfRange, match="the log ends at"):
        undo(bucket, "me", ["a"], start, until=end + 1)
    assert bucket.end_offset == end
