"""Answers by HTTP, for people and for Prometheus: few, read-only, each a function of the query.

Whoever asks is let in as other callers are: with the server's token, if there is one, as a bearer
token or as the password of a browser, and by https where there is TLS.

Each connection has a thread, for one question. Both are bounded, as everybody who reaches the port
may connect: there are so many connections, and each has so long to ask, and to take its answer.
Where there are too many, the one that has said nothing for the longest time makes room.
"""

import base64
import binascii
import io
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from foundation.errors import InvalidInput
from server.protocol.security import is_token

_SENT_AT_ONCE = 65_536
_LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    """What is sent: a body of some type."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """What strangers can have: everybody who reaches the port may connect.

    `ask_s`: how long a question may take to come, from the connection on; `answer_s`: an answer, on
    its way; `question_bytes`: of the question with all its headers.
    """

    connections: int = 64
    ask_s: float = 10.0
    answer_s: float = 30.0
    question_bytes: int = 65_536


_LIMITS = HttpLimits()
Route: TypeAlias = Callable[[Mapping[str, str]], HttpAnswer]
"""Answers a request; gets the query, whose names are there once each."""


class _TimedReader(io.RawIOBase):
    """Reads so much from a connection, until a deadline, however little comes at a time."""

    def __init__(self, connection: socket.socket, deadline: float, most_bytes: int) -> None:
        super().__init__()
        self._connection = connection
        self._deadline = deadline
        self._left = most_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if self._left <= 0:
            raise ConnectionAbortedError("the question is too long")
        _limit(self._connection, self._deadline)
        count = self._connection.recv_into(buffer, min(len(buffer), self._left))
        self._left -= count
        return count


def _limit(connection: socket.socket, deadline: float) -> None:
    """Let the next step of a connection take until the deadline; TimeoutError if that is over."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    connection.settimeout(left_s)


class _BoundedServer(ThreadingHTTPServer):
    """Answers each connection on a thread of its own, within limits."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, where: tuple[str, int], handler: Any, limits: HttpLimits) -> None:
        self.limits = limits
        self._bound = threading.RLock()
        # In the order in which they came, and whether their question is still awaited.
        self._open: dict[Any, bool] = {}
        super().__init__(where, handler)

    @property
    def connections(self) -> int:
        """How many there are."""
        with self._bound:
            return len(self._open)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a connection; where there are too many, end the one that is silent for longest."""
        with self._bound:
            if len(self._open) >= self.limits.connections:
                silent = next((one for one, awaited in self._open.items() if awaited), None)
                if silent is None:  # All are being answered, which has its own deadline.
                    self.shutdown_request(request)
                    return
                del self._open[silent]
                with suppress(OSError):  # Its thread finds out, and ends.
                    socket.socket.shutdown(silent, socket.SHUT_RDWR)
            self._open[request] = True
        super().process_request(request, client_address)

    def has_asked(self, request: Any) -> None:
        """Take note that the question of a connection is there, and is being answered."""
        with self._bound:
            if request in self._open:
                self._open[request] = False

    def shutdown_request(self, request: Any) -> None:
        """End a connection, as this class is told to by the one above."""
        with self._bound:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        """Say nothing: a connection that breaks is no news, and the log is JSON."""


class HttpEndpoint:
    """Answers on a thread of its own until closed. `tls`: certificate and key.

    `routes` by path. `open_to_all`: the paths that need no token.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        *,
        host: str,
        port: int,
        token: str | None = None,
        tls: tuple[Path, Path] | None = None,
        open_to_all: Collection[str] = (),
        limits: HttpLimits = _LIMITS,
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            server: _BoundedServer

            def setup(self) -> None:
                super().setup()
                deadline = time.monotonic() + self.server.limits.ask_s
                most = self.server.limits.question_bytes
                self.rfile = io.BufferedReader(_TimedReader(self.connection, deadline, most))

            def do_GET(self) -> None:
                self.server.has_asked(self.request)
                asked = urlsplit(self.path)
                route = routes.get(asked.path)
                if not self._may_ask(asked.path):
                    return
                if route is None:
                    self._send(
                        HttpAnswer(
                            body=f"there is {_listed(routes)}, and no {asked.path}\n".encode(),
                            status=404,
                        )
                    )
                    return
                self._send(route(dict(parse_qsl(asked.query, keep_blank_values=True))))

            def _may_ask(self, path: str) -> bool:
                if path in open_to_all:
                    return True
                if token is None:
                    return self._is_asked_by_its_name()
                if _has_token(self.headers.get("Authorization", ""), token):
                    return True
                self._send(
                    HttpAnswer(
                        body=b"this wants the server's token, as a bearer token or as the "
                        b"password of any user\n",
                        status=401,
                        headers={"WWW-Authenticate": 'Basic realm="tallybook", charset="UTF-8"'},
                    )
                )
                return False

            def _is_asked_by_its_name(self) -> bool:
                """Without a token, a page of somebody else could ask by a name that leads here."""
                name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host")
                if name in (None, host, *_LOOPBACK):
                    return True
                self._send(HttpAnswer(body=b"there is no such host here\n", status=421))
                return False

            def _send(self, answer: HttpAnswer) -> None:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.content_type)
                self.send_header("Content-Length", str(len(answer.body)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                for name, value in (answer.headers or {}).items():
                    self.send_header(name, value)
                deadline = time.monotonic() + self.server.limits.answer_s
                _limit(self.connection, deadline)
                self.end_headers()
                # TLS begins its time anew with each step, so none is large.
                for start in range(0, len(answer.body), _SENT_AT_ONCE):
                    _limit(self.connection, deadline)
                    self.wfile.write(answer.body[start : start + _SENT_AT_ONCE])

            def log_message(self, *_: object) -> None:
                """Questions are not worth a line each."""

        try:
            self._server = _BoundedServer((host, port), Handler, limits)
        except OSError as exc:
            raise InvalidInput(
                f"nothing can listen on {host}:{port}: {exc.strerror}. Choose another port, or end "
                "what has this one"
            ) from exc
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            # The handshake is left to the caller's own thread: here it would hold up everybody.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._host = host
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{self._host}:{self._server.server_address[1]}"

    @property
    def connections(self) -> int:
        """How many connections there are, each with a thread."""
        return self._server.connections

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


def _has_token(header: str, token: str) -> bool:
    """Whether the header has the token: as it is, or as the password that a browser asked for."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return is_token(header, token)
    try:
        _, _, password = base64.b64decode(value, validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return False
    return is_token(b"Bearer " + password, token)


def _listed(routes: Mapping[str, Route]) -> str:
    return ", ".join(sorted(routes))
