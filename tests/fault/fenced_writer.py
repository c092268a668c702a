"""The writer protocol as a sink speaks it, call by call: fence, recover, ready, put, seal, commit.

For tests of servers and locks together, before there is a sink: it starts over where one would.
"""

import time
from collections.abc import Callable

from foundation.errors import (
    Retryable,
    StartOver,
    UnknownOutcome,
)
from foundation.ids import BucketId, Token
from locks.column_locks.column_lock import ColumnLock
from merge_engine.bucket.undo import UndoRange
from recovery.leader.fenced_writers import Writer
from recovery.writer.access import Answers, DebtUndo, Grant, GrantedRows
from recovery.writer.rows import Rows
from server.client.cluster import Cluster
from server.client.puts import put_granted
from server.client.remote_table import RemoteTable
from server.client.writer_access import RemoteAccess
from tests.fault.cluster_load import DEADLINE_S, Batch

COLUMNS = ("total", "rows")
# What a fresh start can cure: a leader that moved or died, at whatever step.
CURABLE = (StartOver, Retryable, UnknownOutcome)


class FencedWriter:
    """One incarnation after the other of an owner that has both columns."""

    def __init__(self, client: Cluster, table: RemoteTable, owner: str = "sink") -> None:
        self._client = client
        self.table = table
        self.owner = owner
        self.lock: ColumnLock | None = None
        self.terms: dict[BucketId, int] = {}
        self.restarts: list[Exception] = []

    @property
    def writer(self) -> Writer:
        """What goes with every call."""
        assert self.lock is not None
        return Writer(self.owner, self.lock.epoch)

    @property
    def access(self) -> RemoteAccess:
        """The calls themselves."""
        return RemoteAccess(self._client, self.table)

    def start_over(self) -> None:
        """Acquire, fence, pay the debts, and get ready."""
        known = self.lock
        self.lock = self._client.coordinator.locks.acquire(
            self.table.definition.table,
            self.owner,
            COLUMNS,
            only_epoch=None if known is None else known.epoch,
        )
        keys = self.table.bucket_ids()
        columns = sorted({*self.lock.columns, *(c for d in self.lock.debts for c in d.columns)})
        access, writer = self.access, self.writer
        self.terms = dict(access.fence(writer, columns, keys).results)
        for debt in self.lock.debts:
            rest = {key: UndoRange(debt.offsets.get(key, 0)) for key in keys}
            while rest:
                wanted = DebtUndo(
                    writer=writer,
                    terms=self.terms,
                    debtor=debt.owner,
                    columns=debt.columns,
                    ranges=rest,
                )
                undone = access.undo(wanted).results
                rest = {key: one.rest for key, one in undone.items() if one.rest is not None}
        ended = access.end_recovery(writer, self.terms)
        self.lock.ready(ended.results, ended.sessions)

    def put(self, batch: Batch) -> frozenset[str]:
        """Write the rows of a batch, and return the sessions that answered."""
        grant = Grant(
            writer=self.writer,
            owner=self.owner,
            token=Token(self.writer.epoch, batch.number),
            terms=self.terms,
        )
        rows = Rows(data=batch.to_arrow(), columns=COLUMNS)
        return put_granted(self.table.caller, GrantedRows(grant, rows)).sessions

    def seal(self, batch: Batch, at: RemoteTable | None = None) -> Answers[int]:
        """Seal a batch in all buckets; `at`: through this view of the table."""
        access = RemoteAccess(self._client, at or self.table)
        return access.seal(self.writer, self.terms, batch.number)

    def recover(self) -> None:
        """Start over until it succeeds."""
        self._until_cured(self.start_over)

    def write(self, batch: Batch) -> None:
        """Bring a batch to its commit, starting over as often as it takes."""
        broken = self.lock is None

        def attempt() -> None:
            nonlocal broken
            if broken:
                self.start_over()
            broken = True
            assert self.lock is not None
            if self.lock.batch < batch.number:
                answered = self.put(batch)
                sealed = self.seal(batch)
                self.lock.commit(batch.number, sealed.results, sealed.sessions | answered)

        self._until_cured(attempt)

    def _until_cured(self, attempt: Callable[[], None]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                attempt()
                return
            except CURABLE as exc:
                self.restarts.append(exc)
                if time.monotonic() > deadline:
                    raise
