"""Which server leads which bucket: who should, and who does.

Who should is a function of the live servers (`place`). Who does is an ephemeral node per
bucket with the session name of its leader. It goes with the session, as the server's own node does,
so a bucket leaves a live session only when that gives it up.

Every change checks the server's own node in the same transaction. When a session is lost, what was
under way may be sent in the next one, where a lead would outlive its server, and where what was
found to be ours may have become another's.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence

from foundation.errors import CorruptRecord, SessionLost
from foundation.ids import BucketId, LeadKey
from locks.cluster.servers import Server
from locks.encoding.framing import frame_text, read_text
from locks.store.base import Check, Conflict, CoordinationStore, Create, Delete
from locks.store.paths import LEADERS, leader_path, server_path
from locks.store.retrying import retried

AT_ONCE = 200


class _Contended(Exception):
    """Others take some of the same buckets, at the same time."""


class Leaders:
    """Takes and gives up leads, and tells who has them. Safe for threads."""

    def __init__(self, store: CoordinationStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s
        # Two nodes of one path cannot be told apart by version: what is found to be ours must
        # still be ours when it is deleted, and only this process can give it up in between.
        self._changing = threading.Lock()

    def take(self, server: Server, keys: Sequence[LeadKey]) -> list[LeadKey]:
        """Return those of the buckets that the server leads from now on, or did before.

        Never one that another session has. For the server of this session, while that lasts:
        SessionLost if it is not registered. After any other error it may lead some: take them
        again, or give them up.
        """
        with self._changing:
            return [key for some in _parts(keys) for key in self._take(server, some)]

    def give_up(self, server: Server, keys: Sequence[LeadKey]) -> None:
        """Give up those of the buckets that the server leads; the others are left alone."""
        with self._changing:
            for some in _parts(keys):
                self._give_up(server, some)

    def leader_of(self, key: LeadKey) -> str | None:
        """Return the session name of the leader, from a plain read that may be out of date."""
        return self._holders([key]).get(key)

    def leader_now(self, key: LeadKey) -> str | None:
        """Return the session name of the leader, as it is at some moment since the call began."""
        self._store.sync()
        return self.leader_of(key)

    def holders(self, keys: Sequence[LeadKey]) -> dict[LeadKey, str]:
        """Return the session names of those of the buckets that have a leader; as `leader_of`."""
        return self._holders(keys)

    def all(self) -> dict[LeadKey, str]:
        """Return the session names of all leaders, as they are now."""
        self._store.sync()
        return self._holders(list(map(_parse, self._store.children(LEADERS))))

    def _take(self, server: Server, keys: Sequence[LeadKey]) -> list[LeadKey]:
        """Take them in one transaction or, if others want them too, in smaller ones.

        A transaction fails as a whole. Many servers that want what many others want would fail
        for each other, all the time; of two halves, one mostly succeeds, and a single one always
        comes to an end.
        """
        try:
            return self._take_at_once(server, keys)
        except _Contended:
            half = len(keys) // 2
            return [*self._take(server, keys[:half]), *self._take(server, keys[half:])]

    def _take_at_once(self, server: Server, keys: Sequence[LeadKey]) -> list[LeadKey]:
        session, name = server_path(server.name), frame_text(server.name)
        # At first it is supposed that nobody leads any of them: mostly so, and one request.
        attempts = 0

        def attempt() -> list[LeadKey]:
            nonlocal attempts
            attempts += 1
            holders = {} if attempts == 1 else self._holders(keys)
            free = [key for key in keys if key not in holders]
            if free:
                creations = [Create(_path(key), name, ephemeral=True) for key in free]
                try:
                    self._store.transact([Check(session), *creations])
                except Conflict as exc:
                    if exc.path == session:
                        raise SessionLost(
                            f"server {server.address} is not registered, or its session "
                            f"{server.name} is gone; connect and register again"
                        ) from exc
                    if attempts > 1 and len(keys) > 1:
                        raise _Contended from exc
                    raise
            return [key for key in keys if holders.get(key, server.name) == server.name]

        return retried(self._store, self._deadline_s, attempt)

    def _give_up(self, server: Server, keys: Sequence[LeadKey]) -> None:
        def attempt() -> None:
            self._store.sync()
            ours = [key for key, name in self._holders(keys).items() if name == server.name]
            if ours:
                deletions = [Delete(_path(key)) for key in ours]
                self._store.transact([Check(server_path(server.name)), *deletions])

        retried(self._store, self._deadline_s, attempt)

    def _holders(self, keys: Sequence[LeadKey]) -> dict[LeadKey, str]:
        if len(keys) > AT_ONCE:  # Most may be free, of a cluster that starts: one listing says so.
            led = set(self._store.children(LEADERS))
            keys = [key for key in keys if key.node_name in led]
        nodes = self._store.read_many([_path(key) for key in keys])
        return {
            key: read_text(_path(key), node.data)
            for key, node in zip(keys, nodes, strict=True)
            if node is not None
        }


def _path(key: LeadKey) -> str:
    """Return where the leader of a bucket is recorded."""
    return leader_path(key.node_name)


def _parse(name: str) -> LeadKey:
    """Return the bucket of a leader's node; CorruptRecord if that is something else."""
    try:
        table_id, partition, number = map(int, name.split("-"))
    except ValueError as exc:
        raise CorruptRecord(f"{leader_path(name)} is the leader of no bucket") from exc
    return LeadKey(table_id, BucketId(partition, number))


def _parts(keys: Iterable[LeadKey]) -> Iterator[list[LeadKey]]:
    """Return the keys, each once, in parts of a transaction's size."""
    distinct = list(dict.fromkeys(keys))
    for first in range(0, len(distinct), AT_ONCE):
        yield distinct[first : first + AT_ONCE]
