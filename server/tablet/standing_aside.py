"""When a server stands aside: it is leaving, or its segments do not reach the log store.

A server that stands aside is placed nowhere, so the others warm up for its buckets and ask for them
(`locks.cluster.servers`). It serves what it has until then; if all stand aside, all stay as they
are. Whoever wants to take over from one that cannot reach the store has first to show, by what a
leader does, that itself can: else a store that is down for all would drive buckets around.
"""

import threading
import time
from collections.abc import Callable

from foundation.background import surviving
from foundation.errors import TallybookError
from locks.cluster.servers import LEAVING, Members, Server, Servers
from server.tablet.complaints import Complaints
from server.tablet.store_health import StoreHealth

UNABLE = "its segments do not reach the log store"


class StandingAside:
    """Says for one session of one server whether it stands aside. `look` is for one thread."""

    def __init__(
        self,
        servers: Servers,
        server: Server,
        health: StoreHealth,
        complaints: Complaints,
        *,
        probe: Callable[[], None],
        unable_after_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`probe`: raises an error unless this server can write to the log store."""
        self._servers = servers
        self._server = server
        self._health = health
        self._complaints = complaints
        self._probe = probe
        self._unable_after_s = unable_after_s
        self._clock_s = clock_s
        self._leaving = False
        self._unable_since_s: float | None = None
        self._probing: threading.Thread | None = None

    @property
    def is_unable(self) -> bool:
        """Whether the log store is out of reach, as far as is known."""
        return self._unable_since_s is not None

    def leave(self) -> None:
        """Stand aside for good."""
        self._leaving = True
        self._servers.stand_aside(self._server, LEAVING)

    def look(self, members: Members) -> None:
        """Stand aside if the log store was out of reach for too long; come back if it is not."""
        since_s, failing_s = self._unable_since_s, self._health.failing_s()
        if since_s is None and failing_s >= self._unable_after_s:
            self._unable_since_s = self._clock_s()
            self._servers.stand_aside(self._server, UNABLE)
            alone = len(members.able) <= 1
            self._complaints.complain(
                UNABLE,
                f"for {failing_s:.1f} s; "
                + ("nobody else is there to lead" if alone else "others are to lead its buckets"),
            )
        elif (
            since_s is not None
            and self._health.answered_since(since_s)
            and failing_s < self._unable_after_s
        ):
            if not self._leaving:
                self._servers.come_back(self._server)
            self._unable_since_s = None
            self._complaints.over(UNABLE)
        elif since_s is not None:
            self._try_again()

    def check_for(self, why: str | None) -> Callable[[], None]:
        """Return what has to hold before a bucket is asked for, of a server aside for this."""
        return self._probe if why == UNABLE else lambda: None

    def _try_again(self) -> None:
        """Try the store beside all else: a server that leads nothing writes nothing."""
        if self._probing is None or not self._probing.is_alive():
            self._probing = threading.Thread(target=self._try, name="tallybook-try", daemon=True)
            self._probing.start()

    def _try(self) -> None:
        with surviving("trying the log store"):
            try:
                self._probe()
            except TallybookError:
                return
            self._health.answered()
