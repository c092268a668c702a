"""The live tablet servers, in ZooKeeper."""

import uuid
from dataclasses import dataclass

from locks.framing import frame_text, read_text
from locks.paths import SERVERS, server_path
from locks.retrying import retried
from locks.store import CoordinationStore, Create


@dataclass(frozen=True, kw_only=True)
class Server:
    """A live tablet server: the name of its session, new with every session, and its address."""

    name: str
    address: str


def register_server(store: CoordinationStore, deadline_s: float, address: str) -> Server:
    """Announce a live tablet server, for as long as the store's session lasts."""
    server = Server(name=uuid.uuid4().hex, address=address)
    path = server_path(server.name)

    def attempt() -> Server:
        if store.read(path) is None:
            store.transact([Create(path, frame_text(address), ephemeral=True)])
        return server

    return retried(store, deadline_s, attempt)


def list_servers(store: CoordinationStore) -> list[Server]:
    """Return the live tablet servers, by the names of their sessions."""
    store.sync()
    names = store.children(SERVERS)
    nodes = store.read_many(list(map(server_path, names)))
    return [
        Server(name=name, address=read_text(server_path(name), node.data))
        for name, node in zip(names, nodes, strict=True)
        if node is not None
    ]
