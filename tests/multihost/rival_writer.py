"""One of several owners that want the same columns, and die, sleep and come back at any step.

What ends a process ends it here at a failpoint, or while its rows have reached some servers only,
by an error that nobody handles; what pauses one keeps it from renewing its lock, and others are
just slow. Some of those that ended stay away until others have had their columns. And what a
network delivers late is sent late: rows of a batch that was sealed or given up, a fence, a payment
of what is paid.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from foundation.errors import LockHeld, TallybookError
from foundation.failpoints import arm
from locks.store.base import Conflict
from merge_engine.bucket.results import BucketResult, UndoResult
from recovery.writer.access import Answers, DebtUndo, Grant, GrantedRows
from recovery.writer.batch_work import RowsWork
from recovery.writer.redo import RedoLog
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter, WriterState
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.client.writer_access import RemoteAccess
from tests.multihost.rival_batches import COLUMNS, Ledger, rows_of
from tests.multihost.sharing import Shared

TTL_MS = 2_000
DEADLINE_S = 30.0
STEPS = (
    *("acquired", "fenced", "undone", "paid", "recovered", "ready"),
    *("before_put", "redo_written", "prepared", "put", "sealed", "committed"),
)
_LONGEST_SLEEP_S = 6.0
_LONGEST_DELAY_S = 3.0
_LONGEST_AWAY_S = 15.0
_LATEST_S = 12.0
_PAUSE_S = 0.2
_MOST_BATCHES = 6

_current = threading.local()


class Died(BaseException):
    """The process of a writer ends here, without a word."""


@dataclass
class Era:
    """What the rivals of one table share. `over`: begin nothing; `awake`: nobody sleeps now."""

    shared: Shared
    table_id: int
    ledger: Ledger = field(default_factory=Ledger)
    over: threading.Event = field(default_factory=threading.Event)
    awake: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Make a call that comes too late; whatever it is told, nobody listens."""

        def run() -> None:
            self.awake.wait(seconds)
            with suppress(TallybookError, Died):
                call()

        self._start(run, "late")

    def start(self, call: Callable[[Cluster], None], name: str) -> None:
        """Run a rival, or a reader, with a connection of its own."""

        def run() -> None:
            try:
                with self.shared.connected() as cluster:
                    call(cluster)
            except BaseException as exc:
                self.shared.say_wrong(f"{name} has ended: {type(exc).__name__}: {exc}")
                raise

        self._start(run, name)

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name)
        self.threads.append(thread)
        thread.start()

    def join(self) -> None:
        """Wait until all have ended; some begin others before that."""
        while self.threads:
            self.threads.pop(0).join()


class _Access(RemoteAccess):
    """Remembers what was paid."""

    def __init__(self, cluster: Cluster, table: RemoteTable) -> None:
        super().__init__(cluster, table)
        self.paid: list[DebtUndo] = []

    def undo(self, wanted: DebtUndo) -> Answers[UndoResult]:
        self.paid.append(wanted)
        return super().undo(wanted)


class _Writer(TableWriter):
    """A writer that can be put to sleep, or left where it is."""

    asleep = False

    def renew(self) -> None:
        if not self.asleep:
            super().renew()

    def vanish(self) -> None:
        """Do nothing any more: nothing is released, nor said."""
        self._stop_renewal()
        if self._access is not self._given_access:
            self._access.close()


@dataclass(frozen=True)
class _Work(RowsWork):
    """Rows that are put twice, as by a task that was run again; the grant is remembered."""

    grants: list[Grant] = field(default_factory=list)
    again: bool = False

    def put(self, grant: Grant) -> Answers[BucketResult]:
        self.grants.append(grant)
        answers = super().put(grant)
        return super().put(grant) if self.again else answers


class Rival:
    """An owner that acquires, writes and dies, again and again, until its era is over."""

    def __init__(self, era: Era, cluster: Cluster, owner: str, seed: str) -> None:
        self._era, self._cluster, self._owner = era, cluster, owner
        self._table = cluster.table_by_id(era.table_id)
        self._chance = random.Random(seed)
        self._redo = RedoLog.open(era.shared.settings["redo"])
        self._writer: _Writer | None = None
        # For each server that the put under way still reaches, one; None: it reaches all.
        self._reached: list[None] | None = None
        connections = cluster.calls.connections
        self._send, connections.put = connections.put, self._put  # type: ignore[method-assign]

    def run(self) -> None:
        """Live, die, and live again."""
        _current.rival = self
        while not self._era.over.is_set():
            try:
                self._live()
            except LockHeld:
                pass
            except TallybookError as exc:
                self._era.shared.check_error("rivals", exc)
            except Conflict:
                # Of a commit that was made unconditional, to see what comes of it.
                if self._era.shared.settings["without"] is None:
                    raise
            self._era.over.wait(_PAUSE_S)

    def _live(self) -> None:
        chance = self._chance
        columns = chance.sample(COLUMNS, chance.choice([1, 1, 2, 3]))
        redo = self._redo if chance.random() < 0.3 else None
        access, grants = _Access(self._cluster, self._table), list[Grant]()
        settings: dict[str, Any] = {"ttl_ms": TTL_MS, "deadline_s": DEADLINE_S, "handover": True}
        writer = self._writer = _Writer(access, self._owner, columns, redo=redo, **settings)
        was_ready = False
        try:
            writer.start()
            was_ready = True
            for _ in range(chance.randint(1, _MOST_BATCHES)):
                self._batch(writer, columns, grants)
                self._come_late(access, columns, grants, redo)
        except Died:
            if was_ready and redo is None and grants:
                self._go_on_after_death(writer, columns, grants[-1])
            if chance.random() < 0.5:
                writer.vanish()
            else:
                writer.close()
            if chance.random() < 0.5:
                self._era.over.wait(chance.uniform(TTL_MS / 1000, _LONGEST_AWAY_S))
            return
        writer.close()

    def _batch(self, writer: _Writer, columns: list[str], grants: list[Grant]) -> None:
        """Write a batch of a new number."""
        number = self._era.ledger.begin(columns)
        # With the schema that the writer has: names are read as it reads them.
        rows = Rows(data=rows_of(number), columns=columns, schema=self._table.schema)
        again = self._chance.random() < 0.3
        work = _Work(lambda: writer.access, rows, grants=grants, again=again)
        del grants[:]
        if self._chance.random() < 0.15:
            self._reached = [None] * self._chance.randint(0, 2)
        began = time.monotonic()
        try:
            writer.run(writer.next_batch(), work)
        finally:
            self._reached = None
        self._era.ledger.acknowledge(number)
        ended = time.monotonic()
        self._era.shared.say(kind="rivals", number=number, began=began, ended=ended, errors=[])

    # --- What comes too late --------------------------------------------------------------------

    def _come_late(
        self, access: _Access, columns: list[str], grants: list[Grant], redo: RedoLog | None
    ) -> None:
        """After a commit: rows of the same batch, from a task that nobody waits for; a payment."""
        chance, late = self._chance, RemoteAccess(self._cluster, self._table)
        if grants and redo is None and chance.random() < 0.4:
            put = partial(late.put, self._late_rows(columns, grants[-1]))
            self._era.later(chance.uniform(0, 2), put)
        if access.paid and chance.random() < 0.3:
            self._era.later(chance.uniform(0, 2), partial(late.undo, chance.choice(access.paid)))

    def _go_on_after_death(self, writer: _Writer, columns: list[str], grant: Grant) -> None:
        """Rows of a batch that was given up; and those that come with a fence of their own."""
        chance, late = self._chance, RemoteAccess(self._cluster, self._table)
        put = partial(late.put, self._late_rows(columns, grant))
        pinned = writer._held().record.pinned

        def fence_and_put() -> None:
            fenced = late.fence(grant.writer, pinned, late.bucket_ids())
            late.end_recovery(grant.writer, fenced.results)
            late.put(self._late_rows(columns, replace(grant, terms=fenced.results)))

        for call in (put, fence_and_put):
            self._era.later(chance.uniform(TTL_MS / 1000, _LATEST_S), call)

    def _late_rows(self, columns: list[str], grant: Grant) -> GrantedRows:
        number = self._era.ledger.begin_late(columns)
        schema = self._table.schema
        return GrantedRows(grant, Rows(data=rows_of(number), columns=columns, schema=schema))

    def _put(self, *call: Any, **settings: Any) -> Any:
        """Put rows at one server; as the process dies, the next one does not get them any more."""
        reached = self._reached
        if reached is not None:
            try:
                reached.pop()
            except IndexError:
                raise Died from None
        return self._send(*call, **settings)

    # --- Dying and sleeping -----------------------------------------------------------------------

    def step(self) -> None:
        """Die here, or sleep until others have taken over, or take one's time, or go on."""
        fate = self._chance.random()
        if self._era.over.is_set() or self._writer is None:
            return
        if fate < 0.04:
            raise Died
        if fate < 0.08:
            self._writer.asleep = True
            self._era.awake.wait(self._chance.uniform(0.5, _LONGEST_SLEEP_S))
            self._writer.asleep = False
        elif fate < 0.12:
            self._era.awake.wait(self._chance.uniform(0.1, _LONGEST_DELAY_S))


@contextmanager
def mortal_writers() -> Iterator[None]:
    """Have rivals die and sleep at the steps of their writers; other threads' writers do not."""

    def step() -> None:
        rival = getattr(_current, "rival", None)
        if rival is not None:
            rival.step()

    with ExitStack() as stack:
        for name in STEPS:
            stack.enter_context(arm(f"writer.{name}", step))
        yield


def come_back(shared: Shared, table: RemoteTable, owner: str) -> TableWriter:
    """Return the writer of an owner that wants all columns, and drops what it had promised."""
    return table.writer(
        owner_id=owner,
        columns=list(COLUMNS),
        ttl_ms=TTL_MS,
        handover=True,
        deadline_s=DEADLINE_S,
        redo=RedoLog.open(shared.settings["redo"]),
    )


def take_all(shared: Shared, table: RemoteTable, ledger: Ledger) -> TableWriter:
    """Take all columns over, from whoever has them, pay what they owe, and write a batch."""
    while True:
        number = ledger.begin(COLUMNS)  # Each time: what has failed may have been committed.
        writer = come_back(shared, table, "closer")
        try:
            writer.start()
            writer.write(writer.next_batch(), Rows(data=rows_of(number)))
            ledger.acknowledge(number)
            return writer
        except TallybookError as exc:
            shared.check_error("rivals", exc)
            if writer.state is not WriterState.NEW:
                writer.close()
        threading.Event().wait(_PAUSE_S)
