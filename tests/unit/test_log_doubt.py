"""Creates that go wrong: doubt is ended before anything else is appended."""

import pytest

from foundation.errors import (
    Deposed,
    StorageFull,
    StorageUnavailable,
    TallybookError,
    UnknownOutcome,
)
from foundation.failpoints import arm
from merge_engine.bucket.log import Log
from merge_engine.bucket.segment import segment_name
from tests.support.faulty_storage import (
    Create,
    FaultyStorage,
    done_but_unknown,
    interrupt,
    no_room,
    not_done_and_unknown,
    sent_twice,
    still_on_its_way,
    unreachable,
)
from tests.support.logs import contents, write_of


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


def test_who_cannot_end_the_doubt_for_any_reason_does_not_say_that_nothing_was_written(
    storage: FaultyStorage,
) -> None:
    clock = iter([1, 2])

    def time_ms() -> int:
        for now in clock:
            return now
        raise TallybookError("this server has lost its session, and with it the time")

    log = Log(storage, clock_ms=time_ms)
    log.lead()
    storage.faults = [done_but_unknown]
    with pytest.raises(UnknownOutcome, match="lost its session"):
        log.append(write_of(1))
    clock = iter([3, 4])
    assert log.settle()
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
    with arm("log.created", interrupt), pytest.raises(KeyboardInterrupt):
        log.append(write_of(1))
    assert contents(Log(storage)) == [(0, "leader", []), (1, "write", [1])]


def test_a_name_taken_by_whoever_writes_under_our_term_is_not_our_append(
    log: Log, storage: FaultyStorage
) -> None:
    """As a forked child of ours would; what stands there is not what we have written."""
    twin = Log(storage)
    twin.term = log.term
    twin.append(write_of(100))
    with pytest.raises(Deposed, match="another leader"):
        log.append(write_of(1))
    assert contents(Log(storage)) == [(0, "leader", []), (1, "write", [100])]
