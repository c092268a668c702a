"""Writers of tables that a coordinator knows, with buckets of this process and any leaders.

    leader = OneLeader(connect, "orders", logs, views)
    access = CatalogAccess(connect, "orders", leader)
    with TableWriter(access, "etl", ["revenue"]) as writer: ...

Who leads may move, and sessions be lost, as in a cluster.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from foundation.errors import Closed, NotLeader, SessionLost
from foundation.ids import BucketId
from locks.catalog.definitions import CatalogTable
from locks.coordinator import Coordinator
from locks.store.base import CoordinationStore
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.schema.schema import Schema
from recovery.embedded.access import EmbeddedAccess, Leading

Connect = Callable[[], CoordinationStore]


class Leaders(Protocol):
    """Finds who leads."""

    def leading(self, keys: Sequence[BucketId]) -> Iterator[Leading]:
        """Yield the servers that lead these buckets; NotLeader if nobody leads one of them."""


class CatalogPlace:
    """A table as the coordinator's catalogue has it, and whoever leads; a `Place`."""

    def __init__(self, coordinator: Coordinator, table: CatalogTable, leaders: Leaders) -> None:
        self._coordinator = coordinator
        self.table = table
        self.history = history_of(table)
        self.leading = leaders.leading

    def refresh(self) -> None:
        table = self._coordinator.tables.get_by_id(self.table.table_id)
        if table.version != self.table.version:
            self.table, self.history = table, history_of(table)

    def partitions(self) -> Mapping[bytes, int]:
        if not self.history.current.partition_by:
            return {b"": 0}
        return self._coordinator.partitions.ids(self.table)

    def create_partition(self, key: bytes) -> int:
        return self._coordinator.partitions.create(self.table, key)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A bucket that was closed, and a session that was lost, are the leader's: find another."""
        try:
            yield
        except (Closed, SessionLost) as exc:
            raise NotLeader(f"this leader has left; ask who leads now ({exc})") from exc


class CatalogAccess(EmbeddedAccess):
    """An access in a session of its own, which may be lost."""

    def __init__(
        self,
        connect: Connect,
        name: str,
        leaders: Leaders,
        *,
        deadline_s: float = 30.0,
        table_id: int | None = None,
        **settings: Any,
    ) -> None:
        """`table_id`: of the table that it was before, whatever has its name by now."""
        self._connect = connect
        self._name = name
        self._leaders = leaders
        self._settings = {"deadline_s": deadline_s, **settings}
        coordinator = Coordinator(connect(), deadline_s=deadline_s)
        by_id, by_name = coordinator.tables.get_by_id, coordinator.tables.get
        table = by_name(name) if table_id is None else by_id(table_id)
        super().__init__(coordinator, CatalogPlace(coordinator, table, leaders), **settings)

    def reconnect(self) -> "CatalogAccess":
        return CatalogAccess(
            self._connect,
            self._name,
            self._leaders,
            table_id=self.table.table_id,
            **self._settings,
        )

    def close(self) -> None:
        self.coordinator.store.close()


def history_of(table: CatalogTable) -> SchemaHistory:
    """Return all schemas of a table, the current one last."""
    definition = table.definition
    return SchemaHistory(map(Schema.from_json, (*definition.former, definition.schema)))
