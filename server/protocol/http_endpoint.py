"""Answers by HTTP, for people and for Prometheus: few, read-only, each a function of the query.

Whoever asks is let in as other callers are: with the server's token, if there is one, as a bearer
token or as the password of a browser, and by https where there is TLS.
"""

import base64
import binascii
import ssl
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeAlias
from urllib.parse import parse_qsl, urlsplit

from foundation.errors import InvalidInput
from server.protocol.security import is_token

_READ_DEADLINE_S = 10.0
_LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True, kw_only=True)
class HttpAnswer:
    """What is sent: a body of some type."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] | None = None


Route: TypeAlias = Callable[[Mapping[str, str]], HttpAnswer]
"""Answers a request; gets the query, whose names are there once each."""


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

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
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            # Whoever connects and says nothing is not waited for.
            timeout = _READ_DEADLINE_S

            def do_GET(self) -> None:
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
                self.end_headers()
                self.wfile.write(answer.body)

            def log_message(self, *_: object) -> None:
                """Questions are not worth a line each."""

        try:
            self._server = _QuietServer((host, port), Handler)
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
