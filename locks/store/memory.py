"""Coordination in memory, for property tests; `durable` keeps it for a table in one process.

Several sessions share one `MemoryCoordination`; its clock moves only when it is told to.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from foundation.errors import SessionLost
from locks.store.base import (
    ANY_VERSION,
    Check,
    Conflict,
    Create,
    Delete,
    Node,
    Operation,
    Write,
    check_size,
)


@dataclass(frozen=True)
class Stored:
    """A node as it is kept; with a session, it is ephemeral."""

    data: bytes
    version: int
    modified_ms: int
    session: int | None = None


class _Watch(NamedTuple):
    """Whom to call after a node has changed; `until_deleted`: and no more after it was deleted."""

    session: int
    path: str
    changed: Callable[[], None]
    until_deleted: bool


@dataclass
class MemoryCoordination:
    """The nodes that sessions share, and the clock."""

    clock_ms: int = 1_000_000
    nodes: dict[str, Stored] = field(default_factory=dict)
    watches: list["_Watch"] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    live_sessions: set[int] = field(default_factory=set)
    sessions: int = 0

    def connect(self) -> "MemoryStore":
        """Open a session."""
        with self.lock:
            self.sessions += 1
            self.live_sessions.add(self.sessions)
            return MemoryStore(self, self.sessions)

    def advance(self, milliseconds: int) -> None:
        """Move the clock; a step back is as possible as with a real one."""
        with self.lock:
            self.clock_ms += milliseconds

    def now_ms(self) -> int:
        """Return the time."""
        return self.clock_ms

    def refresh(self) -> None:
        """Look whether there is more to know: not here. Called while the lock is held."""

    def publish(self, nodes: dict[str, Stored]) -> bool:
        """Let all see what a transaction made of the nodes; called while the lock is held.

        False: it was not judged by what holds, and nothing was changed.
        """
        self.nodes = nodes
        return True

    def expire(self, session: int) -> None:
        """End a session, as ZooKeeper does with one that is not heard of."""
        with self.lock:
            self.live_sessions.discard(session)
            gone = [path for path, node in self.nodes.items() if node.session == session]
            self.nodes = {path: node for path, node in self.nodes.items() if path not in gone}
            self.watches = [watch for watch in self.watches if watch.session != session]
            watchers = self.watchers_of({*gone, *map(_parent, gone)})
        for changed in watchers:
            changed()

    def watchers_of(self, paths: set[str]) -> list[Callable[[], None]]:
        """Return whom to call after these nodes, or their lists of children, changed."""
        told = [watch.changed for watch in self.watches if watch.path in paths]
        self.watches = [
            watch for watch in self.watches if not watch.until_deleted or watch.path in self.nodes
        ]
        return told


class MemoryStore:
    """One session of a MemoryCoordination; a CoordinationStore."""

    def __init__(self, shared: MemoryCoordination, session: int) -> None:
        self._shared = shared
        self.session = session

    def read(self, path: str) -> Node | None:
        with self._shared.lock:
            self.check_session()
            node = self._shared.nodes.get(path)
            return None if node is None else Node(node.data, node.version, node.modified_ms)

    def read_many(self, paths: Sequence[str]) -> list[Node | None]:
        return [self.read(path) for path in paths]

    def children(self, path: str) -> list[str]:
        with self._shared.lock:
            self.check_session()
            return _children(self._shared.nodes, path)

    def sync(self) -> None:
        with self._shared.lock:
            self.check_session()
            self._shared.refresh()

    def transact(self, operations: Sequence[Operation]) -> None:
        check_size(operations)
        shared = self._shared
        with shared.lock:
            self.check_session()
            after = dict(shared.nodes)
            for operation in operations:
                self._apply(operation, after)
            if not shared.publish(after):
                raise Conflict(operations[0].path)
            watchers = shared.watchers_of(set(_touched(operations)))
        for changed in watchers:
            changed()

    def _apply(self, operation: Operation, nodes: dict[str, Stored]) -> None:
        now = self._shared.now_ms()
        path = operation.path
        node = nodes.get(path)
        if isinstance(operation, Create):
            if node is not None or not _takes_children(nodes, _parent(path)):
                raise Conflict(path)
            session = self.session if operation.ephemeral else None
            nodes[path] = Stored(operation.data, 0, now, session)
            return
        if node is None or operation.version not in (ANY_VERSION, node.version):
            raise Conflict(path)
        if isinstance(operation, Write):
            nodes[path] = Stored(operation.data, node.version + 1, now, node.session)
        elif isinstance(operation, Delete):
            if _children(nodes, path):
                raise Conflict(path)
            del nodes[path]

    def now_ms(self) -> int:
        with self._shared.lock:
            self.check_session()
            return self._shared.now_ms()

    def watch(self, path: str, changed: Callable[[], None], *, until_deleted: bool = False) -> None:
        with self._shared.lock:
            self.check_session()
            if not until_deleted or path in self._shared.nodes:
                watch = _Watch(self.session, path, changed, until_deleted)
                self._shared.watches.append(watch)
        changed()

    def close(self) -> None:
        self._shared.expire(self.session)

    def check_session(self) -> None:
        """Raise SessionLost if the session is gone."""
        if self.session not in self._shared.live_sessions:
            raise SessionLost(f"session {self.session} is gone; connect again")


def _children(nodes: Mapping[str, Stored], path: str) -> list[str]:
    prefix = path.rstrip("/") + "/"
    below = [p.removeprefix(prefix) for p in nodes if p.startswith(prefix)]
    return sorted(name for name in below if "/" not in name)


def _takes_children(nodes: Mapping[str, Stored], path: str) -> bool:
    node = nodes.get(path)
    return path == "" or (node is not None and node.session is None)


def _touched(operations: Iterable[Operation]) -> Iterator[str]:
    """Return the nodes that changed: a parent does when a child comes or goes, not by a write."""
    for operation in operations:
        if not isinstance(operation, Check):
            yield operation.path
        if isinstance(operation, Create | Delete):
            yield _parent(operation.path)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
