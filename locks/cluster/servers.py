"""The live tablet servers, in ZooKeeper."""

import uuid
from dataclasses import dataclass

from locks.encoding.framing import frame_text, read_text
from locks.store.base import CoordinationStore, Create
from locks.store.paths import SERVERS, server_path
from locks.store.retrying import retried


@dataclass(frozen=True, kw_only=True)
class Server:
    """A live tablet server: the name of its session, new with every session, and its address."""

    name: str
    address: str


class Servers:
    """Announces and lists live tablet servers. Safe for threads."""

    def __init__(self, store: CoordinationStore, deadline_s: float) -> None:
        self._store = store
        self._deadline_s = deadline_s

    def register(self, address: str) -> Server:
        """Announce a live tablet server, for as long as the store's session lasts."""
        server = Server(name=uuid.uuid4().hex, address=address)
        path = server_path(server.name)

        def attempt() -> Server:
            if self._store.read(path) is None:
                self._store.transact([Create(path, frame_text(address), ephemeral=True)])
            return server

        return retried(self._store, self._deadline_s, attempt)

    def all(self) -> list[Server]:
        """Return the live tablet servers, by the names of their sessions."""
        self._store.sync()
        names = self._store.children(SERVERS)
        nodes = self._store.read_many(list(map(server_path, names)))
        return [
            Server(name=name, address=read_text(server_path(name), node.data))
            for name, node in zip(names, nodes, strict=True)
            if node is not None
        ]
