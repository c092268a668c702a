"""A coordination store that counts what is asked of it, and what it tells."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from locks.store.base import CoordinationStore, Node, Operation


@dataclass(frozen=True)
class Counts:
    """What a session has asked for: nodes read, nodes listed, bytes of both; and what it was told.

    Each event is answered with two more requests, which set the watch again (`locks.store.watch`);
    these are not counted.
    """

    reads: int = 0
    listings: int = 0
    bytes: int = 0
    syncs: int = 0
    transactions: int = 0
    events: int = 0

    @property
    def requests(self) -> int:
        """All that ZooKeeper has answered, but for syncs: a heartbeat sends those at all times."""
        return self.reads + self.listings + self.transactions

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(self)))


class CountingStore:
    """Passes all on to a store; a CoordinationStore. Safe for threads."""

    def __init__(self, store: CoordinationStore) -> None:
        self._store = store
        self._mutex = threading.Lock()
        self._counts = Counts()

    @property
    def counts(self) -> Counts:
        """What was counted so far."""
        return self._counts

    def _add(self, counts: Counts) -> None:
        with self._mutex:
            self._counts += counts

    def read(self, path: str) -> Node | None:
        return self.read_many([path])[0]

    def read_many(self, paths: Sequence[str]) -> list[Node | None]:
        nodes = self._store.read_many(paths)
        size = sum(len(node.data) for node in nodes if node is not None)
        self._add(Counts(reads=len(paths), bytes=size))
        return nodes

    def children(self, path: str) -> list[str]:
        names = self._store.children(path)
        self._add(Counts(listings=1, bytes=sum(map(len, names))))
        return names

    def sync(self) -> None:
        self._store.sync()
        self._add(Counts(syncs=1))

    def transact(self, operations: Sequence[Operation]) -> None:
        self._add(Counts(transactions=1))
        self._store.transact(operations)

    def now_ms(self) -> int:
        return self._store.now_ms()

    def watch(self, path: str, changed: Callable[[], None], *, until_deleted: bool = False) -> None:
        def told() -> None:
            self._add(Counts(events=1))
            changed()

        self._store.watch(path, told, until_deleted=until_deleted)

    def check_session(self) -> None:
        self._store.check_session()

    def close(self) -> None:
        self._store.close()
