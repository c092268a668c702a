"""A server's view of the lock records of a table, kept fresh by watches."""

import threading
from functools import partial

from locks.coordinator import Coordinator
from locks.paths import owner_path, owners_path
from locks.record_codec import decode_node
from locks.records import LockRecord
from locks.tables import Table


class FreshRecords:
    """The lock records of a table as they were a moment ago, for readers. Safe for threads.

    A watch says that a record, or the list of owners, is worth reading again; that is done on the
    next use, without sync, and only for those. Nothing that must be right may rest on it: whoever
    must know asks `Coordinator.records`. While the connection is down it shows what it last saw.
    """

    def __init__(self, coordinator: Coordinator, table: Table) -> None:
        self._store = coordinator.store
        self._table_id = table.table_id
        self._records: dict[str, LockRecord] = {}
        self._mutex = threading.Lock()
        self._list_changed = threading.Event()
        # Owners whose record changed. Watches add to it from other threads, hence no iteration:
        # `dict.pop` and assignment are atomic.
        self._changed: dict[str, None] = {}
        self._watched: set[str] = set()
        self._store.watch(owners_path(self._table_id), self._list_changed.set)

    def records(self) -> dict[str, LockRecord]:
        """Return the records by owner; reads those that changed since the last use."""
        with self._mutex:
            if self._list_changed.is_set():
                self._list_changed.clear()  # Before reading: a change from here on sets it again.
                self._read_list()
            while self._changed:
                owner, _ = self._changed.popitem()
                self._read(owner)
            return dict(self._records)

    def _read_list(self) -> None:
        try:
            owners = self._store.children(owners_path(self._table_id))
            for owner in set(owners) - self._watched:
                mark = partial(self._changed.__setitem__, owner, None)
                self._store.watch(owner_path(self._table_id, owner), mark)
                self._watched.add(owner)
        except BaseException:
            self._list_changed.set()
            raise

    def _read(self, owner: str) -> None:
        path = owner_path(self._table_id, owner)
        try:
            node = self._store.read(path)
            record = None if node is None else decode_node(path, node)
        except BaseException:
            self._changed[owner] = None
            raise
        if record is None:
            self._records.pop(owner, None)
        else:
            self._records[owner] = record
