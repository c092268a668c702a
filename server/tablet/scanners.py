"""Scanner sessions: each pins one bucket's rows at one log offset, for as long as it is used.

A session outlives the connection that it streams to, so that a reader whose connection broke goes
on after the last key it has, on the same rows. It ends when it is closed, when it was not used for
its time to live, and when the bucket's leader moves. Who comes later is told the same, whichever it
was: what to do about it is the same, too.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

from foundation.background import surviving
from foundation.errors import NotLeader, TooManyScanners, UnknownOrExpiredScannerError
from foundation.ids import LeadKey
from merge_engine.schema.schema import Column
from recovery.reader.bucket_scan import BucketScan, ScannedBatch
from server.tablet.limits import ScannerLimits

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 5.0
# Rows that are being pinned hold the bucket open. Who closes it waits, but not for ever: that may
# wait for ZooKeeper itself.
_LONGEST_OPENING_S = 5.0


class Scanner:
    """One session. Safe for threads; of several streams, the last one to begin has it."""

    def __init__(self, key: LeadKey, limits: ScannerLimits, clock_s: Callable[[], float]) -> None:
        self.scanner_id = uuid.uuid4().hex
        self.key = key
        self._ttl_s = limits.ttl_s
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._scan: BucketScan | None = None
        self._opened = threading.Event()
        self._closed = False
        self._used_s = clock_s()
        self._stream = 0

    @property
    def offset(self) -> int:
        """Where the rows stand in the log: the changelog from here on adds up to the table."""
        return self._usable().offset

    @property
    def expired(self) -> bool:
        """Whether it was not used for its time to live. While it is being opened, it is used."""
        return self._opened.is_set() and self._clock_s() - self._used_s > self._ttl_s

    def open(self, open_scan: Callable[[], BucketScan]) -> None:
        """Take the rows; NotLeader, and they are let go, if the bucket was closed meanwhile."""
        try:
            scan = open_scan()
            with self._lock:
                self._used_s = self._clock_s()
                if not self._closed:
                    self._scan = scan
                    return
            scan.close()
        finally:
            self._opened.set()
        raise NotLeader(f"bucket {self.key} was closed while a scanner was opened: ask who leads")

    def batches(
        self,
        columns: Sequence[Column],
        *,
        after: bytes | None,
        limit: int | None,
        batch_rows: int,
    ) -> Iterator[ScannedBatch]:
        """Return the rows after a key; each batch is a use, and fails once the session is over.

        Every stream that began before fails, too: its reader has come back in this one.
        """
        with self._lock:
            scan = self._usable()
            self._stream += 1
            self._used_s = self._clock_s()
            found = scan.batches(columns, after=after, limit=limit, batch_rows=batch_rows)
            return self._read(self._stream, found)

    def _read(self, stream: int, found: Iterator[ScannedBatch]) -> Iterator[ScannedBatch]:
        while True:
            with self._lock:
                self._usable()
                if stream != self._stream:
                    raise unknown(self.scanner_id)
                batch = next(found, None)
                self._used_s = self._clock_s()
            if batch is None:
                return
            yield batch

    def close(self) -> None:
        """End the session; a batch that is being read ends first. Closing twice is fine."""
        with self._lock:
            self._closed = True
            scan, self._scan = self._scan, None
        if scan is not None:
            scan.close()
        elif not self._opened.wait(_LONGEST_OPENING_S):
            logger.warning("a scanner of bucket %s is still being opened", self.key)

    def _usable(self) -> BucketScan:
        """Checked on every use: the reaper may be late."""
        scan = self._scan
        if scan is None or self.expired:
            raise unknown(self.scanner_id)
        return scan


class Scanners:
    """The sessions of a server. Safe for threads."""

    def __init__(
        self, limits: ScannerLimits, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._scanners: dict[str, Scanner] = {}
        self._closed = threading.Event()
        self.reaped = 0
        self._reaper = threading.Thread(target=self._reap, name="tallybook-reaper", daemon=True)
        self._reaper.start()

    def __len__(self) -> int:
        return len(self._scanners)

    def open(self, key: LeadKey, open_scan: Callable[[], BucketScan]) -> Scanner:
        """Open a session; TooManyScanners if the bucket or the server is at its limit.

        Its place is taken before the rows are pinned: a limit that many pass at once is none.
        """
        self.reap()
        scanner = Scanner(key, self._limits, self._clock_s)
        with self._lock:
            self._check_limits(key)
            self._scanners[scanner.scanner_id] = scanner
        try:
            scanner.open(open_scan)
        except BaseException:
            self.close(scanner.scanner_id)
            raise
        return scanner

    def get(self, scanner_id: str) -> Scanner:
        """Return a session that can be used."""
        scanner = self._scanners.get(scanner_id)
        if scanner is None:
            raise unknown(scanner_id)
        if scanner.expired:
            self.close(scanner_id)
            raise unknown(scanner_id)
        return scanner

    def close(self, scanner_id: str) -> bool:
        """End a session; False for one that is unknown: it has ended already."""
        with self._lock:
            scanner = self._scanners.pop(scanner_id, None)
        if scanner is not None:
            scanner.close()
        return scanner is not None

    def close_bucket(self, key: LeadKey) -> None:
        """End the sessions of a bucket that is no longer led here: it cannot close before."""
        for scanner in list(self._scanners.values()):
            if scanner.key == key:
                self.close(scanner.scanner_id)

    def reap(self) -> None:
        """End the sessions that were not used for their time to live."""
        for scanner in list(self._scanners.values()):
            # Of two who look at the same time, one ends it.
            if scanner.expired and self.close(scanner.scanner_id):
                self.reaped += 1
                logger.info(
                    "scanner %s of bucket %s was not used for %g s, and is closed",
                    scanner.scanner_id,
                    scanner.key,
                    self._limits.ttl_s,
                )

    def shutdown(self) -> None:
        """End all sessions, and the thread that looks after them."""
        self._closed.set()
        for scanner_id in list(self._scanners):
            self.close(scanner_id)
        self._reaper.join()

    def _check_limits(self, key: LeadKey) -> None:
        limits = self._limits
        of_bucket = sum(scanner.key == key for scanner in self._scanners.values())
        if of_bucket >= limits.max_per_bucket:
            raise TooManyScanners(
                f"bucket {key} has {of_bucket} scanners, the limit (--scanners-per-bucket): "
                "close one, or try again"
            )
        if len(self._scanners) >= limits.max_per_server:
            raise TooManyScanners(
                f"the server has {len(self._scanners)} scanners, the limit "
                "(--scanners-per-server): close one, or try again"
            )

    def _reap(self) -> None:
        while not self._closed.wait(min(self._limits.ttl_s / 4, _LONGEST_PAUSE_S)):
            with surviving("closing scanners that are not used"):
                self.reap()


def unknown(scanner_id: str) -> UnknownOrExpiredScannerError:
    """Return the one error for all sessions that are no more."""
    return UnknownOrExpiredScannerError(
        f"there is no scanner {scanner_id}: it was closed, not used in time, or its bucket's "
        "leader moved; begin the scan again"
    )
