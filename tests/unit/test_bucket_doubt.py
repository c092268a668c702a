"""Puts whose create fails or may have failed: counted once, and found out by the next call."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from foundation.errors import StorageFull, StorageUnavailable, UnknownOutcome
from foundation.ids import Token
from merge_engine.working_set.block import PreparedRows, prepare_rows
from tests.conftest import BucketFactory, batch, rows_of
from tests.support.buckets import add
from tests.support.faulty_storage import (
    FaultyStorage,
    done_but_unknown,
    no_room,
    not_done_and_unknown,
    sent_twice,
    still_on_its_way,
    unreachable,
)


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
        add(bucket, [1], [1], owner="me", token=Token(1, 1))
    again = bucket.put(batch(k=[1], a=[1]), owner="me", token=Token(1, 1))
    assert (again.base_offset, again.end_offset, again.repeated) == (1, 2, True)
    assert rows_of(bucket) == {1: (1, None)}


def test_a_put_whose_request_never_arrives_is_done_once_when_tried_again(
    bucket_factory: BucketFactory, faulty: FaultyStorage
) -> None:
    bucket = bucket_factory(storage=faulty)
    faulty.faults = [still_on_its_way]
    with pytest.raises(StorageUnavailable, match="nothing was written; try again"):
        add(bucket, [1], [1], owner="me", token=Token(1, 1))
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
    add(bucket, [1], [1])
    faulty.faults = [fault]
    with pytest.raises((StorageFull, StorageUnavailable)):
        add(bucket, [1, 2], [10, 10], owner="me", token=Token(1, 1))
    assert bucket.last_token("me") is None
    assert rows_of(bucket) == {1: (1, None)}
    assert bucket.lookup(batch(k=[1])).column("a").to_pylist() == [1]
    add(bucket, [1], [2])
    assert rows_of(bucket) == {1: (3, None)}


def test_look_ups_beside_a_replay_of_whole_rows_see_each_row_as_it_was_or_as_it_is(
    bucket_factory: BucketFactory, faulty: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of which all columns are written need not be read first. They are no rows without values
    meanwhile, in place of those that are stored."""
    bucket = bucket_factory(storage=faulty)
    bucket.put(batch(k=[1, 2], a=[1, 2], b=[1, 1]))
    bucket.flush()
    faulty.faults = [done_but_unknown, unreachable]
    with pytest.raises(UnknownOutcome):
        bucket.put(batch(k=[1, 2, 3], a=[10, 10, 10], b=[1, 1, 1]))
    with bucket.exclusive():  # Other buckets need the memory.
        assert bucket._view.retire(by_holder=True) > 0

    def look_up() -> list[int | None]:
        found: list[int | None] = bucket.lookup(batch(k=[1, 2, 3])).column("a").to_pylist()
        return found

    meanwhile: list[list[int | None]] = []

    def beside(*arguments: Any) -> PreparedRows:
        with ThreadPoolExecutor(1) as pool:
            meanwhile.append(pool.submit(look_up).result(60))
        return prepare_rows(*arguments)

    monkeypatch.setattr("merge_engine.bucket.log_and_view.prepare_rows", beside)
    bucket.settled_end()
    assert meanwhile == [[1, 2, None]]
    assert look_up() == [11, 12, 10]
    bucket.flush()
    bucket_factory.crash(into="copy")
    assert rows_of(bucket_factory(name="copy")) == {1: (11, 2), 2: (12, 2), 3: (10, 1)}


def test_a_lookup_beside_a_doubt_shows_the_rows_before_it_or_after_it(
    bucket_factory: BucketFactory, faulty: FaultyStorage
) -> None:
    bucket = bucket_factory(storage=faulty)
    add(bucket, [1, 2], [1, 2])
    faulty.faults = [done_but_unknown, unreachable]
    with pytest.raises(UnknownOutcome):
        add(bucket, [1, 2], [10, 10])
    found = bucket.lookup(batch(k=[1, 2])).column("a").to_pylist()
    assert found in ([1, 2], [11, 12])
    assert rows_of(bucket) == {1: (11, None), 2: (12, None)}
