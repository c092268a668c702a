"""The locks of an embedded table, kept beside it: owners, epochs, debts, what they committed.

The rules are those of a cluster's (see `locks`), in a store that has this table alone. Of the table
itself it keeps nothing: columns, schemas and partitions are the embedded catalogue's, and what a
lock needs to know of them is read from there, each time.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from foundation.errors import LockHeld
from foundation.ids import BucketId
from locks.catalog.definitions import EMBEDDED, UID, CatalogTable, TableDefinition
from locks.column_locks.record_codec import decode_record
from locks.column_locks.records import LockRecord
from locks.coordinator import Coordinator
from locks.encoding.framing import frame_counter
from locks.store.base import Create
from locks.store.durable import DurableCoordination, Objects
from locks.store.memory import MemoryCoordination, Stored
from locks.store.paths import epoch_path, owners_path, table_path
from merge_engine.embedded.catalog import Catalog
from recovery.reader.cut import Cut
from recovery.reader.isolation import unresolved

_TABLE_ID = 1  # In a store that has one table.


class LocalLocks:
    """The locks of one table. Safe for threads."""

    def __init__(self, objects: Objects, catalog: Catalog, name: str) -> None:
        self._catalog = catalog
        self._name = name
        self._shared = DurableCoordination(objects, _first_nodes())
        self.coordinator = Coordinator(self._shared.connect())
        self.session = self.coordinator.servers.register("embedded").name
        self._table: CatalogTable | None = None
        self._decoding = threading.Lock()
        self._decoded: tuple[Mapping[str, Stored], dict[str, LockRecord]] = {}, {}

    @property
    def table(self) -> CatalogTable:
        """The table as locks know it, from the embedded catalogue."""
        schema = self._catalog.history.current
        if self._table is None or self._table.version != schema.version:
            definition = TableDefinition(
                schema=schema.to_json(),
                columns={column.name: column.id for column in schema.value_columns},
                key_columns=tuple(column.name for column in schema.key_columns),
                buckets=self._catalog.buckets,
                options={UID: self._catalog.table_id, EMBEDDED: ""},
            )
            self._table = CatalogTable(
                name=self._name, table_id=_TABLE_ID, version=schema.version, definition=definition
            )
        return self._table

    def records(self) -> Mapping[str, LockRecord]:
        """Return all lock records, as they are now; for committed reads."""
        return self.coordinator.locks.records(self.table)

    def cut(self) -> Cut:
        """Return where the table stands now, as far as writers go: what each has committed."""
        return Cut.of_locks(self._catalog.table_id, self.coordinator.locks.read(self.table))

    def check_free(self, columns: Iterable[int], owner: str) -> None:
        """Raise LockHeld if a lock pins one of the columns, or is this very owner's.

        Also one that has expired: what its owner has not committed is still to be undone.
        """
        wanted = frozenset(columns)
        if self._in_the_way(wanted, owner) is None:
            return
        self.coordinator.store.sync()  # It may have been released elsewhere.
        found = self._in_the_way(wanted, owner)
        if found is not None:
            holder, record = found
            pinned = self.table.definition.column_names(tuple(record.pinned))
            raise LockHeld(
                f"columns {pinned} of table {self._name} are locked by the writer of `{holder}` "
                f"(epoch {record.epoch}): write them, and for `{holder}`, through that writer, or "
                f"close it first. If it is gone, start table.writer(owner_id={holder!r}, ...) "
                "again, which recovers, and close that"
            )

    @contextmanager
    def dropping(self, columns: frozenset[int]) -> Iterator[None]:
        """LockHeld if a live lock pins one of the columns; within it, nobody acquires a lock."""
        with self._shared.lock:
            held, locks = self.coordinator.locks.read(self.table), self.coordinator.locks
            pinning = {o: lock for o, lock in held.owners.items() if lock.record.pinned & columns}
            locks.check_none_live(self.table, pinning)
            yield

    def keep_from(self, key: BucketId) -> int | None:
        """Return from where on a bucket's log may be needed for an undo; None if for none."""
        work = unresolved(self.records(), key)
        return min((one.offset for one in work), default=None)

    def close(self) -> None:
        """End the session of this process; locks that are held stay so."""
        self.coordinator.store.close()

    def _in_the_way(self, columns: frozenset[int], owner: str) -> tuple[str, LockRecord] | None:
        for holder, record in self._held().items():
            if record.pinned & columns or holder == owner:
                return holder, record
        return None

    def _held(self) -> dict[str, LockRecord]:
        """Return the records of all locks that are held, as this process knows them.

        Every put asks: they are decoded once per change. What is published is not changed any more.
        """
        nodes = self._shared.nodes
        with self._decoding:
            known, held = self._decoded
            if known is not nodes:
                prefix = f"{owners_path(_TABLE_ID)}/"
                records = {
                    path.removeprefix(prefix): decode_record(node.data)
                    for path, node in nodes.items()
                    if path.startswith(prefix)
                }
                held = {owner: record for owner, record in records.items() if record.held}
                self._decoded = nodes, held
            return held


def _first_nodes() -> dict[str, bytes]:
    """Return what the store of a table has before anybody has written to it."""
    memory = MemoryCoordination()
    store = Coordinator(memory.connect()).store
    store.transact(
        [
            Create(table_path(_TABLE_ID), b""),
            Create(epoch_path(_TABLE_ID), frame_counter(0)),
            Create(owners_path(_TABLE_ID), b""),
        ]
    )
    return {path: node.data for path, node in memory.nodes.items()}
