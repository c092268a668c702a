"""Servers that lead, warm up and hand over, in one process: coordination and logs in memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from foundation.errors import ServerUnavailable, StorageUnavailable
from foundation.ids import LeadKey
from locks.coordinator import Coordinator
from locks.store.memory import MemoryCoordination
from merge_engine.bucket.options import BucketOptions
from server.tablet.complaints import Complaints
from server.tablet.config import HandOverConfig
from server.tablet.hosting import Hosting
from server.tablet.leadership import Leadership, logger
from server.tablet.standing_aside import StandingAside
from server.tablet.store_health import StoreHealth, WatchedStorage
from tests.support.snapshot_world import MemoryStorage

DEADLINE_S = 30.0
UNABLE_AFTER_S = 5.0


class CountingStorage(MemoryStorage):
    """Counts the segments that are read, and can be out of reach."""

    def __init__(self, shared: MemoryStorage) -> None:
        super().__init__(shared.objects, shared.prefix)
        self.segments_read = [0]
        self.cut_off = [False]
        self.read_only = False

    def _check(self) -> None:
        if self.cut_off[0]:
            raise StorageUnavailable("the store is out of reach")

    def create(self, name: str, data: bytes) -> None:
        self._check()
        if self.read_only:
            raise StorageUnavailable("the store takes nothing")
        super().create(name, data)

    def read(self, name: str) -> bytes:
        self._check()
        data = super().read(name)
        self.segments_read[0] += name.endswith(".seg")
        return data

    def names(self) -> list[str]:
        self._check()
        return super().names()

    def child(self, path: str) -> "CountingStorage":
        below = CountingStorage(super().child(path))
        below.segments_read, below.cut_off = self.segments_read, self.cut_off
        return below


class Crowd:
    """The servers of a cluster, by address: a `Peers` that calls them directly."""

    def __init__(self, logs: MemoryStorage, views: Path, *, settle_s: float = 0.0) -> None:
        self.memory = MemoryCoordination()
        self.logs = logs
        self.views = views
        self.config = HandOverConfig(settle_s=settle_s)
        self.servers: dict[str, LeadingServer] = {}
        self.now_s = 0.0
        # Called before a server is asked: what happens meanwhile. It may raise.
        self.meanwhile: Callable[[LeadKey], None] = lambda _: None
        self.asked: list[tuple[str, LeadKey]] = []

    def join(self, number: int) -> "LeadingServer":
        server = LeadingServer(self, number)
        self.servers[server.address] = server
        return server

    def ask(self, address: str, key: LeadKey, session: str, timeout_s: float) -> str | None:
        assert timeout_s > 0
        self.asked.append((address, key))
        self.meanwhile(key)
        if address not in self.servers:
            raise ServerUnavailable(f"nobody is at {address}")
        return self.servers[address].leadership.hand_over(key, session)

    def look(self) -> None:
        """Let all look once, and end what they began."""
        for server in list(self.servers.values()):
            server.look()

    def close(self) -> None:
        for server in self.servers.values():
            server.leadership.close()
            server.hosting.close_all()


class LeadingServer:
    """One server: its session, its buckets, its leads."""

    def __init__(self, crowd: Crowd, number: int) -> None:
        self.crowd = crowd
        self.address = f"127.0.0.1:{number}"
        self.storage = CountingStorage(crowd.logs)
        self.health = StoreHealth(clock_s=lambda: crowd.now_s)
        self.hosting = Hosting(
            WatchedStorage(self.storage, self.health),
            crowd.views / f"views-{number}",
            BucketOptions(),
        )
        self.complaints = Complaints(logger)
        self.coordinator = Coordinator(crowd.memory.connect())
        self.server = self.coordinator.servers.register(self.address)
        aside = StandingAside(
            self.coordinator.servers,
            self.server,
            self.health,
            self.complaints,
            probe=lambda: self.storage.create(f"probe-{len(self.storage.names())}", b""),
            unable_after_s=UNABLE_AFTER_S,
            clock_s=lambda: crowd.now_s,
        )
        self.leadership = Leadership(
            self.coordinator,
            self.server,
            self.hosting,
            peers=crowd,
            aside=aside,
            config=crowd.config,
            complaints=self.complaints,
            clock_s=lambda: crowd.now_s,
        )

    def look(self) -> None:
        """Look once, and end what that began."""
        self.leadership.reconcile()
        assert self.leadership.wait(DEADLINE_S), "it does not end"

    def led(self) -> list[LeadKey]:
        return sorted(self.hosting.led())

    def die(self) -> None:
        """End the session, as a kill does: nothing is given up."""
        del self.crowd.servers[self.address]
        self.coordinator.store.close()
        self.leadership.close()
        self.hosting.close_all()


@contextmanager
def crowd_of(logs: MemoryStorage, views: Path, *, settle_s: float = 0.0) -> Iterator[Crowd]:
    """Yield a cluster that nobody has joined yet."""
    crowd = Crowd(logs, views, settle_s=settle_s)
    try:
        yield crowd
    finally:
        crowd.close()
