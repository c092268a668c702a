"""A lease on a table's snapshots, as a client holds it."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from foundation.errors import InvalidInput, PartitionGone, ServerUnavailable, UnknownLease
from foundation.ids import BucketId
from locks.coordinator import Coordinator
from locks.snapshots.list_records import ListedSnapshot, SnapshotList
from recovery.reader.cut import Cut
from recovery.writer.renewal import Renewal
from server.client.asking import ask

logger = logging.getLogger(__name__)

_PAUSE_S = 0.1
_LOOK_AGAIN_S = 2.0


class HeldSnapshots(Protocol):
    """Snapshots that a lease holds, whoever has it."""

    lease_id: str

    @property
    def cut(self) -> Cut:
        """Where to read them, unless the reader says so."""

    @property
    def whole_at(self) -> Cut | None:
        """The latest cut that has rows of no other buckets; None if that is not known."""

    @property
    def snapshots(self) -> Mapping[BucketId, ListedSnapshot]:
        """The snapshots that are held, by bucket; UnknownLease if they are no more."""

    def check(self) -> None:
        """Raise UnknownLease if the lease must be over: what it held may be gone, too."""


class SnapshotLease:
    """Keeps snapshots, and the log from their stable offsets on, until it is dropped or expires.

    Made by `RemoteTable.lease_latest`. `cut`: where the table stood when all were held; it can be
    read, and gone on from, for as long as the lease lasts. As a context manager, it drops the lease
    at the end.
    """

    def __init__(
        self,
        coordinator: Callable[[], Coordinator],
        table_id: int,
        lease_id: str,
        snapshots: Mapping[BucketId, ListedSnapshot],
        duration_ms: int,
        *,
        cut: Cut,
        renew: bool,
    ) -> None:
        """`renew`: in the background, three times per duration."""
        self.cut = self.whole_at = cut
        self._coordinator = coordinator
        self._table_id = table_id
        self.lease_id = lease_id
        self._snapshots = dict(snapshots)
        self._duration_ms = duration_ms
        self._lost: UnknownLease | None = None
        # By our own clock: by then it has ended for ZooKeeper, too, unless it was renewed.
        self._ends_s = time.monotonic() + duration_ms / 1000
        self._renewal = Renewal(self._renew, duration_ms / 3000) if renew else None

    @property
    def snapshots(self) -> Mapping[BucketId, ListedSnapshot]:
        """The snapshots that are held, by bucket; UnknownLease if a renewal came too late."""
        self.check()
        return dict(self._snapshots)

    def check(self) -> None:
        """Raise UnknownLease if the lease must be over: what it held may be gone, too."""
        if self._lost is not None:
            raise self._lost
        if time.monotonic() > self._ends_s:
            raise UnknownLease(
                f"lease `{self.lease_id}` was not renewed for {self._duration_ms / 1000:g} s and "
                "has expired; acquire it again, with the latest snapshots"
            )

    def renew(self, duration_ms: int | None = None) -> None:
        """Start the duration anew, or another one; UnknownLease if the lease is gone or expired."""
        duration_ms = duration_ms or self._duration_ms
        began_s = time.monotonic()
        self._coordinator().leases.renew(self._table_id, self.lease_id, duration_ms)
        self._duration_ms = duration_ms
        self._ends_s = began_s + duration_ms / 1000

    def release(self, buckets: Iterable[BucketId]) -> None:
        """Give up what was read; with the last bucket the lease goes."""
        given_up = [BucketId(*bucket) for bucket in buckets]
        self._coordinator().leases.release(self._table_id, self.lease_id, given_up)
        for bucket in given_up:
            self._snapshots.pop(bucket, None)
        if not self._snapshots:
            self._stop()

    def drop(self) -> None:
        """Give up everything. Dropping twice is fine."""
        self._stop()
        self._coordinator().leases.drop(self._table_id, self.lease_id)
        self._snapshots = {}

    def __repr__(self) -> str:
        return f"<SnapshotLease {self.lease_id}; snapshots: {len(self._snapshots)}>"

    def __enter__(self) -> "SnapshotLease":
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop()

    def _renew(self) -> None:
        try:
            if self._lost is None:
                self.renew()
        except UnknownLease as exc:
            self._lost = exc
            logger.warning("lease %s is lost: %s", self.lease_id, exc)

    def _stop(self) -> None:
        if self._renewal is not None:
            self._renewal.stop()
            self._renewal = None


class BorrowedLease:
    """The snapshots of a lease that somebody else holds, and renews. Made by `borrow_lease`."""

    whole_at = None

    def __init__(
        self,
        coordinator: Callable[[], Coordinator],
        table_id: int,
        lease_id: str,
        take_cut: Callable[[], Cut],
    ) -> None:
        self._coordinator = coordinator
        self._table_id = table_id
        self.lease_id = lease_id
        ids = self._ids()
        lists = _lists(coordinator, table_id, list(ids))
        self._snapshots = {
            bucket: one
            for bucket, found in lists.items()
            for one in found.kept
            if one.snapshot_id == ids[bucket]
        }
        self._take_cut = take_cut

    @cached_property
    def cut(self) -> Cut:
        """One that is taken now: the log since the snapshots is held, too."""
        return self._take_cut()

    @property
    def snapshots(self) -> Mapping[BucketId, ListedSnapshot]:
        """The snapshots that the lease held when it was looked at."""
        return self._snapshots

    def check(self) -> None:
        """Raise UnknownLease if the lease is over by now; looked up every few seconds."""
        if time.monotonic() - self._seen_s > _LOOK_AGAIN_S:
            self._ids()

    def _ids(self) -> Mapping[BucketId, int]:
        self._seen_s = time.monotonic()
        for lease in ask(self._coordinator, lambda there: there.leases.all(self._table_id)):
            if lease.lease_id == self.lease_id and lease.live:
                return lease.snapshots
        raise UnknownLease(
            f"there is no lease `{self.lease_id}` on this table, or it has expired: lease the "
            "latest snapshots (`table.lease_latest`), and hold them while they are read"
        )


def hold_latest(
    coordinator: Callable[[], Coordinator],
    table_id: int,
    lease_id: str,
    buckets: Sequence[BucketId],
    duration_ms: int,
    *,
    take: Callable[[Sequence[BucketId]], Any],
    deadline_s: float,
) -> dict[BucketId, ListedSnapshot]:
    """Lease the latest snapshot of every bucket, and return them.

    Between "which is the latest" and "lease it" a snapshot may be retired: then it is asked again,
    for the buckets that are not held yet. Where there is none, `take` has one taken: it goes on for
    about a second, and what it has by then is leased. The deadline begins anew with every bucket
    that is held.
    """
    deadline = time.monotonic() + deadline_s
    held: dict[BucketId, ListedSnapshot] = {}
    while True:
        missing = [bucket for bucket in buckets if bucket not in held]
        if not missing:
            return held
        lists = _lists(coordinator, table_id, missing)
        latest = {
            bucket: found.latest for bucket, found in lists.items() if found.latest is not None
        }
        without = [bucket for bucket in missing if bucket not in latest]
        if without:
            try:
                take(without)
            except ServerUnavailable:  # Its deadline is that of any call, and ours may be longer.
                if time.monotonic() + _PAUSE_S > deadline:
                    raise
        if latest:
            # With those that are held: the lease may have expired meanwhile.
            wanted = held | latest
            ids = {bucket: one.snapshot_id for bucket, one in wanted.items()}
            acquired = coordinator().leases.acquire(table_id, lease_id, ids, duration_ms)
            before, held = held, {bucket: wanted[bucket] for bucket in acquired.held}
            if len(held) > len(before):
                deadline = time.monotonic() + deadline_s
                continue
        if time.monotonic() + _PAUSE_S > deadline:
            raise ServerUnavailable(
                f"lease {lease_id}: {len(missing)} buckets have no snapshot that could be held "
                f"within {deadline_s:g} s, such as {missing[0]}; what is held stays leased until "
                "it expires or is dropped"
            )
        time.sleep(_PAUSE_S)


def hold_whole(
    hold: Callable[[Sequence[BucketId]], dict[BucketId, ListedSnapshot]],
    take_cut: Callable[[], Cut],
    list_buckets: Callable[[Cut | None], Sequence[BucketId]],
) -> tuple[dict[BucketId, ListedSnapshot], Cut]:
    """Hold a snapshot of each bucket that a cut has rows of; return them, and that cut.

    A partition that came while they were held may have half of a batch that is in the cut: then it
    is held, too, and another cut taken.
    """
    buckets = list_buckets(None)
    while True:
        try:
            held = hold(buckets)
        except PartitionGone:
            buckets = list_buckets(None)
            continue
        cut = take_cut()
        before, buckets = buckets, list_buckets(cut)
        if set(buckets) <= set(before):
            return held, cut


def check_whole(
    lease: HeldSnapshots, cut: Cut, list_buckets: Callable[[Cut | None], Sequence[BucketId]]
) -> None:
    """InvalidInput if a cut may have rows of partitions that are younger than the lease."""
    if lease.whole_at is not None and cut.is_before(lease.whole_at):
        return
    held = {bucket.partition for bucket in lease.snapshots}
    missing = [bucket for bucket in list_buckets(cut) if bucket.partition not in held]
    if missing:
        raise InvalidInput(
            f"lease {lease.lease_id} holds no snapshot of {len(missing)} buckets, such as "
            f"{missing[0]}, whose partitions came later, and the cut may have rows there: lease "
            "the latest snapshots, or say buckets=list(lease.snapshots) to have the rows of these "
            "alone"
        )


def _lists(
    coordinator: Callable[[], Coordinator], table_id: int, buckets: Sequence[BucketId]
) -> dict[BucketId, SnapshotList]:
    return ask(coordinator, lambda there: there.snapshots.read_many(table_id, buckets))
