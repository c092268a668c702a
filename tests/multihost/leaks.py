"""What is left when nobody asks for anything any more: scanners, leases, znodes, objects."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from foundation.ids import BucketId, LeadKey
from locks.store.base import CoordinationStore
from locks.store.paths import ASIDE, DROPPED, IDS, LEADERS, LEASES, SNAPSHOTS, TABLES
from merge_engine.bucket.snapshot_storage import SnapshotStorage
from merge_engine.storage.objects import ObjectStorage
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.protocol.definitions import SNAPSHOTS as SNAPSHOT_OBJECTS

_LEFT = ("puts_in_flight", "bytes_in_flight", "scanners", "spooled_puts", "spooled_bytes")
# What a reader that was killed has left goes when its time is over; what was dropped, when servers
# have looked again.
_DEADLINE_S = 90.0
_SHOWN = 4


def leaked(cluster: Cluster) -> list[str]:
    """Return what is left, once there was time for it to go."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        left = [*_held(cluster), *_leases(cluster), *_znodes(cluster), *_objects(cluster)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def _tables(cluster: Cluster) -> list[RemoteTable]:
    return [cluster.table(name) for name in cluster.list_tables()]


def _held(cluster: Cluster) -> Iterator[str]:
    for status in cluster.status():
        for name in _LEFT:
            value = status["metrics"][f"tallybook_{name}"]
            if value:
                yield f"{status['address']} still has {name} {value:g}"


def _leases(cluster: Cluster) -> Iterator[str]:
    for table in _tables(cluster):
        for lease in cluster.coordinator.leases.all(table.table_id):
            yield f"there is a lease still: {lease}"


def _znodes(cluster: Cluster) -> Iterator[str]:
    """Yield nodes of tables, partitions and buckets that there are not any more."""
    store: CoordinationStore = cluster.coordinator.store
    store.sync()
    tables = {str(table.table_id): table for table in _tables(cluster)}
    known: dict[str, set[str]] = {
        TABLES: {table.name for table in tables.values()},
        **{parent: {*tables} for parent in (IDS, SNAPSHOTS, LEASES)},
        **{parent: set() for parent in (DROPPED, ASIDE)},
    }
    buckets = {number: set(table.bucket_ids()) for number, table in tables.items()}
    known[LEADERS] = {
        LeadKey(int(number), key).node_name for number, keys in buckets.items() for key in keys
    }
    for number, keys in buckets.items():
        known[f"{SNAPSHOTS}/{number}"] = {f"{key.partition}-{key.number}" for key in keys}
    for parent, names in known.items():
        left = sorted(set(store.children(parent)) - names)
        if left:
            yield f"{len(left)} znodes are left in {parent}: {left[:_SHOWN]}"


def _objects(cluster: Cluster) -> Iterator[str]:
    """Yield objects that no bucket has, and those of snapshots that no list has."""
    storage = cluster.storage()
    owned = {
        table.definition.path(key): (table, key)
        for table in _tables(cluster)
        for key in table.bucket_ids()
    }
    depth = {path.count("/") for path in owned}
    assert len(depth) == 1, f"paths of buckets are of several depths: {depth}"
    parts = depth.pop() + 1
    homeless = [name for name in storage.names() if _first(name, parts) not in owned]
    if homeless:
        yield f"{len(homeless)} objects are of no bucket: {homeless[:_SHOWN]}"
    for path, (table, key) in owned.items():
        yield from _surplus(cluster, storage.child(path), table, key)


def _surplus(
    cluster: Cluster, storage: ObjectStorage, table: RemoteTable, key: BucketId
) -> Iterator[str]:
    kept = cluster.coordinator.snapshots.read(LeadKey(table.table_id, key)).kept
    spared = _Spared(storage.child(SNAPSHOT_OBJECTS))
    swept = SnapshotStorage(spared).sweep([(one.snapshot_id, one.term) for one in kept])
    if swept:
        yield f"{len(swept)} objects are of no snapshot of {table.name} {key}: {swept[:_SHOWN]}"


def _first(name: str, parts: int) -> str:
    return "/".join(name.split("/")[:parts])


class _Spared:
    """A storage of which nothing is deleted, whoever wants to."""

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage

    def delete(self, names: Sequence[str]) -> None:
        """Do not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)
