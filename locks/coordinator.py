"""The coordinator: one session with the store, and a room for each thing that is kept there.

    coordinator.tables.get("orders")
    coordinator.locks.acquire(table, "etl", ["revenue"])

What is here besides needs more than one of the rooms.
"""

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

from foundation.errors import UnknownTable
from locks.catalog.definitions import CatalogTable, TableDefinition
from locks.catalog.dropped_tables import DroppedTables, dropping
from locks.catalog.partitions import PartitionCatalog
from locks.catalog.tables import TableCatalog, create_if_missing, creating, encode_name
from locks.cluster.leaders import Leaders
from locks.cluster.servers import Servers
from locks.column_locks.locks import ColumnLocks
from locks.snapshots.leases import Leases
from locks.snapshots.lists import SnapshotLists
from locks.store.base import Check, CoordinationStore, Delete, Operation, Write
from locks.store.paths import (
    ASIDE,
    DROPPED,
    LEADERS,
    LEASES,
    SERVERS,
    SNAPSHOTS,
    epoch_path,
    owner_path,
    table_name_path,
)
from locks.store.retrying import retried


class Coordinator:
    """All that is kept in the store, over one session with it. Safe for threads."""

    def __init__(self, store: CoordinationStore, *, deadline_s: float = 30.0) -> None:
        self.store = store
        self._deadline_s = deadline_s
        self.tables = TableCatalog(store, deadline_s)
        self.partitions = PartitionCatalog(store, deadline_s)
        self.dropped = DroppedTables(store, deadline_s)
        self.locks = ColumnLocks(store, deadline_s)
        self.servers = Servers(store, deadline_s)
        self.leaders = Leaders(store, deadline_s)
        self.snapshots = SnapshotLists(store, deadline_s)
        self.leases = Leases(store, deadline_s)
        self.tables.prepare()
        for path in (SERVERS, ASIDE, LEADERS, SNAPSHOTS, LEASES, DROPPED):
            create_if_missing(store, deadline_s, path, b"")

    def alter_table(
        self, table: CatalogTable, definition: TableDefinition, *, force: bool = False
    ) -> CatalogTable:
        """Replace the definition, on condition that the table is still as `table` says.

        LockHeld if a live lock pins a column that the definition drops, unless forced. Returns the
        table as it is then: perhaps altered again, by somebody else.
        """
        dropped = frozenset(table.definition.columns.values()).difference(
            definition.columns.values()
        )

        def conditions() -> Sequence[Operation]:
            """Nobody pins a dropped column, nor acquires or renews a lock before it is gone."""
            held = self.locks.read(table)
            pinning = {o: lock for o, lock in held.owners.items() if lock.record.pinned & dropped}
            self.locks.check_none_live(table, pinning)
            return [
                Check(epoch_path(table.table_id), held.epoch_version),
                *(Check(owner_path(table.table_id, o), one.version) for o, one in pinning.items()),
            ]

        if force or not dropped:
            return self.tables.alter(table, definition)
        return self.tables.alter(table, definition, conditions)

    def drop_table(self, table: CatalogTable, *, force: bool = False) -> None:
        """Drop a table, its partitions and lock records; LockHeld if one is live, unless forced.

        Whoever holds a lock is fenced by that. A table of the same name later has another id. Who
        leads a bucket of it does so until it gives that up: it is nobody else's to end. What it was
        is among the `dropped` tables until it is forgotten; its leases go on.
        """
        sent = False

        def attempt() -> None:
            nonlocal sent
            try:
                held = self.locks.read(table)
            except UnknownTable:
                if sent:
                    return
                raise
            if not force:
                self.locks.check_none_live(table, held.owners)
            sent = True
            found = dropping(self.store, table, held)
            name = Delete(table_name_path(found.table.name), found.name)
            self.store.transact([*found.operations, name])

        retried(self.store, self._deadline_s, attempt)

    def truncate_table(
        self,
        table: CatalogTable,
        anew: Callable[[TableDefinition], TableDefinition],
        *,
        force: bool = False,
    ) -> CatalogTable:
        """Drop a table and create another of its name in one transaction; return that.

        `anew`: what the other one is, of what this one is. All that `drop_table` says holds for the
        table that was: its locks are gone, its leases go on, its files are deleted in time.
        """
        stamp = uuid.uuid4().hex
        sent: set[int] = set()

        def attempt() -> CatalogTable:
            try:
                held = self.locks.read(table)
            except UnknownTable:
                # An earlier attempt may be why: then the table that it made is there.
                for table_id in sent:
                    with suppress(UnknownTable):
                        made = self.tables.get_by_id(table_id)
                        if self.tables.stamp_of(made) == stamp:
                            return made
                raise
            if not force:
                self.locks.check_none_live(table, held.owners)
            found = dropping(self.store, table, held)
            name, definition = found.table.name, anew(found.table.definition)
            table_id, operations = creating(self.store, name, definition)
            pointer = Write(table_name_path(name), encode_name(table_id, stamp), found.name)
            sent.add(table_id)
            self.store.transact([*found.operations, *operations, pointer])
            return CatalogTable(name=name, table_id=table_id, version=0, definition=definition)

        return retried(self.store, self._deadline_s, attempt)
