"""The columns of a running sink, in a table that others may alter meanwhile.

A sink is told names, and locks ids. Servers read what it sends by the schema version that it knows,
so rows never go to another column than the one that was locked, however late the sink hears of a
change. It hears of one by a watch: while nothing changes, ZooKeeper is asked nothing.
"""

import logging
import threading
from collections.abc import Iterable

from foundation.errors import SessionLost, Unavailable, UnknownColumn
from locks.coordinator import Coordinator
from locks.store.base import CoordinationStore
from locks.store.paths import table_path
from merge_engine.schema.schema import Column, Schema
from merge_engine.schema.types import type_name
from server.client.remote_table import RemoteTable

logger = logging.getLogger(__name__)


class UsedColumns:
    """The columns that a sink writes, keys and values, as they were when it started."""

    def __init__(self, table: RemoteTable, written: Iterable[str]) -> None:
        self._table_name = table.name
        keys = [column.name for column in table.schema.key_columns]
        self.written = [table.schema.column(name) for name in written]
        self._columns = [*(table.schema.column(name) for name in keys), *self.written]
        self._checked = table.schema.version

    def check(self, schema: Schema) -> None:
        """Raise UnknownColumn if one of them has another name by now, or is no more.

        Columns of others come, go and change their names without any effect here.
        """
        if schema.version == self._checked:
            return
        for column in self._columns:
            now = schema.column_by_id(column.id)
            if now is None:
                raise UnknownColumn(self._dropped(column, schema))
            if now.name != column.name:
                raise UnknownColumn(self._renamed(column, now))
        self._checked = schema.version

    def _dropped(self, column: Column, schema: Schema) -> str:
        others = [
            f", and a new one ({_type(c)}) has its name"
            for c in schema.columns
            if c.name == column.name
        ]
        return (
            f"{self._what(column)} was dropped while the query ran{''.join(others)}; this batch "
            "was not written. Start the query again with the columns that it is to write"
        )

    def _renamed(self, column: Column, now: Column) -> str:
        return (
            f"{self._what(column)} was renamed to '{now.name}' while the query ran; this batch was "
            "not written. Start the query again with the new name, and with "
            f"renamed={{'{now.name}': '{column.name}'}} if the input keeps the old one"
        )

    def _what(self, column: Column) -> str:
        return (
            f"column '{column.name}' ({_type(column)}) of table {self._table_name}, which this "
            "sink writes,"
        )


class DefinitionWatch:
    """Reads a table's definition again after it may have changed, and not before."""

    def __init__(self) -> None:
        self._changed = threading.Event()
        self._store: CoordinationStore | None = None

    def refresh(self, table: RemoteTable, coordinator: Coordinator) -> None:
        """Bring the table up to date, if there is a reason to.

        Without ZooKeeper the table stays as it is known: the batch itself waits for ZooKeeper.
        """
        try:
            if coordinator.store is not self._store:  # A watch goes with its session.
                where = table_path(table.table_id)
                coordinator.store.watch(where, self._changed.set, until_deleted=True)
                self._store = coordinator.store
            if self._changed.is_set():
                self._changed.clear()
                table.refresh()
        except (SessionLost, Unavailable) as exc:
            self._changed.set()
            logger.info("table %s may have been altered: %s", table.name, exc)


def _type(column: Column) -> str:
    if column.function is None:
        return type_name(column.type)
    return f"{type_name(column.type)}, {column.function.name}"
