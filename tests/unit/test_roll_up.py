"""Old segments are rolled up into larger objects, and nobody who reads can tell."""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from foundation.errors import Deposed, MissingObject, UnknownOutcome
from foundation.failpoints import arm
from merge_engine.bucket import roll_up as rolling
from merge_engine.bucket.log import Log
from merge_engine.bucket.log_names import LogNames
from merge_engine.bucket.roll_up import Run, find_runs
from merge_engine.bucket.rolled import RolledRange
from merge_engine.bucket.segment import SegmentKind, segment_name
from tests.support.faulty_storage import (
    Create,
    FaultyStorage,
    done_but_unknown,
    interrupt,
    not_done_and_unknown,
    sent_twice,
    still_on_its_way,
)
from tests.support.logs import contents, write_of
from tests.support.rolling import append_some, bytes_of, roll_up, roller, seen, several_leaders

STEPS = ("roll_up.read", "roll_up.created", "roll_up.deleted")


def names_of(storage: FaultyStorage) -> LogNames:
    return LogNames.of(storage.names())


def once(action: Callable[[], object]) -> Callable[[], None]:
    """Return what does this at its first visit only."""
    actions = [action]

    def visit() -> None:
        if actions:
            actions.pop()()

    return visit


def leaders_of(log: Log) -> list[int]:
    return [one.base_offset for one in log.headers(0) if one.kind is SegmentKind.LEADER]


# The same log


@pytest.mark.parametrize("segments", [2, 3, 7, 1000])
def test_a_log_reads_the_same_in_either_form_byte_for_byte(
    storage: FaultyStorage, segments: int
) -> None:
    log = several_leaders(storage)
    stale = Log(storage)
    before, data = seen(log), bytes_of(storage)
    roll_up(log, storage, segments)
    assert bool(names_of(storage).rolled) == (segments < 1000)
    for reader in (log, stale, Log(storage)):
        assert seen(reader) == before
    assert bytes_of(storage) == data


def test_only_what_leaders_need_stays_and_the_last_segments(storage: FaultyStorage) -> None:
    log = several_leaders(storage)
    leaders = leaders_of(log)
    count = len(contents(log))
    roll_up(log, storage)
    names = names_of(storage)
    # 24 segments: the last one is never rolled up, two more make no run.
    assert count == 24
    assert len(names.rolled) == 7
    tail = [base for base in names.bases if base >= names.rolled[-1].end]
    assert len(tail) == 3
    assert names.bases == sorted({*leaders, *tail})
    # And that is all that is in memory.
    assert log._bases == tail
    assert sorted(log._headers) == tail


def test_what_ends_beyond_the_offset_waits(storage: FaultyStorage) -> None:
    log = several_leaders(storage, leaders=1, writes=8)
    ends = [header.end_offset for header in log.headers(0)]
    roll_up(log, storage, before=ends[5] - 1)
    assert names_of(storage).rolled == [RolledRange(0, ends[2])]
    roll_up(log, storage, before=ends[5])
    assert names_of(storage).rolled == [RolledRange(0, ends[2]), RolledRange(ends[2], ends[5])]


def test_a_log_is_appended_to_and_rolled_up_in_turns(storage: FaultyStorage) -> None:
    log = Log(storage)
    log.lead()
    for turn in range(6):
        append_some(log, 10 * turn, 4)
        before = seen(log)
        roll_up(log, storage)
        assert seen(log) == seen(Log(storage)) == before
    assert len(names_of(storage).rolled) == 8


def test_while_there_is_little_to_roll_up_the_store_is_not_asked(storage: FaultyStorage) -> None:
    log = several_leaders(storage, leaders=1, writes=9)
    rolling = roller(log, storage)
    assert rolling.step(log.end) is False
    storage.sizes = None  # type: ignore[method-assign, assignment]
    assert rolling.step(log.end) is False


def test_a_step_is_bounded_and_says_that_there_is_more(
    storage: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rolling, "_AT_ONCE", 2)
    log = several_leaders(storage)
    steps = roller(log, storage)
    assert steps.step(log.end) is True
    assert len(names_of(storage).rolled) == 2
    assert [steps.step(log.end) for _ in range(3)] == [True, True, False]
    assert len(names_of(storage).rolled) == 7


# What is chosen


def runs(sizes: dict[int, int], before: int, *rolled: tuple[int, int]) -> list[Run]:
    ranges = [RolledRange(*one) for one in rolled]
    names = LogNames(sorted(sizes), ranges, [])
    by_name = {segment_name(base): size for base, size in sizes.items()}
    return find_runs(names, by_name, before, most_segments=20, most_bytes=3200)


def test_runs_are_full_by_number_or_by_size() -> None:
    assert runs(dict.fromkeys(range(45), 1), 99) == [
        Run(list(range(20)), 20),
        Run(list(range(20, 40)), 40),
    ]
    assert runs(dict.fromkeys(range(45), 100), 99) == [
        Run([*range(20)], 20),
        Run([*range(20, 40)], 40),
    ]
    assert runs(dict.fromkeys(range(20), 1), 99) == []


def test_a_large_segment_stays_and_ends_a_run_that_is_long_enough() -> None:
    small = dict.fromkeys(range(60), 1)
    assert runs({**small, 16: 101}, 99) == [
        Run([*range(16)], 16),
        Run([*range(17, 37)], 37),
        Run([*range(37, 57)], 57),
    ]
    assert runs({**small, 15: 101}, 99)[0] == Run([*range(16, 36)], 36)
    assert runs(dict.fromkeys(range(60), 101), 99) == []


def test_what_is_rolled_up_already_ends_a_run_too() -> None:
    sizes = {**dict.fromkeys(range(17), 1), **dict.fromkeys(range(30, 60), 1)}
    assert runs(sizes, 99, (17, 30)) == [Run([*range(17)], 17), Run([*range(30, 50)], 50)]
    # Leftovers within a range are not part of any run.
    assert runs(dict.fromkeys(range(40), 1), 99, (0, 10)) == [Run([*range(10, 30)], 30)]


# While it is done


@pytest.mark.parametrize("failpoint", STEPS)
def test_readers_see_the_same_log_at_every_step(storage: FaultyStorage, failpoint: str) -> None:
    log = several_leaders(storage)
    before = seen(log)
    visits = 0

    def look() -> None:
        nonlocal visits
        visits += 1
        for reader in (log, Log(storage)):
            assert seen(reader) == before

    with arm(failpoint, look):
        roll_up(log, storage)
    assert visits


def test_a_reading_that_is_under_way_goes_on_in_the_rolled_objects(storage: FaultyStorage) -> None:
    log = several_leaders(storage)
    for reader in (log, Log(storage)):
        before = seen(reader)
        underway = [reader.segments(0), reader.read(h.base_offset for h in before["headers"])]
        headers = reader.headers(0)
        first = [next(one).header for one in underway]
        assert next(headers) == first[0] == first[1]
        roll_up(log, storage)
        assert [next(headers), *headers] == before["headers"][1:]
        for one in underway:
            assert [segment.header for segment in one] == before["headers"][1:]


def test_what_is_appended_meanwhile_stays(storage: FaultyStorage) -> None:
    log = several_leaders(storage)
    with arm("roll_up.read", lambda: append_some(log, 90, 2)):
        roll_up(log, storage)
    assert contents(log) == contents(Log(storage))
    assert len(contents(log)) > 24


@pytest.mark.parametrize("failpoint", STEPS)
def test_what_is_cleaned_meanwhile_stays_cleaned(storage: FaultyStorage, failpoint: str) -> None:
    log = several_leaders(storage)
    before = contents(log)
    with arm(failpoint, once(lambda: log.clean(log.end - 4))):
        roll_up(log, storage)
    left = [one for one in before if one[0] >= log.start]
    assert contents(log) == contents(Log(storage)) == left
    log.clean(log.end - 4)
    assert all(one.end > log.start for one in names_of(storage).rolled)


# Killed half-way


@pytest.mark.parametrize(
    ("failpoint", "visit"), [("roll_up.read", 1), *((s, v) for s in STEPS[1:] for v in (1, 2))]
)
def test_killed_at_any_step_nothing_is_lost_and_the_next_leader_finishes(
    storage: FaultyStorage, tmp_path: Path, failpoint: str, visit: int
) -> None:
    log = several_leaders(storage)
    before, data = seen(log), bytes_of(storage)
    left = visit

    def kill() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            interrupt()

    with arm(failpoint, kill), pytest.raises(KeyboardInterrupt):
        roll_up(log, storage)
    crashed = FaultyStorage(shutil.copytree(tmp_path / "log", tmp_path / "crashed"))
    assert seen(Log(crashed)) == before
    assert bytes_of(crashed) == data
    successor = Log(crashed)
    term = successor.lead()
    roll_up(successor, crashed)
    names = names_of(crashed)
    tail = [base for base in names.bases if base >= names.rolled[-1].end]
    assert names.bases == sorted({*leaders_of(successor), *tail}), "no leftovers"
    assert term == before["end"]
    assert bytes_of(crashed).items() > data.items()


@pytest.mark.parametrize("fault", [done_but_unknown, not_done_and_unknown, sent_twice])
def test_a_create_of_unknown_outcome_is_tried_again(storage: FaultyStorage, fault: Create) -> None:
    log = several_leaders(storage)
    before = seen(log)
    with arm("roll_up.read", lambda: storage.faults.append(fault)):
        roll_up(log, storage)
    assert seen(log) == seen(Log(storage)) == before
    assert len(names_of(storage).rolled) == 7


def test_what_cannot_be_created_is_left_for_another_time(storage: FaultyStorage) -> None:
    log = several_leaders(storage)
    before, names = seen(log), storage.names()
    with (
        arm("roll_up.read", lambda: storage.faults.extend([still_on_its_way] * 4)),
        pytest.raises(UnknownOutcome),
    ):
        roll_up(log, storage)
    assert storage.names() == names
    assert seen(log) == before
    storage.deliver_late()
    for reader in (log, Log(storage)):
        assert seen(reader) == before
    roll_up(log, storage)
    assert seen(log) == seen(Log(storage)) == before
    assert len(names_of(storage).rolled) == 7


# Two that roll up


def test_who_was_deposed_while_it_read_makes_nothing(storage: FaultyStorage) -> None:
    log = several_leaders(storage)
    with arm("roll_up.read", once(Log(storage).lead)), pytest.raises(Deposed):
        roll_up(log, storage)
    assert names_of(storage).rolled == []


def test_what_a_former_leader_has_rolled_up_meanwhile_is_not_made_of_what_is_left(
    storage: FaultyStorage,
) -> None:
    """What was read may be what came late to a name that the other had freed."""
    former = several_leaders(storage)
    log = Log(storage)
    log.lead()
    append_some(log, 50, 3)
    before = seen(log)

    def other_rolls_up() -> None:
        steps = roller(former, storage, segments=4, confirm=lambda: None)
        while steps.step(former.end):
            pass

    rolling = roller(log, storage, segments=5)
    with arm("roll_up.read", once(other_rolls_up)):
        rolling.step(log.end)
    ranges = names_of(storage).rolled
    assert all(one.end <= other.first for one, other in pairwise(ranges))
    assert seen(log) == seen(Log(storage)) == before
    rolling.step(log.end)
    assert seen(log) == seen(Log(storage)) == before


def test_ranges_that_overlap_read_the_same(storage: FaultyStorage) -> None:
    """As a former leader makes them that was paused between its last look and its create."""
    log = several_leaders(storage)
    zombie = Log(storage)
    before, data = seen(log), bytes_of(storage)
    taken = roller(zombie, storage, segments=5, confirm=lambda: roll_up(log, storage))
    taken.step(zombie.end)
    ranges = names_of(storage).rolled
    assert any(one.end > other.first for one, other in pairwise(ranges))
    for reader in (log, zombie, Log(storage)):
        assert seen(reader) == before
    assert bytes_of(storage) == data
    # What was left of it is nobody's, and so is what it left of the leader's.
    successor = Log(storage)
    successor.lead()
    roll_up(successor, storage)
    assert seen(Log(storage))["headers"][:-1] == before["headers"]
    end = max(one.end for one in ranges)
    assert [b for b in names_of(storage).bases if b < end] == leaders_of(log)[:4]


# What comes late


def test_a_create_that_arrives_after_its_offset_was_rolled_up_means_nothing(
    log: Log, storage: FaultyStorage
) -> None:
    storage.faults = [still_on_its_way]
    with pytest.raises(Exception, match="nothing was written"):
        log.append(write_of(1, 2, 3))
    append_some(log, 3, 6)
    before = seen(log)
    roll_up(log, storage)
    storage.deliver_late()
    assert segment_name(1) in storage.names()
    for reader in (log, Log(storage)):
        assert seen(reader) == before
    successor = Log(storage)
    successor.lead()
    roll_up(successor, storage)
    assert segment_name(1) not in storage.names()
    with pytest.raises(MissingObject):
        storage.read(segment_name(1))
