"""Watches that last, on ZooKeeper's, which tell once and are lost with the connection.

kazoo's own lasting watches read the node again by themselves, with blocking calls and retries
without end, on a new thread for each of them after every reconnect. Ours send two requests and wait
for nothing: the requests of a client are served in order, so what its user reads afterwards is
watched already.
"""

from collections.abc import Callable
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError
from kazoo.protocol.states import EventType, WatchedEvent


class Watch:
    """Tells of every change of a node, or of its children, for as long as the session lasts.

    `over`: called when the node was deleted, which ends the watch; None: it goes on, and tells when
    the node is made again. Nobody could take such a watch back: kazoo keeps it, and so does
    ZooKeeper, until the session ends.
    """

    def __init__(
        self,
        client: KazooClient,
        path: str,
        changed: Callable[[], None],
        over: Callable[["Watch"], None] | None = None,
    ) -> None:
        self._client = client
        self._path = path
        self._changed = changed
        self._over = over

    def arm(self) -> None:
        """Ask to be told of the next change, and tell that there may have been one before."""
        # The same callback twice is one watch. Without the node there are no children to watch:
        # that request fails, nobody minds, and both are sent again when the node is created.
        if self._over is None:
            self._client.exists_async(self._path, watch=self._on_event)
        else:  # This fails without the node, and then watches nothing.
            found = self._client.get_async(self._path, watch=self._on_event)
            found.rawlink(self._on_found)
        self._client.get_children_async(self._path, watch=self._on_event)
        self._changed()

    def _on_event(self, event: WatchedEvent) -> None:
        if event.type == EventType.DELETED and self._over is not None:
            self._over(self)
            self._changed()
        # NONE: the connection is lost, and with it the watch. The store arms it when it is back.
        elif event.type != EventType.NONE:
            self.arm()

    def _on_found(self, answer: Any) -> None:
        """The node may have been deleted while nobody watched."""
        if self._over is not None and isinstance(answer.exception, NoNodeError):
            self._over(self)
