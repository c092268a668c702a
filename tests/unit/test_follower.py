"""A bucket that is followed: warm, in nobody's way, and led from where it is."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from foundation.errors import Closed, Deposed, LogGap
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.follower import Follower
from merge_engine.bucket.options import BucketOptions
from merge_engine.encoding.stored_rows import SchemaHistory
from tests.conftest import SUMS, rows_of
from tests.support.buckets import add
from tests.support.snapshot_world import MemoryStorage


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def leader(storage: MemoryStorage, tmp_path: Path) -> Iterator[Bucket]:
    bucket = Bucket(storage, tmp_path / "leader", SchemaHistory([SUMS]), identity="bucket")
    add(bucket, [1], [10])
    yield bucket
    bucket.close()


@pytest.fixture
def follower(leader: Bucket, storage: MemoryStorage, tmp_path: Path) -> Iterator[Follower]:
    assert leader.term == 0
    made = Follower(storage, tmp_path / "follower", SchemaHistory([SUMS]), identity="bucket")
    yield made
    with suppress(Exception):  # Most tests lead it.
        made.close()


def test_what_the_leader_appends_is_followed_and_nothing_is_written(
    leader: Bucket, follower: Follower, storage: MemoryStorage
) -> None:
    assert follower.follow() == 0
    assert follower.applied == leader.end_offset
    for value in range(3):
        add(leader, [2], [value + 1])
    written = storage.names()
    assert follower.follow() == 3
    assert follower.applied == leader.end_offset
    assert storage.names() == written
    add(leader, [3], [1])  # Nobody has deposed it.


def test_who_leads_from_there_has_the_last_changes_and_deposes_the_leader(
    leader: Bucket, follower: Follower
) -> None:
    add(leader, [2], [5])
    bucket = Bucket.led_from(follower)
    try:
        assert bucket.term == leader.end_offset
        assert rows_of(bucket) == {1: (10, None), 2: (5, None)}
        with pytest.raises(Deposed):
            add(leader, [2], [1])
        add(bucket, [2], [1])
        assert rows_of(bucket)[2] == (6, None)
    finally:
        bucket.close()


def test_a_name_that_is_free_because_the_log_was_cleaned_is_not_led_from(
    leader: Bucket, follower: Follower
) -> None:
    """What the follower would create there would stand below the log's start, and mean nothing."""
    for value in range(3):
        add(leader, [2], [value + 1])
    assert leader.clean(leader.end_offset) == leader.end_offset > follower.applied
    with pytest.raises(LogGap, match="but the log starts at"):
        follower.follow()  # A missing segment looks like the end of the log, but for its start.
    with pytest.raises(LogGap, match="but the log starts at"):
        Bucket.led_from(follower)
    add(leader, [2], [1])
    assert leader.confirm() == leader.end_offset


def test_who_finds_only_while_it_leads_that_the_log_was_cleaned_deposes_nobody(
    leader: Bucket, follower: Follower
) -> None:
    for value in range(3):
        add(leader, [2], [value + 1])
    leader.clean(leader.end_offset)
    with pytest.raises(LogGap, match="but the log starts at"):
        Bucket.led_from(follower)
    add(leader, [2], [1])
    assert leader.confirm() == leader.end_offset


def test_while_nobody_leads_the_log_is_listed_once(
    leader: Bucket, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have many objects, and whoever is to lead it is waited for."""
    add(leader, [2], [5])
    listed = []
    names = MemoryStorage.names

    def noted(storage: MemoryStorage) -> list[str]:
        listed.append(storage)
        return names(storage)

    monkeypatch.setattr(MemoryStorage, "names", noted)
    Bucket.led_from(follower).close()
    assert len(listed) == 1


def test_a_warm_up_that_nobody_wants_any_more_ends(
    leader: Bucket, storage: MemoryStorage, tmp_path: Path
) -> None:
    add(leader, [2], [1])
    asked = iter([True, True])
    history = SchemaHistory([SUMS])
    view = tmp_path / "given-up"
    with pytest.raises(Closed):
        Follower(storage, view, history, identity="bucket", go_on=lambda: next(asked, False))
    again = Follower(storage, view, history, identity="bucket")
    assert again.applied == leader.end_offset
    again.close()


def test_who_leads_applies_all_that_is_logged_whoever_wanted_it_warm(
    leader: Bucket, storage: MemoryStorage, tmp_path: Path
) -> None:
    wanted = [True]
    history = SchemaHistory([SUMS])
    warm = Follower(storage, tmp_path / "warm", history, identity="bucket", go_on=lambda: wanted[0])
    wanted[0] = False
    add(leader, [2], [5])
    bucket = Bucket.led_from(warm)
    assert rows_of(bucket) == {1: (10, None), 2: (5, None)}
    bucket.close()


def test_a_bucket_that_has_ended_lets_nobody_in_and_is_closed_later(leader: Bucket) -> None:
    with leader.exclusive():
        leader.end(at_once=True)  # Whoever is at it goes on.
    leader.end()
    for call in (leader.settled_end, leader.flush, lambda: add(leader, [1], [1])):
        with pytest.raises(Closed):
            call()
    leader.close()
    leader.close()


def test_a_follower_goes_on_behind_what_was_rolled_up_meanwhile(
    storage: MemoryStorage, tmp_path: Path
) -> None:
    history, options = SchemaHistory([SUMS]), BucketOptions(roll_up_segments=8)
    leader = Bucket(storage, tmp_path / "a", history, identity="bucket", options=options)
    follower = Follower(storage, tmp_path / "b", history, identity="bucket")
    for value in range(20):
        add(leader, [2], [value + 1])
    while leader.roll_up(leader.end_offset):
        pass
    assert any(name.endswith(".rolled") for name in storage.names())
    assert follower.follow() > 0
    assert follower.applied == leader.end_offset
    add(leader, [2], [1])
    heir = Bucket.led_from(follower)
    assert rows_of(heir) == rows_of(leader) == {2: (211, None)}
    heir.close()
    leader.close()
