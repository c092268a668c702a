"""Watches that last, on ZooKeeper's, which tell once and are lost with the connection.

kazoo's own lasting watches read the node again by themselves, with blocking calls and retries
without end, on a new thread for each of them after every reconnect. Ours send two requests and wait
for nothing: the requests of a client are served in order, so what its user reads afterwards is
watched already.
"""

from collections.abc import Callable

from kazoo.client import KazooClient
from kazoo.protocol.states import EventType, WatchedEvent


class Watch:
    """Tells of every change of a node, or of its children, for as long as the session lasts."""

    def __init__(self, client: KazooClient, path: str, changed: Callable[[], None]) -> None:
        self._client = client
        self._path = path
        self._changed = changed

    def arm(self) -> None:
        """Ask to be told of the next change, and tell that there may have been one before."""
        # The same callback twice is one watch. Without the node there are no children to watch:
        # that request fails, nobody minds, and both are sent again when the node is created.
        self._client.exists_async(self._path, watch=self._on_event)
        self._client.get_children_async(self._path, watch=self._on_event)
        self._changed()

    def _on_event(self, event: WatchedEvent) -> None:
        # NONE: the connection is lost, and with it the watch. The store arms it when it is back.
        if event.type != EventType.NONE:
            self.arm()
