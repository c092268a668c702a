"""A whole cluster on hosts of its own, with a load that never stops: what faults are tried on."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.multihost.history import History
from tests.multihost.hosts import Host, Lab, needs_namespaces
from tests.multihost.load import BUCKETS, CLIENTS
from tests.multihost.network import Network
from tests.multihost.parts import Part, TabletServer, ensemble, python_part
from tests.support.certificates import make_certificate
from tests.support.zookeeper_server import needs_java, wait_until

ZOOKEEPERS = ("zk1", "zk2", "zk3")
SERVERS = ("t1", "t2", "t3")
SPARES = ("t4", "t5", "t6")
_DEADLINE_S = 150.0


class Bed:
    """Hosts, parts, network and load. Whoever made it closes it."""

    def __init__(self, directory: Path, *, seed: int = 0, kinds: Sequence[str] = ()) -> None:
        """Make the hosts; nothing runs there yet. `kinds`: of clients; else all there are."""
        self.lab = Lab(directory, ["s3", "client", *ZOOKEEPERS, *SERVERS, *SPARES])
        self.network = Network(self.lab)
        self.history = History()
        certificate, key = directory / "bed.pem", directory / "bed.key"
        make_certificate(certificate, key, names=[*SERVERS, *SPARES])
        address, self.zookeepers = ensemble([self.host(name) for name in ZOOKEEPERS])
        self.s3 = python_part(self.host("s3"), "tests.multihost.s3", {}, "s3")
        self.servers = [
            TabletServer(self.host(name), address, certificate, key) for name in SERVERS
        ]
        self.spares = [TabletServer(self.host(name), address, certificate, key) for name in SPARES]
        self.settings: dict[str, Any] = {
            "zookeeper": address,
            "tls_root": str(certificate),
            "seed": seed,
            "kinds": list(kinds or CLIENTS),
        }
        self.load = python_part(self.host("client"), "tests.multihost.load", self.settings, "load")

    def host(self, name: str) -> Host:
        """Return a host by its name."""
        return self.lab.hosts[name]

    @property
    def parts(self) -> list[Part]:
        """All that should run, the load last."""
        return [*self.zookeepers, self.s3, *self.servers, self.load]

    def start(self) -> None:
        """Start all parts, and wait until every client has done something."""
        for part in [*self.zookeepers, self.s3]:
            part.start()
        wait_until(
            lambda: self.s3.program.last_words().endswith("s3://tallybook-1"), "S3 serves", 60
        )
        for server in self.servers:
            server.start()
        for server in self.servers:
            server.wait_until_joined()
        self.load.start()
        self.settle()

    def settle(self) -> None:
        """Wait until all servers lead, all parts run, and all clients have gone on since now."""
        began = time.monotonic()
        wanted = {server.address for server in self.servers}
        kinds = set(self.settings["kinds"]) - {"observer"}

        def settled() -> bool:
            led = self.leaders()
            return (
                self.history.led_at > began
                and len(led) == BUCKETS
                and set(led.values()) == wanted
                and self.history.has_gone_on(began, kinds)
            )

        try:
            wait_until(settled, "the bed settles", _DEADLINE_S, every_s=0.1)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.history.told(began - 30)}") from exc
        dead = [part.program.name for part in self.parts if not part.alive]
        assert not dead, f"{dead} ended: {[part.program.last_words() for part in self.parts]}"

    def leaders(self) -> dict[str, str]:
        """Return the addresses of the buckets' leaders, as the load's observer saw them last."""
        self.history.read(self.load.program.log_path)
        return self.history.led

    def close(self) -> None:
        """End everything."""
        self.lab.close()


@contextmanager
def running_bed(directory: Path, *, seed: int = 0) -> Iterator[Bed]:
    """Run a bed for the duration of the block; skip the test where there cannot be one."""
    needs_namespaces()
    needs_java()
    bed = Bed(directory, seed=seed)
    try:
        bed.start()
        yield bed
    finally:
        bed.close()
