"""A bucket that is followed: warm, in nobody's way, and led from where it is."""

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from foundation.errors import Closed, Deposed, LogGap, UnknownOutcome
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.follower import Follower
from merge_engine.bucket.log import Log
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.segment import Segment, SegmentKind, encode_segment, segment_name
from merge_engine.encoding.stored_rows import SchemaHistory
from tests.conftest import SUMS, rows_of
from tests.support.buckets import add
from tests.support.faulty_storage import FaultyStorage, done_but_unknown, not_done_and_unknown
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


@pytest.mark.parametrize("puts", [0, 3])
def test_while_nobody_leads_the_log_is_listed_once_and_once_for_all_that_is_new(
    leader: Bucket, follower: Follower, monkeypatch: pytest.MonkeyPatch, puts: int
) -> None:
    """It may have many objects, and whoever is to lead it is waited for."""
    for _ in range(puts):
        add(leader, [2], [5])
    listed = []
    names = MemoryStorage.names

    def noted(storage: MemoryStorage) -> list[str]:
        listed.append(storage)
        return names(storage)

    monkeypatch.setattr(MemoryStorage, "names", noted)
    Bucket.led_from(follower).close()
    assert len(listed) == (2 if puts else 1)


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


@pytest.mark.parametrize("freed", ["rolled up", "cleaned"])
def test_a_zombie_settles_its_doubt_where_a_follower_stands_and_the_name_was_freed(
    tmp_path: Path, freed: str
) -> None:
    """The view has each committed row; or it cannot be had from there, which is said."""
    history, options = SchemaHistory([SUMS]), BucketOptions(roll_up_segments=8)

    def opened(name: str, storage: FaultyStorage) -> Bucket:
        return Bucket(storage, tmp_path / name, history, identity="bucket", options=options)

    storage = FaultyStorage(tmp_path / "log")
    faulty = FaultyStorage(tmp_path / "log")
    zombie = opened("zombie", faulty)
    add(zombie, [1], [10])
    follower = Follower(storage, tmp_path / "f", history, identity="bucket", options=options)
    faulty.faults = [done_but_unknown, not_done_and_unknown]
    with pytest.raises(UnknownOutcome):
        add(zombie, [77], [7])
    leader = opened("leader", storage)
    for _ in range(30):
        add(leader, [2], [1])
    leader.flush()
    if freed == "cleaned":
        leader.clean(leader.end_offset - 1)
    while leader.roll_up(leader.end_offset):
        pass
    left: list[str] = []
    faulty.delete = left.extend  # type: ignore[method-assign, assignment]
    with pytest.raises(Deposed):
        zombie.settled_end()
    assert left, "it deletes its stray; here it dies before that"
    assert {*left} <= {*storage.names()}
    if freed == "cleaned":
        with pytest.raises(LogGap, match="but the log starts at"):
            follower.follow()
    else:
        assert follower.follow() > 0
        assert follower.applied == leader.end_offset
    follower.close()
    if freed == "rolled up":
        again = opened("f", storage)
        assert rows_of(again) == rows_of(leader) == {1: (10, None), 2: (30, None), 77: (7, None)}
        again.close()
    for bucket in (zombie, leader):
        bucket.close()


@pytest.mark.parametrize("leads", [False, True])
def test_a_follower_that_lags_behind_what_was_rolled_up_takes_no_candidates_segment_there(
    storage: MemoryStorage, tmp_path: Path, leads: bool
) -> None:
    """The candidate, which was paused before its create, is killed right after it."""
    history, options = SchemaHistory([SUMS]), BucketOptions(roll_up_segments=8)
    leader = Bucket(storage, tmp_path / "a", history, identity="bucket", options=options)
    add(leader, [1], [10])
    follower = Follower(storage, tmp_path / "b", history, identity="bucket", options=options)
    candidate = Log(storage)
    add(leader, [77], [7])
    for number in range(20):
        add(leader, [2, 100 + number], [1, 1])
    while leader.roll_up(leader.end_offset):
        pass
    header = candidate._header(SegmentKind.LEADER, candidate.end)
    storage.create(segment_name(candidate.end), encode_segment(Segment(header, {}, {})))
    if not leads:
        assert follower.follow() > 0
        assert follower.applied == leader.end_offset
    expected = rows_of(leader)
    assert expected[77] == (7, None)
    heir = Bucket.led_from(follower)
    assert rows_of(heir) == expected
    heir.close()
    leader.close()


def test_a_follower_that_could_not_apply_what_it_has_read_applies_it_the_next_time(
    leader: Bucket, storage: MemoryStorage, tmp_path: Path
) -> None:
    asked = itertools.count(1)
    follower = Follower(
        storage,
        tmp_path / "interrupted",
        SchemaHistory([SUMS]),
        identity="bucket",
        go_on=lambda: next(asked) != 4,
    )
    for value in range(3):
        add(leader, [2 + value], [1])
    with pytest.raises(Closed):
        follower.follow()
    follower.follow()
    heir = Bucket.led_from(follower)
    assert rows_of(heir) == {1: (10, None), 2: (1, None), 3: (1, None), 4: (1, None)}
    heir.close()
