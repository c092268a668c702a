"""The columns of a running sink, in a table that others may alter meanwhile.

A sink is told names, and locks ids. It goes on with the names that the table had when it started,
in what it reads and in what it sends: servers read that by the schema version of then. So rows
never go to another column than the one that was locked, whatever is called so by now, and however
late the sink hears of a change. It hears of one by a watch: while nothing changes, ZooKeeper is
asked nothing.
"""

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from foundation.errors import SessionLost, Unavailable, UnknownColumn
from locks.coordinator import Coordinator
from locks.store.base import CoordinationStore
from locks.store.paths import table_path
from merge_engine.schema.schema import Column, Schema
from merge_engine.schema.types import type_name
from server.client.remote_table import RemoteTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartedWith:
    """The schema whose names a sink uses, and which table's (its uid): as when it started."""

    table: str
    schema: Schema

    @classmethod
    def of(cls, table: RemoteTable, before: "StartedWith | None") -> "StartedWith":
        """Return the names of before, if they were of this very table; else those of now."""
        uid = table.definition.uid
        if before is not None and before.table == uid:
            return before
        return cls(uid, table.schema)


class UsedColumns:
    """The columns that a sink writes, keys and values, by the names that they had at its start."""

    def __init__(self, table_name: str, schema: Schema, written: Iterable[str]) -> None:
        self._table_name = table_name
        self.written = [schema.column(name) for name in written]
        self._columns = [*schema.key_columns, *self.written]
        self._names = {column.id: column.name for column in self._columns}
        self._checked = schema.version

    def check(self, schema: Schema) -> None:
        """Raise UnknownColumn if one of them is no more; one that was renamed is told in the log.

        Columns of others come, go and change their names without any effect here.
        """
        if schema.version == self._checked:
            return
        for column in self._columns:
            now = schema.column_by_id(column.id)
            if now is None:
                raise UnknownColumn(self._dropped(column, schema))
            if now.name != self._names[column.id]:
                self._names[column.id] = now.name
                logger.warning("%s", self._renamed(column, now))
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
            f"{self._what(column)} is called '{now.name}' by now. The query goes on under the name "
            "that it started with; give it the new one before its program is started again, and "
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
