"""Tablet servers without data: all that they have to do with ZooKeeper is real, and no more.

Membership, heartbeat, leadership, openings and hand-over are the server's own code, and so is what
a leader remembers of the writers that it has fenced. Only the bucket below is an imitation: it has
a term and an end, and opens at once.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from benchmarks.scale.counting import CountingStore
from foundation.errors import TallybookError
from foundation.ids import BucketId, LeadKey
from locks.cluster.heartbeat import Heartbeat
from locks.coordinator import Coordinator
from locks.store.base import CoordinationStore
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.options import BucketOptions
from merge_engine.storage.objects import ObjectStorage
from recovery.leader.fenced_writers import Writer
from recovery.leader.led_bucket import LedBucket
from server.tablet.complaints import Complaints
from server.tablet.config import HandOverConfig
from server.tablet.hosting import Hosting, ReadSnapshots
from server.tablet.leadership import Leadership
from server.tablet.peers import Peers
from server.tablet.standing_aside import StandingAside
from server.tablet.store_health import StoreHealth

logger = logging.getLogger(__name__)
logger.setLevel(logging.ERROR)  # A move that is put off is a warning.


class NoData:
    """What a led bucket needs below it, of a bucket that has no rows and never will."""

    term = 0
    deposed = False

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Let one call in at a time."""
        with self._lock:
            yield

    def settled_end(self) -> int:
        """Return the log end."""
        return 1

    def evolve(self, history: object) -> None:
        """Take another schema."""

    def end(self, *, at_once: bool = False) -> None:
        """Serve nobody any more."""

    def close(self) -> None:
        """Let go of nothing."""


class NoDataHosting(Hosting):
    """Opens buckets without data; what is listed of their snapshots is read all the same."""

    def __init__(self) -> None:
        nowhere = cast(ObjectStorage, None)
        super().__init__(nowhere, Path("no-views"), BucketOptions())
        self._warm: set[LeadKey] = set()

    def warm(self, key: LeadKey, read_snapshots: ReadSnapshots = list, *_: Any, **__: Any) -> None:
        read_snapshots()
        self._warm.add(key)

    def follow(self, key: LeadKey) -> int:
        assert key in self._warm
        return 0

    def cool(self, key: LeadKey) -> None:
        self._warm.discard(key)

    def open(self, key: LeadKey, read_snapshots: ReadSnapshots = list, *_: Any, **__: Any) -> None:
        read_snapshots()
        with self._lock:
            self._buckets[key] = LedBucket(cast(Bucket, NoData()), key.bucket)
            self._unopened.pop(key, None)
            self._asked.discard(key)


class SimulatedServer:
    """A session that joins, leads, hands over, and answers writers."""

    def __init__(
        self,
        store: CoordinationStore,
        address: str,
        peers: Peers,
        *,
        config: HandOverConfig | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """Join. It leads nothing, and watches nothing, before it is told to."""
        self.store = CountingStore(store)
        self.address = address
        self.coordinator = Coordinator(self.store)
        self.server = self.coordinator.servers.register(address)
        self.hosting = NoDataHosting()
        self._peers = peers
        self._config = config or HandOverConfig()
        self._heartbeat = heartbeat

    @cached_property
    def leadership(self) -> Leadership:
        """Its leads; who first asks for them lets it watch the cluster."""
        complaints = Complaints(logger)
        aside = StandingAside(
            self.coordinator.servers,
            self.server,
            StoreHealth(),
            complaints,
            probe=lambda: None,
            unable_after_s=60.0,
        )
        return Leadership(
            self.coordinator,
            self.server,
            self.hosting,
            peers=self._peers,
            aside=aside,
            config=self._config,
            complaints=complaints,
        )

    def start(self) -> None:
        """Tell ZooKeeper that it lives, and look what is to be led, until it is closed."""
        if self._heartbeat is not None:
            self._heartbeat.start()
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """End the session; its leads go with it."""
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self.store.close()
        self.leadership.close()

    def _run(self) -> None:
        try:
            self.leadership.run()
        except TallybookError as exc:
            logger.error("%s has left: %s", self.address, exc)

    # --- What writers ask, as the service of a server answers it ----------------------------------

    def fence(
        self, table_id: int, writer: Writer, columns: Iterable[int], keys: Sequence[BucketId]
    ) -> str:
        """Fence a writer in some buckets, and end its recovery; return the session's name."""
        led = [self.hosting.get(LeadKey(table_id, key)) for key in keys]
        table = self.hosting.table(table_id).table
        record = self.coordinator.locks.record(table, writer.owner)
        for one in led:
            one.end_recovery(writer, one.fence(writer, columns, record))
        return self.server.name
