"""What a server says of itself: to people, and to Prometheus."""

import os
import shutil
import time
from collections.abc import Mapping
from heapq import nlargest
from pathlib import Path
from typing import Any

from foundation import background
from foundation.errors import NotLeader
from foundation.versions import version_of
from merge_engine.bucket.log import wall_clock_ms
from merge_engine.bucket.owner_work import OwnerWork
from server.tablet.complaints import Complaints
from server.tablet.hosting import Hosting
from server.tablet.limits import Admission
from server.tablet.metrics import Labels, Metrics
from server.tablet.scanners import Scanners
from server.tablet.staging import Staging

# Of so many owners a status tells up to where they have written.
_OWNERS_TOLD = 200


class StatusReport:
    """Counters and buckets of one server. Safe for threads."""

    def __init__(self, hosting: Hosting, metrics: Metrics, complaints: Complaints) -> None:
        self._hosting = hosting
        self._metrics = metrics
        self._complaints = complaints
        self._since = time.time()

    def add_gauges(
        self, admission: Admission, scanners: Scanners, staging: Staging, views: Path
    ) -> None:
        """Have the metrics say how much there is of what, whenever they are asked for.

        `views`: a directory on the disk whose space they tell.
        """
        gauge, hosting = self._metrics.gauge, self._hosting
        gauge("buckets_led", lambda: {(): len(hosting.led())})
        gauge("buckets_unopened", lambda: {(): len(hosting.unopened())})
        gauge("puts_in_flight", lambda: {(): admission.puts})
        gauge("bytes_in_flight", lambda: {(): admission.bytes})
        gauge("calls_refused_for_load", lambda: {(): admission.refused})
        gauge("scanners", lambda: {(): len(scanners)})
        gauge("spooled_puts", lambda: {(): len(staging)})
        gauge("spooled_bytes", lambda: {(): staging.scratch.used_bytes})
        gauge("scanners_reaped", lambda: {(): scanners.reaped})
        gauge("working_set_bytes", lambda: {(): hosting.memory.used_bytes})
        gauge("disk_bytes", lambda: {(): _disk(views).total})
        gauge("disk_free_bytes", lambda: {(): _disk(views).free})
        gauge("background_failures_total", _background_failures)
        gauge("problems", lambda: {(): len(self._complaints.all())})
        gauge("log_end_offset", self._end_offsets)
        gauge("owner_epoch", self._owner_epochs)

    def report(
        self, *, address: str, session: str | None, metrics_address: str | None
    ) -> dict[str, Any]:
        """Return counters and buckets, for people and the command line."""
        buckets = [
            {
                "bucket": str(key.bucket),
                "table": self._table_name(key.table_id),
                "table_id": key.table_id,
                "term": led.term,
                "rows": led.bucket.estimated_rows(),
                "bytes": led.bucket.stored_bytes(),
                "start_offset": led.bucket.start_offset,
                "end_offset": led.bucket.end_offset,
                "view_lag": led.bucket.view_lag,
                "view_error": led.bucket.view_error,
                "owners": led.owners(),
                "work": _latest_work(led.bucket.works),
            }
            for key, led in sorted(self._hosting.led().items())
        ]
        return {
            "address": address,
            "pid": os.getpid(),
            "version": version_of("tallybook"),
            "time_ms": wall_clock_ms(),
            "session": session,
            "uptime_s": round(time.time() - self._since, 1),
            "metrics_address": metrics_address,
            "buckets": buckets,
            "unopened": [
                {
                    "bucket": str(key.bucket),
                    "table": self._table_name(key.table_id),
                    "table_id": key.table_id,
                    "why": why,
                }
                for key, why in sorted(self._hosting.unopened().items())
            ],
            "problems": self._complaints.all(),
            "problems_before": self._complaints.before(),
            "metrics": self._metrics.values(),
        }

    def _table_name(self, table_id: int) -> str:
        try:
            return self._hosting.table(table_id).name
        except NotLeader:
            return f"#{table_id}"

    def _end_offsets(self) -> dict[Labels, float]:
        return {
            (
                ("bucket", str(key.bucket)),
                ("table", self._table_name(key.table_id)),
            ): led.bucket.end_offset
            for key, led in self._hosting.led().items()
        }

    def _owner_epochs(self) -> dict[Labels, float]:
        return {
            (
                ("bucket", str(key.bucket)),
                ("owner", owner),
                ("table", self._table_name(key.table_id)),
            ): epoch
            for key, led in self._hosting.led().items()
            for owner, epoch in led.owners().items()
        }


def _latest_work(works: Mapping[str, OwnerWork]) -> dict[str, int]:
    """Return up to where owners have written, of those that wrote last: a bucket has had many."""
    ends = ((work.end_offset, owner) for owner, work in works.items())
    return {owner: end for end, owner in sorted(nlargest(_OWNERS_TOLD, ends))}


def _disk(directory: Path) -> "shutil._ntuple_diskusage":
    """Return how large the disk is; before the directory was made, that of the one above."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return shutil.disk_usage(directory)


def _background_failures() -> dict[Labels, float]:
    return {(("what", what),): count for what, count in background.failures().items()}
