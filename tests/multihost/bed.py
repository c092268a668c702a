"""A whole cluster on hosts of its own, with a load that never stops: what faults are tried on."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.multihost.batches import COLUMNS
from tests.multihost.history import History
from tests.multihost.hosts import Host, Lab, needs_namespaces
from tests.multihost.load import ALWAYS
from tests.multihost.network import Network
from tests.multihost.parts import Part, TabletServer, ensemble, python_part
from tests.multihost.sharing import BUCKETS
from tests.multihost.sink_job import ROUTES
from tests.multihost.spark import MASTER, driver_on, master_on, wait_until_up, worker_on
from tests.support.certificates import make_certificate
from tests.support.zookeeper_server import needs_java, wait_until

ZOOKEEPERS = ("zk1", "zk2", "zk3")
SERVERS = ("t1", "t2", "t3")
SPARES = ("t4", "t5", "t6")
_DEADLINE_S = 150.0
# Those that have nothing to tell, or take their time by themselves: nobody waits for them, nor for
# the tiering job, whose rounds take long where the object store is slow.
SELDOM = {"observer", "alters", "backfills", "leases", "snapshots"}


class Bed:
    """Hosts, parts, network and load. Whoever made it closes it."""

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 0,
        with_spark: bool = False,
        with_tiering: bool = False,
        kinds: Sequence[str] = ALWAYS,
        without: str | None = None,
        follow: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Make the hosts; nothing runs there yet.

        `kinds`: the clients. `without`: a rule of the specification that servers and clients break.
        `follow`: gets what we do, when we do it.
        """
        directory.mkdir()
        certificate, key = directory / "bed.pem", directory / "bed.key"
        make_certificate(certificate, key, names=[*SERVERS, *SPARES])
        self.lab = Lab(directory, ["s3", "client", MASTER, *ZOOKEEPERS, *SERVERS, *SPARES])
        self.network = Network(self.lab)
        self.history = History(follow)
        self._down: set[Part] = set()
        address, self.zookeepers = ensemble([self.host(name) for name in ZOOKEEPERS])
        self.s3 = python_part(self.host("s3"), "s3", "tests.multihost.s3", {})
        self.servers = [
            TabletServer(self.host(name), address, certificate, key) for name in SERVERS
        ]
        self.spares = [TabletServer(self.host(name), address, certificate, key) for name in SPARES]
        self.settings: dict[str, Any] = {
            "zookeeper": address,
            "tls_root": str(certificate),
            "seed": seed,
            "kinds": [*kinds],
            "without": without,
        }
        client = self.host("client")
        self.settings["redo"] = client.inside("redo")
        self.load = python_part(client, "load", "tests.multihost.load", self.settings)
        self.tiering = python_part(client, "tiering", "tests.multihost.tiering_job", self.settings)
        self.with_tiering = with_tiering
        self.master = master_on(self.host(MASTER))
        self.driver = driver_on(self.host(MASTER), self.settings)
        self.workers = [worker_on(self.host(name)) for name in SERVERS] if with_spark else []
        if without is not None:
            for part in (self.load, *self.servers, *self.spares):
                part.switch_off(without)

    def host(self, name: str) -> Host:
        """Return a host by its name."""
        return self.lab.hosts[name]

    @property
    def parts(self) -> list[Part]:
        """All that should run."""
        spark = [self.master, *self.workers] if self.workers else []
        return [*self.zookeepers, self.s3, *self.servers, *spark, *self.clients]

    @property
    def clients(self) -> list[Part]:
        """The programs of the load."""
        tiering = [self.tiering] if self.with_tiering else []
        return [self.load, *([self.driver] if self.workers else []), *tiering]

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
        if self.with_tiering:
            self.tiering.start()
        if self.workers:
            for part in (self.master, *self.workers):
                part.start()
            wait_until_up(self.master, self.workers)
            self.driver.start()
        self.settle()

    def settle(self, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until all servers lead, all parts run, and all clients have gone on since now."""
        began = time.monotonic()
        wanted = {server.address for server in self.servers}
        kinds = {*self.settings["kinds"], *(ROUTES if self.workers else ())} - SELDOM

        def settled() -> bool:
            while_waiting()
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
        self._read_history()
        return self.history.led

    @contextmanager
    def down(self, part: Part) -> Iterator[None]:
        """Kill a part; it is started again at the end."""
        self._down.add(part)
        part.kill()
        try:
            yield
        finally:
            self._down.remove(part)
            part.start()

    def revive(self) -> None:
        """Start what has ended by itself, as whoever looks after servers does: not what is down."""
        for part in self.parts:
            if not part.alive and part not in self._down:
                self.history.note(f"{part.program.name} has ended, and is started again")
                part.start()

    def end_load(self) -> dict[str, int]:
        """End the clients; return how many batches of each column were acknowledged."""
        for part in self.clients:
            part.stop()
        self._read_history()
        return {kind: self.history.batches(kind) for kind in (*COLUMNS, "backfills")}

    def expected_on(self, host: Host) -> set[int]:
        """Return the processes that should be on a host, when the load has ended."""
        return {part.program.pid for part in self.parts if part.host is host and part.alive}

    def _read_history(self) -> None:
        for part in self.clients:
            self.history.read(part.program.log_path)

    def close(self) -> None:
        """End everything."""
        self.lab.close()


@contextmanager
def running_bed(directory: Path, **settings: Any) -> Iterator[Bed]:
    """Run a bed for the duration of the block; skip the test where there cannot be one."""
    needs_namespaces()
    needs_java()
    bed = Bed(directory, **settings)
    try:
        bed.start()
        yield bed
    finally:
        bed.close()
