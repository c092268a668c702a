"""The writer's recovery from a large batch: many calls of undo, and what may happen in between."""

import logging
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

import recovery.writer.debts
import recovery.writer.table_writer
from foundation.errors import OldEpoch
from foundation.failpoints import arm
from recovery.writer.access import DebtUndo
from recovery.writer.table_writer import TableWriter, WriterState
from tests.support.writer_access import WorldAccess
from tests.support.writer_model import Content
from tests.support.writer_table import KEYS
from tests.support.writer_world import Crash, World

LONG_S = 1_000.0


@pytest.fixture
def world() -> Iterator[World]:
    """Return a world in which a, the owner of x, has died in a batch of several parts."""
    made = World(small_parts=True, small_undos=True)
    writer = made.start("a", "x")
    made.write(writer, 0, x(1))
    made.crash_at = "writer.put"
    with pytest.raises(Crash):
        made.write(writer, 1, x(5))
    yield made
    made.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the epochs of the calls of undo that were answered."""
    made: list[int] = []
    undo = WorldAccess.undo

    def counted(self: WorldAccess, work: DebtUndo) -> Any:
        answers = undo(self, work)
        made.append(work.writer.epoch)
        return answers

    monkeypatch.setattr(WorldAccess, "undo", counted)
    return made


def x(amount: int) -> Content:
    return {(0, key): {"x": amount} for key in KEYS}


def values(world: World) -> dict[int, int]:
    return {key: value for ((_, key), column), value in world.cells().items() if column == "x"}


def at_call(number: int, act: Any) -> Any:
    """Arm what happens once, after so many calls of undo."""
    left = iter(range(number - 1))

    def happen() -> None:
        nonlocal act
        if next(left, None) is None and act is not None:
            once, act = act, None
            once()

    return arm("writer.undone", happen)


def test_the_keys_of_all_calls_add_up(world: World, calls: list[int]) -> None:
    seen: list[int] = []
    writer = world.writer("a", "x")
    with arm("writer.undone", lambda: seen.append(writer.progress.undone_keys)):
        writer.start()
    assert len(calls) > 1
    assert len(set(seen)) == len(calls), "it is known as it goes"
    assert writer.progress.undone_keys == seen[-1] == len(KEYS)
    assert values(world) == dict.fromkeys(KEYS, 1)


def test_how_far_it_is_is_logged(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovery.writer.debts, "_SAY_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO):
        world.start("a", "x")
    said = [message for message in caplog.messages if message.startswith("und")]
    # The last part of a put, which comes back first, has no rows.
    assert said == [
        "undoing a: 0 keys so far, 2 of 2 buckets are not done",
        "undoing a: 2 keys so far, 2 of 2 buckets are not done",
        "undid 4 keys of a",
    ]


def test_a_short_undo_is_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        world.start("a", "x")
    assert [one for one in caplog.messages if one.startswith("und")] == ["undid 4 keys of a"]


def test_a_successor_goes_on_and_the_first_one_is_told_with_its_next_call(
    world: World, calls: list[int]
) -> None:
    successors: list[TableWriter] = []
    writer = world.writer("a", "x")
    with at_call(1, lambda: successors.append(world.start("a", "x"))), pytest.raises(OldEpoch):
        writer.start()
    assert writer.state is WriterState.CLOSED
    [successor] = successors
    assert calls.count(successor.epoch) == len(calls) - 1, "the first one had one answer"
    undone = writer.progress.undone_keys + successor.progress.undone_keys
    assert undone == len(KEYS), "nothing was undone twice"
    assert values(world) == dict.fromkeys(KEYS, 1)
    world.write(successor, 1, x(5))
    assert values(world) == dict.fromkeys(KEYS, 6)


def test_a_leader_that_moves_between_two_calls_is_met_by_starting_over(
    world: World, calls: list[int]
) -> None:
    writer = world.writer("a", "x")
    with at_call(1, partial(world.hand_over, 0)):
        writer.start()
    assert writer.progress.starts == 2
    assert len(set(calls)) == 2
    assert values(world) == dict.fromkeys(KEYS, 1)


def test_another_owner_writes_between_two_calls(world: World) -> None:
    content: Content = {(0, key): {"y": 7} for key in KEYS}

    def beside() -> None:
        world.write(world.start("b", "y"), 0, content)

    with at_call(1, beside):
        world.start("a", "x")
    assert values(world) == dict.fromkeys(KEYS, 1)
    assert {cell: value for cell, value in world.cells().items() if cell[1] == "y"} == {
        (key, "y"): 7 for key in content
    }


def test_the_deadline_is_not_for_an_undo_that_makes_progress(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call takes longer than the whole deadline, and leaders move twice in between."""
    slow = SlowUndos(monkeypatch)
    moves = iter([0, 1])

    def move() -> None:
        number = next(moves, None)
        if number is not None:
            world.hand_over(number)

    writer = world.writer("a", "x", deadline_s=LONG_S / 2)
    with arm("writer.undone", move):
        writer.start()
    assert writer.progress.starts == 3
    assert slow.calls >= 3
    assert values(world) == dict.fromkeys(KEYS, 1)


class SlowUndos:
    """Lets every call of undo take very long, by the clock of the writer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        undo = WorldAccess.undo

        def slow(access: WorldAccess, *arguments: Any) -> Any:
            answers = undo(access, *arguments)
            self.calls += 1
            return answers

        monkeypatch.setattr(WorldAccess, "undo", slow)
        clock = SimpleNamespace(monotonic=self.now, sleep=time.sleep)
        for module in (recovery.writer.table_writer, recovery.writer.debts):
            monkeypatch.setattr(module, "time", clock)

    def now(self) -> float:
        return time.monotonic() + self.calls * LONG_S
