"""Several owners with overlapping columns, in any order, against the invariants of the locks.

On the memory store. A second machine has a store whose transactions end in an unknown outcome at
random, applied or not or later, and others that come in between at the worst moment.
What is written in the table's log, and by whom, is modelled here; what becomes of it is read off
the records, transaction by transaction. `TALLYBOOK_EXAMPLES` makes a longer run.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule

from locks import (
    BucketKey,
    ColumnLock,
    Coordinator,
    Debt,
    DebtKind,
    Fenced,
    HandoverNeeded,
    InvalidRequest,
    LockHeld,
    LockRecord,
    LockState,
    MemoryCoordination,
    MemoryStore,
    Offsets,
    RewoundBatch,
    Server,
    StaleLeaders,
    Table,
    TableDefinition,
    Token,
    UnknownOutcome,
)
from locks.paths import owners_path
from locks.record_codec import decode_record
from locks.store import Conflict, Node, Operation

EXAMPLES = int(os.environ.get("TALLYBOOK_EXAMPLES", "40"))
COLUMNS = {"x": 1, "y": 2, "z": 3}
DEFINITION = TableDefinition(schema="{}", columns=COLUMNS, key_columns=("k",), buckets=1)
OWNERS = st.sampled_from(["a", "b", "c", "d"])
WANTED = st.sampled_from(["x", "y", "z", "xy", "yz", "xz", "xyz"])
TTLS = st.sampled_from([2_000, 10_000])
CLOCK_STEPS = st.sampled_from([2_000, 10_000, 10_000, 10_000, 1, 1_999, -1, -2_500, -20_000])
BATCH_STEPS = st.sampled_from([1, 1, 1, 1, 2, 0, -1])
BUCKET = BucketKey(0, 0)
Records = Mapping[str, LockRecord]
locks = Bundle("locks")
servers = Bundle("servers")


@dataclass
class Entry:
    """A write in the log. It is open until it is committed or undone."""

    owner: str
    columns: frozenset[int]
    open: bool = True


@dataclass
class LockObserver:
    """Judges every transaction on the lock records of the table.

    At any moment each unit of uncommitted work is in the tail or in the debts of exactly one held
    record, and work that was committed or undone is in none.
    """

    log: list[Entry] = field(default_factory=list)
    promises: dict[tuple[str, Token], bool] = field(default_factory=dict)
    commits: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    lives: Counter[str] = field(default_factory=Counter)
    committers: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    last_epoch: int = 0

    @property
    def ends(self) -> Offsets:
        """The log ends, as a writer reads them now."""
        return Offsets({BUCKET: len(self.log)})

    def has_open_work(self, owner: str) -> bool:
        """Whether anything of this owner is neither committed nor undone."""
        return any(entry.open and entry.owner == owner for entry in self.log)

    def last_committer(self, column: int) -> str | None:
        """Who committed this column last, of those who are not forgotten."""
        return max(self.committers.get(column, []), default=(0, None))[1]

    def observe(self, before: Records, after: Records, expired: frozenset[str]) -> None:
        """Take a transaction in; `expired`: whose lock has been expired since its last write."""
        changed = {o for o in {*before, *after} if before.get(o) != after.get(o)}
        acquirers = [o for o in changed if o in after and self._is_new(before.get(o), after[o])]
        assert len(acquirers) <= 1
        for owner in changed:
            old, new = before.get(owner), after.get(owner)
            if new is None:
                assert old is not None
                assert not old.held, "a held lock was forgotten"
                self._forget(owner)
            elif owner in acquirers:
                assert new.epoch > self.last_epoch, "an epoch did not rise"
                self.last_epoch = new.epoch
                self._succeed(owner, old, new)
            elif acquirers:
                assert old is not None
                assert old.held
                assert not new.held
                assert owner in expired, f"a live lock of {owner} was taken over"
                self._succeed(owner, old, new)
            else:
                assert old is not None
                assert len(changed) == 1
                self._hold(owner, old, new)
        self._check(after)

    @staticmethod
    def _is_new(old: LockRecord | None, new: LockRecord) -> bool:
        return old is None or old.epoch != new.epoch

    def _forget(self, owner: str) -> None:
        self.lives[owner] += 1
        for column, committers in self.committers.items():
            self.committers[column] = [one for one in committers if one[1] != owner]

    def _succeed(self, owner: str, old: LockRecord | None, new: LockRecord) -> None:
        """An incarnation came to its end: a prepared batch counts as committed, nothing else."""
        if old is None:
            assert new.batch == -1
        elif old.prepared is not None:
            self._committed(owner, old, old.prepared.token.batch)
            assert new.batch == old.prepared.token.batch, "a prepared batch did not count"
        else:
            assert new.batch == old.batch

    def _hold(self, owner: str, old: LockRecord, new: LockRecord) -> None:
        """The holder itself changed its record."""
        assert old.held, "a lock that nobody holds was changed"
        assert old.epoch == new.epoch
        assert new.batch >= old.batch, "a committed batch fell"
        if new.batch > old.batch:
            assert old.ready
            assert new.ready
            self._committed(owner, old, new.batch)
            self._close(Debt(kind=DebtKind.UNDO, owner=owner, columns=old.columns))
            if old.prepared is not None:
                assert new.batch == old.prepared.token.batch
                self.promises[owner, old.prepared.token] = True
        elif old.prepared is not None:
            assert new.prepared == old.prepared, "a prepared batch was taken back"
        if new.prepared is not None and old.prepared is None:
            self.promises[owner, new.prepared.token] = False
        if new.ready and not old.ready:
            for debt in old.debts:
                self._close(debt)
                if debt.prepared is not None:
                    self.promises[debt.owner, debt.prepared.token] = True

    def _committed(self, owner: str, old: LockRecord, batch: int) -> None:
        self.commits[owner, self.lives[owner], batch] += 1
        assert self.commits[owner, self.lives[owner], batch] == 1, "a batch was committed twice"
        for column in old.columns:
            self.committers.setdefault(column, []).append((old.epoch, owner))

    def _close(self, debt: Debt) -> None:
        for number, entry in enumerate(self.log):
            if _covers(debt, number, entry):
                entry.open = False

    def _check(self, records: Records) -> None:
        held = {owner: record for owner, record in records.items() if record.held}
        pins = Counter[int]()
        for record in held.values():
            pins.update(set(record.columns).union(*(debt.columns for debt in record.debts)))
        assert max(pins.values(), default=0) <= 1, f"a column is pinned twice: {pins}"
        unpaid: list[Debt] = []
        for owner, record in held.items():
            assert not (record.debts and record.ready)
            unpaid += record.debts
            if record.ready:
                unpaid.append(_tail(owner, record))
            for debt in record.debts:
                assert debt.owner == owner or debt.owner not in held, (
                    f"{debt.owner} works on while {owner} has a debt of its to pay"
                )
        undo = [debt for debt in unpaid if debt.kind is DebtKind.UNDO]
        for number, entry in enumerate(self.log):
            payers = sum(_covers(debt, number, entry) for debt in undo)
            assert payers == entry.open, f"write {number}, {entry}, has {payers} payers"
        promised = Counter(
            (debt.owner, debt.prepared.token) for debt in unpaid if debt.prepared is not None
        )
        for promise, kept in self.promises.items():
            assert promised[promise] == (not kept), f"{promise} has {promised[promise]} payers"
        assert set(promised) <= set(self.promises)


def _tail(owner: str, record: LockRecord) -> Debt:
    kind = DebtKind.UNDO if record.prepared is None else DebtKind.REDO
    return Debt(
        kind=kind,
        owner=owner,
        columns=record.columns,
        offsets=record.offsets,
        prepared=record.prepared,
    )


def _covers(debt: Debt, number: int, entry: Entry) -> bool:
    """Whether paying the debt would undo this write."""
    return (
        debt.kind is DebtKind.UNDO
        and debt.owner == entry.owner
        and bool(entry.columns.intersection(debt.columns))
        and number >= debt.offsets.get(BUCKET, 0)
    )


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
    table: Table | None = None

    def records(self) -> dict[str, LockRecord]:
        """The lock records as they are."""
        return {owner: decode_record(node.data) for owner, node in self._owners().items()}

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
            late = self.shared.clock_ms >= node.modified_ms + record.ttl_ms
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


class LockMachine(RuleBasedStateMachine):
    """Without faults: what a call returns is known beforehand."""

    scripts: st.SearchStrategy[list[Step]] = st.just([])

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.store = ScriptedStore(self.world, self.intrude)
        self.coordinator = Coordinator(self.store)
        self.other = Coordinator(ScriptedStore(self.world, self.intrude))
        self.table = self.coordinator.create_table("t", DEFINITION)
        self.world.table = self.table
        self.others: dict[str, ColumnLock] = {}
        self.fenced: set[int] = set()
        self.gone: set[str] = set()

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
            self.others[intruder.owner] = self.other.acquire(
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
        return store, Coordinator(store).register_server("127.0.0.1:1")

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
            lock = self.coordinator.acquire(
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
            again = self.coordinator.acquire(
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
            self.coordinator.forget(self.table, owner)
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
        except InvalidRequest:
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


SETTINGS = settings(max_examples=4 * EXAMPLES, stateful_step_count=60, deadline=None)
TestLocks = LockMachine.TestCase
TestLocks.settings = SETTINGS
TestLocksWithFaults = FaultyLockMachine.TestCase
TestLocksWithFaults.settings = SETTINGS
