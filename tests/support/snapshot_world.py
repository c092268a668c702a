"""Leaders of one bucket and their keepers of snapshots, with a storage that can be looked into."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

from foundation.errors import AlreadyExists, MissingObject
from foundation.failpoints import arm
from locks.coordinator import Coordinator
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log import wall_clock_ms
from recovery.leader.snapshot_keeper import SnapshotKeeper

# Where leaders are interrupted: all steps of taking, listing and freeing.
FAILPOINTS = (
    "snapshot.checkpointed",
    "snapshot.before_file",
    "snapshot.files_uploaded",
    "snapshot.manifest_created",
    "snapshot.listed",
    "snapshot.before_delete",
    "snapshot.deleted",
    "snapshot.swept",
)


class Crash(Exception):
    """The process ends here."""


@dataclass
class Objects:
    """The objects of a store by their full names; `ever`: also those that were deleted."""

    now: dict[str, bytes] = field(default_factory=dict)
    ever: dict[str, bytes] = field(default_factory=dict)


class MemoryStorage:
    """An ObjectStorage below a prefix of shared objects."""

    def __init__(self, objects: Objects | None = None, prefix: str = "") -> None:
        self.objects = Objects() if objects is None else objects
        self.prefix = prefix

    def create(self, name: str, data: bytes) -> None:
        path = self.prefix + name
        if path in self.objects.now:
            raise AlreadyExists(f"{path} exists already")
        self.objects.now[path] = data
        self.objects.ever.setdefault(path, data)  # What comes late to a name that was freed is not.

    def read(self, name: str) -> bytes:
        if self.prefix + name not in self.objects.now:
            raise MissingObject(f"{self.prefix}{name} does not exist")
        return self.objects.now[self.prefix + name]

    def open(self, name: str) -> BinaryIO:
        return io.BytesIO(self.read(name))

    def names(self) -> list[str]:
        below = [p.removeprefix(self.prefix) for p in self.objects.now if p.startswith(self.prefix)]
        return sorted(name for name in below if "/" not in name)

    def sizes(self) -> dict[str, int]:
        return {name: len(self.read(name)) for name in self.names()}

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.objects.now.pop(self.prefix + name, None)

    def remove_empty(self, path: str) -> None:
        """Nothing: names are all there is."""

    def child(self, path: str) -> "MemoryStorage":
        return MemoryStorage(self.objects, f"{self.prefix}{path}/")

    def as_if_nothing_was_deleted(self, suffix: str) -> "MemoryStorage":
        """Return a copy that has all objects of this suffix that ever were."""
        ever = {name: data for name, data in self.objects.ever.items() if name.endswith(suffix)}
        return MemoryStorage(Objects(ever, dict(ever)), self.prefix)

    def __str__(self) -> str:
        return f"memory/{self.prefix}"


@dataclass
class Leader:
    """A process that leads the bucket, or thinks so."""

    bucket: Bucket
    keeper: SnapshotKeeper
    view: str


@dataclass
class InMemorySession:
    """A server's place in a cluster that is in memory."""

    coordinator: Coordinator
    name: str
    clock_ms: Callable[[], int] = wall_clock_ms

    def check(self) -> None:
        """It never ends."""

    def check_connected(self) -> None:
        """Nor does its connection."""

    def now_ms(self) -> int:
        """Return the cluster's time."""
        return self.clock_ms()

    def look_again(self) -> None:
        """Nobody leads by it."""


@contextmanager
def interrupted(at: str | None, visit: int, intrude: Callable[[], None]) -> Iterator[None]:
    """Run `intrude` at this visit of the failpoint, once."""
    if at is None:
        yield
        return
    left = visit

    def action() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            intrude()

    with arm(at, action):
        yield
