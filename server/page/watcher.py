"""Looks at the cluster again and again, while somebody looks at the page, and not otherwise.

One thread looks. Whoever asks waits for it a moment, and is then told what is known: a cluster that
does not answer must not keep those who want to know just that.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foundation.errors import TallybookError
from server.client.cluster import Cluster
from server.page.overview import Overview
from server.page.status_requests import StatusRequests
from server.page.trends import Trends

logger = logging.getLogger(__name__)

LOOK_S = 2.0
# How long somebody who asks is kept waiting; Prometheus gives up after ten seconds.
WAIT_S = 2.5
# Trends go on for as long after the last look at the page: whoever reloads it finds them.
WATCH_S = 600.0
# A look that takes so long is told of as a cluster that does not answer; a large one takes seconds.
_LATE_S = 10.0
# What was seen so long ago is not told any more, where no other look has ended since.
_OLD_S = 300.0
_CLOSE_S = 5.0


@dataclass(frozen=True)
class _Look:
    """What a look has brought: what there is or, with `error`, why that is not known."""

    ended_at: float
    seen: dict[str, Any]
    error: str | None = None


class Watcher:
    """What there is, and what has become of it. Safe for threads.

    `connect` is called with the first look; nothing is connected before.
    """

    def __init__(
        self, connect: Callable[[], Cluster], *, look_s: float = LOOK_S, wait_s: float = WAIT_S
    ) -> None:
        self._connect = connect
        self._look_s = look_s
        self._wait_s = wait_s
        self._connecting = threading.Lock()
        self._cluster: Cluster | None = None
        self._requests: StatusRequests | None = None
        self._overview: Overview | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._wanted = False  # By a program: one look.
        self._watched_at: float | None = None  # When somebody looked at the page last.
        self._looking_since: float | None = None
        self._ended = 0  # How many looks have ended.
        self._last: _Look | None = None
        self._trends: Trends | None = None
        self._shown: dict[str, Any] | None = None

    def cluster(self) -> Cluster:
        """Return a connection to the cluster."""
        with self._connecting:
            if self._cluster is None:
                self._cluster = self._connect()
            return self._cluster

    def seen(self) -> dict[str, Any]:
        """Return what was seen last; the first time, that is waited for, but not for long.

        With an `error` where the cluster cannot be asked, and what was seen before.
        """
        with self._changed:
            self._watched_at = time.monotonic()
            self._begin()
            self._changed.wait_for(lambda: self._shown is not None or self._closed, self._wait_s)
            trouble = self._trouble()
            if trouble is None:
                return self._shown or {"error": "the cluster has not answered yet"}
            return {**(self._shown or {}), "error": trouble}

    def now(self) -> dict[str, Any]:
        """Return an overview that is no older than the time between two looks, if there is one.

        It looks by itself if nobody else does, and goes on no further: this is for programs that
        ask every now and then. Where the look takes longer than a program waits, it is the one
        before. With an `error` alone if the cluster cannot be asked.
        """
        with self._changed:
            if self._last is None or time.monotonic() - self._last.ended_at >= self._look_s:
                self._wanted = self._looking_since is None
                before = self._ended
                self._begin()
                if self._is_connected():
                    self._changed.wait_for(
                        lambda: self._ended > before or self._closed, self._wait_s
                    )
            trouble = self._trouble()
            if trouble is not None:
                return {"error": trouble}
            if self._last is None or time.monotonic() - self._last.ended_at > _OLD_S:
                return {"error": "the cluster has not answered yet"}
            return self._last.seen

    def close(self) -> None:
        """Look no more, and end the connection. Closing twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        cluster, self._cluster = self._cluster, None
        if self._requests is not None:
            self._requests.close()
        if cluster is not None:
            cluster.close()
        if thread is not None:
            thread.join(_CLOSE_S)

    def _is_connected(self) -> bool:
        """Whether ZooKeeper is there, as far as is known; it is, before there is a connection."""
        cluster = self._cluster
        return cluster is None or cluster.connected

    def _trouble(self) -> str | None:
        """Return why what there is now is not known; None if it is, or may still be."""
        cluster, since = self._cluster, self._looking_since
        if cluster is not None and not cluster.connected:
            return f"ZooKeeper at {cluster.address} is away"
        if since is not None and time.monotonic() - since >= _LATE_S:
            return f"the cluster has not answered for {time.monotonic() - since:.0f} s"
        return None if self._last is None else self._last.error

    def _begin(self) -> None:
        """Have the thread look, if it does not; under the lock."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="tallybook-page", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while self._await_turn():
            try:
                self._take(self._look())
            except Exception as exc:
                if not isinstance(exc, TallybookError):
                    logger.exception("the page could not look at the cluster")
                self._take({}, _told(exc))

    def _await_turn(self) -> bool:
        """Return when there is to be a look; False when nobody wants any more of them."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                watched = self._watched_at is not None and now - self._watched_at < WATCH_S
                if not watched:  # Whoever comes next wants to know what there is then.
                    self._watched_at, self._trends, self._shown = None, None, None
                due_s = 0.0
                if watched and not self._wanted and self._last is not None:
                    due_s = self._last.ended_at + self._look_s - now
                if (watched or self._wanted) and due_s <= 0:
                    self._wanted, self._looking_since = False, now
                    return True
                if not watched:
                    break
                self._changed.wait(due_s)
            self._thread = None
            return False

    def _look(self) -> dict[str, Any]:
        cluster = self.cluster()
        if self._overview is None:
            self._requests = StatusRequests(cluster.status_of)
            self._overview = Overview(cluster, self._requests.of)
        return self._overview.look()

    def _take(self, seen: dict[str, Any], error: str | None = None) -> None:
        """Make known what a look has brought."""
        with self._changed:
            self._looking_since = None
            self._last = _Look(time.monotonic(), seen, error)
            self._ended += 1
            if self._watched_at is not None and error is None:
                self._trends = self._trends or Trends()
                self._trends.add(seen)
                self._shown = _shown(seen, self._trends)
            self._changed.notify_all()


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
