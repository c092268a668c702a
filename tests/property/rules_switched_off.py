"""The rules of the executable specification, each switched off in the real code."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import locks.column_locks.acquisition
import locks.column_locks.locks
import merge_engine.bucket.undo_steps
import recovery.reader.isolation
import recovery.writer.table_writer
from foundation.ids import BucketId, Token
from locks.catalog.definitions import CatalogTable
from locks.column_locks import lock_set
from locks.column_locks.acquisition import Acquisition, plan_acquisition
from locks.column_locks.column_lock import ColumnLock
from locks.column_locks.lock_set import LockSet
from locks.column_locks.record_codec import decode_node, encode_record
from locks.column_locks.records import Debt, DebtKind, LockRecord, new_stamp
from locks.encoding.framing import read_counter
from locks.encoding.offsets import Offsets
from locks.store.base import CoordinationStore, Write
from merge_engine.bucket.log import Log
from merge_engine.bucket.undo import undo_updates
from merge_engine.bucket.view_meta import ViewMeta
from merge_engine.merging.fold import Update
from recovery.leader.fenced_writers import FencedWriters, Writer
from recovery.leader.led_bucket import LedBucket
from recovery.reader.cut import Bound, BucketCut, Cut
from recovery.reader.later import Sieve
from recovery.writer.debts import DebtPayer, Promises
from recovery.writer.replays import check_same
from recovery.writer.table_writer import TableWriter


def without_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FencedWriters, "check", lambda *_: None)


def without_current(patch: pytest.MonkeyPatch) -> None:
    def grant(
        self: LedBucket, writer: Writer, columns: Iterable[int], record: LockRecord | None
    ) -> int:
        self._writers.fence(writer, frozenset(columns))
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
    patch.setattr(FencedWriters, "check_payment", lambda *_: None)


def without_doubt(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Log) -> bool:
        self.check_leading()
        self._in_doubt = None
        return False

    patch.setattr(Log, "settle", settle)


def without_dedupe(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ViewMeta, "token", lambda *_: None)


def without_token(patch: pytest.MonkeyPatch) -> None:
    real = TableWriter._grant
    patch.setattr(
        TableWriter,
        "_grant",
        lambda self, batch: replace(real(self, batch), token=Token(0, batch)),
    )
    patch.setattr(FencedWriters, "check_new", lambda *_: None)


def without_seal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FencedWriters, "seal", lambda *_: None)


def without_undo(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        merge_engine.bucket.undo_steps,
        "undo_updates",
        lambda log, columns, *a, **kw: undo_updates(log, columns[:1], *a, **kw),
    )


def without_touched(patch: pytest.MonkeyPatch) -> None:
    def undo_to_zero(*args: Any, **settings: Any) -> Iterator[tuple[int, Update]]:
        for back_to, update in undo_updates(*args, **settings):
            yield back_to, replace(update, touches=np.ones_like(update.touches))

    patch.setattr(merge_engine.bucket.undo_steps, "undo_updates", undo_to_zero)


def without_debt(patch: pytest.MonkeyPatch) -> None:
    def plan(
        owner: str, columns: Iterable[int], records: Mapping[str, LockRecord], **fields: Any
    ) -> Acquisition:
        planned = plan_acquisition(owner, columns, records, **fields)
        debts = tuple(debt for debt in planned.record.debts if debt.owner == owner)
        return replace(planned, record=replace(planned.record, debts=debts))

    patch.setattr(locks.column_locks.locks, "plan_acquisition", plan)


def without_pin(patch: pytest.MonkeyPatch) -> None:
    def in_the_way(record: LockRecord, owner: str, columns: frozenset[int]) -> bool:
        own = bool(frozenset(record.columns) & columns)
        return own or any(debt.owner == owner for debt in record.debts)

    patch.setattr(locks.column_locks.acquisition, "in_the_way", in_the_way)


def without_self(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        locks.column_locks.acquisition,
        "in_the_way",
        lambda record, _, columns: bool(record.pinned & columns),
    )


def without_redo(patch: pytest.MonkeyPatch) -> None:
    real = DebtPayer.pay

    def pay(self: DebtPayer, debt: Debt) -> Promises:
        return real(self, debt) if debt.kind is DebtKind.UNDO else {}

    patch.setattr(DebtPayer, "pay", pay)


def without_decided(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(locks.column_locks.acquisition, "decided", lambda record: record)


def without_commit(patch: pytest.MonkeyPatch) -> None:
    real = ColumnLock.commit

    def commit(
        self: ColumnLock,
        batch: int,
        offsets: Mapping[BucketId, int],
        servers: Iterable[str],
        *,
        fingerprint: str = "",
    ) -> None:
        node = self._store.read(self._path)
        if node is None:  # The table was dropped: nothing is committed under any rule.
            real(self, batch, offsets, servers, fingerprint=fingerprint)
            return
        record = decode_node(self._path, node)
        changed = replace(record, batch=batch, offsets=Offsets(offsets), stamp=new_stamp())
        self._store.transact([Write(self._path, encode_record(changed), node.version)])
        self._record, self._version = changed, node.version + 1

    patch.setattr(ColumnLock, "commit", commit)


def without_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ColumnLock, "abandon", ColumnLock.release)


def without_stable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery.reader.isolation, "_lowered", lambda _tail, pinned, _work: pinned)


def without_cut(patch: pytest.MonkeyPatch) -> None:
    """Each bucket is shown as it is when it is read, without what may yet be undone."""
    patch.setattr(Sieve, "is_later", lambda *_: False)


def without_counter(patch: pytest.MonkeyPatch) -> None:
    """Records are read one after the other, whoever acquires meanwhile."""

    def torn(store: CoordinationStore, table: CatalogTable, _deadline_s: float) -> LockSet:
        store.sync()
        counter = lock_set._read_epoch(store, table)
        return LockSet(
            epoch=read_counter("counter", counter.data),
            epoch_version=counter.version,
            modified_ms=counter.modified_ms,
            owners=lock_set._read_owners(store, table),
        )

    patch.setattr(locks.column_locks.locks, "read_locks", torn)


def without_newer(patch: pytest.MonkeyPatch) -> None:
    """Epochs mean nothing to a cut: it goes by the offsets of the records that it has."""
    real = Cut.at

    def at(self: Cut, bucket: BucketId) -> BucketCut:
        found = real(self, bucket)
        held = {owner: one for owner, one in found.bounds.items() if one.offset is not None}
        return BucketCut(bounds=held, others=Bound())

    patch.setattr(Cut, "at", at)


def without_plan(patch: pytest.MonkeyPatch) -> None:
    def check(
        owner: str, batch: int, _fingerprint: str, record: LockRecord, names: Mapping[int, str]
    ) -> None:
        check_same(owner, batch, "", record, names)

    patch.setattr(recovery.writer.table_writer, "check_same", check)


def without_columns(patch: pytest.MonkeyPatch) -> None:
    def check(
        owner: str, batch: int, fingerprint: str, record: LockRecord, names: Mapping[int, str]
    ) -> None:
        check_same(owner, batch, fingerprint, replace(record, columns=()), names)

    patch.setattr(recovery.writer.table_writer, "check_same", check)


def without_former(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(locks.column_locks.locks, "is_former_query", lambda *_: False)
