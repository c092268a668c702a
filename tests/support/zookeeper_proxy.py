"""A proxy before a real ZooKeeper that loses requests and answers, or cuts a client off.

Or keeps everything back, as a network does that loses packets: nobody is told that it is broken.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from locks.store.embedded_zookeeper import EmbeddedZooKeeper

MULTI = 14  # ZooKeeper's request type of a transaction.


class Proxy:
    """Passes a client's requests to the server one by one, and loses what it is told to lose."""

    def __init__(self, zookeeper: EmbeddedZooKeeper) -> None:
        self._server = ("127.0.0.1", int(zookeeper.address.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._mutex = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._accepting = True
        self._ignoring = 0
        self._ignored: list[socket.socket] = []
        self._passing = threading.Event()
        self._passing.set()
        self._losses: list[str] = []
        self.lost: list[str] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def lose(self, *losses: str) -> None:
        """Cut the connection at the next transactions: their "request" or their "answer"."""
        self._losses = list(losses)
        self.lost = []

    def refuse(self) -> None:
        """Cut all connections, and let nobody through."""
        self._accepting = False
        self._cut()

    def ignore_next(self, clients: int) -> None:
        """Cut all connections, and say nothing to the next clients that come."""
        self._ignoring = clients
        self._cut()

    def hold(self) -> None:
        """Pass nothing on, in either direction, and leave all connections as they are."""
        self._passing.clear()

    def pass_on(self) -> None:
        """Pass on what was held back, and what comes."""
        self._passing.set()

    def accept(self) -> None:
        """Let clients through again."""
        self._accepting = True

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._passing.set()
        self._cut()
        for thread in self._threads:
            thread.join()
        for client in self._ignored:
            client.close()

    def _cut(self) -> None:
        with self._mutex:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self._accepting:
                client.close()
                continue
            if self._ignoring:
                self._ignoring -= 1
                self._ignored.append(client)
                continue
            server = socket.create_connection(self._server)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._mutex:
                self._connections |= {client, server}
            losing = threading.Event()
            for pass_on, source, target in (
                (self._pass_requests, client, server),
                (self._pass_answers, server, client),
            ):
                thread = threading.Thread(target=pass_on, args=(source, target, losing))
                self._threads.append(thread)
                thread.start()

    def _pass_requests(
        self, client: socket.socket, server: socket.socket, losing: threading.Event
    ) -> None:
        first = True
        with self._closing(client, server):
            while frame := _frame(client):
                self._passing.wait()
                is_transaction = not first and int.from_bytes(frame[8:12], "big") == MULTI
                first = False
                if not is_transaction or not self._losses:
                    server.sendall(frame)
                    continue
                self.lost.append(self._losses.pop(0))
                if self.lost[-1] == "request":
                    return
                losing.set()  # From here on answers are lost; the server's comes, then we cut.
                server.sendall(frame)

    def _pass_answers(
        self, server: socket.socket, client: socket.socket, losing: threading.Event
    ) -> None:
        with self._closing(client, server):
            while frame := _frame(server):
                self._passing.wait()
                if losing.is_set():
                    return
                client.sendall(frame)

    @contextmanager
    def _closing(self, client: socket.socket, server: socket.socket) -> Iterator[None]:
        try:
            yield
        except OSError:
            pass
        finally:
            with self._mutex:
                for end in (client, server):
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
            client.close()
            server.close()


def _frame(source: socket.socket) -> bytes:
    """Read a message with its length, or nothing at the end."""
    head = _exactly(source, 4)
    return head and head + _exactly(source, int.from_bytes(head, "big"))


def _exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = source.recv(size - len(data))
        if not more:
            return b""
        data += more
    return data
