"""The world of the lock machine: a store in memory, its clock, and transactions that go wrong.

Transactions end in an unknown outcome as they are told to, applied or not or later, and others come
in between at the worst moment. Each is shown to the observer of the model.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from hypothesis import strategies as st

from foundation.errors import UnknownOutcome
from locks.catalog.definitions import CatalogTable
from locks.column_locks.record_codec import decode_record
from locks.column_locks.records import LockRecord
from locks.store.base import Conflict, Node, Operation
from locks.store.memory import MemoryCoordination, MemoryStore
from locks.store.paths import owners_path
from tests.property.lock_model import LockObserver

OWNERS = st.sampled_from(["a", "b", "c", "d"])
WANTED = st.sampled_from(["x", "y", "z", "xy", "yz", "xz", "xyz"])


class Fault(Enum):
    """What becomes of a transaction, and of its answer."""

    NONE = auto()
    APPLIED = auto()
    """Applied; the answer is lost."""
    LOST = auto()
    """Never arrives."""
    LATE = auto()
    """The answer is lost; applied before the next request of this session is served."""


@dataclass(frozen=True)
class Intruder:
    """Another process that comes in between: time passes, and an owner acquires or goes on."""

    clock_step: int
    owner: str
    columns: str
    goes_on: bool


@dataclass(frozen=True)
class Step:
    """How one transaction goes."""

    before: Intruder | None
    fault: Fault
    after: Intruder | None


INTRUDERS: st.SearchStrategy[Intruder] = st.builds(
    Intruder,
    clock_step=st.sampled_from([0, 2_000, 10_000]),
    owner=OWNERS,
    columns=WANTED,
    goes_on=st.booleans(),
)
FAULTS = st.sampled_from(Fault)
ALONE = st.builds(Step, before=st.none(), fault=FAULTS, after=st.none())
INTRUDED = st.builds(Step, before=st.none() | INTRUDERS, fault=FAULTS, after=st.none() | INTRUDERS)
SCRIPTS: st.SearchStrategy[list[Step]] = st.one_of(
    st.just([]), st.lists(ALONE, max_size=3), st.lists(INTRUDED, max_size=4)
)


@dataclass
class World:
    """The shared store, the clock, and the observer of all that is written."""

    shared: MemoryCoordination = field(default_factory=MemoryCoordination)
    observer: LockObserver = field(default_factory=LockObserver)
    expired: set[str] = field(default_factory=set)
    table: CatalogTable | None = None

    def records(self) -> dict[str, LockRecord]:
        """The lock records as they are; who was forgotten has none."""
        found = {owner: decode_record(node.data) for owner, node in self._owners().items()}
        return {owner: record for owner, record in found.items() if not record.blank}

    def live(self) -> dict[str, LockRecord]:
        """Those that keep others out now."""
        return {
            owner: record
            for owner, record in self.records().items()
            if record.held and owner not in self._expired_now()
        }

    def advance(self, milliseconds: int) -> None:
        """Move the clock."""
        self.shared.advance(milliseconds)
        self.expired |= self._expired_now()

    def transact(self, apply: Callable[[], None]) -> None:
        """Carry a transaction out, and show it to the observer."""
        before, versions = self.records(), self._owners()
        apply()
        after = self.records()
        if before != after:
            self.observer.observe(before, after, frozenset(self.expired))
        for owner, node in self._owners().items():
            if versions.get(owner) != node:
                self.expired.discard(owner)
        self.expired = (self.expired | self._expired_now()) & set(after)

    def _owners(self) -> dict[str, Node]:
        if self.table is None:
            return {}
        prefix = owners_path(self.table.table_id) + "/"
        return {
            path.removeprefix(prefix): Node(node.data, node.version, node.modified_ms)
            for path, node in self.shared.nodes.items()
            if path.startswith(prefix)
        }

    def _expired_now(self) -> set[str]:
        gone = set()
        for owner, node in self._owners().items():
            record = decode_record(node.data)
            late = self.shared.now_ms() >= node.modified_ms + record.ttl_ms
            if record.abandoned or late:
                gone.add(owner)
        return gone


class ScriptedStore(MemoryStore):
    """A session whose transactions go as they are told to, and are observed."""

    def __init__(self, world: World, intrude: Callable[[Intruder], None]) -> None:
        super().__init__(world.shared, world.shared.connect().session)
        self.script: deque[Step] = deque()
        self._world = world
        self._intrude = intrude
        self._late: Sequence[Operation] | None = None

    def transact(self, operations: Sequence[Operation]) -> None:
        self._settle()
        step = self.script.popleft() if self.script else Step(None, Fault.NONE, None)
        if step.before is not None:
            self._intrude(step.before)
        if step.fault is Fault.NONE:
            self._apply_observed(operations)
            return
        if step.fault is Fault.APPLIED:
            self._apply_unanswered(operations)
        elif step.fault is Fault.LATE:
            self._late = operations
        if step.after is not None:
            self._intrude(step.after)
        raise UnknownOutcome("the answer was lost")

    def read(self, path: str) -> Node | None:
        self._settle()
        return super().read(path)

    def sync(self) -> None:
        self._settle()
        super().sync()

    def _settle(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            self._apply_unanswered(late)

    def _apply_observed(self, operations: Sequence[Operation]) -> None:
        self._world.transact(partial(super().transact, operations))

    def _apply_unanswered(self, operations: Sequence[Operation]) -> None:
        with suppress(Conflict):
            self._apply_observed(operations)
