"""Tables without servers, in a directory: a leader in this process, and writers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from locks import Coordinator, LockRecord, MemoryCoordination, Table, TableDefinition
from merge_engine import LocalStorage, Schema
from recovery.embedded import EmbeddedAccess, history_of
from recovery.one_leader import OneLeader
from recovery.redo import RedoLog
from recovery.writer import TableWriter


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
        self.table = self.coordinator.create_table(name, definition)
        self.leader = self.new_leader("views")

    @property
    def redo(self) -> RedoLog:
        """The redo log of all tables of the directory."""
        return RedoLog.open(str(self.directory / "redo"))

    def new_leader(self, views: str) -> OneLeader:
        where = f"{self.name}-{self.table.table_id}"
        logs = LocalStorage(self.directory / "logs" / where)
        return OneLeader(self.shared.connect, self.name, logs, self.directory / views / where)

    def access(self, leader: OneLeader | None = None) -> EmbeddedAccess:
        return EmbeddedAccess(self.shared.connect, self.name, leader or self.leader)

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
        keys = self.access().bucket_keys()
        [leading] = (leader or self.leader).leading(keys)
        return [
            {name: value for name, value in row.items() if value is not None}
            for key in keys
            for batch in leading.buckets[key].bucket.scan()
            for row in batch.to_pylist()
        ]

    def records(self) -> dict[str, LockRecord]:
        return self.coordinator.records(self.table)

    def evolve(self, schema: Schema, *, force: bool = False) -> Table:
        table = self.coordinator.table(self.name)
        changed = replace(
            table.definition,
            schema=schema.to_json(),
            former=(*table.definition.former, table.definition.schema),
            columns={column.name: column.id for column in schema.value_columns},
        )
        return self.coordinator.alter_table(table, changed, force=force)

    def schema(self) -> Schema:
        return history_of(self.coordinator.table(self.name)).current

    def drop(self) -> None:
        self.leader.close()
        self.coordinator.drop_table(self.coordinator.table(self.name), force=True)
