"""The files of tables and partitions that were dropped: deleted once nobody leads or leases them.

A drop is recorded in ZooKeeper together with what it drops, and forgotten when the files are gone.
Several servers may do this at once: deleting twice is fine.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from foundation.errors import SessionLost, TallybookError, UnknownTable
from foundation.failpoints import hit
from foundation.ids import BucketId, LeadKey
from locks.catalog.definitions import CatalogTable
from locks.catalog.dropped_tables import DroppedTable
from locks.coordinator import Coordinator
from merge_engine.bucket.snapshot_storage import SnapshotStorage
from merge_engine.storage.objects import ObjectStorage
from server.protocol.definitions import SNAPSHOTS, ClusterTable
from server.tablet.requests import Session
from server.tablet.retention import Retention

logger = logging.getLogger(__name__)


class Janitor:
    """Deletes what was dropped, for one server after the other: the first of the living does it."""

    def __init__(self, logs: ObjectStorage, session: Session) -> None:
        self._logs = logs
        self._session = session
        self._retention = Retention(session)

    def look(self) -> None:
        """Drop what is past its retention, and delete what can be deleted now."""
        coordinator, name = self._session.coordinator, self._session.name
        if min((server.name for server in coordinator.servers.all()), default="") != name:
            return
        for dropped in coordinator.dropped.all():
            with _left_for_later(f"the files of dropped table {dropped.table.name}"):
                self._delete_table(coordinator, dropped)
        tables = coordinator.tables.all()
        self._retention.forget_all_but(frozenset(table.table_id for table in tables))
        for table in tables:
            with _left_for_later(f"partitions of table {table.name} that are past their retention"):
                self._retention.look(coordinator, table)
            with _left_for_later(f"the files of dropped partitions of table {table.name}"):
                self._delete_partitions(coordinator, table)

    def _delete_table(self, coordinator: Coordinator, dropped: DroppedTable) -> None:
        table = dropped.table
        if self._delete(coordinator, table, dropped.partitions):
            hit("dropped.deleted")
            coordinator.dropped.forget(table.table_id)
            logger.info("the files of dropped table %s are deleted", table.name)

    def _delete_partitions(self, coordinator: Coordinator, table: CatalogTable) -> None:
        for partition in coordinator.partitions.dropped(table):
            if self._delete(coordinator, table, [partition]):
                hit("dropped.deleted")
                coordinator.partitions.forget(table, partition)
                logger.info("the files of partition %d of %s are deleted", partition, table.name)

    def _delete(
        self, coordinator: Coordinator, table: CatalogTable, partitions: Iterable[int]
    ) -> bool:
        """Delete the buckets' files as far as nobody needs them; True if that was all of them."""
        pinned = coordinator.leases.pinned(table.table_id)
        cluster_table = ClusterTable(table)
        if not cluster_table.schema.partition_by:
            partitions = [0]
        keys = [
            BucketId(partition, number)
            for partition in partitions
            for number in range(cluster_table.buckets)
        ]
        # Of each what can be deleted, also where another one has to wait.
        done = [self._delete_bucket(coordinator, cluster_table, key, pinned) for key in keys]
        return all(done)

    def _delete_bucket(
        self,
        coordinator: Coordinator,
        table: ClusterTable,
        key: BucketId,
        pinned: Mapping[BucketId, Iterable[int]],
    ) -> bool:
        lead = LeadKey(table.table_id, key)
        if coordinator.leaders.leader_of(lead) is not None:
            return False  # It may still be writing; it notices soon, and lets go.
        logs = self._logs.child(table.path(key))
        leased = frozenset(pinned.get(key, ()))
        kept = []
        if leased:
            listed = coordinator.snapshots.read(lead).kept
            kept = [(one.snapshot_id, one.term) for one in listed if one.snapshot_id in leased]
        SnapshotStorage(logs.child(SNAPSHOTS)).sweep(kept)
        if kept:
            return False
        logs.delete(logs.names())
        self._logs.remove_empty(table.path(key))
        return True


@contextmanager
def _left_for_later(what: str) -> Iterator[None]:
    """What cannot be deleted now is tried again, and keeps nothing else from being deleted."""
    try:
        yield
    except SessionLost:
        raise
    except UnknownTable:  # Dropped meanwhile: the next look has it among the dropped ones.
        return
    except TallybookError as exc:
        logger.warning("%s are left for later: %s", what, exc)
