"""The writer protocol as a sink speaks it, call by call: fence, recover, ready, put, seal, commit.

For tests of servers and locks together, before there is a sink: it starts over where one would.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from locks import BucketKey, ColumnLock, CoordinationError
from merge_engine import Retryable, Token, UndoRange, UnknownOutcome
from recovery.errors import NotFenced, NotLeader
from recovery.guard import Writer
from server.client import Cluster
from server.remote_table import RemoteTable
from tests.fault.cluster_load import DEADLINE_S, Batch

COLUMNS = ("total", "rows")
# What a fresh start can cure: a leader that moved or died, at whatever step.
CURABLE = (NotLeader, NotFenced, Retryable, UnknownOutcome, CoordinationError)


class FencedWriter:
    """One incarnation after the other of an owner that has both columns."""

    def __init__(self, client: Cluster, table: RemoteTable, owner: str = "sink") -> None:
        self._client = client
        self.table = table
        self.owner = owner
        self.lock: ColumnLock | None = None
        self.terms: dict[BucketKey, int] = {}
        self.restarts: list[Exception] = []

    @property
    def writer(self) -> Writer:
        """What goes with every call."""
        assert self.lock is not None
        return Writer(self.owner, self.lock.epoch)

    @property
    def fields(self) -> dict[str, Any]:
        """The same, as the calls carry it."""
        return {"writer": self.owner, "epoch": self.writer.epoch}

    def start_over(self) -> None:
        """Acquire, fence, pay the debts, and get ready."""
        known = self.lock
        self.lock = self._client.coordinator.acquire(
            self.table.definition.table,
            self.owner,
            COLUMNS,
            only_epoch=None if known is None else known.epoch,
        )
        keys = self.table.bucket_keys()
        columns = sorted({*self.lock.columns, *(c for d in self.lock.debts for c in d.columns)})
        self.terms, _ = self.table.call(
            "fence", {**self.fields, "columns": columns}, {k: [] for k in keys}, answer="terms"
        )
        for debt in self.lock.debts:
            fields = {**self.fields, "debtor": debt.owner, "columns": list(debt.columns)}
            rest = {key: UndoRange(debt.offsets.get(key, 0)) for key in keys}
            while rest:
                undone, _ = self.table.undo_some(fields, rest, self.terms)
                rest = {key: one.rest for key, one in undone.items() if one.rest is not None}
        ends, sessions = self.table.call(
            "end_recovery", self.fields, self._terms(), answer="ends", patient=False
        )
        self.lock.ready(ends, sessions)

    def put(self, batch: Batch) -> frozenset[str]:
        """Write the rows of a batch, and return the sessions that answered."""
        result = self.table.put(
            batch.to_arrow(),
            columns=COLUMNS,
            owner=self.owner,
            token=Token(self.writer.epoch, batch.number),
            writer=self.writer,
            terms=self.terms,
        )
        return result.sessions

    def seal(
        self, batch: Batch, at: RemoteTable | None = None
    ) -> tuple[Mapping[BucketKey, int], frozenset[str]]:
        """Seal a batch in all buckets; `at`: through this view of the table."""
        rows = self._terms()
        fields = {**self.fields, "batch": batch.number}
        return (at or self.table).call("seal", fields, rows, answer="ends", patient=False)

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
                ends, sessions = self.seal(batch)
                self.lock.commit(batch.number, ends, sessions | answered)

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

    def _terms(self) -> dict[BucketKey, list[int]]:
        return {key: [term] for key, term in self.terms.items()}
