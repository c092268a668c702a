"""Cleaning a log drops its oldest segments and leaves no gap."""

import shutil
from copy import copy
from pathlib import Path

import pytest

from foundation.errors import OffsetOutOfRange, StorageUnavailable
from foundation.failpoints import arm
from merge_engine.bucket.log import Log
from merge_engine.bucket.log_names import LogNames, RolledRanges
from merge_engine.bucket.segment import SegmentKind, segment_name
from tests.support.faulty_storage import FaultyStorage, interrupt, still_on_its_way
from tests.support.logs import contents, ticking, write_of
from tests.support.rolling import roll_up, seen, several_leaders


def test_cleaning_drops_whole_segments_below_the_offset_and_keeps_leaders(
    long_log: Log, storage: FaultyStorage
) -> None:
    assert contents(long_log) == [
        (0, "leader", []),
        (1, "leader", []),
        (2, "write", [1, 2]),
        (4, "write", [3, 4]),
    ]
    assert long_log.clean(3) == 2
    assert long_log.clean(5) == 4
    assert storage.names() == [
        segment_name(0),
        segment_name(1),
        segment_name(4),
        "00000000000000000004.start",
    ]
    for log in (long_log, Log(storage)):
        assert (log.start, log.end) == (4, 6)
        assert contents(log) == [(4, "write", [3, 4])]
        with pytest.raises(OffsetOutOfRange, match=r"has \[4, 6\)"):
            list(log.segments(3))


def test_a_log_that_was_cleaned_to_its_end_goes_on_where_it_was(
    long_log: Log, storage: FaultyStorage
) -> None:
    assert long_log.clean(99) == 6
    reopened = Log(storage)
    assert (reopened.start, reopened.end, contents(reopened)) == (6, 6, [])
    assert reopened.lead() == 6
    reopened.append(write_of(7))
    assert contents(Log(storage)) == [(6, "leader", []), (7, "write", [7])]


def test_cleaning_below_the_start_does_nothing(long_log: Log, storage: FaultyStorage) -> None:
    long_log.clean(4)
    names = storage.names()
    assert long_log.clean(0) == long_log.clean(-5) == long_log.clean(4) == 4
    assert storage.names() == names


def test_what_is_younger_than_the_time_to_live_stays_and_all_behind_it(
    storage: FaultyStorage,
) -> None:
    log = Log(storage, clock_ms=ticking([10, 20, 90, 30]))
    log.lead()
    for key in (1, 2, 3):
        log.append(write_of(key))
    assert log.clean(99, older_than_ms=15) == 1
    assert log.clean(99, older_than_ms=20) == 1
    # The clock jumped back for the last one, which is not a reason to leave a gap.
    assert log.clean(99, older_than_ms=50) == 2
    assert contents(log) == [(2, "write", [2]), (3, "write", [3])]


@pytest.mark.parametrize("failpoint", ["clean.before_mark", "clean.marked", "clean.deleted"])
def test_a_clean_that_was_killed_is_finished_by_the_next_one(
    long_log: Log, storage: FaultyStorage, failpoint: str
) -> None:
    with arm(failpoint, interrupt), pytest.raises(KeyboardInterrupt):
        long_log.clean(6)
    reopened = Log(storage)
    assert reopened.start == (0 if failpoint == "clean.before_mark" else 6)
    assert reopened.end == 6
    reopened.lead()
    assert len(contents(reopened)) == (5 if failpoint == "clean.before_mark" else 1)
    assert reopened.clean(6) == 6
    assert storage.names() == [
        segment_name(0),
        segment_name(1),
        segment_name(6),
        "00000000000000000006.start",
    ]


def test_a_create_that_arrives_after_its_occupied_offset_was_cleaned_means_nothing(
    log: Log, storage: FaultyStorage
) -> None:
    storage.faults = [still_on_its_way]
    with pytest.raises(StorageUnavailable):
        log.append(write_of(1, 2, 3))
    log.clean(log.end)
    storage.deliver_late()
    assert segment_name(1) in storage.names()
    reopened = Log(storage)
    assert (reopened.start, reopened.end, contents(reopened)) == (2, 2, [])
    assert reopened.lead() == 2
    assert contents(reopened) == [(2, "leader", [])]
    reopened.clean(2)
    assert segment_name(1) not in storage.names()


# Where it was rolled up


@pytest.mark.parametrize("before", range(0, 48, 5))
def test_cleaning_drops_the_same_of_a_log_that_was_rolled_up(
    storage: FaultyStorage, tmp_path: Path, before: int
) -> None:
    log = several_leaders(storage)
    plain = FaultyStorage(shutil.copytree(tmp_path / "log", tmp_path / "plain"))
    twin = copy(log)
    twin._storage, twin._headers, twin._rolled = plain, {}, RolledRanges()
    leaders = [one.base_offset for one in log.headers(0) if one.kind is SegmentKind.LEADER]
    roll_up(log, storage)
    assert log.clean(before) == twin.clean(before)
    for reader in (log, Log(storage)):
        assert seen(reader) == seen(twin)
        assert reader.cleaned == twin.cleaned
    marks = [name for name in plain.names() if name.endswith(".start")]
    assert marks == [name for name in storage.names() if name.endswith(".start")]
    for mark in marks:
        assert storage.read(mark) == plain.read(mark)
    names = LogNames.of(storage.names())
    assert all(one.end > log.start for one in names.rolled)
    # A leader that comes later goes on with it.
    successor = Log(storage)
    leaders.append(successor.lead())
    assert successor.clean(successor.end) == successor.end
    names = LogNames.of(storage.names())
    assert names.rolled == []
    assert names.bases == leaders


@pytest.mark.parametrize("failpoint", ["clean.before_mark", "clean.marked", "clean.deleted"])
def test_a_clean_within_what_was_rolled_up_that_was_killed_is_finished_by_the_next(
    storage: FaultyStorage, failpoint: str
) -> None:
    log = several_leaders(storage)
    roll_up(log, storage)
    before = seen(log)
    with arm(failpoint, interrupt), pytest.raises(KeyboardInterrupt):
        log.clean(19)
    reopened = Log(storage)
    assert reopened.start in (0, 19)
    assert seen(reopened)["segments"] == before["segments"][-len(contents(reopened)) :]
    reopened.lead()
    assert reopened.clean(19) == 19
    assert contents(reopened)[:-1] == contents(log, 19)


def test_what_is_young_within_a_rolled_object_stays(storage: FaultyStorage) -> None:
    log = Log(storage, clock_ms=ticking(range(10)))
    log.lead()
    for key in range(6):
        log.append(write_of(key))
    roll_up(log, storage)
    assert log.clean(99, older_than_ms=4) == 4
    assert contents(log)[0] == contents(Log(storage))[0] == (4, "write", [3])
