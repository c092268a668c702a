"""Whether this server's segments reach the log store, told by what becomes of them.

Only creates of segments count: they are small and created all the time, while a file of a snapshot may well be
under way for longer than a session lasts. A create that is not answered counts as one that fails:
the client of a store tries again by itself, for minutes. Nobody is asked how the store is: a server
that writes nothing is in nobody's way.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from foundation.errors import StorageUnavailable, UnknownOutcome
from merge_engine.bucket.segment import SUFFIX
from merge_engine.storage.objects import ObjectStorage

# Others are asked instead, who answer within a fraction of that.
_SILENT_S = 1.0


class StoreHealth:
    """For how long no segment has reached the store, though some were to. Safe for threads."""

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._under_way: dict[object, float] = {}
        self._failed_s: float | None = None  # When the first one began that has failed since.
        self._answered_s = clock_s()

    def failing_s(self) -> float:
        """Return for how long creates have failed, or waited, and none was answered; 0: not."""
        with self._lock:
            begun = list(self._under_way.values())
            if self._failed_s is not None:
                begun.append(self._failed_s)
            if not begun:
                return 0.0
            return max(0.0, self._clock_s() - max(min(begun), self._answered_s))

    def waiting_s(self) -> float:
        """Return for how long somebody has waited, and nobody was answered; 0: nobody waits."""
        with self._lock:
            begun = min(self._under_way.values(), default=None)
            if begun is None:
                return 0.0
            return max(0.0, self._clock_s() - max(begun, self._answered_s))

    def answered_since(self, when_s: float) -> bool:
        """Whether the store has answered since then, by the clock."""
        return self._answered_s > when_s

    def answered(self) -> None:
        """Take in that the store has answered: it has created an object, or has it already."""
        with self._lock:
            self._answered_s = self._clock_s()
            self._failed_s = None

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Take in what becomes of a create, or of a read."""
        this, began = object(), self._clock_s()
        with self._lock:
            self._under_way[this] = began
        try:
            yield
        except (StorageUnavailable, UnknownOutcome):
            with self._lock:
                self._failed_s = began if self._failed_s is None else self._failed_s
            raise
        except BaseException:  # A name that is taken, or not there, or a full disk is an answer.
            self.answered()
            raise
        else:
            self.answered()
        finally:
            with self._lock:
                del self._under_way[this]


class WatchedStorage:
    """An ObjectStorage that tells what becomes of the segments that are created in it.

    And, apart from that, of what is read in it: whoever waits for that can write all the same.
    """

    def __init__(
        self, storage: ObjectStorage, health: StoreHealth, reads: StoreHealth | None = None
    ) -> None:
        self.wrapped = storage
        self._health = health
        self._reads = reads or StoreHealth()

    def is_silent(self) -> bool:
        """Whether somebody has waited for the store for long, and nobody was answered."""
        return max(self._health.waiting_s(), self._reads.waiting_s()) >= _SILENT_S

    def create(self, name: str, data: bytes) -> None:
        if not name.endswith(SUFFIX):
            self.wrapped.create(name, data)
            return
        with self._health.asking():
            self.wrapped.create(name, data)

    def read(self, name: str) -> bytes:
        with self._reads.asking():
            return self.wrapped.read(name)

    def open(self, name: str) -> BinaryIO:
        return self.wrapped.open(name)

    def names(self) -> list[str]:
        return self.wrapped.names()

    def sizes(self) -> dict[str, int]:
        return self.wrapped.sizes()

    def delete(self, names: Sequence[str]) -> None:
        self.wrapped.delete(names)

    def child(self, path: str) -> "WatchedStorage":
        return WatchedStorage(self.wrapped.child(path), self._health, self._reads)

    def __str__(self) -> str:
        return str(self.wrapped)
