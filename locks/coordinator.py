"""Who may do what: tables, live servers and column locks, by conditional transactions.

Any process may act; there is no lock server to lose. The rules of the locks are those of the
project's executable specification, in its words.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from locks.acquisition import (
    Acquisition,
    decided,
    is_other_query,
    last_committers,
    plan_acquisition,
    rivals_of,
)
from locks.catalog import TableCatalog, create_if_missing
from locks.column_lock import ColumnLock
from locks.dropped import DroppedTable, DroppedTables, dropping
from locks.errors import (
    Fenced,
    HandoverNeeded,
    InvalidTtl,
    LockHeld,
    RecordTooLarge,
    UnknownTable,
)
from locks.framing import frame_counter
from locks.held import Held, HeldRecord, describe, read_held
from locks.leaders import Leaders, LeadKey
from locks.leases import Leases
from locks.partitions import PartitionCatalog
from locks.paths import (
    DROPPED,
    LEADERS,
    LEASES,
    SERVERS,
    SNAPSHOTS,
    epoch_path,
    owner_path,
)
from locks.record_codec import decode_node, encode_record
from locks.records import LockRecord, new_stamp
from locks.retrying import retried
from locks.servers import Server, list_servers, register_server
from locks.snapshot_lists import SnapshotLists
from locks.store import Check, CoordinationStore, Create, Operation, Write
from locks.tables import Table, TableDefinition
from locks.watching_cluster import ClusterWatch

DEFAULT_TTL_MS = 600_000
SHORTEST_TTL_MS = 2_000
LONGEST_TTL_MS = 7 * 24 * 3_600_000


@dataclass(frozen=True, kw_only=True)
class LockInfo:
    """An owner as `list_locks` shows it. `expires_ms` is by ZooKeeper's clock."""

    owner: str
    record: LockRecord
    live: bool
    expires_ms: int


class Coordinator:
    """The coordinator's calls, over one session with the store. Safe for threads."""

    def __init__(self, store: CoordinationStore, *, deadline_s: float = 30.0) -> None:
        self._store = store
        self._deadline_s = deadline_s
        self._tables = TableCatalog(store, deadline_s)
        self._partitions = PartitionCatalog(store, deadline_s)
        self._leaders = Leaders(store, deadline_s)
        self._dropped = DroppedTables(store, deadline_s)
        self._snapshots = SnapshotLists(store, deadline_s)
        self._leases = Leases(store, deadline_s)
        self._tables.prepare()
        for path in (SERVERS, LEADERS, SNAPSHOTS, LEASES, DROPPED):
            create_if_missing(store, deadline_s, path, b"")

    @property
    def store(self) -> CoordinationStore:
        """The session underneath."""
        return self._store

    @property
    def snapshots(self) -> SnapshotLists:
        """Which snapshots of which bucket there are."""
        return self._snapshots

    @property
    def leases(self) -> Leases:
        """Which snapshots must not be deleted."""
        return self._leases

    def create_table(self, name: str, definition: TableDefinition) -> Table:
        """Create a table; TableExists if there is one of this name."""
        return self._tables.create(name, definition)

    def table(self, name: str) -> Table:
        """Return the table of this name, as it is now; UnknownTable if there is none."""
        return self._tables.get(name)

    def table_by_id(self, table_id: int) -> Table:
        """Return the table of this id, as it is now; UnknownTable if it was dropped."""
        return self._tables.get_by_id(table_id)

    def list_tables(self) -> list[str]:
        """Return the names of all tables."""
        return self._tables.names()

    def list_tables_by_id(self) -> list[Table]:
        """Return all tables with their definitions, as they are now, in the order of their ids."""
        return self._tables.all()

    def alter_table(
        self, table: Table, definition: TableDefinition, *, force: bool = False
    ) -> Table:
        """Replace the definition, on condition that the table is still as `table` says.

        LockHeld if a live lock pins a column that the definition drops, unless forced. Returns the
        table as it is then: perhaps altered again, by somebody else.
        """
        dropped = frozenset(table.definition.columns.values()).difference(
            definition.columns.values()
        )

        def conditions() -> Sequence[Operation]:
            """Nobody pins a dropped column, nor acquires or renews a lock before it is gone."""
            held = self._read_locks(table)
            pinning = {o: lock for o, lock in held.owners.items() if lock.record.pinned & dropped}
            self._check_none_live(table, pinning)
            return [
                Check(epoch_path(table.table_id), held.epoch_version),
                *(Check(owner_path(table.table_id, o), one.version) for o, one in pinning.items()),
            ]

        if force or not dropped:
            return self._tables.alter(table, definition)
        return self._tables.alter(table, definition, conditions)

    def drop_table(self, table: Table, *, force: bool = False) -> None:
        """Drop a table, its partitions and lock records; LockHeld if one is live, unless forced.

        Whoever holds a lock is fenced by that. A table of the same name later has another id. Who
        leads a bucket of it does so until it gives that up: it is nobody else's to end. What it was
        is among the `dropped_tables` until it is forgotten; its leases go on.
        """
        sent = False

        def attempt() -> None:
            nonlocal sent
            try:
                held = self._read_locks(table)
            except UnknownTable:
                if sent:
                    return
                raise
            if not force:
                self._check_none_live(table, held.owners)
            sent = True
            self._store.transact(dropping(self._store, table, held))

        retried(self._store, self._deadline_s, attempt)

    def dropped_tables(self) -> list[DroppedTable]:
        """Return the dropped tables whose files are still to be deleted, in the order of ids."""
        return self._dropped.all()

    def forget_dropped(self, table_id: int) -> None:
        """Forget a dropped table whose files are gone, with its lists of snapshots and leases."""
        self._dropped.forget(table_id)

    def partitions(self, table: Table) -> dict[bytes, int]:
        """Return the ids of a table's partitions by key, as they are now (sync, read)."""
        return self._partitions.ids(table)

    def create_partition(self, table: Table, key: bytes) -> int:
        """Return the id of the partition of this key, which is created if there is none."""
        return self._partitions.create(table, key)

    def drop_partition(self, table: Table, key: bytes) -> int | None:
        """Drop the partition of this key and return its id; None if there is none.

        The id is never given again. A partition created later with the same key is a new one. It is
        among the `dropped_partitions` until it is forgotten.
        """
        return self._partitions.drop(table, key)

    def dropped_partitions(self, table: Table) -> list[int]:
        """Return the ids of dropped partitions whose files are still to be deleted."""
        return self._partitions.dropped(table)

    def forget_dropped_partition(self, table: Table, partition: int) -> None:
        """Forget a dropped partition whose files are gone, with its lists of snapshots."""
        self._partitions.forget(table, partition)

    def register_server(self, address: str) -> Server:
        """Announce a live tablet server, for as long as this session lasts."""
        return register_server(self._store, self._deadline_s, address)

    def list_servers(self) -> list[Server]:
        """Return the live tablet servers."""
        return list_servers(self._store)

    def take_lead(self, server: Server, keys: Sequence[LeadKey]) -> list[LeadKey]:
        """Return those of the buckets that the server leads from now on, or did before.

        Never one that another session has. For the server of this session, while that lasts:
        SessionLost if it is not registered. After any other error it may lead some: take them
        again, or give them up.
        """
        return self._leaders.take(server, keys)

    def give_up_lead(self, server: Server, keys: Sequence[LeadKey]) -> None:
        """Give up those of the buckets that the server leads; the others are left alone."""
        self._leaders.give_up(server, keys)

    def leader_of(self, key: LeadKey) -> str | None:
        """Return the session name of the bucket's leader. A plain read, which may lag behind."""
        return self._leaders.leader_of(key)

    def leaders(self) -> dict[LeadKey, str]:
        """Return the session names of all leaders, as they are now."""
        return self._leaders.all()

    def watch_cluster(self, changed: Callable[[], None]) -> None:
        """Call back, from any thread, when it is worth reading the cluster again.

        When servers, leaders, tables, their definitions or partitions may have changed, for as long
        as the session lasts, and at once. Must not wait for anything; nothing may rest on it.
        """
        ClusterWatch(self._store, changed)

    def acquire(
        self,
        table: Table,
        owner: str,
        columns: Sequence[str | int],
        *,
        ttl_ms: int = DEFAULT_TTL_MS,
        query_id: str | None = None,
        handover: bool = False,
        only_epoch: int | None = None,
        stamp: bytes | None = None,
    ) -> ColumnLock:
        """Acquire the columns; what expired owners had not committed comes along as debts.

        Columns go by name or, for who must not be led astray by a name that was given to another,
        by id. The same owner may acquire again at any time, with other columns too: its former self
        is fenced. `query_id`: the streaming query that counts the batches; None for a writer that
        is no query, or for an operator. `handover`: another owner committed a column last, or
        another query of this owner, and this one begins where it ended. `only_epoch`: only if the
        record still has this epoch, else Fenced; so a writer starts over without fencing a
        successor. `stamp`: of this acquisition (`new_stamp`), for whoever calls again after an
        unknown outcome or in another session, so that what took effect is recognised. Refused: the
        message says whose the columns are.
        """
        owner_path(table.table_id, owner)  # Judge the owner id before anything is read.
        if not SHORTEST_TTL_MS <= ttl_ms <= LONGEST_TTL_MS:
            raise InvalidTtl(
                f"a TTL of {ttl_ms} ms; it ranges from {SHORTEST_TTL_MS} to {LONGEST_TTL_MS} ms"
            )
        wanted = table.definition.column_ids(table.name, columns)
        stamp = new_stamp() if stamp is None else stamp

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
            held = self._read_locks(table)
            own = held.owners.get(owner)
            if own is not None and own.record.stamp == stamp:
                return lock(own.record, own.version)
            if only_epoch is not None:
                _check_epoch(owner, own, only_epoch)
            self._check_rivals(table, owner, wanted, held)
            if not handover and only_epoch is None:  # To go on with them is no handover.
                _check_committers(table, owner, wanted, held)
                _check_query(table, owner, held, query_id)
            plan = plan_acquisition(
                owner,
                wanted,
                held.records,
                epoch=held.epoch + 1,
                ttl_ms=ttl_ms,
                query_id=query_id,
                stamp=stamp,
                handover=handover,
            )
            try:
                self._store.transact(_acquiring(table.table_id, owner, held, plan))
            except RecordTooLarge as exc:
                raise RecordTooLarge(
                    f"`{owner}` would have {len(plan.record.debts)} debts to pay, and {exc}; "
                    "acquire fewer columns at a time, or release the expired owners one by one"
                ) from exc
            return lock(plan.record, 0 if own is None else own.version + 1)

        return retried(self._store, self._deadline_s, attempt)

    def forget(self, table: Table, owner: str) -> None:
        """Blank the record of an owner that holds no lock, and with it its batch number.

        The node stays. One that is created anew begins at version 0 again, and a former self of the
        owner that still has a version in hand would meet it.
        """
        path = owner_path(table.table_id, owner)

        def attempt() -> None:
            held = self._read_locks(table).owners.get(owner)
            if held is not None and held.record.held:
                raise LockHeld(describe(table, owner, held, self._store.now_ms()))
            if held is not None and not held.record.blank:
                self._store.transact([Write(path, encode_record(LockRecord()), held.version)])

        retried(self._store, self._deadline_s, attempt)

    def list_locks(self, table: Table) -> list[LockInfo]:
        """Return all owners of a table, with what they hold and last committed."""
        held = self._read_locks(table)
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

    def records(self, table: Table) -> dict[str, LockRecord]:
        """Return all lock records of a table, as they are now and within one epoch."""
        records = self._read_locks(table).records
        return {owner: record for owner, record in records.items() if not record.blank}

    def record(self, table: Table, owner: str) -> LockRecord | None:
        """Return one lock record, as it is now (sync, read); None if there is none any more."""
        path = owner_path(table.table_id, owner)
        self._store.sync()
        node = self._store.read(path)
        record = None if node is None else decode_node(path, node)
        return None if record is None or record.blank else record

    def _read_locks(self, table: Table) -> Held:
        return read_held(self._store, table, self._deadline_s)

    def _check_none_live(self, table: Table, locks: Mapping[str, HeldRecord]) -> None:
        """Raise LockHeld if one of them is live; the clock is asked only if one might be."""
        if not locks:
            return
        now_ms = self._store.now_ms()
        for owner, lock in locks.items():
            if lock.is_live(now_ms):
                raise LockHeld(describe(table, owner, lock, now_ms))

    def _check_rivals(self, table: Table, owner: str, wanted: tuple[int, ...], held: Held) -> None:
        """Refuse if a live lock is in the way."""
        rivals = rivals_of(owner, frozenset(wanted), held.records)
        self._check_none_live(table, {rival: held.owners[rival] for rival in rivals})


def _acquiring(table_id: int, owner: str, held: Held, plan: Acquisition) -> list[Operation]:
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


def _check_epoch(owner: str, held: HeldRecord | None, epoch: int) -> None:
    if held is None or not held.record.held or held.record.epoch != epoch:
        now = "gone"
        if held is not None:
            now = f"at epoch {held.record.epoch}" if held.record.held else "no longer held"
        raise Fenced(f"the lock of {owner} was at epoch {epoch} and is {now}; stop for good")


def _check_committers(table: Table, owner: str, wanted: tuple[int, ...], held: Held) -> None:
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


def _check_query(table: Table, owner: str, held: Held, query_id: str | None) -> None:
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
