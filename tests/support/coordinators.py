"""What tests of the coordinator share: a table, its locks, and clusters on either store."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from foundation.ids import BucketId
from locks.catalog.definitions import CatalogTable, TableDefinition
from locks.column_locks.column_lock import ColumnLock
from locks.column_locks.locks import SHORTEST_TTL_MS
from locks.column_locks.record_codec import decode_node, encode_record
from locks.coordinator import Coordinator
from locks.encoding.offsets import Offsets
from locks.store.base import CoordinationStore, Operation, Write
from locks.store.memory import MemoryCoordination
from locks.store.paths import owner_path
from tests.support.zookeeper_server import wait_until

COLUMNS = {"orders": 11, "revenue": 12, "status": 13, "tags": 14}
DEFINITION = TableDefinition(
    schema="{}", columns=COLUMNS, key_columns=("customer_id",), buckets=4, options={"a": "b"}
)
ENDS = Offsets({BucketId(0, 0): 5, BucketId(0, 1): 7})
LATER = Offsets({BucketId(0, 0): 9, BucketId(0, 1): 8})

# What a holder may call, by name.
CALLS: dict[str, Callable[[ColumnLock], None]] = {
    "ready": lambda lock: lock.ready(ENDS, []),
    "renew": lambda lock: lock.renew(),
    "prepare": lambda lock: lock.prepare(0, "there"),
    "commit": lambda lock: lock.commit(0, LATER, []),
    "release": lambda lock: lock.release(),
    "abandon": lambda lock: lock.abandon(),
    "check": lambda lock: lock.check(),
}


@dataclass
class Cluster:
    """A coordination store, and coordinators with a session each."""

    connect: Callable[[], CoordinationStore]
    memory: MemoryCoordination | None = None
    coordinators: list[Coordinator] = field(default_factory=list)

    def coordinator(self) -> Coordinator:
        """Return a new coordinator, in a session of its own."""
        self.coordinators.append(Coordinator(self.connect()))
        return self.coordinators[-1]

    def expire(self, table: CatalogTable, owner: str) -> None:
        """Let an owner's TTL pass, by the store's own clock.

        In memory the clock is moved, and with it goes every lock of no longer a TTL; in ZooKeeper
        the record is given a TTL of a millisecond, which then passes.
        """
        store = self.coordinators[0].store
        path = owner_path(table.table_id, owner)
        node = store.read(path)
        assert node is not None
        record = decode_node(path, node)
        if self.memory is not None:
            self.memory.advance(record.ttl_ms)
            return
        store.transact([Write(path, encode_record(replace(record, ttl_ms=1)), node.version)])
        written = store.now_ms()
        wait_until(lambda: store.now_ms() > written + 1, "ZooKeeper's clock to move")


def ready(
    coordinator: Coordinator, table: CatalogTable, owner: str, *columns: str, **kw: Any
) -> ColumnLock:
    """Return a lock that has got ready, with ENDS as its baseline."""
    lock = coordinator.locks.acquire(table, owner, columns, **kw)
    lock.ready(ENDS, [])
    return lock


def just_before_the_next_transaction(
    coordinator: Coordinator, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let somebody else act between what the next call reads and what it writes."""
    real = coordinator.store.transact

    def transact(operations: Sequence[Operation]) -> None:
        monkeypatch.undo()
        act()
        real(operations)

    monkeypatch.setattr(coordinator.store, "transact", transact)


def expired_lock_that_commits_in_between(
    cluster: Cluster, coordinator: Coordinator, table: CatalogTable, monkeypatch: pytest.MonkeyPatch
) -> ColumnLock:
    """Return a lock of `etl-1` that has expired, and commits in the middle of the next call."""
    lock = ready(cluster.coordinator(), table, "etl-1", "orders", ttl_ms=SHORTEST_TTL_MS)
    cluster.expire(table, "etl-1")
    just_before_the_next_transaction(coordinator, lambda: lock.commit(0, LATER, []), monkeypatch)
    return lock
