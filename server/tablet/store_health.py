"""Whether this server's segments reach the log store, told by what becomes of them.

Only creates of segments count: they are small and happen all the time, while a file of a snapshot
may well be under way for longer than a session lasts. One that is not answered counts as one that
fails: the client of a store tries again by itself, for minutes. But not if what is read meanwhile
is answered: then the store is there, and has much to do. Nobody is asked how the store is: a server
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


class StoreHealth:
    """For how long no segment has reached the store, though some were to. Safe for threads."""

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._creates: dict[object, float] = {}  # Under way, and since when.
        self._reads: dict[object, float] = {}
        self._failed_s: float | None = None  # When the first create began that has failed since.
        self._created_s = self._heard_s = clock_s()  # The last answer to a create, and to anything.

    def failing_s(self) -> float:
        """Return for how long creates have failed, or waited, and none was answered; 0: not."""
        with self._lock:
            since = [] if self._failed_s is None else [max(self._failed_s, self._created_s)]
            if self._creates:
                since.append(max(min(self._creates.values()), self._heard_s))
            return max(0.0, self._clock_s() - min(since)) if since else 0.0

    def waiting_s(self) -> float:
        """Return for how long somebody has waited, and nobody was answered; 0: nobody waits."""
        with self._lock:
            begun = [*self._creates.values(), *self._reads.values()]
            return max(0.0, self._clock_s() - max(min(begun), self._heard_s)) if begun else 0.0

    def answered_since(self, when_s: float) -> bool:
        """Whether the store has answered a create since then, by the clock."""
        return self._created_s > when_s

    def answered(self) -> None:
        """Take in that the store has answered: it has created an object, or has it already."""
        with self._lock:
            self._created_s = self._heard_s = self._clock_s()
            self._failed_s = None

    @contextmanager
    def creating(self) -> Iterator[None]:
        """Take in what becomes of a create."""
        this, began = object(), self._clock_s()
        with self._lock:
            self._creates[this] = began
        try:
            yield
        except (StorageUnavailable, UnknownOutcome):
            with self._lock:
                self._failed_s = began if self._failed_s is None else self._failed_s
            raise
        except BaseException:  # A name that is taken, or a disk that is full, is an answer.
            self.answered()
            raise
        else:
            self.answered()
        finally:
            with self._lock:
                del self._creates[this]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Take in whether a read is answered: that there is no such object is an answer, too."""
        this, began = object(), self._clock_s()
        with self._lock:
            self._reads[this] = began
        answered = True
        try:
            yield
        except StorageUnavailable:
            answered = False
            raise
        finally:
            with self._lock:
                del self._reads[this]
                if answered:
                    self._heard_s = self._clock_s()


class WatchedStorage:
    """An ObjectStorage that tells what becomes of segments that are created, and of reads."""

    def __init__(self, storage: ObjectStorage, health: StoreHealth) -> None:
        self.wrapped = storage
        self._health = health

    def create(self, name: str, data: bytes) -> None:
        if not name.endswith(SUFFIX):
            self.wrapped.create(name, data)
            return
        with self._health.creating():
            self.wrapped.create(name, data)

    def read(self, name: str) -> bytes:
        with self._health.reading():
            return self.wrapped.read(name)

    def open(self, name: str) -> BinaryIO:
        return self.wrapped.open(name)

    def names(self) -> list[str]:
        return self.wrapped.names()

    def sizes(self) -> dict[str, int]:
        return self.wrapped.sizes()

    def delete(self, names: Sequence[str]) -> None:
        self.wrapped.delete(names)

    def remove_empty(self, path: str) -> None:
        self.wrapped.remove_empty(path)

    def child(self, path: str) -> "WatchedStorage":
        return WatchedStorage(self.wrapped.child(path), self._health)

    def __str__(self) -> str:
        return str(self.wrapped)
