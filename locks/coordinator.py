"""Who may do what: tables, live servers and column locks, by conditional transactions.

Any process may act; there is no lock server to lose. The rules of the locks are those of the
project's executable specification, in its words.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from locks.acquisition import Acquisition, last_committers, plan_acquisition, rivals_of
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
from locks.held import Held, HeldRecord, describe
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
    owners_path,
)
from locks.record_codec import decode_node, encode_record
from locks.records import LockRecord, new_stamp
from locks.retrying import retried
from locks.servers import Server, list_servers, register_server
from locks.snapshot_lists import SnapshotLists
from locks.store import CoordinationStore, Create, Delete, Operation, Write
from locks.tables import Table, TableDefinition, dropped
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

    def alter_table(self, table: Table, definition: TableDefinition) -> Table:
        """Replace the definition, on condition that the table is still as `table` says."""
        return self._tables.alter(table, definition)

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
                now_ms = self._store.now_ms()
                for owner, lock in held.owners.items():
                    if lock.is_live(now_ms):
                        raise LockHeld(describe(table, owner, lock, now_ms))
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
        columns: Sequence[str],
        *,
        ttl_ms: int = DEFAULT_TTL_MS,
        query_id: str = "",
        handover: bool = False,
        only_epoch: int | None = None,
        stamp: bytes | None = None,
    ) -> ColumnLock:
        """Acquire the columns; what expired owners had not committed comes along as debts.

        The same owner may acquire again at any time, with other columns too: its former self is
        fenced. `only_epoch`: only if the record still has this epoch, else Fenced; so a writer
        starts over without fencing a successor. `stamp`: of this acquisition (`new_stamp`), for
        whoever calls again after an unknown outcome or in another session, so that what took effect
        is recognised. Refused: the message says whose the columns are.
        """
        owner_path(table.table_id, owner)  # Judge the owner id before anything is read.
        if not SHORTEST_TTL_MS <= ttl_ms <= LONGEST_TTL_MS:
            raise InvalidTtl(
                f"a TTL of {ttl_ms} ms; it ranges from {SHORTEST_TTL_MS} to {LONGEST_TTL_MS} ms"
            )
        wanted = table.definition.column_ids(table.name, tuple(columns))
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
            if not handover:
                _check_committers(table, owner, wanted, held)
            plan = plan_acquisition(
                owner,
                wanted,
                held.records,
                epoch=held.epoch + 1,
                ttl_ms=ttl_ms,
                query_id=query_id,
                stamp=stamp,
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
        """Remove the record of an owner that holds no lock, and with it its batch number."""
        path = owner_path(table.table_id, owner)

        def attempt() -> None:
            held = self._read_locks(table).owners.get(owner)
            if held is not None and held.record.held:
                raise LockHeld(describe(table, owner, held, self._store.now_ms()))
            if held is not None:
                self._store.transact([Delete(path, held.version)])

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
        ]

    def records(self, table: Table) -> dict[str, LockRecord]:
        """Return all lock records of a table, as they are now (sync, read)."""
        return self._read_locks(table).records

    def record(self, table: Table, owner: str) -> LockRecord | None:
        """Return one lock record, as it is now (sync, read); None if there is none any more."""
        path = owner_path(table.table_id, owner)
        self._store.sync()
        node = self._store.read(path)
        return None if node is None else decode_node(path, node)

    def _read_locks(self, table: Table) -> Held:
        """Read the epoch counter first: whatever is acquired after that raises its version."""
        self._store.sync()
        counter = self._store.read(epoch_path(table.table_id))
        if counter is None:
            raise dropped(table)
        names = self._store.children(owners_path(table.table_id))
        paths = [owner_path(table.table_id, owner) for owner in names]
        owners = {}
        for owner, path, node in zip(names, paths, self._store.read_many(paths), strict=True):
            if node is not None:
                record = decode_node(path, node)
                owners[owner] = HeldRecord(
                    record=record,
                    version=node.version,
                    expires_ms=node.modified_ms + record.ttl_ms,
                )
        return Held(epoch=int(counter.data), epoch_version=counter.version, owners=owners)

    def _check_rivals(self, table: Table, owner: str, wanted: tuple[int, ...], held: Held) -> None:
        """Refuse if a live lock is in the way; the clock is asked only when one might be."""
        rivals = rivals_of(owner, frozenset(wanted), held.records)
        if not rivals:
            return
        now_ms = self._store.now_ms()
        for rival in rivals:
            if held.owners[rival].is_live(now_ms):
                raise LockHeld(describe(table, rival, held.owners[rival], now_ms))


def _acquiring(table_id: int, owner: str, held: Held, plan: Acquisition) -> list[Operation]:
    """The epoch counter, the own record and those of the owners taken over: all or none."""
    path, data = owner_path(table_id, owner), encode_record(plan.record)
    own = held.owners.get(owner)
    return [
        Write(epoch_path(table_id), str(plan.record.epoch).encode(), held.epoch_version),
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
