"""What a tablet server knows of its cluster: tables, partitions, servers; read where it changed.

A look at a cluster of many servers must not cost each of them a look at all there is. So watches
say which part may have changed, and only that is read again; while nothing changes, ZooKeeper is
asked nothing. No decision rests on a watch: all is read again now and then.

Leads are not watched. A lead that its server's session took along shows in the list of servers;
whoever is handed one is told so; and who misses one looks at that very node.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from locks.catalog.definitions import CatalogTable, decode_table
from locks.catalog.partitions import decode_partitions
from locks.cluster.servers import Members, Servers
from locks.store.base import CoordinationStore, numbered_children
from locks.store.paths import ASIDE, IDS, SERVERS, partitions_path, table_path

READ_ALL_AGAIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class _Told:
    """Which parts of the picture may have changed: the list of tables, some tables, the servers."""

    listing: bool = False
    tables: frozenset[int] = frozenset()
    members: bool = False

    def __or__(self, other: "_Told") -> "_Told":
        return _Told(
            listing=self.listing or other.listing,
            tables=self.tables | other.tables,
            members=self.members or other.members,
        )


class ClusterPicture:
    """Kept for one session. `look` and what it finds are for one thread at a time."""

    def __init__(
        self,
        store: CoordinationStore,
        servers: Servers,
        changed: Callable[[], None],
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`changed`: called from some thread when it may be worth looking; must not wait."""
        self._store = store
        self._servers = servers
        self._changed = changed
        self._clock_s = clock_s
        self._all_again_s = float("-inf")
        self._mutex = threading.Lock()
        self._told = _Told()
        self._watched: set[int] = set()
        self.tables: dict[int, CatalogTable] = {}
        self.partitions: dict[int, frozenset[int]] = {}
        """The ids of all partitions, by table; none of a table without partitions."""
        self.members = Members(live=())
        store.watch(IDS, partial(self._tell, _Told(listing=True)))
        store.watch(SERVERS, partial(self._tell, _Told(members=True)))
        store.watch(ASIDE, partial(self._tell, _Told(members=True)))

    def look(self) -> bool:
        """Read what may have changed; return whether anything was read.

        What could not be read because of an error is read the next time. SessionLost also where
        there is nothing to read: no watch will ever tell anything again.
        """
        self._store.check_session()
        told = self._take_told()
        try:
            listing = told.listing
            while listing:
                self._list_tables()  # To watch a new one is to be told of it.
                since = self._take_told()
                listing = since.listing  # Of what came while it was listed.
                told |= since
            if told.tables:
                self._read_tables(told.tables)
            if told.members:
                self.members = self._servers.members()
        except BaseException:
            self._tell(told)
            raise
        return told != _Told()

    def _list_tables(self) -> None:
        self._store.sync()
        ids = set(numbered_children(self._store, IDS))
        for table_id in set(self.tables) - ids:
            del self.tables[table_id], self.partitions[table_id]
        self._watched &= ids  # Those of others end with what they watch: no id comes twice.
        for table_id in sorted(ids - self._watched):
            told = partial(self._tell, _Told(tables=frozenset({table_id})))
            self._store.watch(table_path(table_id), told, until_deleted=True)
            self._store.watch(partitions_path(table_id), told, until_deleted=True)
            self._watched.add(table_id)

    def _read_tables(self, ids: frozenset[int]) -> None:
        """Read definitions and partitions; a table that was dropped meanwhile is left out."""
        wanted = sorted(ids)
        self._store.sync()
        paths = [*map(table_path, wanted), *map(partitions_path, wanted)]
        nodes = self._store.read_many(paths)
        halves = zip(wanted, nodes[: len(wanted)], nodes[len(wanted) :], strict=True)
        for table_id, definition, partitions in halves:
            if definition is None or partitions is None:
                self.tables.pop(table_id, None)
                self.partitions.pop(table_id, None)
                continue
            table = decode_table(table_id, definition.data, definition.version)
            found = decode_partitions(table_id, partitions.data, partitions.version)
            self.tables[table_id] = table
            self.partitions[table_id] = frozenset(found.ids.values())

    def _tell(self, told: _Told) -> None:
        with self._mutex:
            self._told |= told
        self._changed()

    def _take_told(self) -> _Told:
        """Return what may have changed, before it is read: a change from here on is told again."""
        now_s = self._clock_s()
        with self._mutex:
            told, self._told = self._told, _Told()
        if now_s >= self._all_again_s:
            self._all_again_s = now_s + READ_ALL_AGAIN_S
            told |= _Told(listing=True, members=True, tables=frozenset(self.tables))
        return told
