"""How a tablet server is set up."""

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundation.errors import InvalidInput
from merge_engine.bucket.options import BucketOptions
from server.protocol.security import ClientTls, check_token
from server.tablet.limits import Limits, ScannerLimits, SpoolLimits
from server.tablet.open_zookeeper import no_credentials
from server.tablet.steps import CALL_S

LOOPBACK = ("127.0.0.1", "localhost")
_OF_HOSTS = frozenset(string.ascii_letters + string.digits + ".-_")


@dataclass(frozen=True, kw_only=True)
class SnapshotConfig:
    """How often, how many, and how long the log is kept before them.

    The options of a server are --snapshot-interval, --snapshots-retained and --log-ttl.
    """

    interval_s: float = 600.0
    retained: int = 2
    log_ttl_s: float = 7 * 24 * 3600.0

    def __post_init__(self) -> None:
        if self.interval_s <= 0 or self.log_ttl_s < 0:
            raise InvalidInput(
                f"the time between snapshots ({self.interval_s:g} s) is positive, and the log's "
                f"time to live ({self.log_ttl_s:g} s) not negative"
            )
        if self.retained < 1:
            raise InvalidInput(f"at least 1 snapshot is kept per bucket, not {self.retained}")


@dataclass(frozen=True, kw_only=True)
class HandOverConfig:
    """How buckets move from one live server to another.

    `settle_s`: how long the set of servers has to stay the same before buckets are moved to even
    the load. `drain_s`: how long a server that stops waits for others to take its buckets over. The
    options of a server are --settle and --drain-deadline.
    """

    settle_s: float = 5.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        if self.settle_s < 0 or self.drain_s < 0:
            raise InvalidInput(
                f"neither the time in which servers settle ({self.settle_s:g} s) nor that in which "
                f"one hands over before it stops ({self.drain_s:g} s) can be negative"
            )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """`zookeeper`: host:port[,host:port...][/chroot]. `logs`: where all servers' logs go, a shared
    directory or a URL such as s3://bucket/path. `views`: this server's own directory, a cache.

    `host` is also what clients are told. On any other than the loopback address a token is
    required of every call, and for the metrics. `port` 0: any that is free. A token needs
    `credentials`, which close ZooKeeper to others, unless `allow_open_zookeeper`. `call_s`: about
    how long a call goes on that has much to do, as an undo; clients ask again. `tls_root`: whom to
    trust among the other servers, which it asks for their buckets; else its own certificate.
    `tls_client_ca`: who has to vouch for the certificates of clients, and of other servers; else
    clients need none.
    """

    zookeeper: str
    logs: str
    views: Path
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = field(default=None, repr=False)
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_root: Path | None = None
    tls_client_ca: Path | None = None
    metrics_port: int | None = None
    credentials: tuple[str, str] | None = field(default=None, repr=False)
    allow_open_zookeeper: bool = False
    session_timeout_s: float = 10.0
    limits: Limits = field(default_factory=Limits)
    scanners: ScannerLimits = field(default_factory=ScannerLimits)
    spool: SpoolLimits = field(default_factory=SpoolLimits)
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)
    hand_over: HandOverConfig = field(default_factory=HandOverConfig)
    options: BucketOptions = field(default_factory=BucketOptions)
    call_s: float = CALL_S
    storage_settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not self.host or not set(self.host) <= _OF_HOSTS:
            raise InvalidInput(
                f"the host {self.host!r} is neither a name nor an IPv4 address; give an IPv6 "
                "machine by its name"
            )
        if self.host not in LOOPBACK and not self.token:
            raise InvalidInput(
                f"a server on {self.host} can be reached by others: give it a token, which every "
                "client then needs; or let it listen on 127.0.0.1"
            )
        if self.token is not None:
            check_token(self.token)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidInput("TLS needs both a certificate and its key")
        if self.tls_client_ca is not None and self.tls is None:
            raise InvalidInput("certificates of clients are for TLS: give the server its own, too")
        if self.host == "0.0.0.0":
            raise InvalidInput(
                f"{self.host} is no address that clients could be told; give the machine's own"
            )
        if self.checks_zookeeper and self.credentials is None:
            raise no_credentials(self.zookeeper)

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """The certificate and its key, if there are any."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return self.tls_certificate, self.tls_key

    @property
    def trusted(self) -> Path | None:
        """Whom this server trusts among the others, if it speaks TLS: all of them do, or none."""
        return None if self.tls is None else self.tls_root or self.tls_certificate

    @property
    def client_tls(self) -> ClientTls | None:
        """How this server calls the others, if it speaks TLS: as itself, if they want to know."""
        if self.trusted is None:
            return None
        if self.tls_client_ca is None:
            return ClientTls(root=self.trusted)
        return ClientTls(root=self.trusted, certificate=self.tls_certificate, key=self.tls_key)

    @property
    def checks_zookeeper(self) -> bool:
        """Whether the server stays away from a cluster whose ZooKeeper is open to others."""
        return self.token is not None and not self.allow_open_zookeeper
