"""One leader appends to the log, without a gap, until another deposes it."""

import pytest

from foundation.errors import (
    Deposed,
    OffsetOutOfRange,
    StorageFull,
    StorageUnavailable,
    UnknownOutcome,
)
from merge_engine.bucket.log import Log
from merge_engine.storage.objects import LocalStorage
from tests.support.faulty_storage import (
    FaultyStorage,
    done_but_unknown,
    no_room,
    not_done_and_unknown,
    sent_twice,
    still_on_its_way,
    unreachable,
)
from tests.support.logs import contents, ticking, write_of

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
