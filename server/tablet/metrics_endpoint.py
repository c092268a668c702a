"""Prometheus' text format over HTTP: GET /metrics.

It is let in as other callers are: with the server's token, if it has one, as a bearer token, and by
https if the server speaks TLS.
"""

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from server.protocol.security import is_token
from server.tablet.metrics import Metrics

_READ_DEADLINE_S = 10.0


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing: a connection that breaks is no news, and the log is JSON."""


class MetricsEndpoint:
    """Answers on a thread of its own until closed. `tls`: certificate and key."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        host: str,
        port: int,
        token: str | None = None,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            # Whoever connects and says nothing is not waited for.
            timeout = _READ_DEADLINE_S

            def do_GET(self) -> None:
                if token is not None and not is_token(self.headers.get("Authorization", ""), token):
                    self.send_error(401, "the metrics want the server's token as a bearer token")
                    return
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404, "the metrics are at /metrics")
                    return
                body = metrics.to_prometheus().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Scrapes are not worth a line each."""

        self._server = _QuietServer((host, port), Handler)
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
