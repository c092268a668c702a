"""The page of a cluster, served from outside of its servers: by `tallybook page`, or a program."""

from collections.abc import Callable
from pathlib import Path

from foundation.errors import InvalidInput
from server.client.cluster import Cluster
from server.page.site import StatusPage

_LOOPBACK = ("127.0.0.1", "localhost")


def page_of_cluster(
    connect: Callable[[], Cluster],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    tls: tuple[Path, Path] | None = None,
) -> StatusPage:
    """Serve the page of a cluster until it is closed; `url` says where.

    `connect`: to the cluster, with all that this takes; called with the first look, and never if
    nobody looks. `/readyz` is 503 while the cluster cannot be asked. `token`: what the page wants
    from those who look, as a bearer token or as a password; the cluster's own is a good one.
    InvalidInput for a host other than the loopback address without one. `tls`: certificate, key.
    """
    if token is None and host not in _LOOPBACK:
        raise InvalidInput(
            f"a page at {host} is open to all who reach it: give it a token, or serve it at "
            f"{_LOOPBACK[0]}"
        )
    return StatusPage(connect, host=host, port=port, token=token, tls=tls)
