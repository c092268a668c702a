"""A lease that goes along with a stream: it holds the log from where the stream stands.

A lease holds the latest snapshots of its time, and the log since. As the stream goes on, the next
one is taken; when the stream has come to where that one begins, those before it are dropped. They
are called `<name>.<number>`. A stream that comes back finds those of its former run, and holds on
to them until it has caught up.
"""

import logging
import time

from foundation.errors import UnknownLease
from locks.snapshots.leases import Leases
from recovery.reader.cut import Cut
from recovery.writer.renewal import Renewal
from server.client.asking import ask
from server.client.remote_table import RemoteTable

logger = logging.getLogger(__name__)

# A lease of many buckets is a large record: it is not taken with each micro-batch.
_AGAIN_S = 300.0


class StreamLease:
    """Held, and renewed, from when it is made until `stop`; then it expires."""

    def __init__(self, table: RemoteTable, name: str, duration_ms: int) -> None:
        self._table = table
        self._name = name
        self._duration_ms = duration_ms
        self._former = self._found()
        self._number = max((int(one.rpartition(".")[2]) for one in self._former), default=0)
        self._again_s = min(_AGAIN_S, duration_ms / 4000)
        self._current, self._begins_at = self._take()
        self._renewal = Renewal(self._renew, duration_ms / 3000)

    def advance(self, position: Cut) -> None:
        """Drop what a stream does not need that has come to this cut."""
        if not self._begins_at.is_before(position):
            return
        # First of all they are not renewed any more.
        former, self._former = self._former, []
        for lease_id in former:
            self._leases().drop(self._table.table_id, lease_id)
        old = time.monotonic() - self._taken_s >= self._again_s
        if old or not self._held.issuperset(self._table.bucket_ids()):
            self._former = [self._current]
            self._current, self._begins_at = self._take()

    def stop(self) -> None:
        """Renew it no more."""
        self._renewal.stop()

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

    def _take(self) -> tuple[str, Cut]:
        self._taken_s = time.monotonic()
        self._number += 1
        lease_id = f"{self._name}.{self._number}"
        lease = self._table.lease_latest(lease_id, self._duration_ms / 1000, renew=False)
        self._held = frozenset(lease.snapshots)
        return lease_id, lease.cut

    def _renew(self) -> None:
        for lease_id in (*self._former, self._current):
            if lease_id == self._current and not self._held:
                continue  # There is no partition yet, and a lease of nothing is none.
            try:
                self._leases().renew(self._table.table_id, lease_id, self._duration_ms)
            except UnknownLease as exc:
                if lease_id not in (*self._former, self._current):
                    continue  # It was dropped just now.
                logger.warning("the log may be cleaned before the stream has read it: %s", exc)

    def _leases(self) -> Leases:
        return self._table.caller.cluster.coordinator.leases
