"""Prometheus' text format over HTTP: GET /metrics."""

from collections.abc import Mapping
from pathlib import Path

from server.protocol.http_endpoint import HttpAnswer, HttpEndpoint
from server.tablet.metrics import Metrics


class MetricsEndpoint(HttpEndpoint):
    """Says what the metrics are. `token`, `tls`: as the server has them."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        host: str,
        port: int,
        token: str | None = None,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        def answer(_: Mapping[str, str]) -> HttpAnswer:
            return metrics_answer(metrics)

        super().__init__({"/metrics": answer}, host=host, port=port, token=token, tls=tls)


def metrics_answer(metrics: Metrics) -> HttpAnswer:
    """Return the metrics as Prometheus reads them."""
    return HttpAnswer(
        body=metrics.to_prometheus().encode(),
        content_type="text/plain; version=0.0.4; charset=utf-8",
    )
