"""Cuts that a server takes by itself, each for all who wait for one, and the last of each table.

To take a cut is to ask ZooKeeper, several times. But a bucket that has nothing beyond an old cut is
at any later one just what it is at that: see `settled_lookup`.
"""

import threading
from collections.abc import Callable, Sequence

from foundation.deadlines import deadline_in
from foundation.errors import Unavailable
from foundation.gatherer import Gatherer
from locks.column_locks.lock_set import LockSet
from recovery.reader.cut import Cut
from server.protocol.definitions import ClusterTable

_DEADLINE_S = 30.0
_MOST_TABLES = 1_000
_MOST_CALLERS = 10_000

ReadLocks = Callable[[ClusterTable], LockSet]
"""Reads the locks of a table as they are now, and within one epoch."""


class KeptCuts:
    """The cuts of all tables that are read here. Safe for threads."""

    def __init__(self, read_locks: ReadLocks) -> None:
        self._read_locks = read_locks
        self._lock = threading.Lock()
        self._tables: dict[str, _TableCuts] = {}

    def last(self, table: ClusterTable) -> Cut | None:
        """Return the cut of a table that was taken last, however long ago; None if none was."""
        return self._of(table).last if table.locked else _cut_without_locks(table)

    def take(self, table: ClusterTable) -> Cut:
        """Return a cut of now: what was committed before this call is in it."""
        return self._of(table).take(table) if table.locked else _cut_without_locks(table)

    def _of(self, table: ClusterTable) -> "_TableCuts":
        cuts = self._tables.get(table.uid)
        if cuts is None:
            with self._lock:
                if len(self._tables) >= _MOST_TABLES:  # Those that were dropped are among them.
                    del self._tables[next(iter(self._tables))]
                cuts = self._tables.setdefault(table.uid, _TableCuts(self._read_locks))
        return cuts


class _TableCuts:
    """The cuts of one table."""

    def __init__(self, read_locks: ReadLocks) -> None:
        self._read_locks = read_locks
        self._taking = Gatherer(self._take, name="tallybook-cuts", most=_MOST_CALLERS)
        self.last: Cut | None = None

    def take(self, table: ClusterTable) -> Cut:
        try:
            return self._taking.ask(table, deadline_in(_DEADLINE_S))
        except TimeoutError as exc:
            raise Unavailable(f"no cut of table {table.name} was taken in time") from exc

    def _take(self, tables: Sequence[ClusterTable]) -> list[Cut]:
        table = tables[0]
        self.last = Cut.of_locks(table.uid, self._read_locks(table))
        return [self.last] * len(tables)


def _cut_without_locks(table: ClusterTable) -> Cut:
    """Return the cut of a table in which all that was put is committed."""
    return Cut(table=table.uid, epoch=None, time_ms=0)
