"""The real writer, locks and buckets against a model of the committed batches.

In the manner of the executable specification: owners with overlapping columns, replays with other
contents, crashes, zombies that go on, expiries, takeovers, leaders that move between any two steps,
deposed leaders that still answer, answers that get lost, calls that arrive late. In the end all is
taken over, and each column of each key holds what the committed batches made of it, in order.
`TALLYBOOK_EXAMPLES` makes a longer run.
"""

import os
from collections.abc import Callable
from functools import partial

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from foundation.errors import HandoverNeeded, InvalidInput, LockHeld, Overflow, RewoundBatch
from recovery.writer.table_writer import TableWriter, WriterState
from tests.support.writer_model import Content
from tests.support.writer_table import COLUMNS, KEYS, MOST, PARTITIONS
from tests.support.writer_world import STOPPED, Crash, World

EXAMPLES = int(os.environ.get("TALLYBOOK_EXAMPLES", "20"))
WANTS = {"a": ("x",), "b": ("yz", "y", "z"), "c": ("xy", "x"), "d": ("x", "xz")}
OWNERS = st.sampled_from([(owner, columns) for owner in WANTS for columns in WANTS[owner]])
SKIPS = st.sampled_from([1, 1, 1, 1, 1, 2, 0, -1])
AMOUNTS = st.integers(1, 9) | st.integers(-9, 9) | st.just(MOST)
CONTENTS = st.dictionaries(
    st.tuples(st.sampled_from(PARTITIONS), st.sampled_from(KEYS)),
    st.none() | st.lists(AMOUNTS, min_size=3, max_size=3),
    min_size=1,
    max_size=4,
)
Amounts = dict[tuple[int, int], list[int] | None]
NUMBERS = st.integers(0, 7)
FINGERPRINTS = st.sampled_from(["", "", "at noon", "at midnight"])
Act = tuple[str, int, tuple[str, str], Amounts]
EVENTS = [
    *("crash", "crash", "expire", "take over", "take over", "succeed", "write beside"),
    *("hand over", "lose server", "lose server to a zombie", "lose server to a zombie"),
    *("deliver", "deliver", "deliver segments", "forget", "read"),
    *("lose answer", "lose request", "lose late", "lose session", "lose twice"),
    *("storage answer", "storage request", "storage late", "storage refused"),
]
ACTS: st.SearchStrategy[Act] = st.tuples(st.sampled_from(EVENTS), NUMBERS, OWNERS, CONTENTS)
PLANS = st.lists(st.tuples(st.integers(0, 10), ACTS), max_size=4)
Plan = list[tuple[int, Act]]


class WriterMachine(RuleBasedStateMachine):
    """Writers come, write and go; whatever happens beside happens in between."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.writers: list[TableWriter] = []

    @initialize(
        partitioned=st.sampled_from([False, False, True]),
        small_parts=st.booleans(),
        small_undos=st.booleans(),
    )
    def open(self, partitioned: bool, small_parts: bool, small_undos: bool) -> None:
        self.world = World(
            partitioned=partitioned, small_parts=small_parts, small_undos=small_undos
        )

    # --- What writers do ------------------------------------------------------------------------

    @rule(
        who=OWNERS,
        redo=st.booleans(),
        manner=st.sampled_from(["", "", "", "no handover", "asks zombies", "asks zombies"]),
        content=CONTENTS,
        plan=PLANS,
    )
    def start(
        self, who: tuple[str, str], redo: bool, manner: str, content: Amounts, plan: Plan
    ) -> None:
        """Start a writer and, if nothing is in the way, write a batch."""
        owner, columns = who
        handover = manner != "no handover"
        writer = self.world.writer(owner, columns, redo=redo, handover=handover)
        if manner == "asks zombies":
            self.world.accesses[-1].believes.update(self.world.zombies)
        if self.attempt(writer, lambda: self.begin(writer), plan[:2]):
            self.write(len(self.writers) - 1, 1, content, None, plan[2:])

    def begin(self, writer: TableWriter) -> bool:
        try:
            writer.start()
        except (LockHeld, HandoverNeeded):
            return False
        except InvalidInput:
            assert not self.world.promises(writer), "only a redo log is ever missing"
            return False
        self.writers.append(writer)
        return True

    @rule(
        at=NUMBERS,
        skip=SKIPS,
        content=CONTENTS,
        stray=st.none() | CONTENTS,
        plan=PLANS,
        fingerprint=FINGERPRINTS,
    )
    def write(  # noqa: PLR0917
        self,
        at: int,
        skip: int,
        content: Amounts,
        stray: Amounts | None,
        plan: Plan,
        fingerprint: str = "",
    ) -> None:
        writer = self.pick(at)
        if writer is None:
            return
        known = writer.batch
        batch = max(0, known + skip)
        rows = self.content_for(writer, content)
        others = (
            None
            if stray is None or self.world.promises(writer)
            else self.content_for(writer, stray)
        )

        def write() -> None:
            try:
                written = self.world.write(writer, batch, rows, others, fingerprint)
            except RewoundBatch:
                assert batch < writer.batch or self.is_another(writer, batch, fingerprint)
            except Overflow:
                assert writer.state in (WriterState.CLEAN, WriterState.DIRTY, WriterState.FENCED)
            else:
                assert written or batch == known
                assert not self.is_another(writer, batch, fingerprint)
                assert writer.batch == batch
                assert writer.state is WriterState.CLEAN

        self.attempt(writer, write, plan)

    def is_another(self, writer: TableWriter, batch: int, fingerprint: str) -> bool:
        """Whether the last committed batch has this number, and is another one."""
        record = self.world.records()[writer.owner]
        both = fingerprint and record.fingerprint
        planned_otherwise = bool(both) and fingerprint != record.fingerprint
        had_fewer = not set(record.columns) <= record.last_columns
        return batch == record.batch and (planned_otherwise or had_fewer)

    @rule(at=NUMBERS, plan=PLANS)
    def close(self, at: int, plan: Plan) -> None:
        writer = self.pick(at)
        if writer is not None:
            self.writers.remove(writer)
            self.attempt(writer, writer.close, plan)

    @rule(act=ACTS)
    def happen(self, act: Act) -> None:
        if act[0] != "crash":
            self.world.run(self.event(act))

    def attempt(self, writer: TableWriter, call: Callable[[], object], plan: Plan) -> object:
        """Call, while the world goes its way; a writer that dies is never heard of again."""
        try:
            return self.world.run(call, *((steps, self.event(act)) for steps, act in plan))
        except Crash:
            self.writers = [other for other in self.writers if other is not writer]
        except STOPPED:
            pass
        return None

    def pick(self, at: int) -> TableWriter | None:
        usable = (WriterState.CLEAN, WriterState.DIRTY)
        self.writers = [writer for writer in self.writers if writer.state in usable]
        return self.writers[-1 - at % len(self.writers)] if self.writers else None

    def content_for(self, writer: TableWriter, amounts: Amounts) -> Content:
        partitioned = self.world.partitioned
        return {
            (p if partitioned else 0, k): {
                column: None if values is None else values[COLUMNS.index(column)]
                for column in writer.columns
            }
            for (p, k), values in amounts.items()
        }

    # --- What happens beside --------------------------------------------------------------------

    def event(self, act: Act) -> Callable[[], object]:
        name, number, who, content = act
        world = self.world
        simple: dict[str, Callable[[], object]] = {
            "crash": world.crash,
            "expire": world.expire,
            "hand over": partial(world.hand_over, number),
            "lose server": partial(world.lose_server, number, zombie=False),
            "lose server to a zombie": partial(world.lose_server, number, zombie=True),
            "deliver": partial(world.deliver, -1 - number),
            "deliver segments": world.deliver_segments,
            "take over": partial(self.beside, who, content, expire=True, redo=number % 2 == 1),
            "succeed": partial(self.succeed, number, content),
            "write beside": partial(self.beside, who, content, expire=False, redo=False),
            "forget": partial(self.forget, who[0]),
            "read": self.read,
            "lose twice": partial(world.losses.extend, ["request", "answer"]),
        }
        if name in simple:
            return simple[name]
        kind, fault = name.split()
        if kind == "lose":
            return partial(world.losses.append, fault)
        return partial(world.fail_storage, number, fault)

    def beside(self, who: tuple[str, str], content: Amounts, *, expire: bool, redo: bool) -> None:
        """Another writer comes, writes a batch, and stays."""
        if expire:
            self.world.expire()
        writer = self.world.writer(*who, redo=redo)
        try:
            if self.begin(writer):
                batch = writer.batch + 1
                self.world.write(writer, batch, self.content_for(writer, content))
        except (*STOPPED, Overflow):
            return

    def succeed(self, number: int, content: Amounts) -> None:
        """One of the writers comes a second time, so that the first is a zombie from here on."""
        writer = self.pick(number)
        if writer is not None:
            who = writer.owner, "".join(writer.columns)
            self.beside(who, content, expire=False, redo=self.world.promises(writer))

    def forget(self, owner: str) -> None:
        try:
            self.world.coordinator.locks.forget(self.world.table, owner)
        except LockHeld:
            return

    @rule(taken=PLANS, read=PLANS, older=st.integers(0, 3))
    def look(self, taken: Plan, read: Plan, older: int) -> None:
        """Take a cut while others go on; and read it, or one before it, while they go on."""
        self.run(self.world.take_cut, taken)
        at = -1 - older % len(self.world.cuts)
        self.run(lambda: self.world.read_cut(at), read)

    def run(self, call: Callable[[], object], plan: Plan) -> None:
        events = [(steps, self.event(act)) for steps, act in plan if act[0] != "crash"]
        self.world.run(call, *events)

    def read(self) -> None:
        """A committed read shows what was committed, whatever is under way."""
        self.world.take_cut()
        self.world.read_cut()
        self.world.scan()

    # --- The end --------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world.check()
            self.read()
        finally:
            self.world.close()


TestWriterMachine = WriterMachine.TestCase
TestWriterMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=20,
    suppress_health_check=list(HealthCheck),
)
