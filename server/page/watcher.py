"""Looks at the cluster again and again, while somebody looks at the page, and not otherwise."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from foundation.errors import TallybookError
from server.client.cluster import Cluster
from server.page.overview import Overview
from server.page.trends import Trends

logger = logging.getLogger(__name__)

LOOK_S = 2.0
# Trends go on for as long after the last look at the page: whoever reloads it finds them.
WATCH_S = 600.0
_FIRST_S = 20.0


class Watcher:
    """What there is, and what has become of it. Safe for threads.

    `connect` is called with the first look; nothing is connected before.
    """

    def __init__(self, connect: Callable[[], Cluster], *, look_s: float = LOOK_S) -> None:
        self._connect = connect
        self._look_s = look_s
        self._changed = threading.Condition()
        self._cluster: Cluster | None = None
        self._thread: threading.Thread | None = None
        self._asked_at = 0.0
        self._seen: dict[str, Any] | None = None
        self._closed = False
        self._looking = threading.Lock()
        self._overview: Overview | None = None
        self._looked: tuple[float, dict[str, Any]] | None = None

    def cluster(self) -> Cluster:
        """Return a connection to the cluster."""
        with self._changed:
            if self._cluster is None:
                self._cluster = self._connect()
            return self._cluster

    def seen(self) -> dict[str, Any]:
        """Return what was seen last; the first time, that is waited for.

        With an `error` where the cluster could not be asked, and what was seen before.
        """
        deadline = time.monotonic() + _FIRST_S
        with self._changed:
            self._asked_at = time.monotonic()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._watch, name="tallybook-page", daemon=True
                )
                self._thread.start()
            self._changed.wait_for(
                lambda: self._seen is not None or self._closed, deadline - time.monotonic()
            )
            return self._seen or {"error": "the cluster was not reached yet"}

    def now(self) -> dict[str, Any]:
        """Return an overview that is no older than the time between two looks.

        It looks by itself if nobody else does, and goes on no further: this is for programs that
        ask every now and then. With an `error` alone if the cluster cannot be asked.
        """
        try:
            return self._look(at_most_s=self._look_s)
        except Exception as exc:
            return {"error": _told(exc)}

    def close(self) -> None:
        """Look no more, and end the connection. Closing twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread, cluster, self._cluster = self._thread, self._cluster, None
        if cluster is not None:
            cluster.close()
        if thread is not None:
            thread.join()

    def _watch(self) -> None:
        trends = Trends()
        while not self._is_over():
            try:
                seen = self._look()
                trends.add(seen)
                self._show(_shown(seen, trends))
            except Exception as exc:
                if not isinstance(exc, TallybookError):
                    logger.exception("the page could not look at the cluster")
                self._show({**(self._seen or {}), "error": _told(exc)})
            with self._changed:
                self._changed.wait_for(lambda: self._closed, self._look_s)

    def _look(self, at_most_s: float = 0.0) -> dict[str, Any]:
        """Look at the cluster, one thread at a time; or return what was seen just now."""
        with self._looking:
            if self._looked is not None and time.monotonic() - self._looked[0] < at_most_s:
                return self._looked[1]
            if self._overview is None:
                self._overview = Overview(self.cluster())
            began_s = time.monotonic()
            seen = self._overview.look()
            self._looked = began_s, seen
            return seen

    def _show(self, seen: dict[str, Any]) -> None:
        with self._changed:
            self._seen = seen
            self._changed.notify_all()

    def _is_over(self) -> bool:
        with self._changed:
            if not self._closed and time.monotonic() - self._asked_at < WATCH_S:
                return False
            self._thread = None
            self._seen = None  # Whoever comes next wants to know what there is then.
            return True


def _told(exc: Exception) -> str:
    return str(exc) if isinstance(exc, TallybookError) else f"{type(exc).__name__}: {exc}"


def _shown(seen: dict[str, Any], trends: Trends) -> dict[str, Any]:
    """Return what the page gets: without counters, and with what they show."""
    return {
        **seen,
        "servers": [
            {name: value for name, value in server.items() if name != "metrics"}
            for server in seen["servers"]
        ],
        "tables": [
            {
                **table,
                "rows_per_s": round(trends.growth(table["name"]), 2),
                "sizes": trends.sizes(table["name"]),
                "buckets": [
                    {name: value for name, value in bucket.items() if name != "work"}
                    for bucket in table["buckets"]
                ],
                "locks": [
                    {**lock, "events": trends.events(table["name"], lock["owner"])}
                    for lock in table["locks"]
                ],
            }
            for table in seen["tables"]
        ],
        "points": trends.points(),
        "errors": trends.errors(),
        "error": None,
    }
