"""Until when a session is certainly alive, and what time ZooKeeper has, by ZooKeeper's own answers.

What kazoo believes of the connection is not enough: a process that was paused past its session
wakes up connected, as far as it knows. So a thread asks, again and again, and an answer says: when
this was *sent*, the session was alive. It is then certainly alive for its time-out from there on,
less what a ZooKeeper that follows another may be late in telling the leader of us.

Time is measured by a clock of this machine that also counts while it is suspended.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from foundation.background import surviving
from foundation.errors import SessionLost, TallybookError

logger = logging.getLogger(__name__)

_BEATS_PER_TIMEOUT = 10
# A ZooKeeper that follows tells the leader every half tick which sessions it has heard of, and a
# session lasts for two ticks at least. If it is cut off before it has told of our last question,
# the leader goes by the one before: the session ends a quarter and a tenth of its time-out early.
_CERTAIN = 0.6
_READ_CLOCK_AGAIN_S = 60.0


def boot_s() -> float:
    """Return the seconds since this machine was started, those when it was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class AnsweringStore(Protocol):
    """What a heartbeat needs of a session."""

    @property
    def session_timeout_s(self) -> float:
        """How long the session lasts without being heard of, as ZooKeeper has it."""

    def sync(self) -> None:
        """Hear from ZooKeeper's leader."""

    def now_ms(self) -> int:
        """Return ZooKeeper's time."""


class Heartbeat:
    """Asks from `start` to `stop`. Safe for threads."""

    def __init__(self, store: AnsweringStore, *, clock_s: Callable[[], float] = boot_s) -> None:
        self._store = store
        self._clock_s = clock_s
        self._alive_until_s = float("-inf")
        # What ZooKeeper's clock was ahead of ours when it was last read.
        self._ahead_ms = 0
        self._clock_read_s = float("-inf")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tallybook-heartbeat", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the session is certainly alive: nobody else has what rests on it."""
        return self._clock_s() < self._alive_until_s

    def now_ms(self) -> int:
        """Return ZooKeeper's time, which is the same for all servers whatever clocks they have."""
        return int(self._clock_s() * 1000) + self._ahead_ms

    def start(self) -> "Heartbeat":
        """Begin; on return, ZooKeeper has answered once."""
        self.beat()
        self._thread.start()
        return self

    def stop(self) -> None:
        """End; a question that is under way is not waited for. Stopping twice is fine."""
        self._stopped.set()
        self._alive_until_s = float("-inf")

    def beat(self) -> None:
        """Ask once."""
        sent_s = self._clock_s()
        if sent_s - self._clock_read_s >= _READ_CLOCK_AGAIN_S:
            time_ms = self._store.now_ms()
            self._ahead_ms = time_ms - int(self._clock_s() * 1000)
            self._clock_read_s = sent_s
        self._store.sync()
        if not self._stopped.is_set():
            self._alive_until_s = sent_s + self._store.session_timeout_s * _CERTAIN

    def _run(self) -> None:
        while not self._stopped.wait(self._store.session_timeout_s / _BEATS_PER_TIMEOUT):
            # A heart that stops for good is a server that refuses everything and does not leave.
            with surviving("the heartbeat"):
                try:
                    self.beat()
                except SessionLost:
                    self.stop()
                except TallybookError as exc:
                    logger.info("ZooKeeper does not answer: %s", exc)
