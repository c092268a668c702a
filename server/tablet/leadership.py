"""A server's leads: takes those that should be its, hands over those that should not.

Nothing rests on being early: a bucket that is led by two is settled by its log. What this sees to
is that a bucket leaves a live session only by that session's own hand-over, in this order: stop
serving, close, give the node up.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from foundation.errors import CorruptRecord, SessionLost, TallybookError, UnknownTable
from foundation.failpoints import hit
from foundation.ids import BucketId, LeadKey
from foundation.parallel import map_all
from locks.cluster.placement import place
from locks.cluster.servers import Server
from locks.cluster.watch import ClusterWatch
from locks.coordinator import Coordinator
from server.protocol.definitions import ClusterTable
from server.tablet.complaints import Complaints
from server.tablet.hosting import Hosting

logger = logging.getLogger(__name__)

# Watches say when to look again; this is for what they cannot tell, such as a disk with room again.
_LOOK_AGAIN_S = 1.0
_OPEN_AT_ONCE = 4
# What cannot be opened is tried again after a second, then two, then four.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0


@dataclass(frozen=True)
class _Failure:
    """Why a bucket could not be opened, and when to try again."""

    why: str
    pause_s: float
    again_s: float


class Leadership:
    """Keeps what is hosted in line with who should lead, for one session of one server."""

    def __init__(
        self,
        coordinator: Coordinator,
        server: Server,
        hosting: Hosting,
        complaints: Complaints | None = None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._server = server
        self._hosting = hosting
        self._complaints = complaints or Complaints(logger)
        self._clock_s = clock_s
        self._failures: dict[LeadKey, _Failure] = {}
        self._worth_looking = threading.Event()
        self._stopping = False
        # One at a time; a hand-over must not pass an opening of the same bucket.
        self._reconciling = threading.Lock()
        self._opening = ThreadPoolExecutor(_OPEN_AT_ONCE, thread_name_prefix="tallybook-open")
        ClusterWatch(coordinator.store, self._worth_looking.set)

    def run(self) -> None:
        """Keep in line until stopped, or until the session is lost: then SessionLost."""
        while not self._stopping:
            self._worth_looking.clear()  # Before looking: a change from here on sets it again.
            self.reconcile()
            self._worth_looking.wait(_LOOK_AGAIN_S)

    def look_again(self) -> None:
        """Say that something may have changed."""
        self._worth_looking.set()

    def stop(self) -> None:
        """Hand everything over, as far as ZooKeeper still answers."""
        with self._reconciling:
            self._stopping = True
            led = list(self._hosting.led())
            self._hosting.close_all()
            try:
                self._coordinator.leaders.give_up(self._server, led)
            except TallybookError as exc:
                logger.warning("leads are left to the session's end: %s", exc)
        self._worth_looking.set()
        self.close()

    def close(self) -> None:
        """End the threads of a session that is over; not before a hand-over has ended."""
        with self._reconciling:
            self._stopping = True
        self._opening.shutdown()

    def reconcile(self) -> None:
        """Look who should lead what, and act on it."""
        with self._reconciling:
            if self._stopping:
                return
            tables = [ClusterTable(table) for table in self._coordinator.tables.all()]
            for table in tables:
                self._hosting.set_table(table)
            servers = self._coordinator.servers.all()
            if self._server not in servers:  # Nobody would ever give it a bucket again.
                raise SessionLost(f"the node of session {self._server.name} is gone; join again")
            leaders = self._who_should_lead(tables, [server.address for server in servers])
            mine = {key for key, address in leaders.items() if address == self._server.address}
            led = self._hosting.led()
            self._drop([key for key in led if key not in leaders])
            self._hosting.forget_tables(table.table_id for table in tables)
            self._hand_over(
                [
                    key
                    for key, of in led.items()
                    if key in leaders and (key not in mine or of.bucket.deposed)
                ]
            )
            self._forget_failures(mine)
            now_s = self._clock_s()
            waiting = {key for key, failure in self._failures.items() if failure.again_s > now_s}
            self._take(sorted(mine.difference(self._hosting.led(), waiting)))

    def _forget_failures(self, mine: Collection[LeadKey]) -> None:
        """What is no longer ours to open is no longer wrong here."""
        for key in [key for key in self._failures if key not in mine]:
            del self._failures[key]
            self._complaints.over(_about(key))
        self._hosting.set_unopened({key: one.why for key, one in self._failures.items()})

    def _who_should_lead(
        self, tables: Sequence[ClusterTable], addresses: Sequence[str]
    ) -> dict[LeadKey, str]:
        """Return all buckets of all tables, with the address of the server that should have it."""
        leaders = {}
        for table in tables:
            partitions: Collection[int] = (0,)
            if table.schema.partition_by:
                try:
                    partitions = self._coordinator.partitions.ids(table.table).values()
                except UnknownTable:  # Dropped since it was listed.
                    continue
            for partition in partitions:
                placed = place(table.table_id, partition, table.buckets, addresses)
                for number, address in enumerate(placed):
                    leaders[LeadKey(table.table_id, BucketId(partition, number))] = address
        return leaders

    def _take(self, keys: Sequence[LeadKey]) -> None:
        if not keys:
            return
        taken = self._coordinator.leaders.take(self._server, keys)
        hit("leadership.taken")
        map_all(self._opening, self._open, taken)

    def _open(self, key: LeadKey) -> None:
        began = time.monotonic()
        try:
            self._hosting.open(
                key,
                lambda: self._snapshots(key),
                lambda: ClusterTable(self._coordinator.tables.get_by_id(key.table_id)),
            )
        except UnknownTable:  # Dropped since it was looked for; the next look lets go of it.
            return
        except (TallybookError, OSError) as exc:
            # It is tried again. The node stays: nobody else could open it, either, if it is the
            # log that is damaged; and if it is this machine, its operator sees it in the status.
            self._fail(key, str(exc))
            return
        self._failures.pop(key, None)
        self._complaints.over(_about(key))
        led = self._hosting.get(key)
        logger.info(
            "leading bucket %s at term %d, open after %.3f s",
            key,
            led.term,
            time.monotonic() - began,
        )

    def _fail(self, key: LeadKey, why: str) -> None:
        before = self._failures.get(key)
        pause_s = _FIRST_PAUSE_S
        if before is not None:
            pause_s = min(2 * before.pause_s, _LONGEST_PAUSE_S)
        self._failures[key] = _Failure(why, pause_s, self._clock_s() + pause_s)
        self._hosting.set_unopened({key: one.why for key, one in self._failures.items()})
        self._complaints.complain(_about(key), why)

    def _snapshots(self, key: LeadKey) -> list[tuple[int, int]]:
        """Return the ids and terms of a bucket's snapshots, the latest first."""
        try:
            listed = self._coordinator.snapshots.read(key).listed
        except CorruptRecord as exc:  # It must not keep the server from its other buckets.
            logger.warning("no snapshot of bucket %s can be found: %s", key, exc)
            return []
        return [(one.snapshot_id, one.term) for one in reversed(listed)]

    def _hand_over(self, keys: Sequence[LeadKey]) -> None:
        for key in keys:
            self._hosting.close(key)
            logger.info("handing bucket %s over", key)
        if keys:
            hit("leadership.closed")
            self._coordinator.leaders.give_up(self._server, keys)

    def _drop(self, keys: Sequence[LeadKey]) -> None:
        for key in keys:
            try:
                self._hosting.drop(key)
            except TallybookError:
                logger.exception("bucket %s was dropped, and did not close", key)
        if keys:
            self._coordinator.leaders.give_up(self._server, keys)


def _about(key: LeadKey) -> str:
    return f"bucket {key} cannot be opened"
