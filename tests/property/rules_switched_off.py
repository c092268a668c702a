"""The rules of the executable specification, each switched off in the real code."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import locks.acquisition
import locks.coordinator
import merge_engine.bucket
import recovery.isolation
from locks import BucketKey, ColumnLock, DebtKind, LockRecord, Offsets
from locks.acquisition import Acquisition, plan_acquisition
from locks.record_codec import decode_node, encode_record
from locks.records import Debt, new_stamp
from locks.store import Write
from merge_engine import Token
from merge_engine.fold import Update
from merge_engine.log import Log
from merge_engine.undo import undo_updates
from merge_engine.view import View
from recovery.guard import Guard, Writer
from recovery.led_bucket import LedBucket
from recovery.writer import TableWriter


def without_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Guard, "check", lambda *_: None)


def without_current(patch: pytest.MonkeyPatch) -> None:
    def grant(
        self: LedBucket, writer: Writer, columns: Iterable[int], record: LockRecord | None
    ) -> int:
        self._guard.fence(writer, frozenset(columns))
        return self.term

    patch.setattr(LedBucket, "fence", grant)


def without_leaders(patch: pytest.MonkeyPatch) -> None:
    real = ColumnLock._update

    def update(self: ColumnLock, change: Any, _servers: object = (), end: Any = None) -> None:
        real(self, change, (), end)

    patch.setattr(ColumnLock, "_update", update)


def without_term(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedBucket, "_check_term", lambda *_: None)


def without_closed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Guard, "check_payment", lambda *_: None)


def without_doubt(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Log) -> bool:
        self.check_leading()
        self._in_doubt = None
        return False

    patch.setattr(Log, "settle", settle)


def without_dedupe(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(View, "token", lambda *_: None)


def without_token(patch: pytest.MonkeyPatch) -> None:
    real = TableWriter._grant
    patch.setattr(
        TableWriter,
        "_grant",
        lambda self, batch: replace(real(self, batch), token=Token(0, batch)),
    )
    patch.setattr(Guard, "check_new", lambda *_: None)


def without_seal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Guard, "seal", lambda *_: None)


def without_undo(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        merge_engine.bucket,
        "undo_updates",
        lambda log, columns, *a, **kw: undo_updates(log, columns[:1], *a, **kw),
    )


def without_touched(patch: pytest.MonkeyPatch) -> None:
    def undo_to_zero(*args: Any, **settings: Any) -> Iterator[tuple[int, Update]]:
        for back_to, update in undo_updates(*args, **settings):
            yield back_to, replace(update, touches=np.ones_like(update.touches))

    patch.setattr(merge_engine.bucket, "undo_updates", undo_to_zero)


def without_debt(patch: pytest.MonkeyPatch) -> None:
    def plan(
        owner: str, columns: Iterable[int], records: Mapping[str, LockRecord], **fields: Any
    ) -> Acquisition:
        planned = plan_acquisition(owner, columns, records, **fields)
        debts = tuple(debt for debt in planned.record.debts if debt.owner == owner)
        return replace(planned, record=replace(planned.record, debts=debts))

    patch.setattr(locks.coordinator, "plan_acquisition", plan)


def without_pin(patch: pytest.MonkeyPatch) -> None:
    def in_the_way(record: LockRecord, owner: str, columns: frozenset[int]) -> bool:
        own = bool(frozenset(record.columns) & columns)
        return own or any(debt.owner == owner for debt in record.debts)

    patch.setattr(locks.acquisition, "in_the_way", in_the_way)


def without_self(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        locks.acquisition, "in_the_way", lambda record, _, columns: bool(record.pinned & columns)
    )


def without_redo(patch: pytest.MonkeyPatch) -> None:
    real = TableWriter._pay

    def pay(self: TableWriter, debt: Debt, writer: Writer) -> Mapping[str, Sequence[str]]:
        return real(self, debt, writer) if debt.kind is DebtKind.UNDO else {}

    patch.setattr(TableWriter, "_pay", pay)


def without_decided(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(locks.acquisition, "decided", lambda record: record)


def without_commit(patch: pytest.MonkeyPatch) -> None:
    def commit(self: ColumnLock, batch: int, offsets: Mapping[BucketKey, int], _: object) -> None:
        node = self._store.read(self._path)
        assert node is not None
        record = decode_node(self._path, node)
        changed = replace(record, batch=batch, offsets=Offsets(offsets), stamp=new_stamp())
        self._store.transact([Write(self._path, encode_record(changed), node.version)])
        self._record, self._version = changed, node.version + 1

    patch.setattr(ColumnLock, "commit", commit)


def without_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ColumnLock, "abandon", ColumnLock.release)


def without_stable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery.isolation, "_lowered", lambda _tail, pinned, _work: pinned)
