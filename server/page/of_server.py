"""The page of a tablet server: a client of the cluster like any other, in the same process."""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager

from server.client.cluster import Cluster, connect
from server.page.site import StatusPage
from server.tablet.config import ServerConfig
from server.tablet.tablet_server import TabletServer

logger = logging.getLogger(__name__)


@contextmanager
def page_of(
    server: TabletServer, config: ServerConfig, port: int | None
) -> Iterator[StatusPage | None]:
    """Show the page for the duration of the block, as the server is guarded; without a port, none.

    Port 0: any that is free.
    """
    if port is None:
        yield None
        return

    def connect_here() -> Cluster:
        tls = config.client_tls
        return connect(
            config.zookeeper,
            token=config.token,
            tls_root=None if tls is None else tls.root,
            tls_certificate=None if tls is None else tls.certificate,
            tls_key=None if tls is None else tls.key,
            credentials=config.credentials,
        )

    page = StatusPage(
        connect_here,
        host=config.host,
        port=port,
        token=config.token,
        tls=config.tls,
        unready=server.unready,
    )
    with closing(page):
        logger.info("the status page is at %s", page.url)
        yield page
