"""How much a server takes on at a time: beyond it, an error that can be retried, not a crash."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from foundation.errors import InvalidInput, Overloaded

MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one server. A put is held in memory from its first row to its commit.

    The options of a server are --max-puts, --max-bytes-in-flight and --lookup-max-keys.
    """

    max_puts: int = 32
    max_bytes_in_flight: int = 512 * MEBIBYTE
    lookup_max_keys: int = 1_000_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise InvalidInput(f"{name} is {value}; a server needs at least 1")


@dataclass(frozen=True, kw_only=True)
class ScannerLimits:
    """`ttl_s`: how long a scanner is kept that nobody uses.

    The options of a server are --scanner-ttl, --scanners-per-bucket and --scanners-per-server.
    """

    ttl_s: float = 60.0
    max_per_bucket: int = 8
    max_per_server: int = 200

    def __post_init__(self) -> None:
        if self.ttl_s <= 0 or self.max_per_bucket < 1 or self.max_per_server < 1:
            raise InvalidInput(
                f"a scanner's time to live ({self.ttl_s:g} s) and the limits per bucket "
                f"({self.max_per_bucket}) and server ({self.max_per_server}) are positive"
            )


@dataclass(frozen=True, kw_only=True)
class SpoolLimits:
    """What large puts, and masks of scans, may take of the disk of the views.

    `ttl_s`: after how long that nobody asks for an upload it is looked at whether its writer is
    still there. The options of a server are
    --spool-max-bytes and --spool-min-free-bytes.
    """

    max_bytes: int = 64 * 1024 * MEBIBYTE
    min_free_bytes: int = 1024 * MEBIBYTE
    ttl_s: float = 120.0

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.min_free_bytes < 0 or self.ttl_s <= 0:
            raise InvalidInput(
                f"the spool's limit ({self.max_bytes}) and time to live ({self.ttl_s:g} s) are "
                f"positive, and what stays free of its disk ({self.min_free_bytes}) not negative"
            )


class Admission:
    """Counts what is under way, and refuses what would be too much. Safe for threads."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._changed = threading.Condition()
        self._closing = False
        self.puts = 0
        self.bytes = 0
        self.refused = 0

    @contextmanager
    def put(self, announced: int = 0) -> Iterator["Load"]:
        """Admit a put, or raise Overloaded; what it holds is given back at the end.

        `announced`: how many bytes are to come. They are counted before they are read: a message
        takes memory before anybody can refuse it.
        """
        with self._changed:
            if self._closing:
                raise Overloaded("the server is stopping; nothing was written, try another")
            if self.puts >= self._limits.max_puts:
                self.refused += 1
                raise Overloaded(
                    f"{self.puts} puts are under way, the limit (--max-puts); nothing was "
                    "written, try again"
                )
            self.puts += 1
        try:
            with self.holding(announced) as load:
                yield load
        finally:
            with self._changed:
                self.puts -= 1
                self._changed.notify_all()

    @contextmanager
    def holding(self, size: int = 0) -> Iterator["Load"]:
        """Count bytes while they are held, or raise Overloaded."""
        load = Load(self)
        try:
            load.reserve(size)
            yield load
        finally:
            with self._changed:
                self.bytes -= load.bytes

    def grow(self, size: int, held: int) -> None:
        """Count more bytes of a call that holds some, or raise Overloaded."""
        with self._changed:
            # One call alone may be larger than the limit: its own limit is another.
            if self.bytes > held and self.bytes + size > self._limits.max_bytes_in_flight:
                self.refused += 1
                raise Overloaded(
                    f"{self.bytes:,} bytes are in flight, near the limit of "
                    f"{self._limits.max_bytes_in_flight:,} (--max-bytes-in-flight); nothing was "
                    "written, try again"
                )
            self.bytes += size

    def close(self, deadline_s: float) -> bool:
        """Refuse new puts and wait for those under way; False if some are still there."""
        with self._changed:
            self._closing = True
            return self._changed.wait_for(lambda: self.puts == 0, deadline_s)


class Load:
    """What one call holds: `bytes` are counted, of which `received` have arrived."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.bytes = 0
        self.received = 0

    def reserve(self, size: int) -> None:
        """Count bytes that are to come, or raise Overloaded."""
        more = max(0, size - self.bytes)
        self._admission.grow(more, self.bytes)
        self.bytes += more

    def grow(self, size: int) -> None:
        """Hold bytes that have arrived, announced or not; or raise Overloaded."""
        self.received += size
        self.reserve(self.received)
