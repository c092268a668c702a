"""The nodes of leases: how they are read, and on what conditions they change.

A lease that was deleted and one that came after it under the same id have the same versions. So
every new one raises the version of the node above, which is read first, and a change checks that
too: it never meets a later lease than the one it was made for.
"""

from collections.abc import Callable, Sequence

from foundation.errors import RecordTooLarge
from locks.catalog.definitions import dropped_id
from locks.snapshots.lease_records import Lease, LeaseRecord, encode_lease, lease_of
from locks.store.base import (
    ANY_VERSION,
    Check,
    Conflict,
    CoordinationStore,
    Create,
    Delete,
    Operation,
    Write,
)
from locks.store.paths import lease_path, leases_path, table_path


class LeaseNodes:
    """Reads and changes the leases' nodes; each change is one conditional transaction."""

    def __init__(self, store: CoordinationStore) -> None:
        self._store = store

    def find(self, table_id: int, lease_id: str) -> Lease | None:
        """Return a lease, as it is now (sync, read); InvalidLease for an id that cannot be."""
        lease_path(table_id, lease_id)  # Judge the id before anything is read.
        return self._read(table_id, lambda: [lease_id]).get(lease_id)

    def all(self, table_id: int) -> dict[str, Lease]:
        """Return all leases of a table by id, as they are now (sync, read)."""
        return self._read(table_id, lambda: self._store.children(leases_path(table_id)))

    def _read(self, table_id: int, list_ids: Callable[[], Sequence[str]]) -> dict[str, Lease]:
        self._store.sync()
        above = self._store.read(leases_path(table_id))
        if above is None:
            return {}
        ids = list_ids()
        paths = [lease_path(table_id, lease_id) for lease_id in ids]
        nodes = self._store.read_many(paths)
        return {
            lease_id: lease_of(path, node, above.version)
            for lease_id, path, node in zip(ids, paths, nodes, strict=True)
            if node is not None
        }

    def acquire(
        self, table_id: int, lease_id: str, lease: Lease | None, record: LeaseRecord
    ) -> None:
        """Create a lease, or write one that is as it was found; UnknownTable if it was dropped."""
        changes = (
            self._creating(table_id, lease_id, record)
            if lease is None
            else _writing(table_id, lease_id, lease, record)
        )
        try:
            self._store.transact([Check(table_path(table_id)), *changes])
        except Conflict as exc:
            if exc.path == table_path(table_id):
                raise dropped_id(table_id) from exc
            raise
        except RecordTooLarge as exc:
            raise RecordTooLarge(
                f"lease `{lease_id}` would hold snapshots of {len(record.snapshots):,} buckets, "
                f"which are too many: {exc}; use several leases"
            ) from exc

    def write(self, table_id: int, lease_id: str, lease: Lease, record: LeaseRecord) -> None:
        """Write a lease that is still as it was found; its table may have been dropped."""
        self._store.transact(_writing(table_id, lease_id, lease, record))

    def delete(self, table_id: int, lease_id: str, lease: Lease) -> None:
        """Delete a lease that is still as it was found."""
        path = lease_path(table_id, lease_id)
        self._store.transact([_check_above(table_id, lease), Delete(path, lease.version)])

    def _creating(self, table_id: int, lease_id: str, record: LeaseRecord) -> list[Operation]:
        above = leases_path(table_id)
        first = self._store.read(above) is None
        return [
            Create(above, b"") if first else Write(above, b"", ANY_VERSION),
            Create(lease_path(table_id, lease_id), encode_lease(record)),
        ]


def _writing(table_id: int, lease_id: str, lease: Lease, record: LeaseRecord) -> list[Operation]:
    path = lease_path(table_id, lease_id)
    return [_check_above(table_id, lease), Write(path, encode_lease(record), lease.version)]


def _check_above(table_id: int, lease: Lease) -> Check:
    return Check(leases_path(table_id), lease.version_above)
