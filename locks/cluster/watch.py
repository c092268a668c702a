"""A watch of all that decides what a tablet server has to do."""

import logging
import threading
from collections.abc import Callable

from foundation.errors import SessionLost, TallybookError
from locks.store.base import CoordinationStore
from locks.store.paths import ASIDE, IDS, LEADERS, SERVERS, partitions_path, table_path

logger = logging.getLogger(__name__)


class ClusterWatch:
    """Calls back when servers, leaders, tables, definitions or partitions may have changed.

    Tables are watched as they appear. To find them takes a request, and the thread that tells of a
    change must not wait for an answer: a thread looks, for as long as there is something to look
    for. To watch a new table is to call back once more, so nothing is missed in between.
    """

    def __init__(self, store: CoordinationStore, changed: Callable[[], None]) -> None:
        self._store = store
        self._changed = changed
        self._mutex = threading.Lock()
        self._list_changed = False
        self._looking = False
        self._watched: set[int] = set()
        store.watch(SERVERS, changed)
        store.watch(ASIDE, changed)
        store.watch(LEADERS, changed)
        store.watch(IDS, self._on_tables)

    def _on_tables(self) -> None:
        self._changed()
        with self._mutex:
            self._list_changed = True
            if self._looking:
                return
            self._looking = True
        threading.Thread(target=self._look, name="cluster-watch", daemon=True).start()

    def _look(self) -> None:
        while self._is_to_look():
            try:
                self._watch_new_tables()
            except SessionLost:
                return  # Nothing is told any more, either.
            except TallybookError:
                # Once the connection is back, all watches are called, and lead here again.
                logger.warning("new tables are not watched for the time being", exc_info=True)

    def _is_to_look(self) -> bool:
        with self._mutex:
            self._looking = self._list_changed
            self._list_changed = False  # Before reading: a change from here on sets it again.
            return self._looking

    def _watch_new_tables(self) -> None:
        for table_id in set(map(int, self._store.children(IDS))) - self._watched:
            self._store.watch(table_path(table_id), self._changed)
            self._store.watch(partitions_path(table_id), self._changed)
            self._watched.add(table_id)
