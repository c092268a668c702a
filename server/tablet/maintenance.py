"""What a server does by itself for the buckets that it leads, and for those that were dropped.

Snapshots in their time and on demand, what they make needless, the log before them, which is
cleaned and rolled up; and the files of dropped tables and partitions, once nobody leads or leases
them. All of it can be cut off at any point and is taken up again, by this server or another.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from foundation.background import surviving
from foundation.errors import (
    Closed,
    Deposed,
    NotLeader,
    SessionLost,
    Superseded,
    TallybookError,
    UnknownTable,
)
from foundation.ids import LeadKey
from locks.snapshots.list_records import ListedSnapshot
from recovery.leader.led_bucket import LedBucket
from recovery.leader.snapshot_keeper import SnapshotKeeper
from server.protocol.calls import TakeSnapshots, TakeSnapshotsAnswer
from server.protocol.messages import NOT_THERE
from server.tablet.config import SnapshotConfig
from server.tablet.janitor import Janitor
from server.tablet.metrics import Metrics
from server.tablet.requests import Requests
from server.tablet.steps import CALL_S, GoOn, Steps

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_STOP_S = 5.0
_FREE_AGAIN_S = 10.0
# Of a snapshot that is taken on demand, a file is in memory at a time. It mostly waits: for the log
# store, and for ZooKeeper.
_AT_ONCE = 4


@dataclass
class _Kept:
    """A bucket's keeper; when its next snapshot is due, and the next clean-up, by the clock."""

    led: LedBucket
    keeper: SnapshotKeeper
    due_s: float
    free_s: float = 0.0
    # Whether there may be something of its log to roll up.
    rolls_up: bool = False


class Maintenance:
    """Looks after the buckets from `start` to `stop`, in a thread of its own."""

    def __init__(
        self,
        requests: Requests,
        janitor: Janitor,
        metrics: Metrics,
        config: SnapshotConfig,
        *,
        call_s: float = CALL_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`call_s`: about how long a call goes on that takes snapshots."""
        self._requests = requests
        self._hosting = requests.hosting
        self._janitor = janitor
        self._metrics = metrics
        self._config = config
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._steps = Steps("snapshot", threads=_AT_ONCE, call_s=call_s)
        self._kept: dict[LeadKey, _Kept] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tallybook-maintenance", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, after what is under way, unless that takes long. Stopping twice is fine.

        A call to a ZooKeeper that is gone waits for its deadline. What is cut off is taken up again
        by whoever comes next.
        """
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def shutdown(self) -> None:
        """End the threads that take snapshots on demand, once nobody asks any more."""
        self._steps.shutdown()

    def take(self, call: TakeSnapshots) -> TakeSnapshotsAnswer:
        """Take snapshots of buckets now, for a client; the latest are the answer."""
        keys = self._requests.keys(self._requests.table(call), call.buckets)
        session = self._requests.session.name
        led = list(zip(keys, self._hosting.get_all(keys), strict=True))

        def take(one: tuple[LeadKey, LedBucket], _: GoOn) -> int:
            return self._take(self._keeper(*one)).snapshot_id

        def leave(one: tuple[LeadKey, LedBucket]) -> int:
            return NOT_THERE if call.some else take(one, bool)

        ids = self._steps.run(led, take, leave)
        return TakeSnapshotsAnswer(session=session, results=tuple(ids))

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            with surviving("maintenance"):
                try:
                    self.look()
                except TallybookError as exc:
                    logger.info("maintenance waits: %s", exc)

    def look(self) -> None:
        """Do what is due; what fails for one bucket or table keeps none of the others from it."""
        self._requests.session.check_connected()
        self._look()
        if not self._stopping.is_set():
            self._janitor.look()

    def _look(self) -> None:
        led = self._hosting.led()
        with self._lock:
            for key in [key for key, kept in self._kept.items() if led.get(key) is not kept.led]:
                del self._kept[key]
        for key, bucket in led.items():
            if self._stopping.is_set():
                return
            try:
                self._look_after(key, bucket)
            except (Closed, Deposed, NotLeader, SessionLost, UnknownTable):
                continue
            except Superseded:
                # Another leader was there, or the bucket was dropped: see, and let go of it.
                with suppress(TallybookError):
                    bucket.bucket.confirm()
            except TallybookError as exc:
                self._metrics.count("snapshot_failures")
                logger.warning("the snapshots of bucket %s have to wait: %s", key, exc)
            except Exception:
                self._metrics.count("snapshot_failures")
                logger.exception("the snapshots of bucket %s have to wait", key)

    def _look_after(self, key: LeadKey, led: LedBucket) -> None:
        kept = self._keeper(key, led)
        now_s = self._clock_s()
        if now_s >= kept.due_s:
            self._take(kept)
        elif kept.keeper.has_surplus and now_s >= kept.free_s:
            # What fails is not tried all the time; what is leased may be free soon.
            kept.free_s = now_s + _FREE_AGAIN_S
            kept.keeper.free()
            kept.free_s = now_s
        if kept.rolls_up:
            # A little at a time, for others wait; if it fails, not before the next snapshot again.
            kept.rolls_up = False
            kept.rolls_up = kept.keeper.roll_up_log()

    def _take(self, kept: _Kept) -> ListedSnapshot:
        # Whatever comes of it: one that fails is not tried all the time.
        kept.due_s = self._next_due_s()
        with self._metrics.timed("snapshot"):
            latest = kept.keeper.take()
            # By ZooKeeper's clock, as all segments are dated: no server's own decides what is old.
            now_ms = self._requests.session.now_ms()
            older_than_ms = now_ms - int(self._config.log_ttl_s * 1000)
            kept.keeper.clean_log(older_than_ms=older_than_ms)
        kept.rolls_up = True
        return latest

    def _keeper(self, key: LeadKey, led: LedBucket) -> _Kept:
        with self._lock:
            kept = self._kept.get(key)
        if kept is not None and kept.led is led:
            return kept
        due_s = self._first_due_s(key, led)
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept.led is not led:
                kept = self._kept[key] = _Kept(led, self._new_keeper(key, led), due_s)
            return kept

    def _new_keeper(self, key: LeadKey, led: LedBucket) -> SnapshotKeeper:
        table = self._hosting.table(key.table_id)
        session = self._requests.session
        return SnapshotKeeper(
            led.bucket,
            key,
            self._hosting.snapshots(key),
            lists=lambda: session.coordinator.snapshots,
            leases=lambda: session.coordinator.leases,
            read_records=self._requests.records_of(table),
            directory=self._hosting.checkpoints,
            retained=self._config.retained,
            clock_ms=session.now_ms,
        )

    def _first_due_s(self, key: LeadKey, led: LedBucket) -> float:
        """By the latest snapshot, whoever took it, or the log's first segment, if there is none.

        So a bucket that moves more often than snapshots are taken gets them all the same.
        """
        session = self._requests.session
        latest = session.coordinator.snapshots.read(key).latest
        if latest is not None:
            since_ms: int | None = latest.created_ms
        else:
            first = next(led.bucket.headers(led.bucket.start_offset), None)
            since_ms = None if first is None else first.timestamp_ms
        now_ms, due_s = session.now_ms(), self._next_due_s()
        age_s = 0.0 if since_ms is None else max(0.0, (now_ms - since_ms) / 1000)
        soon_s = self._clock_s() + self._config.interval_s * random.uniform(0, 0.1)
        return max(due_s - age_s, soon_s)

    def _next_due_s(self) -> float:
        """Not all buckets at once: they were opened together."""
        return self._clock_s() + self._config.interval_s * random.uniform(0.9, 1.1)
