"""Coordination that survives its process, for a table in one process: memory, kept as objects.

Every change of what is not ephemeral is one object more, created before anybody sees the change:

    <20 digits>   in the frame of `framing`, format 1: a text that no other object has, how many
                  nodes there are, and of each its path, version, time of the last write, length
                  and data

The object with the highest number is what holds; those before it are deleted some time later. A
process dies between two of them, or before or after one, and never within: an object appears
whole, or not at all. Sessions and ephemeral nodes are not kept; they end with the process.

Who opens the same objects elsewhere sees what was last written. As long as both only read, that is
all. Of two that write, whoever finds its next number taken, or a later one there, has lost: its
change did not happen, and nothing that it does counts any more (`InUse`).
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from foundation import forks
from foundation.errors import (
    AlreadyExists,
    CorruptRecord,
    InUse,
    MissingObject,
    StorageFull,
    StorageUnavailable,
    Unavailable,
    UnknownFormat,
    UnknownOutcome,
)
from foundation.failpoints import hit
from foundation.formats import Formats
from locks.encoding.framing import Reader, RecordFormats, encode_text, frame, read_framed
from locks.encoding.integers import encode_one
from locks.store.memory import MemoryCoordination, Stored

_DIGITS = 20
# Some older objects stay: whoever lists them meanwhile always finds one that is as late as its own.
_KEPT, _DELETED_AT_ONCE = 8, 8
_READING_ATTEMPTS = 10


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Objects(Protocol):
    """Where the objects are: named, immutable, each created once. See `ObjectStorage`."""

    def create(self, name: str, data: bytes) -> None:
        """Create an object, durable on return; AlreadyExists if the name is taken."""

    def read(self, name: str) -> bytes:
        """Return an object's bytes; MissingObject if there is none."""

    def names(self) -> list[str]:
        """Return all names."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; names that do not exist are passed over."""


@dataclass(frozen=True)
class _Change:
    """An object that is to be created, or may have been, and the nodes as they are with it."""

    number: int
    data: bytes
    nodes: dict[str, Stored]


class DurableCoordination(MemoryCoordination):
    """Nodes that outlive the process, with the machine's clock, or another one.

    Sessions are opened by `connect`. An error of the storage is Unavailable if certainly nothing
    was changed, else UnknownOutcome; what became of it is settled by the next `sync` or change.
    Watches tell of changes by this process only.
    """

    def __init__(
        self,
        objects: Objects,
        initial: Mapping[str, bytes] | None = None,
        *,
        clock: Callable[[], int] = _wall_clock_ms,
    ) -> None:
        """`initial`: nodes that there are from the beginning, before anything was written.

        `clock`: its milliseconds; `advance` moves it, as for a clock in memory.
        """
        self._clock = clock
        initial = initial or {}
        self._initial = {path: Stored(data, 0, clock()) for path, data in initial.items()}
        super().__init__(clock_ms=0, nodes=dict(self._initial))
        self._objects = objects
        self._process = os.getpid()
        self._number = 0
        self._doubt: _Change | None = None
        self._has_written = False
        self._lost = False
        with self.lock, _certain():
            self._load()

    def now_ms(self) -> int:
        return self._clock() + self.clock_ms

    def refresh(self) -> None:
        """Settle what is in doubt; and see what others have written, unless we do so ourselves."""
        self._settle()
        if not self._has_written:
            with _certain():
                self._load()

    def publish(self, nodes: dict[str, Stored]) -> bool:
        if forks.is_inherited(self._process):  # What it wrote would take the table from its parent.
            raise forks.after_fork("an embedded table")
        if self._doubt is not None:
            # What was judged by nodes that may be others is judged again.
            self._settle()
            return False
        if _kept(nodes) == _kept(self.nodes):
            self.nodes = nodes
            return True
        if self._lost:
            raise _lost(self._objects)
        self._doubt = _Change(self._number + 1, encode_nodes(_kept(nodes), uuid.uuid4().hex), nodes)
        try:
            self._settle()
        except Unavailable:  # The first attempt at it: it is certain that there is none.
            self._doubt = None
            raise
        except InUse:
            if self._has_written:
                raise
            # What we knew was only read, and may be read again: we have come last, and go on.
            self._lost = False
            with _certain():
                self._load()
            return False
        return True

    def _settle(self) -> None:
        """See to it that the change in doubt, if there is one, has happened."""
        change = self._doubt
        if change is None:
            return
        with _certain():
            self._create(change)
        hit("locks.created")
        try:
            found = self._numbers()
        except StorageUnavailable as exc:
            raise UnknownOutcome(f"{exc}, and whether another process writes, too") from exc
        if max(found, default=0) > change.number:  # Ours was free, since a later one replaced it.
            self._lose()
        self._doubt = None
        self.nodes, self._number, self._has_written = change.nodes, change.number, True
        self._delete_old(found)

    def _create(self, change: _Change) -> None:
        name = _name(change.number)
        try:
            self._objects.create(name, change.data)
        except AlreadyExists as exc:
            with suppress(MissingObject):
                if self._objects.read(name) == change.data:  # An earlier attempt of our own.
                    return
            self._lose(exc)

    def _lose(self, cause: Exception | None = None) -> None:
        self._doubt, self._lost = None, True
        raise _lost(self._objects) from cause

    def _delete_old(self, found: Sequence[int]) -> None:
        old = [number for number in found if number <= self._number - _KEPT]
        if len(old) >= _DELETED_AT_ONCE:
            with suppress(StorageUnavailable):  # They are in nobody's way.
                self._objects.delete([_name(number) for number in old])
            hit("locks.deleted")

    def _load(self) -> None:
        """Read what holds, unless it is known; sessions of this process keep what is theirs."""
        for _ in range(_READING_ATTEMPTS):
            found = self._numbers()
            if not found or found[-1] == self._number:
                return
            name = _name(found[-1])
            try:
                data = self._objects.read(name)
            except MissingObject:  # Deleted since, by whoever has written later ones.
                continue
            kept = decode_nodes(f"{name} in {self._objects}", data)
            own = {path: node for path, node in self.nodes.items() if node.session is not None}
            self.nodes = {**self._initial, **kept, **own}
            self._number = found[-1]
            return
        raise Unavailable(f"{self._objects} changes faster than it can be read; try again")

    def _numbers(self) -> list[int]:
        return sorted(int(name) for name in self._objects.names() if _is_name(name))


def encode_nodes(nodes: Mapping[str, Stored], stamp: str) -> bytes:
    """Return the nodes as an object; by the stamp no two of them are the same."""
    parts = [encode_text(stamp), encode_one(len(nodes))]
    for path, node in sorted(nodes.items()):
        numbers = (node.version, node.modified_ms, len(node.data))
        parts += [encode_text(path), *map(encode_one, numbers), node.data]
    return frame(FORMATS.current, parts)


def decode_nodes(what: str, data: bytes) -> dict[str, Stored]:
    """Return the nodes; CorruptRecord if the object is damaged, UnknownFormat if it is newer."""
    try:
        return read_framed(FORMATS, data, what)
    except CorruptRecord as exc:
        raise CorruptRecord(
            f"{exc}. These are the locks of a table and what its writers have committed: restore "
            "the object from a copy. Without it, nobody knows what is to be undone"
        ) from exc


def _read_format_1(reader: Reader) -> dict[str, Stored]:
    reader.text()
    nodes = {}
    for _ in range(reader.count()):
        path, version, modified_ms = reader.text(), reader.integer(), reader.integer()
        nodes[path] = Stored(reader.take(reader.integer()), version, modified_ms)
    return nodes


FORMATS: RecordFormats[dict[str, Stored]] = Formats(
    name="local-locks", current=1, readers={1: _read_format_1}, error=UnknownFormat
)


def _kept(nodes: Mapping[str, Stored]) -> dict[str, Stored]:
    return {path: node for path, node in nodes.items() if node.session is None}


def _lost(objects: Objects) -> InUse:
    return InUse(
        f"another process has written to {objects}, and this one has lost the table to it; what it "
        "had not committed is undone by the next writer. Close the table and open it where it is "
        "to be written"
    )


@contextmanager
def _certain() -> Iterator[None]:
    """What the storage did not do, for certain, was not done."""
    try:
        yield
    except (StorageUnavailable, StorageFull) as exc:
        raise Unavailable(str(exc)) from exc


def _name(number: int) -> str:
    return f"{number:0{_DIGITS}}"


def _is_name(name: str) -> bool:
    return len(name) == _DIGITS and name.isdecimal()
