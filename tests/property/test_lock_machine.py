"""Several owners with overlapping columns, in any order, against the invariants of the locks.

On the memory store, and on the one that is kept in objects. A second machine has a store whose
transactions end in an unknown outcome at random, applied or not or later, and others that come in
between at the worst moment.
What is written in the table's log, and by whom, is modelled; what becomes of it is read off
the records, transaction by transaction. `TALLYBOOK_EXAMPLES` makes a longer run.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
)

from foundation.errors import (
    Fenced,
    HandoverNeeded,
    InvalidInput,
    LockHeld,
    RewoundBatch,
    StaleLeaders,
)
from locks.catalog.definitions import TableDefinition
from locks.cluster.servers import Server
from locks.column_locks.column_lock import ColumnLock, LockState
from locks.column_locks.records import Debt, DebtKind
from locks.coordinator import Coordinator
from locks.store.durable import DurableCoordination
from locks.store.memory import MemoryCoordination, MemoryStore
from tests.property.lock_model import Entry, LockObserver
from tests.property.lock_world import (
    INTRUDERS,
    OWNERS,
    SCRIPTS,
    WANTED,
    Intruder,
    ScriptedStore,
    Step,
    World,
)
from tests.support.memory_log import MemoryLog

EXAMPLES = int(os.environ.get("TALLYBOOK_EXAMPLES", "15"))
COLUMNS = {"x": 1, "y": 2, "z": 3}
DEFINITION = TableDefinition(schema="{}", columns=COLUMNS, key_columns=("k",), buckets=1)
TTLS = st.sampled_from([2_000, 10_000])
CLOCK_STEPS = st.sampled_from([2_000, 10_000, 10_000, 10_000, 1, 1_999, -1, -2_500, -20_000])
BATCH_STEPS = st.sampled_from([1, 1, 1, 1, 2, 0, -1])
locks = Bundle("locks")
servers = Bundle("servers")


class LockMachine(RuleBasedStateMachine):
    """Without faults: what a call returns is known beforehand."""

    scripts: st.SearchStrategy[list[Step]] = st.just([])

    def __init__(self) -> None:
        super().__init__()
        self.world = World(shared=self.new_store())
        self.store = ScriptedStore(self.world, self.intrude)
        self.coordinator = Coordinator(self.store)
        self.other = Coordinator(ScriptedStore(self.world, self.intrude))
        self.table = self.coordinator.tables.create("t", DEFINITION)
        self.world.table = self.table
        self.others: dict[str, ColumnLock] = {}
        self.fenced: set[int] = set()
        self.gone: set[str] = set()

    def new_store(self) -> MemoryCoordination:
        return MemoryCoordination()

    @property
    def observer(self) -> LockObserver:
        return self.world.observer

    def intrude(self, intruder: Intruder) -> None:
        going_on = [lock for lock in self.others.values() if self.is_current(lock)]
        if intruder.goes_on and going_on:
            lock = going_on[0]
            if lock.state is LockState.ACQUIRED:
                lock.ready(self.observer.ends, [])
            else:
                self.write(lock)
                lock.commit(lock.batch + 1, self.observer.ends, [])
            return
        self.world.advance(intruder.clock_step)
        with suppress(LockHeld):
            self.others[intruder.owner] = self.other.locks.acquire(
                self.table, intruder.owner, list(intruder.columns), ttl_ms=10_000, handover=True
            )

    @initialize(target=servers)
    def first_server(self) -> tuple[MemoryStore, Server]:
        return self.new_server()

    @rule(target=servers)
    def register_a_server(self) -> tuple[MemoryStore, Server]:
        return self.new_server()

    def new_server(self) -> tuple[MemoryStore, Server]:
        store = self.world.shared.connect()
        return store, Coordinator(store).servers.register("127.0.0.1:1")

    @rule(server=servers)
    def lose_the_session_of_a_server(self, server: tuple[MemoryStore, Server]) -> None:
        server[0].close()
        self.gone.add(server[1].name)

    @rule(step=CLOCK_STEPS)
    def step_the_clock(self, step: int) -> None:
        self.world.advance(step)

    @rule(
        target=locks,
        owner=OWNERS,
        columns=WANTED,
        ttl_ms=TTLS,
        handover=st.sampled_from([True, True, True, False]),
        goes_on=st.integers(0, 4),
        data=st.data(),
    )
    def acquire(  # noqa: PLR0917
        self,
        owner: str,
        columns: str,
        ttl_ms: int,
        handover: bool,
        goes_on: int,
        data: st.DataObject,
    ) -> ColumnLock:
        """Acquire and, often, go on at once: get ready, write, commit, release."""
        quiet, last_epoch = self.play(data), self.observer.last_epoch
        in_the_way = self.in_the_way(owner, columns)
        strangers = self.strangers(owner, columns)
        try:
            lock = self.coordinator.locks.acquire(
                self.table, owner, list(columns), ttl_ms=ttl_ms, handover=handover
            )
        except LockHeld:
            assert in_the_way or not quiet, "refused, and nobody is in the way"
            return multiple()  # type: ignore[return-value]
        except HandoverNeeded:
            assert not handover
            assert strangers or not quiet, "a handover, and from nobody"
            return multiple()  # type: ignore[return-value]
        assert not in_the_way or not quiet, f"{in_the_way} was in the way"
        assert handover or not strangers or not quiet
        assert lock.epoch == last_epoch + 1 or not quiet, "acquired twice"
        self.assert_is_current(lock, quiet)
        if goes_on >= 1:
            self.ready(lock, [], data)
        if goes_on >= 2:
            self.write(lock)
        if goes_on >= 3:
            self.commit(lock, 1, [], data)
        if goes_on >= 4:
            self.release(lock, data)
        return lock

    @rule(target=locks, lock=locks, columns=WANTED, data=st.data())
    def start_over(self, lock: ColumnLock, columns: str, data: st.DataObject) -> ColumnLock:
        quiet = self.play(data)
        current, in_the_way = self.is_current(lock), self.in_the_way(lock.owner, columns)
        try:
            again = self.coordinator.locks.acquire(
                self.table,
                lock.owner,
                list(columns),
                ttl_ms=2_000,
                handover=True,
                only_epoch=lock.epoch,
            )
        except Fenced:
            assert not current or not quiet
            return multiple()  # type: ignore[return-value]
        except LockHeld:
            assert (current and in_the_way) or not quiet
            return multiple()  # type: ignore[return-value]
        assert current, "a successor was fenced by its predecessor"
        self.assert_is_current(again, quiet)
        return again

    @rule(lock=locks)
    def write(self, lock: ColumnLock) -> None:
        """A put of the lock's holder, or of a zombie that its successor has not fenced yet."""
        record = self.world.records().get(lock.owner)
        if record is not None and record.held and record.epoch == lock.epoch:
            if record.ready and record.prepared is None:
                self.observer.log.append(Entry(lock.owner, frozenset(record.columns)))
            return
        for other in self.world.records().values():
            if any(self.is_tail_of(lock, debt) for debt in other.debts):
                self.observer.log.append(Entry(lock.owner, frozenset(lock.columns)))

    @staticmethod
    def is_tail_of(lock: ColumnLock, debt: Debt) -> bool:
        return (
            lock.state is LockState.READY
            and debt.kind is DebtKind.UNDO
            and (debt.owner, debt.columns, debt.offsets)
            == (lock.owner, lock.columns, lock.record.offsets)
        )

    @rule(lock=locks, answering=st.lists(servers, max_size=2), data=st.data())
    def ready(
        self, lock: ColumnLock, answering: list[tuple[MemoryStore, Server]], data: st.DataObject
    ) -> None:
        names = [server.name for _, server in answering]
        ends = self.observer.ends
        self.call(lock, lambda: lock.ready(ends, names), data, {LockState.ACQUIRED}, names)

    @rule(lock=locks, data=st.data())
    def renew(self, lock: ColumnLock, data: st.DataObject) -> None:
        self.call(lock, lock.renew, data, {LockState.ACQUIRED, LockState.READY})

    @rule(lock=locks, data=st.data())
    def check(self, lock: ColumnLock, data: st.DataObject) -> None:
        self.call(lock, lock.check, data, {LockState.ACQUIRED, LockState.READY})

    @rule(lock=locks, skip=BATCH_STEPS, data=st.data())
    def prepare(self, lock: ColumnLock, skip: int, data: st.DataObject) -> None:
        if not self.observer.has_open_work(lock.owner):
            batch = lock.batch + skip
            self.call(lock, lambda: lock.prepare(batch, "there"), data, {LockState.READY})

    @rule(
        lock=locks,
        skip=BATCH_STEPS,
        answering=st.lists(servers, max_size=2),
        data=st.data(),
    )
    def commit(
        self,
        lock: ColumnLock,
        skip: int,
        answering: list[tuple[MemoryStore, Server]],
        data: st.DataObject,
    ) -> None:
        batch, ends = lock.batch + skip, self.observer.ends
        names = [server.name for _, server in answering]
        life = self.observer.lives[lock.owner]
        done = self.call(
            lock, lambda: lock.commit(batch, ends, names), data, {LockState.READY}, names
        )
        if done:
            assert self.observer.commits[lock.owner, life, batch] == 1

    @rule(lock=locks, data=st.data())
    def release(self, lock: ColumnLock, data: st.DataObject) -> None:
        if not self.observer.has_open_work(lock.owner):
            self.call(lock, lock.release, data, {LockState.READY})

    @rule(lock=locks, data=st.data())
    def abandon(self, lock: ColumnLock, data: st.DataObject) -> None:
        self.call(lock, lock.abandon, data, {LockState.ACQUIRED, LockState.READY})

    @rule(owner=OWNERS, data=st.data())
    def forget(self, owner: str, data: st.DataObject) -> None:
        quiet = self.play(data)
        record = self.world.records().get(owner)
        try:
            self.coordinator.locks.forget(self.table, owner)
        except LockHeld:
            assert (record is not None and record.held) or not quiet
        else:
            assert record is None or not record.held
            assert owner not in self.world.records() or not quiet

    def call(
        self,
        lock: ColumnLock,
        call: Callable[[], None],
        data: st.DataObject,
        allowed: set[LockState],
        names: Sequence[str] = (),
    ) -> bool:
        """Call, and judge what it says. Return whether it succeeded."""
        quiet = self.play(data)
        state, current = lock.state, self.is_current(lock)
        stale = any(name in self.gone for name in names)
        try:
            call()
        except Fenced:
            assert not current or not quiet, "fenced by nobody"
            assert state not in (LockState.ENDED,)
            self.fenced.add(id(lock))
            return False
        except StaleLeaders:
            assert stale, "all servers that answered are alive"
            assert state in allowed
        except RewoundBatch:
            assert state in allowed
        except InvalidInput:
            assert state not in allowed or lock.record.prepared is not None
        else:
            assert id(lock) not in self.fenced, "a fenced handle succeeded"
            assert current, "a lock that is not held any more succeeded"
            assert state in allowed
            assert not stale
            assert lock.state is not LockState.FENCED
            return True
        assert id(lock) not in self.fenced, "a fenced handle does not say so"
        return False

    def play(self, data: st.DataObject) -> bool:
        """Draw how the next transactions go.

        Return whether nobody comes in between: then it is known what a call will return, whatever
        becomes of its transactions.
        """
        script = data.draw(self.scripts)
        self.store.script = deque(script)
        return all(step.before is None and step.after is None for step in script)

    def is_current(self, lock: ColumnLock) -> bool:
        record = self.world.records().get(lock.owner)
        return record is not None and record.held and record.epoch == lock.epoch

    def assert_is_current(self, lock: ColumnLock, quiet: bool) -> None:
        assert lock.state is LockState.ACQUIRED
        assert lock.record.held
        if quiet:
            assert self.world.records()[lock.owner] == lock.record

    def in_the_way(self, owner: str, columns: str) -> set[str]:
        """The live locks of others on these columns, or with a debt of this owner to pay."""
        wanted = {COLUMNS[column] for column in columns}
        return {
            other
            for other, record in self.world.live().items()
            if other != owner
            and (
                wanted & set(record.columns).union(*(debt.columns for debt in record.debts))
                or any(debt.owner == owner for debt in record.debts)
            )
        }

    def strangers(self, owner: str, columns: str) -> set[str]:
        """Who committed these columns last, other than this owner.

        A prepared batch of an expired lock is about to count.
        """
        last = {column: self.observer.last_committer(COLUMNS[column]) for column in columns}
        for other, record in self.world.records().items():
            if record.held and record.prepared is not None:
                last |= dict.fromkeys((c for c in columns if COLUMNS[c] in record.columns), other)
        return {committer for committer in last.values() if committer not in (None, owner)}


class FaultyLockMachine(LockMachine):
    """With faults: whatever happens to transactions, the invariants hold and no call lies."""

    scripts = SCRIPTS

    @rule(intruder=INTRUDERS)
    def another_process_acts(self, intruder: Intruder) -> None:
        self.intrude(intruder)


class DurableLockMachine(FaultyLockMachine):
    """On a store that is kept: at any time, what is opened again is the same."""

    def new_store(self) -> MemoryCoordination:
        self.objects = MemoryLog()
        return DurableCoordination(self.objects, clock=lambda: 1_000_000)

    @invariant()
    def opened_again_it_is_the_same(self) -> None:
        again = DurableCoordination(self.objects)
        kept = {p: node for p, node in self.world.shared.nodes.items() if node.session is None}
        assert again.nodes == kept


SETTINGS = settings(max_examples=4 * EXAMPLES, stateful_step_count=60, deadline=None)
TestLocks = LockMachine.TestCase
TestLocks.settings = SETTINGS
TestLocksWithFaults = FaultyLockMachine.TestCase
TestLocksWithFaults.settings = SETTINGS
TestDurableLocks = DurableLockMachine.TestCase
TestDurableLocks.settings = settings(SETTINGS, max_examples=EXAMPLES)
