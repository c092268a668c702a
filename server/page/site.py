"""The status page by HTTP: `/`, what it is made of, `/metrics`, `/healthz` and `/readyz`.

The page needs nothing but itself, and asks nobody else. Only whether this process is there and
ready is told without the token.
"""

import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from foundation.errors import TallybookError
from server.client.cluster import Cluster
from server.page.cluster_metrics import cluster_metrics
from server.page.questions import row_of
from server.page.watcher import LOOK_S, Watcher
from server.protocol.http_endpoint import HttpAnswer, HttpEndpoint
from server.tablet.metrics_endpoint import metrics_answer

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


class StatusPage(HttpEndpoint):
    """Serves the page until closed. `connect`: to the cluster, once somebody looks.

    `unready`: tells why this process is not ready, if it is not; unless given, it is ready while it
    can ask the cluster. `/metrics` and `/readyz` answer within three seconds of what is known.
    """

    def __init__(
        self,
        connect: Callable[[], Cluster],
        *,
        host: str,
        port: int,
        token: str | None = None,
        tls: tuple[Path, Path] | None = None,
        unready: Callable[[], str | None] | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        self._watcher = Watcher(connect, look_s=look_s)
        self._unready = unready or (lambda: self._watcher.now().get("error"))
        self._scheme = "http" if tls is None else "https"
        page = files("server.page").joinpath("page.html").read_bytes()
        routes = {
            "/": lambda _: HttpAnswer(
                body=page,
                content_type="text/html; charset=utf-8",
                headers={"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"},
            ),
            "/overview.json": lambda _: _json(self._watcher.seen()),
            "/row.json": self._row,
            "/metrics": lambda _: metrics_answer(cluster_metrics(self._watcher.now())),
            "/healthz": lambda _: HttpAnswer(body=b"ok\n"),
            "/readyz": self._ready,
        }
        super().__init__(
            routes,
            host=host,
            port=port,
            token=token,
            tls=tls,
            open_to_all=("/healthz", "/readyz"),
        )

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        return f"{self._scheme}://{self.address}/"

    def close(self) -> None:
        """Stop answering."""
        super().close()
        self._watcher.close()

    def _row(self, asked: Mapping[str, str]) -> HttpAnswer:
        try:
            return _json(row_of(self._watcher.cluster(), asked))
        except TallybookError as exc:
            return _json({"error": str(exc)}, status=400)

    def _ready(self, _: Mapping[str, str]) -> HttpAnswer:
        why = self._unready()
        if why is None:
            return HttpAnswer(body=b"ready\n")
        return HttpAnswer(body=f"not ready: {why}\n".encode(), status=503)


def _json(value: Any, *, status: int = 200) -> HttpAnswer:
    body = json.dumps(value, separators=(",", ":")).encode()
    return HttpAnswer(body=body, content_type="application/json", status=status)
