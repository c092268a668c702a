"""Hosts on which the commands of a page are run as they stand: Spark, ZooKeeper, an object store.

Of what the page takes for granted, packages below /srv/tallybook are scripts that call those of the
tests, and systemd is a stand-in (`systemctl`). /srv/tallybook is the same on all hosts, the rest of
/srv each host's own.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.multihost import systemctl
from tests.multihost.history import History
from tests.multihost.hosts import REPOSITORY, Host, Lab, command_line, needs_namespaces
from tests.multihost.load import ALWAYS
from tests.multihost.parts import Part, ensemble, python_part
from tests.multihost.sharing import BUCKETS
from tests.multihost.spark import spark_home
from tests.support.java_classes import SHORT_LIVED
from tests.support.markdown import Block
from tests.support.zookeeper_server import needs_java, wait_until

HOSTS = ("s3", "client", "spark", "zk1", "zk2", "zk3", "t1", "t2", "t3")
SHARED = Path("/srv/tallybook")
_BLOCK_DEADLINE_S = 240.0
_PROGRESS_DEADLINE_S = 150.0


class DocumentedHosts:
    """The hosts of a page, and a load that begins when there are servers."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.lab = Lab(directory, HOSTS)
        self._shared = directory / "shared"
        _install(self._shared)
        for host in self.lab.hosts.values():
            own = host.disk / "srv"
            (own / "spark").mkdir(parents=True)
            (own / "tallybook").mkdir()
            host.run("mount", "--bind", str(own), "/srv")
            host.run("mount", "--bind", str(self._shared), str(SHARED))
        self.zookeeper, self._zookeepers = ensemble([self.host(f"zk{n}") for n in (1, 2, 3)])
        self._s3 = python_part(self.host("s3"), "s3", "tests.multihost.s3", {})
        self.history = History()
        self._load: Part | None = None
        self._blocks = 0

    def host(self, name: str) -> Host:
        """Return a host by its name."""
        return self.lab.hosts[name]

    def start(self) -> None:
        """Start what the page takes for granted: ZooKeeper, and an object store with a bucket."""
        for part in [*self._zookeepers, self._s3]:
            part.start()
        wait_until(
            lambda: self._s3.program.last_words().endswith("s3://tallybook-1"), "S3 serves", 60
        )

    def run(self, block: Block) -> None:
        """Run a block of the page to its end, on each of its hosts."""
        for name in block.hosts:
            self._run_on(self.host(name), block)

    def _run_on(self, host: Host, block: Block) -> None:
        self._blocks += 1
        where = f"{block.where} on {host.name}"
        self.history.note(f"{where} is run")
        variables = {
            "PATH": f"{SHARED / 'venv' / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "SPARK_DAEMON_JAVA_OPTS": SHORT_LIVED,
        }
        program = host.program(f"block-{self._blocks}", ["bash", "-euc", block.text], variables)
        try:
            wait_until(lambda: not program.alive, where, _BLOCK_DEADLINE_S, every_s=0.05)
        except AssertionError as exc:
            raise AssertionError(f"{exc}: {program.last_words()}\n{self.told()}") from exc
        assert program.code == 0, f"{where}: {program.last_words()}"

    def begin_load(self) -> None:
        """Have clients write and read from now on."""
        settings = {
            "zookeeper": self.zookeeper,
            "tls_root": str(SHARED / "server.pem"),
            "seed": 0,
            "kinds": [*ALWAYS],
        }
        secrets = dict(
            line.split("=", 1) for line in (self._shared / "environment").read_text().splitlines()
        )
        module = "tests.multihost.load"
        self._load = python_part(self.host("client"), "load", module, settings, secrets)
        self._load.start()

    def wait_until_gone_on(self, what: str, since: float | None = None) -> None:
        """Return when all buckets are led, and each client has done something that it began now.

        Prints how long the slowest took, of all that ended since then; unless given, since now.
        """
        began = self.history.note(f"{what}: do clients go on?")

        def gone_on() -> bool:
            self.read()
            kinds = {*ALWAYS} - {"observer"}
            led = self.history.led_at > began and len(self.history.led) == BUCKETS
            return led and self.history.has_gone_on(began, kinds)

        try:
            wait_until(gone_on, f"clients go on after {what}", _PROGRESS_DEADLINE_S, every_s=0.1)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.told()}") from exc
        assert not self.history.wrong, f"{self.history.wrong}\n{self.told()}"
        print(f"{what}, slowest: {self.history.slowest(began if since is None else since)}")

    def read(self) -> None:
        """Take in what the clients have said."""
        assert self._load is not None
        self.history.read(self._load.program.log_path)

    def process_of(self, host: str, unit: str) -> int:
        """Return the process of a unit that a page has enabled."""
        return int((self.host(host).disk / "tmp" / "units" / f"{unit}.child").read_text())

    def servers(self) -> dict[int, str]:
        """Return the processes of tablet servers, and the hosts on which they are."""
        return {
            pid: name
            for name, host in self.lab.hosts.items()
            for pid in host.processes()
            if command_line(pid)[1:3] == ["-m", "server"]
        }

    def told(self) -> str:
        """Tell what happened, and what the driver of the servers said last."""
        if self._load is not None:
            self.read()
        logs = sorted(self.lab.directory.glob("disks/*/tmp/units/*.log"))
        said = [f"{log.parts[-4]} {log.stem}: {log.read_text()[-1500:]}" for log in logs]
        return "\n".join([self.history.told(0), *said])


def _install(shared: Path) -> None:
    """Put what the page calls where the page has it."""
    programs = {
        "tallybook": f"{sys.executable} -m tallybook",
        "spark-class": f"env SPARK_HOME={spark_home()} {spark_home() / 'bin' / 'spark-class'}",
        "systemctl": f"{sys.executable} {systemctl.__file__}",
    }
    directory = shared / "venv" / "bin"
    directory.mkdir(parents=True)
    for name, command in programs.items():
        (directory / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (directory / name).chmod(0o755)


@contextmanager
def documented_hosts(directory: Path) -> Iterator[DocumentedHosts]:
    """Have the hosts for the duration of the block; skip the test where there cannot be any."""
    needs_namespaces()
    needs_java()
    hosts = DocumentedHosts(directory)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.lab.close()
