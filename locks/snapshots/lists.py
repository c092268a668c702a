"""Which snapshots of a bucket there are, in ZooKeeper: one list per bucket, its leader's to change.

A leader first claims the list with its term. From then on no earlier leader changes it: neither
lists nor retires nor removes. Every change is one conditional write, applied to the list as it is.

How a snapshot goes: its leader retires it, *then* reads the leases (`Leases.pinned`), deletes the
files of those that no lease holds, and removes them from the list. Who leases does it the other
way round, see `leases`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from foundation.errors import InvalidInput, Superseded
from foundation.ids import BucketId, LeadKey
from locks.catalog.definitions import dropped_id
from locks.catalog.partitions import decode_partitions
from locks.snapshots.list_records import ListedSnapshot, SnapshotList, decode_list, encode_list
from locks.store.base import Check, Conflict, CoordinationStore, Create, Node, Operation, Write
from locks.store.paths import partitions_path, snapshot_list_path, snapshots_path, table_path
from locks.store.retrying import retried


class SnapshotLists:
    """Reads, claims and changes the lists of snapshots. Safe for threads."""

    def __init__(self, store: CoordinationStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s

    def read(self, key: LeadKey) -> SnapshotList:
        """Return a bucket's list, as it is now; an empty one if there is none."""
        return self.read_many(key.table_id, [key.bucket])[key.bucket]

    def read_many(self, table_id: int, keys: Sequence[BucketId]) -> dict[BucketId, SnapshotList]:
        """Return the lists of these buckets, all of them read after this call began."""
        self._store.sync()
        leads = [LeadKey(table_id, key) for key in keys]
        nodes = self._store.read_many(list(map(_path, leads)))
        return {lead.bucket: _decode(lead, node) for lead, node in zip(leads, nodes, strict=True)}

    def claim(self, key: LeadKey, term: int) -> SnapshotList:
        """Make the list this leader's and return it; Superseded if a later leader was here.

        UnknownTable or Superseded if it would be a new list, of a table or partition that was
        dropped.
        """

        def attempt() -> SnapshotList:
            found = self.read(key)
            if found.term > term:
                raise _superseded(found, term)
            if found.version is not None and found.term == term:
                return found
            claimed = replace(found, term=term)
            if found.version is None:
                return self._transact(self._creating(claimed), claimed)
            return self._transact([_write(claimed)], claimed)

        return retried(self._store, self._deadline_s, attempt)

    def add(self, listed: SnapshotList, snapshot: ListedSnapshot, retained: int) -> SnapshotList:
        """List a new snapshot and, in the same write, retire all but the newest `retained`.

        Adding it again changes nothing. UnknownTable if the table was dropped.
        """
        if snapshot.term != listed.term or not snapshot.is_listed:
            raise InvalidInput(
                f"snapshot {snapshot.snapshot_id} of bucket {listed.key} has term {snapshot.term} "
                f"and is {snapshot.state.name.lower()}; a new one is listed, by the leader of term "
                f"{listed.term} that made it"
            )
        if retained < 1:
            raise InvalidInput(f"{retained} snapshots to be retained, and at least one is")

        def change(found: SnapshotList) -> SnapshotList:
            if snapshot.snapshot_id < found.next_id:
                same = [one for one in found.snapshots if one.snapshot_id == snapshot.snapshot_id]
                if not same or replace(same[0], state=snapshot.state) != snapshot:
                    raise InvalidInput(
                        f"bucket {found.key} had a snapshot {snapshot.snapshot_id} already; the "
                        f"next is {found.next_id}"
                    )
                return found
            longer = replace(
                found,
                next_id=snapshot.snapshot_id + 1,
                snapshots=(*found.snapshots, snapshot),
            )
            return longer.retaining(retained)

        return self._update(listed, change, Check(table_path(listed.key.table_id)))

    def remove(self, listed: SnapshotList, ids: Iterable[int]) -> SnapshotList:
        """Take retired snapshots, whose files are gone, from the list; others stay."""
        gone = frozenset(ids)

        def change(found: SnapshotList) -> SnapshotList:
            still = [one for one in found.snapshots if one.is_listed or one.snapshot_id not in gone]
            return replace(found, snapshots=tuple(still))

        return self._update(listed, change)

    def _update(
        self,
        listed: SnapshotList,
        change: Callable[[SnapshotList], SnapshotList],
        *checks: Operation,
    ) -> SnapshotList:
        """Write what the change makes of the list, which is read only if it is not as it was."""
        if listed.version is None:
            raise InvalidInput(
                f"nobody has claimed the snapshots of bucket {listed.key}; claim them"
            )
        known: SnapshotList | None = listed

        def attempt() -> SnapshotList:
            nonlocal known
            found, known = known or self.read(listed.key), None
            if found.version is None or found.term != listed.term:
                raise _superseded(found, listed.term)
            changed = change(found)
            if changed == found:
                return found
            return self._transact([*checks, _write(changed)], changed)

        return retried(self._store, self._deadline_s, attempt)

    def _creating(self, claimed: SnapshotList) -> list[Operation]:
        """Return what creates a list, on condition that its table and partition are still there."""
        table_id, (partition, _) = claimed.key
        operations: list[Operation] = [Check(table_path(table_id))]
        if partition != 0:
            node = self._store.read(partitions_path(table_id))
            if node is None:
                raise dropped_id(table_id)
            if partition not in decode_partitions(table_id, node.data, node.version).ids.values():
                raise _superseded(claimed, claimed.term)
            operations.append(Check(partitions_path(table_id), node.version))
        if self._store.read(snapshots_path(table_id)) is None:
            operations.append(Create(snapshots_path(table_id), b""))
        return [*operations, Create(_path(claimed.key), encode_list(claimed))]

    def _transact(self, operations: Sequence[Operation], written: SnapshotList) -> SnapshotList:
        try:
            self._store.transact(operations)
        except Conflict as exc:
            if exc.path == table_path(written.key.table_id):
                raise dropped_id(written.key.table_id) from exc
            raise
        return replace(written, version=0 if written.version is None else written.version + 1)


def _path(key: LeadKey) -> str:
    return snapshot_list_path(key.table_id, *key.bucket)


def _decode(key: LeadKey, node: Node | None) -> SnapshotList:
    return SnapshotList(key=key) if node is None else decode_list(key, node.data, node.version)


def _write(listed: SnapshotList) -> Write:
    assert listed.version is not None
    return Write(_path(listed.key), encode_list(listed), listed.version)


def _superseded(found: SnapshotList, term: int) -> Superseded:
    if found.version is None:
        why = "is gone: its table or partition was dropped"
    else:
        why = f"was claimed by the leader of term {found.term}"
    return Superseded(
        f"the list of snapshots of bucket {found.key} {why}; the leader of term {term} has to stop"
    )
