"""A lease that goes along with a reader: it holds the log from where the reader stands.

A lease holds the latest snapshots of its time, and the log since. As the reader goes on, the next
one is taken; when the reader has come to where that one begins, those before it are dropped. They
are called `<name>.<number>`. A reader that comes back finds those of its former run, and holds on
to them until it has caught up.
"""

import logging
import math
import time
from collections.abc import Iterable

from foundation.errors import UnknownLease
from locks.snapshots.leases import Leases
from recovery.reader.cut import Cut
from recovery.writer.renewal import Renewal
from server.client.asking import ask
from server.client.remote_table import RemoteTable

logger = logging.getLogger(__name__)

# A lease of many buckets is a large record: it is not taken with each micro-batch.
_AGAIN_S = 300.0


class RollingLease:
    """Held, and renewed, from when it is made until `stop`; then it expires, unless it is dropped.

    `lease_id`: the latest, whose snapshots can be read at `begins_at`, or at any later cut.
    """

    def __init__(self, table: RemoteTable, name: str, duration_ms: int) -> None:
        self._table = table
        self._name = name
        self._duration_ms = duration_ms
        self._former = [one for one in self._found() if self._is_renewed(one)]
        self._number = max((int(one.rpartition(".")[2]) for one in self._former), default=0)
        self._again_s = min(_AGAIN_S, duration_ms / 4000)
        self.lease_id, self.begins_at = self._take()
        self._renewal = Renewal(self._renew, duration_ms / 3000)

    @property
    def holds(self) -> bool:
        """Whether there is anything to hold: a table without partitions has no snapshots."""
        return bool(self._held)

    def advance(self, position: Cut) -> None:
        """Drop what a reader does not need that has come to this cut."""
        if not self.begins_at.is_before(position):
            return
        # First of all they are not renewed any more.
        former, self._former = self._former, []
        self._drop(former)
        old = time.monotonic() - self._taken_s >= self._again_s
        if old or not self._held.issuperset(self._table.bucket_ids()):
            self.take()

    def take(self) -> None:
        """Lease the latest snapshots, beside what is held until the reader has come to them."""
        lease_id, begins_at = self._take()
        self._former = [*self._former, self.lease_id]
        self.lease_id, self.begins_at = lease_id, begins_at

    def stop(self) -> None:
        """Renew it no more: it is held for as long as it lasts."""
        self._renewal.stop()

    def hold(self, duration_ms: int) -> None:
        """Renew it once more, for so long, and no more."""
        self.stop()
        self._duration_ms = duration_ms
        self._renew()

    def drop(self) -> None:
        """Give up everything. Dropping twice is fine."""
        self.stop()
        self._drop([*self._former, self.lease_id])

    def _drop(self, lease_ids: Iterable[str]) -> None:
        for lease_id in lease_ids:
            self._leases().drop(self._table.table_id, lease_id)

    def _found(self) -> list[str]:
        """Return the leases of a former run that still hold."""
        prefix = f"{self._name}."
        table_id, cluster = self._table.table_id, self._table.caller.cluster
        known = ask(lambda: cluster.coordinator, lambda there: there.leases.all(table_id))
        return [
            one.lease_id
            for one in known
            if one.live
            and one.lease_id.startswith(prefix)
            and one.lease_id.removeprefix(prefix).isdecimal()
        ]

    def _is_renewed(self, lease_id: str) -> bool:
        """Renew a lease of a former run at once: nobody has for a while. False if it is over."""
        try:
            self._leases().renew(self._table.table_id, lease_id, self._duration_ms)
        except UnknownLease:
            return False
        return True

    def _take(self) -> tuple[str, Cut]:
        began_s = time.monotonic()
        self._number += 1
        lease_id = f"{self._name}.{self._number}"
        lease = self._table.lease_latest(lease_id, self._duration_ms / 1000, renew=False)
        self._taken_s, self._held = began_s, frozenset(lease.snapshots)
        return lease_id, lease.cut

    def _renew(self) -> None:
        for lease_id in (*self._former, self.lease_id):
            if lease_id == self.lease_id and not self._held:
                continue  # There is no partition yet, and a lease of nothing is none.
            try:
                self._leases().renew(self._table.table_id, lease_id, self._duration_ms)
            except UnknownLease as exc:
                if lease_id not in (*self._former, self.lease_id):
                    continue  # It was dropped just now.
                logger.warning("the log may be cleaned before it was read: %s", exc)
                self._taken_s = -math.inf  # The next is taken as soon as the reader goes on.

    def _leases(self) -> Leases:
        return self._table.caller.cluster.coordinator.leases
