"""Tables without servers, in a directory: a leader in this process, and writers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from locks.catalog.definitions import CatalogTable, TableDefinition
from locks.column_locks.records import LockRecord
from locks.coordinator import Coordinator
from locks.store.memory import MemoryCoordination
from merge_engine.schema.schema import Schema
from merge_engine.storage.objects import LocalStorage
from recovery.writer.redo import RedoLog
from recovery.writer.table_writer import TableWriter
from tests.support.catalog_access import CatalogAccess, history_of
from tests.support.one_leader import OneLeader


class Embedded:
    """A table, its leader, and writers. Several may share coordination and directory."""

    def __init__(
        self,
        directory: Path,
        definition: TableDefinition,
        *,
        name: str = "t",
        shared: MemoryCoordination | None = None,
    ) -> None:
        self.directory = directory
        self.name = name
        self.shared = shared or MemoryCoordination()
        self.coordinator = Coordinator(self.shared.connect())
        self.table = self.coordinator.tables.create(name, definition)
        self.leader = self.new_leader("views")

    @property
    def redo(self) -> RedoLog:
        """The redo log of all tables of the directory."""
        return RedoLog.open(str(self.directory / "redo"))

    def new_leader(self, views: str) -> OneLeader:
        where = f"{self.name}-{self.table.table_id}"
        logs = LocalStorage(self.directory / "logs" / where)
        return OneLeader(self.shared.connect, self.name, logs, self.directory / views / where)

    def access(self, leader: OneLeader | None = None) -> CatalogAccess:
        return CatalogAccess(self.shared.connect, self.name, leader or self.leader)

    def writer(
        self, columns: Any = "x", *, owner: str = "a", redo: bool = False, **settings: Any
    ) -> TableWriter:
        usual = {
            "handover": True,
            "deadline_s": 0.5,
            "redo": self.redo if redo else None,
            "pause": lambda _: None,
        }
        return TableWriter(self.access(), owner, list(columns), **{**usual, **settings})

    def rows(self, leader: OneLeader | None = None) -> list[dict[str, Any]]:
        keys = self.access().bucket_ids()
        [leading] = (leader or self.leader).leading(keys)
        return [
            {name: value for name, value in row.items() if value is not None}
            for key in keys
            for batch in leading.buckets[key].bucket.scan()
            for row in batch.to_pylist()
        ]

    def records(self) -> dict[str, LockRecord]:
        return self.coordinator.locks.records(self.table)

    def evolve(self, schema: Schema, *, force: bool = False) -> CatalogTable:
        table = self.coordinator.tables.get(self.name)
        changed = replace(
            table.definition,
            schema=schema.to_json(),
            former=(*table.definition.former, table.definition.schema),
            columns={column.name: column.id for column in schema.value_columns},
        )
        return self.coordinator.alter_table(table, changed, force=force)

    def schema(self) -> Schema:
        return history_of(self.coordinator.tables.get(self.name)).current

    def drop(self) -> None:
        self.leader.close()
        self.coordinator.drop_table(self.coordinator.tables.get(self.name), force=True)
