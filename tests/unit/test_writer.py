"""The writer's plain behaviours, one by one: see tests/property for all of them together."""

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

import recovery.writer.table_writer
from foundation.errors import (
    CorruptSegment,
    Fenced,
    HandoverNeeded,
    InvalidInput,
    LockHeld,
    NotLeader,
    OldEpoch,
    Overflow,
    RewoundBatch,
    StorageUnavailable,
    TallybookError,
)
from locks.store.paths import owner_path
from recovery.writer.access import Answers, Grant, GrantedRows
from recovery.writer.renewal import Renewal
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter, WriterState
from tests.support.works import PutBy
from tests.support.writer_model import Content
from tests.support.writer_table import MOST
from tests.support.writer_world import FAILPOINTS, TTL_MS, Crash, World
from tests.support.zookeeper_server import wait_until


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture
def writer(world: World) -> TableWriter:
    """Return a writer of x that has started."""
    return world.start("a", "x")


def x(amount: int | None, *keys: int) -> Content:
    return {(0, key): {"x": amount} for key in keys or (1, 2)}


def values(world: World) -> dict[int, int]:
    """Return what the column x shows."""
    return {key: value for ((_, key), _), value in world.cells().items()}


# --- Batches ------------------------------------------------------------------------------------


def test_batches_follow_each_other(world: World, writer: TableWriter) -> None:
    assert (writer.batch, writer.state) == (-1, WriterState.CLEAN)
    assert world.write(writer, 0, x(1))
    assert world.write(writer, 1, x(2, 1))
    assert values(world) == {1: 3, 2: 1}
    assert (writer.batch, writer.progress.batch, writer.progress.keys_changed) == (1, 1, 3)


def test_a_batch_that_was_committed_is_skipped(world: World, writer: TableWriter) -> None:
    world.write(writer, 0, x(1))
    assert not world.write(writer, 0, x(5))
    assert writer.progress.skipped == 1
    again = world.start("a", "x")
    assert not world.write(again, 0, x(5))
    assert values(world) == {1: 1, 2: 1}


def test_a_batch_before_the_last_one_is_an_error_that_says_what_to_do(
    world: World, writer: TableWriter
) -> None:
    world.write(writer, 3, x(1))
    with pytest.raises(RewoundBatch, match=r"batch 2 of `a` comes after batch 3.*handover=True"):
        world.write(writer, 2, x(5))
    assert writer.state is WriterState.CLEAN
    assert world.write(writer, 4, x(1))


def test_batches_may_be_left_out_and_it_is_logged(
    world: World, writer: TableWriter, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert world.write(writer, 7, x(1))
    assert "batch 7 of a is the first that it commits: its source left some out" in caplog.text


def test_a_query_that_leaves_out_its_first_batch_after_a_handover_is_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with world.writer("q", "x", query_id="first") as first:
        world.write(first, 0, x(1))
    with world.writer("q", "x", query_id="second") as second, caplog.at_level(logging.WARNING):
        world.write(second, 2, x(1))
    assert "batch 3 of q follows batch 0 (its query's batch 0 is batch 1): its" in caplog.text


def test_an_empty_batch_is_committed(world: World, writer: TableWriter) -> None:
    assert writer.write(0, Rows(data=[]))
    assert writer.batch == 0


@pytest.mark.parametrize("redo", [False, True])
def test_bad_input_leaves_nothing_and_the_next_batch_works(world: World, redo: bool) -> None:
    """Key 1 is in another server's bucket than key 2, and has been written by then."""
    writer = world.start("a", "x", redo=redo)
    world.write(writer, 0, x(1))
    with pytest.raises(Overflow, match="column 'x', key k=2"):
        world.write(writer, 1, {**x(5, 1), **x(MOST, 2)})
    assert values(world) == {1: 1, 2: 1}
    assert writer.state is WriterState.CLEAN
    assert world.write(writer, 1, x(2))
    assert values(world) == {1: 3, 2: 3}


def test_whatever_a_put_raises_is_the_callers_and_nothing_stays(
    world: World, writer: TableWriter
) -> None:
    def put(grant: Grant) -> Answers[object]:
        writer.access.put(GrantedRows(grant, world.rows(x(1))))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        writer.run(0, PutBy(put))
    assert values(world) == {}
    assert world.write(writer, 0, x(2))


def test_a_new_partition_is_written_from_its_first_batch_on_and_undone_from_zero() -> None:
    world = World(partitioned=True)
    writer = world.start("a", "x")
    world.write(writer, 0, {(0, 1): {"x": 1}})
    with pytest.raises(Crash):
        world.run(lambda: world.write(writer, 1, {(2, 1): {"x": 5}}), (8, world.crash))
    assert world.cells() == {((0, 1), "x"): 1, ((2, 1), "x"): 5}
    world.check()
    world.close()


def test_a_partition_that_somebody_else_created_is_fenced_without_starting_over() -> None:
    world = World(partitioned=True)
    ours, theirs = world.start("a", "x"), world.start("b", "y")
    world.write(theirs, 0, {(0, 1): {"y": 1}})
    world.write(ours, 0, {(0, 1): {"x": 1}})
    assert ours.progress.starts == 1
    world.check()
    world.close()


@pytest.mark.parametrize("redo", [False, True])
def test_a_delete_of_a_partition_that_does_not_exist_is_no_part_of_its_batch(redo: bool) -> None:
    world = World(partitioned=True)
    writer = world.start("a", "x", redo=redo)
    world.write(writer, 0, {(0, 1): {"x": 1}, (1, 1): {"x": None}})
    with pytest.raises(Crash):
        world.run(
            lambda: world.write(writer, 1, {(0, 1): {"x": 5}, (1, 1): {"x": None}}),
            (6, world.crash),
        )
    world.check()
    assert len(world.coordinator.partitions.ids(world.table)) == 1
    world.close()


def test_what_was_in_a_dropped_partition_is_not_owed_any_more() -> None:
    world = World(partitioned=True)
    writer = world.start("a", "x")
    world.write(writer, 0, {(0, 1): {"x": 1}, (2, 1): {"x": 1}})
    with pytest.raises(Crash):
        world.run(
            lambda: world.write(writer, 1, {(0, 1): {"x": 5}, (2, 1): {"x": 5}}), (4, world.crash)
        )
    for key in world.coordinator.partitions.ids(world.table):
        if key.endswith(b"\x02"):
            world.coordinator.partitions.drop(world.table, key)
    again = world.start("a", "x")
    assert again.progress.undone_keys == 1
    assert world.cells() == {((0, 1), "x"): 1, ((2, 1), "x"): 6}
    world.close()


# --- Crashes ------------------------------------------------------------------------------------


def test_the_world_knows_every_failpoint_of_the_writer() -> None:
    room = Path(recovery.writer.table_writer.__file__).parent
    sources = [path.read_text() for path in room.glob("*.py")]
    found = {name for source in sources for name in re.findall(r'hit\("(.+)"\)', source)}
    assert found == set(FAILPOINTS)


@pytest.mark.parametrize("redo", [False, True])
@pytest.mark.parametrize("failpoint", FAILPOINTS)
def test_a_crash_anywhere_counts_each_batch_once(world: World, failpoint: str, redo: bool) -> None:
    """The first life leaves something to pay, the second dies at the failpoint, the third ends."""
    batches = [x(1), x(2, 1), {**x(3, 1), **x(None, 2)}]
    for crash_at in ("writer.put", failpoint, None):
        world.crash_at = crash_at
        if crash_at in (("writer.undone",) if redo else ("writer.redo_written", "writer.prepared")):
            continue
        try:
            writer = world.start("a", "x", redo=redo)
            for batch in range(max(0, writer.batch), len(batches)):
                world.write(writer, batch, batches[batch])
        except Crash:
            continue
        assert crash_at is None
    assert values(world) == {1: 6}
    world.check()


# --- From start to close ------------------------------------------------------------------------


def test_a_clean_writer_releases_and_keeps_its_batch_number(
    world: World, writer: TableWriter
) -> None:
    world.write(writer, 0, x(1))
    writer.close()
    writer.close()
    assert writer.state is WriterState.CLOSED
    assert not world.records()["a"].held
    assert world.start("b", "x").progress.undone_keys == 0
    assert world.records()["a"].batch == 0


def test_a_writer_with_uncommitted_work_abandons(world: World, writer: TableWriter) -> None:
    def interrupted(grant: Grant) -> Answers[object]:
        writer.access.put(GrantedRows(grant, world.rows(x(1))))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.run(0, PutBy(interrupted))
    writer.close()
    assert world.records()["a"].abandoned
    assert world.start("b", "x").progress.undone_keys == 2
    assert values(world) == {}


def test_a_writer_is_used_between_start_and_close(world: World, writer: TableWriter) -> None:
    unused = world.writer("b", "y")
    with pytest.raises(InvalidInput, match="the writer of `b` is new"):
        unused.write(0, Rows(data=[]))
    with pytest.raises(InvalidInput, match="`b` was not started"):
        _ = unused.batch
    unused.close()
    with pytest.raises(InvalidInput, match="`a` was started already"):
        writer.start()
    writer.close()
    with pytest.raises(InvalidInput, match="the writer of `a` is closed"):
        writer.write(0, Rows(data=[]))


def test_a_refused_writer_may_be_started_again(world: World, writer: TableWriter) -> None:
    other = world.writer("b", "x")
    with pytest.raises(LockHeld):
        other.start()
    writer.close()
    assert other.start().state is WriterState.CLEAN


def test_a_writer_that_cannot_recover_leaves_its_lock_to_others(world: World) -> None:
    first = world.start("a", "x", redo=True)
    with pytest.raises(Crash):
        world.run(lambda: world.write(first, 0, x(1)), (4, world.crash))
    second = world.writer("a", "x")
    with pytest.raises(InvalidInput, match=r"lies at .* by a writer with that redo log"):
        second.start()
    assert second.state is WriterState.CLOSED
    assert world.records()["a"].abandoned
    assert world.start("b", "x", redo=True).state is WriterState.CLEAN
    assert values(world) == {1: 1, 2: 1}


def test_a_column_that_another_owner_has_committed_needs_a_handover(
    world: World, writer: TableWriter
) -> None:
    world.write(writer, 0, x(1))
    writer.close()
    with pytest.raises(HandoverNeeded, match="Go on as `a`, or pass handover=True"):
        world.start("b", "x", handover=False)
    assert world.start("b", "x").batch == -1


# --- Succession and starting over ---------------------------------------------------------------


def test_a_fenced_writer_stops_for_good(world: World, writer: TableWriter) -> None:
    world.start("a", "x")
    with pytest.raises((Fenced, OldEpoch)):
        world.write(writer, 0, x(1))
    assert writer.state is WriterState.FENCED
    with pytest.raises(InvalidInput, match="the writer of `a` is fenced"):
        world.write(writer, 0, x(1))
    held = world.records()["a"]
    writer.close()
    assert world.records()["a"] == held


@pytest.mark.parametrize(
    "failure",
    [
        FileNotFoundError("the file that this batch has staged"),
        InvalidInput("what the tasks have written is not there"),
        CorruptSegment("the promise is gone"),
        NotLeader("the bucket has moved"),
    ],
)
def test_a_writer_that_has_a_successor_is_told_so_whatever_fails(
    world: World, failure: Exception
) -> None:
    """The successor has cleared away what the batch needed."""
    writer = world.start("a", "x", deadline_s=0.0)

    def put(_: Grant) -> Answers[object]:
        world.start("a", "x")
        raise failure

    with pytest.raises(Fenced, match="was acquired again, with epoch 2; stop for good") as told:
        writer.run(0, PutBy(put))
    assert told.value.__cause__ is failure
    assert writer.state is WriterState.FENCED


def test_a_failure_is_told_as_it_is_while_nobody_can_say_who_holds_the_lock(
    world: World, writer: TableWriter
) -> None:
    def put(_: Grant) -> Answers[object]:
        world.losses.append("session")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        writer.run(0, PutBy(put))
    assert world.write(writer, 0, x(1))


@pytest.mark.parametrize(
    "happening",
    [
        lambda world: world.hand_over(0),
        lambda world: world.lose_server(1, zombie=False),
        lambda world: world.lose_server(1, zombie=True),
        lambda world: world.fail_storage(0, "late"),
        lambda world: world.losses.extend(["request", "answer", "request"]),
        lambda world: world.losses.append("session"),
    ],
)
@pytest.mark.parametrize("steps", range(10))
def test_what_can_be_cured_is_cured_under_a_new_epoch(
    world: World, writer: TableWriter, happening: Callable[[World], None], steps: int
) -> None:
    world.write(writer, 0, x(1))
    assert world.run(lambda: world.write(writer, 1, x(1)), (steps, lambda: happening(world)))
    assert world.write(writer, 2, x(1))
    assert values(world) == {1: 3, 2: 3}
    world.check()


def test_a_writer_that_starts_over_does_not_fence_its_successor(
    world: World, writer: TableWriter
) -> None:
    def succeed() -> None:
        world.start("a", "x")
        world.hand_over(0)
        world.hand_over(1)

    with pytest.raises((Fenced, OldEpoch)):
        world.run(lambda: world.write(writer, 0, x(1)), (0, succeed))
    assert world.records()["a"].epoch == 2


@pytest.mark.parametrize("losses", [["request", "answer"], ["session"], ["request", "late"]])
def test_an_acquisition_of_unknown_outcome_is_its_own(
    world: World, writer: TableWriter, losses: list[str]
) -> None:
    """When it starts over, the epoch that it finds may be the one that it has just acquired."""

    def lose() -> None:
        world.hand_over(0)
        world.losses.extend(losses)

    assert world.run(lambda: world.write(writer, 0, x(1)), (0, lose))
    assert writer.epoch == 2 == world.records()["a"].epoch


@pytest.mark.parametrize("redo", [False, True])
def test_what_a_deposed_leader_says_of_offsets_and_values_counts_for_nothing(
    world: World, redo: bool
) -> None:
    """It knows neither the offset to undo from, nor that there is room for what was promised."""
    writer = world.start("a", "x", redo=redo)
    world.write(writer, 0, x(MOST))
    for number in range(2):
        world.lose_server(number, zombie=True)
    for access in world.accesses:
        access.believes.clear()
    world.write(writer, 1, x(None))
    world.write(writer, 2, x(2))
    with pytest.raises(Crash):
        world.run(lambda: world.write(writer, 3, x(3)), (4, world.crash))
    again = world.writer("a", "x", redo=redo)
    world.accesses[-1].believes.update(world.zombies)
    again.start()
    assert values(world) == ({1: 5, 2: 5} if redo else {1: 2, 2: 2})


def test_what_is_not_cured_in_time_is_raised_and_cured_by_the_next_call(world: World) -> None:
    writer = world.start("a", "x", deadline_s=0.0)
    world.fail_storage(0, "refused")
    with pytest.raises(StorageUnavailable):
        writer.write(0, world.rows(x(1)))
    assert writer.state is WriterState.DIRTY
    assert world.write(writer, 0, x(2))
    assert values(world) == {1: 2, 2: 2}


@pytest.mark.parametrize("loss", ["answer", "request", "late", "session"])
def test_a_commit_of_unknown_outcome_is_read_back(
    world: World, writer: TableWriter, loss: str
) -> None:
    lose = (8, lambda: world.losses.append(loss))
    assert world.run(lambda: world.write(writer, 0, x(1)), lose)
    assert writer.progress.batch == 0
    assert not world.write(writer, 0, x(1))
    assert values(world) == {1: 1, 2: 1}
    assert writer.epoch == (2 if loss == "session" else 1)


def test_a_session_that_was_opened_on_the_way_is_closed_at_the_end(
    world: World, writer: TableWriter
) -> None:
    given = writer.access
    world.run(lambda: world.write(writer, 0, x(1)), (8, lambda: world.losses.append("session")))
    opened = writer.access
    assert opened is not given
    writer.close()
    with pytest.raises(TallybookError, match="is gone"):
        opened.coordinator.store.sync()


def test_a_leader_that_nobody_finds_is_waited_for_until_the_deadline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    writer = world.writer("a", "x", deadline_s=0.5, pause=pauses.append)

    def nobody(*_: object) -> Answers[int]:
        raise NotLeader("nobody leads")

    monkeypatch.setattr(writer.access, "fence", nobody)
    with pytest.raises(NotLeader):
        writer.start()
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32]
    assert writer.state is WriterState.CLOSED


# --- Redo ---------------------------------------------------------------------------------------


def test_a_promised_batch_is_rolled_forward_by_whoever_comes_next(world: World) -> None:
    first = world.start("a", "x", redo=True)
    with pytest.raises(Crash):
        world.run(lambda: world.write(first, 0, {**x(1, 1), **x(2, 3)}), (4, world.crash))
    world.expire()
    second = world.start("b", "x", redo=True)
    assert values(world) == {1: 1, 3: 2}
    assert world.records()["a"].batch == 0
    assert second.batch == -1


def test_a_leader_that_moves_behind_the_promise_does_not_make_it_twice(world: World) -> None:
    writer = world.start("a", "x", redo=True)
    assert world.run(lambda: world.write(writer, 0, x(1)), (4, lambda: world.hand_over(0)))
    assert values(world) == {1: 1, 2: 1}
    assert (writer.progress.batch, writer.progress.skipped) == (0, 0)


def test_the_redo_log_is_emptied_on_the_way(world: World) -> None:
    """By the commit, by whoever pays, and by the next start of whoever died before its promise."""
    writer = world.start("a", "x", redo=True)
    world.write(writer, 0, x(1))
    assert world.redo_storage.names() == []
    for steps in (3, 4):
        writing = partial(world.write, world.start("a", "x", redo=True), 1, x(1))
        with pytest.raises(Crash):
            world.run(writing, (steps, world.crash))
        assert len(world.redo_storage.names()) == 1
        world.start("a", "x", redo=True)
        assert world.redo_storage.names() == []
    assert values(world) == {1: 2, 2: 2}


def test_a_batch_that_its_heir_has_dropped_is_no_damage(world: World) -> None:
    """A writer that pauses before it pays is fenced, and is told that."""
    first = world.start("a", "x", redo=True)
    with pytest.raises(Crash):
        world.run(lambda: world.write(first, 0, x(1)), (4, world.crash))
    zombie = world.writer("a", "x", redo=True)
    fenced = 4
    with pytest.raises(Fenced):
        world.run(zombie.start, (fenced, lambda: world.start("a", "x", redo=True)))


def test_a_promise_that_is_lost_is_an_error(world: World) -> None:
    first = world.start("a", "x", redo=True)
    with pytest.raises(Crash):
        world.run(lambda: world.write(first, 0, x(1)), (4, world.crash))
    world.redo_storage.objects.clear()
    with pytest.raises(CorruptSegment, match="a batch was promised and cannot be rolled forward"):
        world.start("a", "x", redo=True)


# --- Renewal ------------------------------------------------------------------------------------


def test_the_lock_is_renewed_in_the_background(world: World, writer: TableWriter) -> None:
    path = owner_path(world.table.table_id, "a")
    world.shared.advance(TTL_MS - 1)
    renewal = Renewal(writer.renew, 0.001)
    wait_until(lambda: world.shared.nodes[path].modified_ms == world.shared.clock_ms, "a renewal")
    renewal.stop()
    world.shared.advance(TTL_MS - 1)
    with pytest.raises(LockHeld):
        world.start("b", "x")


def test_a_renewal_that_fails_is_tried_again_and_does_not_stop_the_writer(world: World) -> None:
    calls: list[int] = []

    def renew() -> None:
        calls.append(1)
        raise Fenced("no longer ours")

    renewal = Renewal(renew, 0.001)
    wait_until(lambda: len(calls) > 2, "three renewals")
    renewal.stop()


def test_renewing_before_the_start_is_an_error(world: World) -> None:
    with pytest.raises(InvalidInput, match="was not started"):
        world.writer("a", "x").renew()
