"""A bucket whose log is rolled up does all that it did before, and others go on meanwhile."""

import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foundation.errors import Closed, Deposed
from foundation.failpoints import arm
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log_names import LogNames
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.segment import Segment, encode_segment
from merge_engine.storage.objects import LocalStorage
from tests.conftest import BucketFactory, rows_of, undo
from tests.support.buckets import add, put

OPTIONS = BucketOptions(roll_up_segments=4)
DEADLINE_S = 30


class CountingStorage(LocalStorage):
    """A storage that tells which objects were read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.reads: list[str] = []

    def read(self, name: str) -> bytes:
        self.reads.append(name)
        return super().read(name)


def roll_up(bucket: Bucket) -> None:
    while bucket.roll_up(bucket.end_offset):
        pass


def encoded(segments: Iterable[Segment]) -> list[bytes]:
    return [encode_segment(one) for one in segments]


@pytest.fixture
def bucket(bucket_factory: BucketFactory) -> Bucket:
    """Return a bucket with twenty small puts of two owners."""
    bucket = bucket_factory(options=OPTIONS)
    for number in range(10):
        put(bucket, owner="me", k=[number % 3, 7], a=[1, number])
        put(bucket, owner="her", k=[number % 3], b=[number])
    return bucket


def test_rows_and_log_are_the_same_and_so_they_are_for_who_opens_it_next(
    bucket: Bucket, bucket_factory: BucketFactory
) -> None:
    rows, log = rows_of(bucket), encoded(bucket.read_log(0))
    headers, works = list(bucket.headers(0)), dict(bucket.works)
    middle = encoded(bucket.read_log(3, 17))
    roll_up(bucket)
    assert len(LogNames.of(bucket_factory.storage().names()).rolled) == 5
    assert (rows_of(bucket), encoded(bucket.read_log(0))) == (rows, log)
    assert list(bucket.headers(0)) == headers
    assert encoded(bucket.read_log(3, 17)) == middle
    bucket.close()
    shutil.rmtree(bucket_factory.view_path())
    again = bucket_factory(options=OPTIONS)
    assert rows_of(again) == rows
    assert encoded(again.read_log(0))[:-1] == log
    assert dict(again.works) == works


def test_an_object_is_full_by_bytes_too_and_large_segments_stay(
    bucket_factory: BucketFactory,
) -> None:
    bucket = bucket_factory(options=BucketOptions(roll_up_segments=1000, roll_up_bytes=50_000))
    for number in range(60):
        add(bucket, [number], [1])
    add(bucket, [*range(5000)], [*range(5000)])
    for number in range(60):
        add(bucket, [number], [1])
    log = encoded(bucket.read_log(0))
    roll_up(bucket)
    names = LogNames.of(bucket_factory.storage().names())
    assert len(names.rolled) >= 2
    # One put of 5,000 rows, at offset 61.
    assert names.to_ranges().at(61) is None
    assert 61 in names.bases
    assert encoded(bucket.read_log(0)) == log


@pytest.mark.parametrize("back_to", [1, 8, 20])
def test_what_is_rolled_up_is_undone_as_ever(
    bucket: Bucket, bucket_factory: BucketFactory, back_to: int
) -> None:
    bucket.close()
    shutil.copytree(bucket_factory.directory / "bucket", bucket_factory.directory / "twin")
    twin, bucket = (bucket_factory(name=name, options=OPTIONS) for name in ("twin", "bucket"))
    roll_up(bucket)
    for one in (twin, bucket):
        undo(one, "me", ["a"], back_to)
    assert rows_of(bucket) == rows_of(twin)
    roll_up(bucket)
    for one in (twin, bucket):
        put(one, owner="me", k=[1, 2], a=[100, 200])
        undo(one, "me", ["a"], back_to)
    assert rows_of(bucket) == rows_of(twin)
    assert bucket.end_offset == twin.end_offset


@pytest.mark.parametrize("failpoint", ["roll_up.read", "roll_up.created", "roll_up.deleted"])
def test_others_put_and_read_while_it_is_rolled_up(bucket: Bucket, failpoint: str) -> None:
    log = encoded(bucket.read_log(0))
    done = []

    def others_go_on() -> None:
        with ThreadPoolExecutor(1) as pool:
            changed = pool.submit(add, bucket, [5], [1]).result(DEADLINE_S)
            read = pool.submit(lambda: encoded(bucket.read_log(0))).result(DEADLINE_S)
        assert read[: len(log)] == log
        done.append(changed)

    with arm(failpoint, others_go_on):
        bucket.roll_up(bucket.end_offset)
    assert done
    assert rows_of(bucket)[5] == (len(done), None)


def test_two_threads_may_roll_up_at_once(bucket: Bucket) -> None:
    log = encoded(bucket.read_log(0))
    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(roll_up, bucket) for _ in range(4)]:
            one.result(DEADLINE_S)
    assert encoded(bucket.read_log(0)) == log


def test_a_closed_or_deposed_bucket_is_not_rolled_up(
    bucket: Bucket, bucket_factory: BucketFactory
) -> None:
    names = bucket_factory.storage().names()
    bucket_factory(view="other")
    with pytest.raises(Deposed):
        roll_up(bucket)
    assert len(bucket_factory.storage().names()) == len(names) + 1
    bucket.close()
    with pytest.raises(Closed):
        roll_up(bucket)


def test_opening_and_memory_do_not_grow_with_the_number_of_batches(
    bucket_factory: BucketFactory,
) -> None:
    counting = CountingStorage(bucket_factory.log_path())
    found = []
    for rounds in (10, 40):
        bucket = bucket_factory(storage=counting, options=OPTIONS)
        for number in range(rounds):
            add(bucket, [number % 5], [1])
        roll_up(bucket)
        held = len(bucket._log._bases), len(bucket._log._headers), len(bucket._log._indexes)
        bucket.close()
        counting.reads.clear()
        bucket = bucket_factory(storage=counting, options=OPTIONS)
        found.append((len(counting.reads), max(held) <= 5))
        bucket.close()
    assert found[0] == found[1]
    assert found[0][1]
