"""The live tablet servers, in ZooKeeper, and which of them stand aside.

A server that stands aside is to lead nothing: it is leaving, or cannot do what a leader has to. It
serves what it has until another asks for it. That is said by a node of its own, beside the
server's, so that releases which know nothing of it read the latter as ever.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foundation.errors import SessionLost
from locks.encoding.framing import frame_text, read_text
from locks.store.base import Check, Conflict, CoordinationStore, Create, Delete
from locks.store.paths import ASIDE, SERVERS, aside_path, server_path
from locks.store.retrying import retried

LEAVING = "it is leaving"


@dataclass(frozen=True, kw_only=True)
class Server:
    """A live tablet server: the name of its session, new with every session, and its address."""

    name: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Members:
    """The live servers; `aside`: why one is to lead nothing, by the name of its session."""

    live: Sequence[Server]
    aside: Mapping[str, str] = field(default_factory=dict)

    @property
    def able(self) -> list[Server]:
        """Those that do not stand aside."""
        return [server for server in self.live if server.name not in self.aside]

    @property
    def candidates(self) -> list[Server]:
        """Those among whom buckets are placed: if all stand aside, there is nobody better."""
        return self.able or list(self.live)

    def named(self, name: str) -> Server | None:
        """Return the live server of this session."""
        return next((server for server in self.live if server.name == name), None)


class Servers:
    """Announces and lists live tablet servers. Safe for threads."""

    def __init__(self, store: CoordinationStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s
        # What a session's node says never changes, so it is read once, however many look.
        self._addresses: dict[str, str] = {}

    def register(self, address: str) -> Server:
        """Announce a live tablet server, for as long as the store's session lasts."""
        server = Server(name=uuid.uuid4().hex, address=address)
        path = server_path(server.name)

        def attempt() -> Server:
            if self._store.read(path) is None:
                self._store.transact([Create(path, frame_text(address), ephemeral=True)])
            return server

        return retried(self._store, self._deadline_s, attempt)

    def stand_aside(self, server: Server, why: str) -> None:
        """Say that a server is to lead nothing, until it comes back or its session ends.

        For the server of this session. Saying it again changes nothing, not even why.
        """
        path = aside_path(server.name)
        registered = Check(server_path(server.name))

        def attempt() -> None:
            if self._store.read(path) is not None:
                return
            try:
                self._store.transact([registered, Create(path, frame_text(why), ephemeral=True)])
            except Conflict as exc:
                if exc.path == registered.path:
                    raise SessionLost(f"session {server.name} is gone; join again") from exc
                raise

        retried(self._store, self._deadline_s, attempt)

    def come_back(self, server: Server) -> None:
        """Say that a server leads again what it should."""
        path = aside_path(server.name)

        def attempt() -> None:
            self._store.sync()
            if self._store.read(path) is not None:
                self._store.transact([Delete(path)])

        retried(self._store, self._deadline_s, attempt)

    def all(self) -> list[Server]:
        """Return the live tablet servers, by the names of their sessions."""
        self._store.sync()
        names, known = self._store.children(SERVERS), self._addresses
        found = self._texts([server_path(name) for name in names if name not in known])
        met = {_name(path): address for path, address in found.items()}
        known = {name: at for name in names if (at := known.get(name) or met.get(name))}
        self._addresses = known
        return [Server(name=name, address=address) for name, address in known.items()]

    def members(self) -> Members:
        """Return the live tablet servers, and which of them stand aside."""
        live = self.all()
        aside = self._texts([aside_path(name) for name in self._store.children(ASIDE)])
        return Members(live=live, aside={_name(path): why for path, why in aside.items()})

    def _texts(self, paths: Sequence[str]) -> dict[str, str]:
        nodes = self._store.read_many(paths)
        return {
            path: read_text(path, node.data)
            for path, node in zip(paths, nodes, strict=True)
            if node is not None
        }


def _name(path: str) -> str:
    return path.rpartition("/")[2]
