"""A proxy before a tablet server that cuts connections after so many bytes of answers.

Or makes the way long: answers arrive a while after they were sent.
"""

import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from server.client.connections import Connections


class FlightProxy:
    """Passes bytes on; each of `cuts` ends all connections when so many more came back.

    `delay_s`: how much later than usual answers arrive.
    """

    def __init__(self, address: str, *, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._mutex = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._left: list[int] = []
        self.cuts = 0
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def cut_after(self, *sizes: int) -> None:
        """Cut when so many bytes were passed, and again when so many more were."""
        with self._mutex:
            self._left, self.cuts = list(sizes), 0

    def cut(self) -> None:
        """End all connections now."""
        with self._mutex:
            self._cut()

    def __enter__(self) -> "FlightProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()

    def _cut(self) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server)
            except OSError:
                client.close()
                continue
            with self._mutex:
                self._connections |= {client, server}
            for source, target, counted in ((client, server, False), (server, client, True)):
                thread = threading.Thread(target=self._pass, args=(source, target, counted))
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if counted:
                    time.sleep(self._delay_s)
                passed = self._count(data) if counted else data
                target.sendall(passed)
                if len(passed) < len(data):
                    self.cut()
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()

    def _count(self, data: bytes) -> bytes:
        """Return what is passed of it: less, if the connections are to be cut there."""
        with self._mutex:
            if not self._left:
                return data
            if self._left[0] >= len(data):
                self._left[0] -= len(data)
                return data
            self.cuts += 1
            return data[: self._left.pop(0)]


def lead_through(monkeypatch: pytest.MonkeyPatch, server: str, proxy: FlightProxy) -> None:
    """Let all clients that connect from now on reach this server by the proxy."""
    connect = Connections._connect

    def by_proxy(self: Connections, address: str) -> Any:
        return connect(self, proxy.address if address == server else address)

    monkeypatch.setattr(Connections, "_connect", by_proxy)
