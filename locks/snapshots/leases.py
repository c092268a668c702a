"""Leases: they keep snapshots from being deleted, until they end by themselves.

Whether a snapshot was leased in time is settled by order. Who leases *asks* for it in the lease,
then reads the list, and only then holds it, if it is still listed. Who deletes retires the snapshot
first and then reads the leases (`pinned`), which have what is asked for, too. At least one of the
two sees the other. What is held stays so when it is retired: it is not asked for again.

The clock is ZooKeeper's alone. An expired lease is nobody's any more, and yet keeps what it has
until it is deleted. Leases outlive their table, but a dropped one gets no new ones.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from foundation.errors import InvalidTtl, UnknownLease, UnknownOutcome
from foundation.ids import BucketId
from locks.catalog.definitions import dropped_id
from locks.catalog.partitions import decode_partitions
from locks.column_locks.records import new_stamp
from locks.encoding.offsets import Offsets
from locks.snapshots.lease_nodes import LeaseNodes
from locks.snapshots.lease_records import Lease, LeaseInfo, LeaseRecord
from locks.snapshots.lists import SnapshotLists
from locks.store.base import Conflict, CoordinationStore
from locks.store.paths import partitions_path
from locks.store.retrying import retried

SHORTEST_LEASE_MS = 2_000
LONGEST_LEASE_MS = 7 * 24 * 3_600_000
_ROUNDS = 10


@dataclass(frozen=True, kw_only=True)
class Acquired:
    """Which of the wanted snapshots a lease holds now, and which are not to be had any more."""

    held: Mapping[BucketId, int]
    unavailable: Mapping[BucketId, int]


class Leases:
    """Acquires, renews and ends leases, and tells the cleaner of them. Safe for threads.

    Tables go by their ids. Every call but `acquire` works on a dropped table, too.
    """

    def __init__(self, store: CoordinationStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s
        self._nodes = LeaseNodes(store)
        self._lists = SnapshotLists(store, deadline_s)

    def acquire(
        self,
        table_id: int,
        lease_id: str,
        snapshots: Mapping[BucketId, int],
        duration_ms: int,
    ) -> Acquired:
        """Lease these snapshots, beside what the lease holds already, from now for the duration.

        A bucket's snapshot takes the place of the one that was held before, if it is to be had:
        listed, or held by this very lease. A lease of nothing is none. Written twice, to ask and to
        hold, with one look at the lists between; once if all is held already. UnknownTable if the
        table was dropped. After an error acquire again, or drop the lease: what was asked for is
        kept until then, or until it expires.
        """
        _check_duration(duration_ms)
        wanted = Offsets(snapshots).to_dict()
        asking, holding = new_stamp(), new_stamp()

        def attempt() -> Acquired | None:
            """Ask and return None, or look and hold."""
            lease = self._nodes.find(table_id, lease_id)
            stamp = None if lease is None else lease.record.stamp
            held = self._held(lease, surely_live=stamp in (asking, holding))
            if stamp == holding:
                return _acquired(wanted, held)
            record = LeaseRecord(stamp=asking, duration_ms=duration_ms, snapshots=Offsets(held))
            missing = {key: one for key, one in wanted.items() if held.get(key) != one}
            if lease is not None and stamp == asking:
                held |= self._listed(table_id, lease.record.asked.to_dict())
            elif missing:
                record = replace(record, asked=Offsets(missing))
                self._nodes.acquire(table_id, lease_id, lease, record)
                return None
            if held and wanted:
                record = replace(record, stamp=holding, snapshots=Offsets(held))
                self._nodes.acquire(table_id, lease_id, lease, record)
            elif lease is not None and stamp == asking:
                self._nodes.delete(table_id, lease_id, lease)
            return _acquired(wanted, held)

        for _ in range(_ROUNDS):
            acquired = retried(self._store, self._deadline_s, attempt)
            if acquired is not None:
                return acquired
        raise UnknownOutcome(
            f"lease `{lease_id}` was changed by others {_ROUNDS} times meanwhile, and may hold "
            "what was asked for or not; use the id for one job only, and acquire again"
        )

    def renew(self, table_id: int, lease_id: str, duration_ms: int | None = None) -> None:
        """Start the duration anew, or another one; UnknownLease if the lease is gone or expired."""
        if duration_ms is not None:
            _check_duration(duration_ms)
        stamp = new_stamp()

        def attempt() -> None:
            lease = self._nodes.find(table_id, lease_id)
            if lease is None or not lease.snapshots:
                raise _unknown(table_id, lease_id, "it was dropped, or expired, or never was")
            if lease.record.stamp == stamp:
                return
            late_ms = self._store.now_ms() - lease.expires_ms
            if late_ms >= 0:
                raise _unknown(table_id, lease_id, f"it expired {late_ms / 1000:.1f} s ago")
            duration = lease.record.duration_ms if duration_ms is None else duration_ms
            # What an acquisition asked for and did not take is not kept for ever: one that is still
            # under way asks again.
            record = LeaseRecord(stamp=stamp, duration_ms=duration, snapshots=lease.snapshots)
            self._nodes.write(table_id, lease_id, lease, record)

        retried(self._store, self._deadline_s, attempt)

    def release(self, table_id: int, lease_id: str, buckets: Iterable[BucketId]) -> None:
        """Give these buckets' snapshots up; the lease goes with the last one.

        It is not prolonged by that. What it does not hold is given up already.
        """
        given_up = frozenset(buckets)

        def attempt() -> None:
            lease = self._nodes.find(table_id, lease_id)
            if lease is None:
                return
            held = lease.snapshots.to_dict()
            left = {key: one for key, one in held.items() if key not in given_up}
            if not left:
                self._nodes.delete(table_id, lease_id, lease)
            elif len(left) < len(held):
                record = LeaseRecord(
                    stamp=new_stamp(),
                    duration_ms=lease.record.duration_ms,
                    started_ms=lease.started_ms,
                    snapshots=Offsets(left),
                )
                self._nodes.write(table_id, lease_id, lease, record)

        retried(self._store, self._deadline_s, attempt)

    def drop(self, table_id: int, lease_id: str) -> None:
        """End the lease, if there is one."""

        def attempt() -> None:
            lease = self._nodes.find(table_id, lease_id)
            if lease is not None:
                self._nodes.delete(table_id, lease_id, lease)

        retried(self._store, self._deadline_s, attempt)

    def all(self, table_id: int) -> list[LeaseInfo]:
        """Return all leases of a table, as they are now, by their ids."""
        leases = self._nodes.all(table_id)
        now_ms = self._store.now_ms() if leases else 0
        return [
            LeaseInfo(
                lease_id=lease_id,
                snapshots=lease.snapshots,
                expires_ms=lease.expires_ms,
                live=lease.is_live(now_ms),
            )
            for lease_id, lease in leases.items()
        ]

    def pinned(self, table_id: int) -> dict[BucketId, frozenset[int]]:
        """Return what must not be deleted: the snapshots held or asked for, by bucket.

        Asked *after* snapshots were retired, it tells which of those are to be kept. Expired leases
        are deleted; one that cannot be, as somebody changes it just now, still counts.
        """
        leases = self._nodes.all(table_id)
        now_ms = self._store.now_ms() if leases else 0
        pinned: dict[BucketId, set[int]] = {}
        for lease_id, lease in leases.items():
            if not lease.is_live(now_ms):
                with suppress(Conflict, UnknownOutcome):
                    self._nodes.delete(table_id, lease_id, lease)
                    continue
            for snapshots in (lease.snapshots, lease.record.asked):
                for key, snapshot in snapshots.to_dict().items():
                    pinned.setdefault(key, set()).add(snapshot)
        return {key: frozenset(ids) for key, ids in pinned.items()}

    def _held(self, lease: Lease | None, *, surely_live: bool) -> dict[BucketId, int]:
        """Return what a lease holds: nothing once it has expired."""
        if lease is None or not (surely_live or lease.is_live(self._store.now_ms())):
            return {}
        return lease.snapshots.to_dict()

    def _listed(self, table_id: int, snapshots: Mapping[BucketId, int]) -> dict[BucketId, int]:
        """Return which of the snapshots are listed now, and not of a dropped partition.

        What was dropped is not retired first: whoever deletes it reads the leases after the drop.
        """
        lists = self._lists.read_many(table_id, list(snapshots))
        node = self._store.read(partitions_path(table_id))
        if node is None:
            raise dropped_id(table_id)
        partitions = {0, *decode_partitions(table_id, node.data, node.version).ids.values()}
        return {
            key: one
            for key, one in snapshots.items()
            if key.partition in partitions
            and any(listed.snapshot_id == one for listed in lists[key].listed)
        }


def _acquired(wanted: Mapping[BucketId, int], held: Mapping[BucketId, int]) -> Acquired:
    return Acquired(
        held={key: one for key, one in wanted.items() if held.get(key) == one},
        unavailable={key: one for key, one in wanted.items() if held.get(key) != one},
    )


def _check_duration(duration_ms: int) -> None:
    if not SHORTEST_LEASE_MS <= duration_ms <= LONGEST_LEASE_MS:
        raise InvalidTtl(
            f"a lease of {duration_ms} ms; it lasts from {SHORTEST_LEASE_MS} to "
            f"{LONGEST_LEASE_MS} ms"
        )


def _unknown(table_id: int, lease_id: str, why: str) -> UnknownLease:
    return UnknownLease(
        f"there is no lease `{lease_id}` on table {table_id}: {why}; acquire it again, with the "
        "latest snapshots"
    )
