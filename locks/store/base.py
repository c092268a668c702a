"""The boundary to ZooKeeper: a few calls, with an in-memory implementation beside the real one.

Nodes have data, a version that rises with every write, and the time of the last write by the
*store's* clock, the only one that anybody judges expiry by. Every change is one transaction of
conditional operations that takes effect whole or not at all.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from foundation.errors import CorruptRecord, RecordTooLarge

ANY_VERSION = -1
MAX_TRANSACTION_BYTES = 900_000
DELETED_AT_ONCE = 200


class Node(NamedTuple):
    """A node as it was read."""

    data: bytes
    version: int
    modified_ms: int


class Create(NamedTuple):
    """Create a node; fails if there is one, or if its parent is missing or ephemeral.

    An ephemeral one goes with this store's session.
    """

    path: str
    data: bytes
    ephemeral: bool = False


class Write(NamedTuple):
    """Replace a node's data; fails if it is not there or of another version."""

    path: str
    data: bytes
    version: int


class Delete(NamedTuple):
    """Delete a node without children; fails if it is not there or of another version."""

    path: str
    version: int = ANY_VERSION


class Check(NamedTuple):
    """Fail unless the node is there and of this version."""

    path: str
    version: int = ANY_VERSION


Operation = Create | Write | Delete | Check


class Conflict(Exception):
    """A condition of a transaction did not hold; nothing was changed. `path` is the node's.

    It is the first operation's, in their order, whose condition did not hold.
    """

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} is not as it was")
        self.path = path


class CoordinationStore(Protocol):
    """What the coordinator needs. All calls are safe from several threads.

    While the connection is down, calls wait within their deadline and then raise Unavailable; when
    the session is gone, every call raises SessionLost, for good.
    """

    def read(self, path: str) -> Node | None:
        """Return the node, or None. May be older than other clients' writes: see `sync`."""

    def read_many(self, paths: Sequence[str]) -> list[Node | None]:
        """Return each node as `read` does; asked for together, they cost little more than one.

        Not as of one moment, and in no order of time.
        """

    def children(self, path: str) -> list[str]:
        """Return the names of the node's children, sorted; none if it does not exist."""

    def sync(self) -> None:
        """From here on, reads see all that was written before this call, by anybody.

        And all that this store has sent before: after it, a write of unknown outcome has either
        taken effect or never will.
        """

    def transact(self, operations: Sequence[Operation]) -> None:
        """Carry all operations out, or none.

        Raises Conflict if a condition does not hold, UnknownOutcome if the answer was lost,
        RecordTooLarge before anything is sent.
        """

    def now_ms(self) -> int:
        """Return the store's clock, by writing to it. It may step back: it is somebody's clock."""

    def watch(self, path: str, changed: Callable[[], None], *, until_deleted: bool = False) -> None:
        """Call back, from some thread, after the node or its children may have changed.

        `until_deleted`: the node is there, and is never made anew once it was deleted. That is told
        as the last change, and the watch is over: it would be kept for ever otherwise.

        Called once at registration, then for every change or for several at once, and after a lost
        connection once it is back. What is read after a call back is watched: a later change is
        told again. Must not wait for anything. Nothing may rest on it but the wish to read again.
        """

    def check_session(self) -> None:
        """Raise SessionLost if the session is known to be gone. Nobody is asked."""

    def close(self) -> None:
        """End the session; its ephemeral nodes go."""


def check_size(operations: Sequence[Operation]) -> None:
    """Refuse a transaction that ZooKeeper would cut the connection for."""
    size = sum(len(one.data) for one in operations if isinstance(one, Create | Write))
    if size > MAX_TRANSACTION_BYTES:
        raise RecordTooLarge(
            f"a transaction of {size:,} bytes; ZooKeeper takes {MAX_TRANSACTION_BYTES:,}"
        )


def numbered_children(store: CoordinationStore, path: str) -> list[int]:
    """Return the children, whose names are ids, ascending; CorruptRecord if one is none."""
    names = store.children(path)
    for name in names:
        if not name.isdecimal():
            raise CorruptRecord(f"{path}/{name} is not a number; nobody but Tallybook writes there")
    return sorted(map(int, names))


def delete_all(store: CoordinationStore, paths: Sequence[str]) -> None:
    """Delete the nodes, some at a time; Conflict if one is gone already."""
    for first in range(0, len(paths), DELETED_AT_ONCE):
        store.transact([Delete(path) for path in paths[first : first + DELETED_AT_ONCE]])
