"""The log: one leader appends, doubt is ended before anything else, and cleaning leaves no gap."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from merge_engine.errors import (
    CorruptSegment,
    Deposed,
    LogGap,
    OffsetOutOfRange,
    StorageFull,
    StorageUnavailable,
    UnknownOutcome,
)
from merge_engine.failpoints import arm
from merge_engine.log import Log
from merge_engine.segment import (
    Change,
    Segment,
    SegmentHeader,
    SegmentKind,
    decode_segment,
    encode_segment,
    segment_name,
)
from merge_engine.storage import AlreadyExists, LocalStorage

Create = Callable[[LocalStorage, str, bytes], None]


class FaultyStorage(LocalStorage):
    """A storage whose next creates go wrong in ways that are given one by one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.faults: list[Create] = []
        self.late: list[tuple[str, bytes]] = []

    def create(self, name: str, data: bytes) -> None:
        if self.faults:
            self.faults.pop(0)(self, name, data)
        else:
            super().create(name, data)

    def really_create(self, name: str, data: bytes) -> None:
        super().create(name, data)

    def deliver_late(self) -> None:
        """Let the requests that were on their way arrive now."""
        for name, data in self.late:
            try:
                super().create(name, data)
            except AlreadyExists:
                continue
        self.late = []


def done_but_unknown(storage: LocalStorage, name: str, data: bytes) -> None:
    LocalStorage.create(storage, name, data)
    raise UnknownOutcome(f"{name}: the connection broke")


def not_done_and_unknown(storage: LocalStorage, name: str, data: bytes) -> None:
    raise UnknownOutcome(f"{name}: the connection broke")


def still_on_its_way(storage: LocalStorage, name: str, data: bytes) -> None:
    assert isinstance(storage, FaultyStorage)
    storage.late.append((name, data))
    raise UnknownOutcome(f"{name}: timed out")


def sent_twice(storage: LocalStorage, name: str, data: bytes) -> None:
    """The store's client sent the request again after it had been applied."""
    LocalStorage.create(storage, name, data)
    LocalStorage.create(storage, name, data)


def no_room(storage: LocalStorage, name: str, data: bytes) -> None:
    raise StorageFull(f"{name}: no room")


def unreachable(storage: LocalStorage, name: str, data: bytes) -> None:
    raise StorageUnavailable(f"{name}: unreachable")


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(tmp_path / "log")


@pytest.fixture
def log(storage: FaultyStorage) -> Log:
    opened = Log(storage)
    opened.lead()
    return opened


def write_of(*keys: int) -> Segment:
    """Return a write of these keys, as a bucket would hand it to the log."""
    count = len(keys)
    header = SegmentHeader(
        kind=SegmentKind.WRITE,
        base_offset=0,
        term=0,
        nonce="",
        timestamp_ms=0,
        rows=count,
        column_ids=(2,),
    )
    before, after = pa.nulls(count, pa.int64()), pa.array(keys, pa.int64())
    change = Change(np.zeros(count, bool), before, np.ones(count, bool), after)
    return Segment(header, {1: pa.array(keys, pa.int64())}, {2: change})


def contents(log: Log, start: int | None = None) -> list[tuple[int, str, list[int]]]:
    """Return what the log holds: base offset, kind and keys of each segment."""
    return [
        (
            segment.header.base_offset,
            segment.header.kind.value,
            segment.keys[1].to_pylist() if segment.keys else [],
        )
        for segment in log.segments(log.start if start is None else start)
    ]


def ticking(times: Sequence[int]) -> Callable[[], int]:
    ticks: Iterator[int] = iter(times)
    return lambda: next(ticks)


# Appending


def test_a_new_log_is_empty_and_nobody_leads_it(storage: FaultyStorage) -> None:
    log = Log(storage)
    assert (log.start, log.end, log.term) == (0, 0, None)
    assert contents(log) == []
    with pytest.raises(Deposed):
        log.append(write_of(1))
    assert storage.names() == []


def test_to_lead_is_to_append_a_leader_segment_whose_offset_is_the_term(log: Log) -> None:
    assert (log.term, log.end) == (0, 1)
    assert contents(log) == [(0, "leader", [])]


def test_appends_follow_each_other_without_a_gap(log: Log, storage: FaultyStorage) -> None:
    first = log.append(write_of(1, 2, 3))
    second = log.append(write_of(4))
    assert (first.base_offset, first.end_offset) == (1, 4)
    assert (second.base_offset, second.end_offset) == (4, 5)
    expected = [(0, "leader", []), (1, "write", [1, 2, 3]), (4, "write", [4])]
    assert contents(log) == expected
    assert contents(Log(storage)) == expected


def test_an_append_is_stamped_with_term_time_and_a_nonce_of_its_own(
    storage: FaultyStorage,
) -> None:
    log = Log(storage, clock_ms=ticking([10, 20, 30]))
    log.lead()
    first, second = log.append(write_of(1)), log.append(write_of(2))
    assert (first.term, first.timestamp_ms) == (0, 20)
    assert (second.term, second.timestamp_ms) == (0, 30)
    assert first.nonce
    assert first.nonce != second.nonce


def test_reading_starts_with_the_segment_that_holds_the_offset(log: Log) -> None:
    log.append(write_of(1, 2, 3))
    log.append(write_of(4))
    assert contents(log, 2) == [(1, "write", [1, 2, 3]), (4, "write", [4])]
    assert contents(log, 4) == [(4, "write", [4])]
    assert contents(log, 5) == []
    assert [s.header.base_offset for s in log.segments(0, 1)] == [0]
    assert [s.header.base_offset for s in log.segments(0, 2)] == [0, 1]
    assert [s.header.base_offset for s in log.segments(0, 99)] == [0, 1, 4]


def test_an_offset_that_the_log_does_not_have_is_an_error_with_those_it_has(log: Log) -> None:
    with pytest.raises(OffsetOutOfRange, match=r"offset 2 is not in the log, which has \[0, 1\)"):
        list(log.segments(2))
    with pytest.raises(OffsetOutOfRange, match="offset -1"):
        list(log.segments(-1))


# Creates that go wrong


def test_a_create_of_unknown_outcome_that_happened_is_an_append(
    log: Log, storage: FaultyStorage
) -> None:
    storage.faults = [done_but_unknown]
    header = log.append(write_of(1, 2))
    assert (header.base_offset, header.end_offset, log.end) == (1, 3, 3)
    assert contents(log) == contents(Log(storage)) == [(0, "leader", []), (1, "write", [1, 2])]


def test_a_create_of_unknown_outcome_that_did_not_happen_is_certain_to_have_failed(
    log: Log, storage: FaultyStorage
) -> None:
    storage.faults = [not_done_and_unknown]
    with pytest.raises(StorageUnavailable, match="offset 1: nothing was written; try again"):
        log.append(write_of(1, 2))
    assert contents(log) == [(0, "leader", []), (1, "empty", [])]
    assert log.append(write_of(1, 2)).base_offset == 2
    assert contents(log) == contents(Log(storage))


def test_a_create_that_arrives_after_its_offset_was_occupied_changes_nothing(
    log: Log, storage: FaultyStorage
) -> None:
    storage.faults = [still_on_its_way]
    with pytest.raises(StorageUnavailable):
        log.append(write_of(1, 2))
    storage.deliver_late()
    assert contents(Log(storage)) == [(0, "leader", []), (1, "empty", [])]
    log.append(write_of(3))
    assert contents(Log(storage))[1:] == [(1, "empty", []), (2, "write", [3])]


def test_a_name_taken_by_our_own_request_that_was_sent_twice_is_an_append(
    log: Log, storage: FaultyStorage
) -> None:
    storage.faults = [sent_twice]
    assert log.append(write_of(1)).base_offset == 1
    assert not log.deposed
    assert contents(log) == [(0, "leader", []), (1, "write", [1])]


@pytest.mark.parametrize("fault", [no_room, unreachable])
def test_a_create_that_certainly_failed_leaves_no_trace(
    log: Log, storage: FaultyStorage, fault: Create
) -> None:
    storage.faults = [fault]
    with pytest.raises((StorageFull, StorageUnavailable)):
        log.append(write_of(1))
    assert storage.names() == [segment_name(0)]
    assert log.append(write_of(1)).base_offset == 1


@pytest.mark.parametrize("settling", [no_room, unreachable, not_done_and_unknown])
def test_while_the_doubt_cannot_be_ended_every_call_says_so_and_then_it_ends(
    log: Log, storage: FaultyStorage, settling: Create
) -> None:
    storage.faults = [done_but_unknown, settling, settling]
    with pytest.raises(UnknownOutcome):
        log.append(write_of(1))
    with pytest.raises((StorageFull, StorageUnavailable, UnknownOutcome)):
        log.append(write_of(2))
    assert log.settle() is True
    assert log.settle() is False
    log.append(write_of(3))
    assert contents(log) == [(0, "leader", []), (1, "write", [1]), (2, "write", [3])]


def test_a_doubt_about_a_create_that_arrives_before_it_is_settled_ends_with_the_segment(
    log: Log, storage: FaultyStorage
) -> None:
    storage.faults = [still_on_its_way, unreachable]
    with pytest.raises(UnknownOutcome, match=r"offset 1.*timed out.*the next call finds out first"):
        log.append(write_of(1))
    storage.deliver_late()
    assert log.settle() is True
    assert contents(log) == [(0, "leader", []), (1, "write", [1])]


def test_a_doubt_about_the_occupying_segment_itself_is_ended_too(
    log: Log, storage: FaultyStorage
) -> None:
    storage.faults = [not_done_and_unknown, done_but_unknown]
    with pytest.raises(UnknownOutcome):
        log.append(write_of(1))
    assert log.settle() is False
    assert contents(log) == [(0, "leader", []), (1, "empty", [])]
    assert log.append(write_of(2)).base_offset == 2


def test_killed_right_after_the_create_the_segment_is_there_for_the_next(
    log: Log, storage: FaultyStorage
) -> None:
    def kill() -> None:
        raise KeyboardInterrupt

    with arm("log.created", kill), pytest.raises(KeyboardInterrupt):
        log.append(write_of(1))
    assert contents(Log(storage)) == [(0, "leader", []), (1, "write", [1])]


# Leaders


def test_a_new_leader_deposes_the_former_whose_next_append_changes_nothing(
    log: Log, storage: FaultyStorage
) -> None:
    log.append(write_of(1))
    successor = Log(storage)
    assert successor.lead() == 2
    before = storage.names()
    with pytest.raises(Deposed, match=r"another leader has taken this bucket since term 0; open"):
        log.append(write_of(2))
    assert storage.names() == before
    assert log.deposed
    with pytest.raises(Deposed):
        log.settle()
    with pytest.raises(Deposed):
        log.append(write_of(2))
    assert successor.append(write_of(3)).term == 2


def test_a_deposed_leader_collides_also_when_its_successor_has_cleaned_the_log(
    log: Log, storage: FaultyStorage
) -> None:
    successor = Log(storage)
    successor.lead()
    successor.append(write_of(1))
    successor.clean(successor.end)
    with pytest.raises(Deposed):
        log.append(write_of(2))


def test_a_doubt_that_a_new_leader_ended_is_a_deposition(log: Log, storage: FaultyStorage) -> None:
    storage.faults = [still_on_its_way, unreachable]
    with pytest.raises(UnknownOutcome):
        log.append(write_of(1))
    Log(storage).lead()
    storage.deliver_late()
    with pytest.raises(Deposed):
        log.settle()
    assert contents(Log(storage)) == [(0, "leader", []), (1, "leader", [])]


def test_a_new_leader_chases_one_that_goes_on_appending(log: Log, storage: FaultyStorage) -> None:
    successor = Log(storage)

    def overtaken(to: LocalStorage, name: str, data: bytes) -> None:
        log.append(write_of(log.end))
        LocalStorage.create(to, name, data)

    storage.faults = [overtaken]
    # The former leader appends through the same storage while the successor's create is under way.
    assert successor.lead() == 2
    assert contents(successor) == [(0, "leader", []), (1, "write", [1]), (2, "leader", [])]
    with pytest.raises(Deposed):
        log.append(write_of(9))


def test_a_leader_whose_own_segment_was_in_doubt_leads_from_it(storage: FaultyStorage) -> None:
    storage.faults = [done_but_unknown]
    log = Log(storage)
    assert log.lead() == 0
    storage.faults = [sent_twice]
    assert Log(storage).lead() == 1
    assert [kind for _, kind, _ in contents(Log(storage))] == ["leader", "leader"]


def test_a_leader_segment_that_arrives_late_deposes_nobody_who_came_after_it(
    storage: FaultyStorage,
) -> None:
    storage.faults = [still_on_its_way]
    log = Log(storage)
    assert log.lead() == 0
    storage.deliver_late()
    assert log.append(write_of(1)).base_offset == 1
    assert contents(Log(storage)) == [(0, "leader", []), (1, "write", [1])]


def test_the_attempts_to_lead_are_bounded(storage: FaultyStorage) -> None:
    storage.faults = [not_done_and_unknown] * 1000
    with pytest.raises(StorageUnavailable, match="could not take the lead after 100 attempts"):
        Log(storage).lead()
    assert len(storage.faults) == 900


def test_leading_on_a_full_disk_changes_nothing(storage: FaultyStorage) -> None:
    storage.faults = [no_room]
    with pytest.raises(StorageFull):
        Log(storage).lead()
    assert storage.names() == []


# Cleaning


@pytest.fixture
def long_log(storage: FaultyStorage) -> Log:
    """Return a log with leaders at 0 and 1, and writes at [2, 4) and [4, 6)."""
    Log(storage).lead()
    log = Log(storage)
    log.lead()
    log.append(write_of(1, 2))
    log.append(write_of(3, 4))
    return log


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
    def kill() -> None:
        raise KeyboardInterrupt

    with arm(failpoint, kill), pytest.raises(KeyboardInterrupt):
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


# Damage


def test_a_missing_segment_in_the_middle_is_a_gap_that_is_named(
    log: Log, storage: FaultyStorage
) -> None:
    log.append(write_of(1, 2))
    log.append(write_of(3))
    storage.delete([segment_name(1)])
    for damaged in (log, Log(storage)):
        with pytest.raises(LogGap, match=rf"{segment_name(1)} is missing .*restore it from a copy"):
            contents(damaged)


def test_a_missing_first_segment_is_a_gap_and_the_next_ones_are_not_read_instead(
    log: Log, storage: FaultyStorage
) -> None:
    log.append(write_of(1, 2))
    log.append(write_of(3))
    storage.delete([segment_name(0)])
    with pytest.raises(LogGap, match=rf"{segment_name(0)} is missing"):
        contents(Log(storage))


def test_a_missing_segment_at_the_start_of_a_cleaned_log_is_a_gap_that_is_named(
    long_log: Log, storage: FaultyStorage
) -> None:
    long_log.clean(4)
    long_log = Log(storage)
    long_log.lead()
    storage.delete([segment_name(4)])
    with pytest.raises(LogGap, match=rf"{segment_name(4)} is missing"):
        contents(Log(storage))


def test_swapped_segments_are_noticed(log: Log, storage: FaultyStorage, tmp_path: Path) -> None:
    log.append(write_of(1))
    log.append(write_of(2))
    first, second = (tmp_path / "log" / segment_name(offset) for offset in (1, 2))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(CorruptSegment, match="renamed or swapped"):
        contents(log)
    with pytest.raises(CorruptSegment, match="renamed or swapped"):
        Log(storage)


def test_a_renamed_segment_is_noticed(log: Log, storage: FaultyStorage, tmp_path: Path) -> None:
    log.append(write_of(1))
    (tmp_path / "log" / segment_name(1)).rename(tmp_path / "log" / segment_name(5))
    with pytest.raises(CorruptSegment, match=rf"{segment_name(5)}.*renamed or swapped"):
        Log(storage)


def test_a_truncated_last_segment_is_an_error_and_not_the_end_of_the_log(
    log: Log, storage: FaultyStorage, tmp_path: Path
) -> None:
    log.append(write_of(1))
    path = tmp_path / "log" / segment_name(1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptSegment, match=r"log offset 1\): truncated, or not a segment"):
        Log(storage)
    path.write_bytes(b"")
    with pytest.raises(CorruptSegment, match=r"log offset 1\): only 0 bytes"):
        Log(storage)


def test_an_object_with_a_name_that_is_no_offset_is_named(storage: FaultyStorage) -> None:
    storage.create("copy-of-1.seg", b"")
    with pytest.raises(CorruptSegment, match=r"'copy-of-1\.seg' is not an object of a log; move"):
        Log(storage)


def test_other_objects_in_the_storage_do_no_harm(log: Log, storage: FaultyStorage) -> None:
    storage.create("README", b"")
    assert contents(Log(storage)) == [(0, "leader", [])]


def test_a_leader_segment_is_one_that_the_tests_can_read(log: Log, storage: FaultyStorage) -> None:
    leader = decode_segment(segment_name(0), storage.read(segment_name(0)))
    assert leader.header.kind is SegmentKind.LEADER
    assert encode_segment(leader) == storage.read(segment_name(0))
