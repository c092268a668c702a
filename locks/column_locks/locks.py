"""The column locks of a table: acquired, listed and forgotten, by conditional transactions.

Any process may act; there is no lock server to lose. The rules are those of the project's
executable specification (`docs/spec/protocol.py`), in its words.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from foundation.errors import (
    Fenced,
    FormerQuery,
    HandoverNeeded,
    InvalidTtl,
    LockHeld,
    RecordTooLarge,
)
from locks.catalog.definitions import CatalogTable
from locks.column_locks.acquisition import (
    Acquisition,
    decided,
    is_former_query,
    is_other_query,
    last_committers,
    plan_acquisition,
    rivals_of,
)
from locks.column_locks.column_lock import ColumnLock
from locks.column_locks.lock_set import LockEntry, LockSet, describe, read_lock, read_locks
from locks.column_locks.record_codec import decode_node, encode_record
from locks.column_locks.records import LockRecord, new_stamp
from locks.encoding.framing import frame_counter
from locks.store.base import CoordinationStore, Create, Operation, Write
from locks.store.paths import epoch_path, owner_path
from locks.store.retrying import retried

DEFAULT_TTL_MS = 600_000
SHORTEST_TTL_MS = 2_000
LONGEST_TTL_MS = 7 * 24 * 3_600_000


@dataclass(frozen=True, kw_only=True)
class LockInfo:
    """An owner as `ColumnLocks.all` shows it. Moments are by ZooKeeper's clock.

    `committed_ms`: of its last batch; None if it has committed none. Of records that an earlier
    release wrote, this and `held_since_ms` are when they were last written.
    """

    owner: str
    record: LockRecord
    live: bool
    expires_ms: int

    @property
    def written_ms(self) -> int:
        """When the record was last written: with a batch, or to renew it."""
        return self.expires_ms - self.record.ttl_ms

    @property
    def held_since_ms(self) -> int | None:
        """When the lock was acquired; None if it is not held."""
        return self.written_ms - self.record.held_ms if self.record.held else None

    @property
    def committed_ms(self) -> int | None:
        """When the last batch was committed."""
        return self.written_ms - self.record.idle_ms if self.record.batch >= 0 else None


class ColumnLocks:
    """The locks of all tables, over one session with the store. Safe for threads."""

    def __init__(self, store: CoordinationStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s

    def acquire(
        self,
        table: CatalogTable,
        owner: str,
        columns: Sequence[str | int],
        *,
        ttl_ms: int = DEFAULT_TTL_MS,
        query_id: str | None = None,
        handover: bool = False,
        only_epoch: int | None = None,
        stamp: bytes | None = None,
        query_name: str = "",
    ) -> ColumnLock:
        """Acquire the columns; what expired owners had not committed comes along as debts.

        Columns go by name or, for who must not be led astray by a name that was given to another,
        by id. The same owner may acquire again at any time, with other columns too: its former self
        is fenced. `query_id`: the streaming query that counts the batches; None for a writer that
        is no query, or for an operator. `handover`: another owner committed a column last, or
        another query of this owner, and this one begins where it ended. A former query, which this
        owner was handed over from, is refused all the same: FormerQuery. `only_epoch`: only if the
        record still has this epoch, else Fenced; so a writer starts over without fencing a
        successor. `stamp`: of this acquisition (`new_stamp`), for whoever calls again after an
        unknown outcome or in another session, so that what took effect is recognised. `query_name`:
        what people call the query. Refused: the message says whose the columns are.
        """
        owner_path(table.table_id, owner)  # Judge the owner id before anything is read.
        if not SHORTEST_TTL_MS <= ttl_ms <= LONGEST_TTL_MS:
            raise InvalidTtl(
                f"a TTL of {ttl_ms} ms; it ranges from {SHORTEST_TTL_MS} to {LONGEST_TTL_MS} ms"
            )
        wanted = table.definition.column_ids(table.name, columns)
        stamp = new_stamp() if stamp is None else stamp
        now_ms = _clock_of(self._store)

        def lock(record: LockRecord, version: int) -> ColumnLock:
            return ColumnLock(
                self._store,
                deadline_s=self._deadline_s,
                table_id=table.table_id,
                owner=owner,
                record=record,
                version=version,
            )

        def attempt() -> ColumnLock:
            held = self._read_for(table, owner, wanted, only_epoch)
            own = held.owners.get(owner)
            if own is not None and own.record.stamp == stamp:
                return lock(own.record, own.version)
            if only_epoch is not None:
                _check_epoch(owner, own, only_epoch)
            self._check_rivals(table, owner, wanted, held)
            _check_former(table, owner, held, query_id)
            if not handover and only_epoch is None:  # To go on with them is no handover.
                _check_committers(table, owner, wanted, held)
                _check_query(table, owner, held, query_id)
            plan = plan_acquisition(
                owner,
                wanted,
                _aged(held, now_ms),
                epoch=held.epoch + 1,
                ttl_ms=ttl_ms,
                query_id=query_id,
                stamp=stamp,
                handover=handover,
                query_name=query_name,
            )
            self._carry_out(plan, table, owner, held)
            return lock(plan.record, 0 if own is None else own.version + 1)

        return retried(self._store, self._deadline_s, attempt)

    def _carry_out(self, plan: Acquisition, table: CatalogTable, owner: str, held: LockSet) -> None:
        try:
            self._store.transact(_acquiring(table.table_id, owner, held, plan))
        except RecordTooLarge as exc:
            raise RecordTooLarge(
                f"`{owner}` would have {len(plan.record.debts)} debts to pay, and {exc}; "
                "acquire fewer columns at a time, or release the expired owners one by one"
            ) from exc

    def forget(self, table: CatalogTable, owner: str) -> None:
        """Blank the record of an owner that holds no lock, and with it its batch number.

        The node stays. One that is created anew begins at version 0 again, and a former self of the
        owner that still has a version in hand would meet it.
        """
        path = owner_path(table.table_id, owner)

        def attempt() -> None:
            held = self.read(table).owners.get(owner)
            if held is not None and held.record.held:
                raise LockHeld(describe(table, owner, held, self._store.now_ms()))
            if held is not None and not held.record.blank:
                self._store.transact([Write(path, encode_record(LockRecord()), held.version)])

        retried(self._store, self._deadline_s, attempt)

    def all(self, table: CatalogTable) -> list[LockInfo]:
        """Return all owners of a table, with what they hold and last committed."""
        held = self.read(table)
        now_ms = self._store.now_ms()
        return [
            LockInfo(
                owner=owner,
                record=lock.record,
                live=lock.is_live(now_ms),
                expires_ms=lock.expires_ms,
            )
            for owner, lock in held.owners.items()
            if not lock.record.blank
        ]

    def look(self, table: CatalogTable, owner: str) -> LockInfo | None:
        """Return what one owner holds and last committed, as it is now; None if there is none."""
        held = read_lock(self._store, table, owner).owners.get(owner)
        if held is None or held.record.blank:
            return None
        live, expires_ms = held.is_live(self._store.now_ms()), held.expires_ms
        return LockInfo(owner=owner, record=held.record, live=live, expires_ms=expires_ms)

    def records(self, table: CatalogTable) -> dict[str, LockRecord]:
        """Return all lock records of a table, as they are now and within one epoch."""
        records = self.read(table).records
        return {owner: record for owner, record in records.items() if not record.blank}

    def record(self, table: CatalogTable, owner: str) -> LockRecord | None:
        """Return one lock record, as it is now (sync, read); None if there is none any more."""
        path = owner_path(table.table_id, owner)
        self._store.sync()
        node = self._store.read(path)
        record = None if node is None else decode_node(path, node)
        return None if record is None or record.blank else record

    def read(self, table: CatalogTable) -> LockSet:
        """Return all locks of a table, as they are now and within one epoch."""
        return read_locks(self._store, table, self._deadline_s)

    def _read_for(
        self, table: CatalogTable, owner: str, wanted: Sequence[int], only_epoch: int | None
    ) -> LockSet:
        """Return what an acquisition has to know: all locks; its own, to go on with what it holds.

        What a held record pins, no other one does, and no other one has a debt of its owner: who
        takes either takes the lock over, and writes this record. So the condition on its version is
        one on all rivals. Where a leader is gone all owners of a table start over at once, and had
        each to read the records of all, again and again, a hundred of them took over a minute.
        """
        if only_epoch is not None:
            alone = read_lock(self._store, table, owner)
            own = alone.owners.get(owner)
            if own is not None and _goes_on(own.record, wanted, only_epoch):
                return alone
        return self.read(table)

    def check_none_live(self, table: CatalogTable, locks: Mapping[str, LockEntry]) -> None:
        """Raise LockHeld if one of them is live; the clock is asked only if one might be."""
        if not locks:
            return
        now_ms = self._store.now_ms()
        for owner, lock in locks.items():
            if lock.is_live(now_ms):
                raise LockHeld(describe(table, owner, lock, now_ms))

    def _check_rivals(
        self, table: CatalogTable, owner: str, wanted: tuple[int, ...], held: LockSet
    ) -> None:
        """Refuse if a live lock is in the way."""
        rivals = rivals_of(owner, frozenset(wanted), held.records)
        self.check_none_live(table, {rival: held.owners[rival] for rival in rivals})


def _clock_of(store: CoordinationStore) -> Callable[[], int]:
    """Return a clock that asks the store's when it is asked first, and goes on by itself.

    It is for what people read, and to ask the store's is a write: each attempt of hundreds that
    acquire at once would make the others wait for one more.
    """
    begun: list[tuple[int, float]] = []

    def now_ms() -> int:
        if not begun:
            begun.append((store.now_ms(), time.monotonic()))
        [(began_ms, began)] = begun
        return began_ms + int((time.monotonic() - began) * 1000)

    return now_ms


def _aged(held: LockSet, clock: Callable[[], int]) -> Mapping[str, LockRecord]:
    """Return the records as they are to be written now; the clock is asked if there are any."""
    if not held.owners:
        return {}
    now_ms = clock()
    return {
        owner: lock.record.aged(now_ms - lock.modified_ms) for owner, lock in held.owners.items()
    }


def _acquiring(table_id: int, owner: str, held: LockSet, plan: Acquisition) -> list[Operation]:
    """The epoch counter, the own record and those of the owners taken over: all or none."""
    path, data = owner_path(table_id, owner), encode_record(plan.record)
    own = held.owners.get(owner)
    return [
        Write(epoch_path(table_id), frame_counter(plan.record.epoch), held.epoch_version),
        Create(path, data) if own is None else Write(path, data, own.version),
        *(
            Write(
                owner_path(table_id, rival),
                encode_record(replace(record, stamp=new_stamp())),
                held.owners[rival].version,
            )
            for rival, record in plan.taken_over.items()
        ),
    ]


def _goes_on(record: LockRecord, wanted: Sequence[int], epoch: int) -> bool:
    """Whether this is the lock of that epoch, and has all of these columns."""
    return record.held and record.epoch == epoch and record.pinned.issuperset(wanted)


def _check_epoch(owner: str, held: LockEntry | None, epoch: int) -> None:
    if held is None or not held.record.held or held.record.epoch != epoch:
        now = "gone"
        if held is not None:
            now = f"at epoch {held.record.epoch}" if held.record.held else "no longer held"
        raise Fenced(f"the lock of {owner} was at epoch {epoch} and is {now}; stop for good")


def _check_committers(
    table: CatalogTable, owner: str, wanted: tuple[int, ...], held: LockSet
) -> None:
    """Another owner's history must not silently be counted again under a new name."""
    for column, last in last_committers(wanted, held.records).items():
        if last != owner:
            name = table.definition.column_names((column,))
            raise HandoverNeeded(
                f"column {name} of table {table.name} was last committed by `{last}` (batch "
                f"{held.records[last].batch}), not by `{owner}`: a new checkpoint or a new job "
                f"would count its whole history again. Go on as `{last}`, or pass handover=True if "
                f"`{owner}` begins where `{last}` ended"
            )


def _check_former(table: CatalogTable, owner: str, held: LockSet, query_id: str | None) -> None:
    """What a query had committed before its owner was handed over would count again."""
    own = held.owners.get(owner)
    if own is not None and is_former_query(record := own.record, query_id):
        heir = f"query {record.query_id}" if record.query_id else "a writer that is no query"
        raise FormerQuery(
            f"query {query_id} has written table {table.name} as `{owner}`, and `{owner}` was "
            f"handed over to {heir} since (its last batch is {decided(record).batch}): which "
            "batches of the former query count is not known any more, and they would count again. "
            "Nothing was written. What is missing in the table goes there by a new checkpoint that "
            "begins behind what was committed, with handover=True, or by tb.write"
        )


def _check_query(table: CatalogTable, owner: str, held: LockSet, query_id: str | None) -> None:
    """Another query counts its batches from 0, and what it has read is not known to be the same."""
    own = held.owners.get(owner)
    if own is not None and is_other_query(record := decided(own.record), query_id):
        before = f"query {record.query_id}" if record.query_id else "a writer that is no query"
        raise HandoverNeeded(
            f"`{owner}` last wrote table {table.name} for {before} (batch {record.batch}), and now "
            f"asks for query {query_id}: a new checkpoint, or another job under this owner id, "
            "would count its whole history again. Go on with the checkpoint of that query, or pass "
            "handover=True if this one begins where that one ended; its batches are numbered on"
        )
