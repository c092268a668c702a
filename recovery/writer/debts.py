"""Paying debts: what a former self, or an expired owner, had not committed.

`undo`: bring its changes back. `redo`: put the batch that it promised, or what is left of it.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foundation.errors import TallybookError
from foundation.failpoints import hit
from locks.column_locks.records import Debt, DebtKind, Prepared
from merge_engine.bucket.undo import UndoRange
from recovery.leader.fenced_writers import Writer
from recovery.writer.access import DebtUndo, Grant, GrantedRows, TableAccess, Terms
from recovery.writer.progress import Progress
from recovery.writer.redo import RedoLog, read_promise

logger = logging.getLogger(__name__)

Promises = Mapping[str, Sequence[str]]
"""Promised batches by location, with the other objects that each of them has."""

_SAY_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True)
class DebtPayer:
    """Pays the debts of a lock's holder that was fenced in all buckets, at these terms."""

    access: TableAccess
    writer: Writer
    terms: Terms
    redo: RedoLog | None
    progress: Progress

    def pay(self, debt: Debt) -> Promises:
        """Undo, or keep what was promised; return where that is, for whoever drops it."""
        if debt.kind is DebtKind.UNDO:
            self._undo(debt)
            return {}
        assert debt.prepared is not None
        return self._keep(debt.owner, debt.prepared)

    def _undo(self, debt: Debt) -> None:
        """Undo a debt, call by call, and say every few seconds how far it is."""
        rest = {key: UndoRange(debt.offsets.get(key, 0)) for key in self.terms}
        keys, said = 0, time.monotonic()
        while rest:
            began = time.monotonic()
            undone = self.access.undo(
                DebtUndo(
                    writer=self.writer,
                    terms=self.terms,
                    debtor=debt.owner,
                    columns=debt.columns,
                    ranges=rest,
                )
            )
            changed = sum(result.changed for result in undone.results.values())
            rest = {key: one.rest for key, one in undone.results.items() if one.rest is not None}
            keys += changed
            self.progress.undone_keys += changed
            now = time.monotonic()
            self.progress.undoing_s += now - began
            if rest and now - said >= _SAY_EVERY_S:
                said = now
                logger.info(
                    "undoing %s: %d keys so far, %d of %d buckets are not done",
                    *(debt.owner, keys, len(rest), len(self.terms)),
                )
            hit("writer.undone")
        logger.info("undid %d keys of %s", keys, debt.owner)

    def _keep(self, owner: str, prepared: Prepared) -> Promises:
        """Put a promised batch, or what is left of it; return where it is."""
        promise = read_promise(prepared.location, self.redo)
        where = {prepared.location: promise.contents.objects}
        token, form = prepared.token, promise.contents.form
        if form is not None and form.schema_version > self.access.schema.version:
            self.access.refresh()
        rows = promise.rows(self.access.schema)
        if rows is None:
            logger.info("all that batch %d of %s was for is gone", token.batch, owner)
            return where
        grant = Grant(writer=self.writer, owner=owner, token=token, terms=self.terms)
        self.access.keep(GrantedRows(grant, rows), promise)
        logger.info("rolled batch %d of %s forward", token.batch, owner)
        return where


def drop_promises(
    redo: RedoLog | None, table: str, owner: str, kept: Promises, before_epoch: int | None = None
) -> None:
    """Drop what nobody will read again; if that fails, the next start of the owner does it.

    `before_epoch`: what our earlier epochs have left, too: nobody else has a debt of ours.
    """
    try:
        for location, objects in kept.items():
            RedoLog.holding(location, redo).delete(location, objects)
        if redo is not None and before_epoch is not None:
            redo.delete_of(table, owner, before_epoch=before_epoch)
    except TallybookError as exc:
        logger.warning("batches of %s are left in the redo log: %s", owner, exc)
