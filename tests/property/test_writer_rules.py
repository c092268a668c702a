"""Each rule of the executable specification is needed, and the model notices when one is missing.

One history per rule, in the real code: with the rule the table ends as the committed batches made
it; with the rule switched off it does not. The histories are the shortest known.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from foundation.errors import FormerQuery, LockHeld, RewoundBatch
from foundation.ids import BucketId
from recovery.writer.access import Answers, Grant, GrantedRows
from recovery.writer.table_writer import TableWriter
from tests.property import rules_switched_off as off
from tests.support import specification
from tests.support.works import PutBy
from tests.support.writer_model import Content
from tests.support.writer_world import STOPPED, Crash, World

FIRST, SECOND = (0, 1), (0, 2)
"""Keys of bucket 0 and of bucket 1."""
Off = Callable[[pytest.MonkeyPatch], None]
History = Callable[[World], None]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def x(amount: int | None, *keys: tuple[int, int]) -> Content:
    """Return a batch that adds to the column x of these keys."""
    return {key: {"x": amount} for key in keys or (FIRST, SECOND)}


def stopped(world: World, call: Callable[[], object], *plan: Any) -> None:
    """Call; the writer may be stopped on the way, or go on if nothing keeps it from it."""
    try:
        world.run(call, *plan)
    except (Crash, *STOPPED):
        return


def crashed(world: World, writer: TableWriter, batch: int, content: Content, steps: int) -> None:
    """Write a batch, and die after so many steps."""
    with pytest.raises(Crash):
        world.run(lambda: world.write(writer, batch, content), (steps, world.crash))


def left_a_tail(world: World, owner: str = "a", columns: str = "x") -> None:
    """An owner has committed 1 to each cell, and dies with 5 more that it has not."""
    writer = world.start(owner, columns)
    for batch, amount in enumerate((1, 5)):
        content = {key: dict.fromkeys(columns, amount) for key in (FIRST, SECOND)}
        if amount == 1:
            world.write(writer, batch, content)
        else:
            crashed(world, writer, batch, content, steps=PUT)


# Steps of a writer in a table of two servers: one before each call to a server, one behind.
BEFORE_PUT, PUT, PREPARED, SEALED = 0, 4, 4, 8
ACQUIRED = 0
# Steps of a reader of two records: before the counter, the list, and each of them.
RECORD_OF_C = 3


# --- The histories ------------------------------------------------------------------------------


def fence(world: World) -> None:
    """A zombie puts what it has, after it was taken over."""
    zombie = world.start("a", "x")

    def take_over() -> None:
        heir = world.take_over("b", "x")
        assert heir is not None
        world.write(heir, 0, x(1))

    stopped(world, lambda: world.write(zombie, 0, x(5)), (BEFORE_PUT, take_over))


def current(world: World) -> None:
    """A writer pauses before its fences; its successor pays, commits and goes; leaders move."""
    left_a_tail(world)
    zombie = world.writer("a", "x")

    def succeed() -> None:
        heir = world.start("a", "x")
        world.write(heir, 1, x(2))
        heir.close()
        world.hand_over(0)
        world.hand_over(1)

    stopped(world, zombie.start, (ACQUIRED, succeed))


def leaders(world: World) -> None:
    """A deposed leader tells a log end that was passed long ago."""
    world.start("a", "x").close()
    for number in range(2):
        world.lose_server(number, zombie=True)
    for access in world.accesses:
        access.believes.clear()
    first = world.start("a", "x")
    world.write(first, 0, x(1))
    first.close()
    second = world.writer("a", "x")
    world.accesses[-1].believes.update(world.zombies)
    second.start()


def term(world: World) -> None:
    """A new leader gets to know a writer by calls that were sent twice, but not its seals."""
    writer = world.start("a", "x")
    world.write(writer, 0, x(1, FIRST), stray=x(5, SECOND))
    world.hand_over(1)
    world.deliver_only("fence", "end_recovery", "stray")
    writer.close()


def closed(world: World) -> None:
    """A payment arrives a second time, behind a commit."""
    left_a_tail(world)
    writer = world.start("a", "x")
    world.write(writer, 1, x(2))
    world.deliver_only("undo")
    writer.close()


def doubt(world: World) -> None:
    """The store does not answer a create, and carries it out when nobody thinks of it any more."""
    writer = world.start("a", "x")
    contents = [x(5, FIRST), x(1, SECOND)]  # A replay draws anew.

    def put(grant: Grant) -> Answers[Any]:
        return writer.access.put(GrantedRows(grant, world.rows(contents.pop(0))))

    world.logs[BucketId(0, 0)].faults.append("late")
    assert writer.run(0, PutBy(put))
    world.deliver_segments()
    writer.close()
    world.hand_over(0)


def dedupe(world: World) -> None:
    """A task is run twice."""
    writer = world.start("a", "x")
    world.run(lambda: world.write(writer, 0, x(1), stray=x(1)), (PUT, deliver_strays(world)))


def token(world: World) -> None:
    """A batch is undone and written again."""
    left_a_tail(world)
    world.write(world.start("a", "x"), 1, x(2))


def seal(world: World) -> None:
    """A task of a batch arrives after it was committed, and before the next one is."""
    writer = world.start("a", "x")
    world.write(writer, 0, x(1, FIRST), stray=x(5, SECOND))
    deliver_strays(world)()
    world.write(writer, 1, x(1))


def undo(world: World) -> None:
    """An owner of two columns dies in the middle of a batch."""
    left_a_tail(world, "a", "xy")


def touched(world: World) -> None:
    """A writer dies in its first batch, and leaves no rows behind."""
    crashed(world, world.start("a", "x"), 0, x(5), steps=PUT)


def debt(world: World) -> None:
    """An owner dies for good, and another one takes its column."""
    left_a_tail(world)
    heir = world.take_over("b", "x")
    assert heir is not None
    heir.close()


def pin(world: World) -> None:
    """Somebody takes one column of two; a third owner wants the other before the debt is paid."""
    left_a_tail(world, "a", "xy")
    world.expire()

    def write_beside() -> None:
        try:
            third = world.start("c", "x")
        except LockHeld:
            return
        world.write(third, 0, x(2))
        third.close()

    stopped(world, world.writer("b", "y").start, (ACQUIRED, write_beside))


def self_(world: World) -> None:
    """An owner comes back with another column, while its batch waits to be rolled forward."""
    owner = world.start("a", "x", redo=True)
    crashed(world, owner, 0, x(1), steps=PREPARED + PUT + 1)
    world.expire()

    def come_back() -> None:
        try:
            again = world.start("a", "y")
        except LockHeld:
            return
        world.write(again, 1, {key: {"y": 1} for key in (FIRST, SECOND)})

    stopped(world, world.writer("b", "x", redo=True).start, (ACQUIRED, come_back))


def redo(world: World) -> None:
    """A batch was promised, and its writer dies before it is written."""
    crashed(world, world.start("a", "x", redo=True), 0, x(1), steps=PREPARED)


def decided(world: World) -> None:
    """A batch that was promised is replayed by its source."""
    crashed(world, world.start("a", "x", redo=True), 0, x(1), steps=PREPARED)
    world.write(world.start("a", "x", redo=True), 0, x(2))


def commit(world: World) -> None:
    """A writer pauses before its commit, and its successor undoes what it has written."""
    writer = world.start("a", "x")
    succeed = lambda: world.start("a", "x")  # noqa: E731
    stopped(world, lambda: world.write(writer, 0, x(1)), (SEALED, succeed))


def release(world: World) -> None:
    """A job is interrupted in the middle of a batch, and ends in an orderly way."""
    writer = world.start("a", "x")

    def put(grant: Grant) -> Answers[Any]:
        writer.access.put(GrantedRows(grant, world.rows(x(1))))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.run(0, PutBy(put))
    writer.close()


def stable(world: World) -> None:
    """A scan is taken in the middle of a batch that is undone later."""
    left_a_tail(world)
    world.scan()


def cut(world: World) -> None:
    """A cut is read when the next batch is committed."""
    writer = world.start("a", "x")
    world.write(writer, 0, x(1))
    world.take_cut()
    world.write(writer, 1, x(5))
    world.read_cut()


def counter(world: World) -> None:
    """A debt moves from a record that is read to one that was read before."""
    world.start("b", "y").close()
    left_a_tail(world, "c")

    def take_over_and_die() -> None:
        world.crash_at = "writer.acquired"
        with pytest.raises(Crash):
            world.take_over("b", "x")

    world.run(world.take_cut, (RECORD_OF_C, take_over_and_die))
    world.read_cut()


def newer(world: World) -> None:
    """An owner that holds nothing comes back after the cut, and so does one that nobody knew."""
    owner = world.start("a", "x")
    world.write(owner, 0, x(1))
    owner.close()
    world.take_cut()
    world.write(world.start("a", "x"), 1, x(5))
    world.write(world.start("b", "y"), 0, {FIRST: {"y": 1}})
    world.read_cut()


def plan(world: World) -> None:
    """A checkpoint is set back by a batch, and other rows are planned under its number."""
    writer = world.start("a", "x", query_id="q")
    assert world.write(writer, 0, x(1), fingerprint="at noon")
    assert not world.write(writer, 0, x(1), fingerprint="at noon"), "a replay"
    never_skipped(lambda: world.write(writer, 0, x(5), fingerprint="at midnight"))


def columns(world: World) -> None:
    """Two writers have one owner id, and each its own columns and numbers."""
    world.write(world.start("a", "x"), 0, x(1))
    never_skipped(lambda: world.write(world.start("a", "y"), 0, {FIRST: {"y": 1}}))


def former(world: World) -> None:
    """A nightly job is run again with its checkpoint, after that of the next night."""
    for night in ("monday", "tuesday"):
        writer = world.start("a", "x", query_id=night)
        world.write(writer, 0, x(1))
        writer.close()
    with suppress(FormerQuery):
        again = world.start("a", "x", query_id="monday")
        assert not world.write(again, 0, x(1)), "what monday has committed counts again"


def never_skipped(write: Callable[[], bool]) -> None:
    """Write what was not committed before: whatever becomes of it, its rows are not left out."""
    with suppress(RewoundBatch):
        assert write(), "its rows are in no batch, and nobody was told"


def deliver_strays(world: World) -> Callable[[], None]:
    return lambda: world.deliver_only("stray")


RULES: dict[str, tuple[History, Off]] = {
    "fence": (fence, off.without_fence),
    "current": (current, off.without_current),
    "leaders": (leaders, off.without_leaders),
    "term": (term, off.without_term),
    "closed": (closed, off.without_closed),
    "doubt": (doubt, off.without_doubt),
    "dedupe": (dedupe, off.without_dedupe),
    "token": (token, off.without_token),
    "seal": (seal, off.without_seal),
    "undo": (undo, off.without_undo),
    "touched": (touched, off.without_touched),
    "debt": (debt, off.without_debt),
    "pin": (pin, off.without_pin),
    "self": (self_, off.without_self),
    "redo": (redo, off.without_redo),
    "decided": (decided, off.without_decided),
    "commit": (commit, off.without_commit),
    "release": (release, off.without_release),
    "stable": (stable, off.without_stable),
    "cut": (cut, off.without_cut),
    "counter": (counter, off.without_counter),
    "newer": (newer, off.without_newer),
    "plan": (plan, off.without_plan),
    "columns": (columns, off.without_columns),
    "former": (former, off.without_former),
}


def test_all_rules_of_the_specification_are_here() -> None:
    assert [*RULES] == [*specification.load().RULES]


@pytest.mark.parametrize("rule", RULES)
def test_with_the_rule_the_table_is_what_was_committed(world: World, rule: str) -> None:
    history, _ = RULES[rule]
    history(world)
    world.check()


@pytest.mark.parametrize("rule", RULES)
def test_without_the_rule_it_is_not(
    world: World, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, switch_off = RULES[rule]
    switch_off(monkeypatch)

    def run() -> None:
        history(world)
        world.check()

    with pytest.raises(AssertionError):
        run()
