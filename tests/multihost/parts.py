"""What runs on the hosts of a bed: a ZooKeeper ensemble, the object store, tablet servers.

Each part can be stopped, killed and started again; it keeps its disk and its address.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foundation.errors import ServerNotStarted
from locks.store.embedded_zookeeper import find_jars, find_java
from locks.store.zookeeper import CREDENTIALS_VARIABLE
from server.protocol.environment import TOKEN_VARIABLE
from tests.multihost import s3
from tests.multihost.hosts import Host, Program
from tests.support.java_classes import SHORT_LIVED
from tests.support.zookeeper_server import wait_until

SESSION_S = 5.0
PORT = 7070
LOGS = "s3://tallybook-1/logs"
SECRETS = {TOKEN_VARIABLE: "token-of-the-bed", CREDENTIALS_VARIABLE: "user:password"}
_CLIENT_PORT = 2181
_START_DEADLINE_S = 90.0
_CLOCK = Path(__file__).with_name("clock")
_ZOOKEEPER_MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"


class Part:
    """A program of a host that can be started again."""

    def __init__(
        self, host: Host, name: str, command: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        self.host = host
        self._name = name
        self._command = list(command)
        self._variables = dict(variables)
        self._program: Program | None = None

    @property
    def program(self) -> Program:
        """The process that runs, or ran last."""
        if self._program is None:
            raise ServerNotStarted(f"{self._name} of {self.host.name} was not started")
        return self._program

    @property
    def alive(self) -> bool:
        """Whether it was started, and runs."""
        return self._program is not None and self._program.alive

    def start(self) -> None:
        """Start it; it serves a moment later."""
        self._program = self.host.program(self._name, self._command, self._variables)

    def switch_off(self, rule: str) -> None:
        """Have a Python program break a rule of the specification, from its next start on."""
        python, flag, *rest = self._command
        assert flag == "-m", f"{self._name} is no module of Python"
        self._command = [python, flag, "tests.multihost.without", rule, *rest]

    def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        self.program.stop()

    def kill(self) -> None:
        """End it as a crash would."""
        self.program.kill()


class TabletServer(Part):
    """A tablet server, started by hand, with token and TLS."""

    def __init__(self, host: Host, zookeeper: str, certificate: Path, key: Path) -> None:
        self._joined = host.disk / "address"
        command = [
            *(sys.executable, "-m", "tallybook", "serve"),
            *("--zookeeper", zookeeper),
            *("--logs", LOGS),
            *("--views", host.inside("views")),
            *("--host", host.name, "--port", str(PORT)),
            *("--session-timeout", f"{SESSION_S:g}"),
            *("--tls-certificate", str(certificate), "--tls-key", str(key)),
            *("--address-file", host.inside("address")),
        ]
        self._clock = host.disk / "clock"
        self.move_clock(0)
        clock = {"PYTHONPATH": str(_CLOCK), "TALLYBOOK_BED_CLOCK": host.inside("clock")}
        super().__init__(host, "server", command, {**s3.settings().variables, **SECRETS, **clock})

    @property
    def address(self) -> str:
        """What clients are told."""
        return f"{self.host.name}:{PORT}"

    def start(self) -> None:
        """Start it; it joins the others a moment later."""
        self._joined.unlink(missing_ok=True)
        super().start()

    def move_clock(self, seconds: int) -> None:
        """Have its wall clock be so much ahead from now on, or behind."""
        with self._clock.open("r+b" if self._clock.exists() else "wb") as clock:
            clock.write(seconds.to_bytes(8, "little", signed=True))

    def wait_until_joined(self) -> None:
        """Return when it has joined the cluster."""
        wait_until(
            lambda: self._joined.exists() or not self.alive,
            f"the server of {self.host.name} joins",
            _START_DEADLINE_S,
        )
        assert self.alive, f"{self.host.name}: {self.program.last_words()}"


def ensemble(hosts: Sequence[Host]) -> tuple[str, list[Part]]:
    """Return the address of a ZooKeeper ensemble, and its servers, one per host."""
    peers = [f"server.{number}={host.name}:2888:3888" for number, host in enumerate(hosts, 1)]
    parts = []
    for number, host in enumerate(hosts, 1):
        directory = host.disk / "zookeeper"
        directory.mkdir()
        (directory / "myid").write_text(str(number))
        lines = [
            f"dataDir={host.inside('zookeeper')}",
            f"clientPort={_CLIENT_PORT}",
            *("tickTime=1000", "initLimit=20", "syncLimit=5"),
            *("maxClientCnxns=0", "admin.enableServer=false"),
            *peers,
        ]
        (directory / "zoo.cfg").write_text("\n".join([*lines, ""]))
        options = [*SHORT_LIVED.split(), "-XX:-UsePerfData", "-Xmx256m", "-cp", find_jars()]
        command = [find_java(), *options, _ZOOKEEPER_MAIN, host.inside("zookeeper", "zoo.cfg")]
        parts.append(Part(host, "zookeeper", command, {}))
    return ",".join(f"{host.name}:{_CLIENT_PORT}" for host in hosts) + "/tallybook", parts


# Says nothing where nobody listens yet.
_ASK = """
import contextlib, socket, sys
with contextlib.suppress(OSError):
    there = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
    there.sendall(b"srvr")
    print(there.makefile().read())
"""


def is_leading(zookeeper: Part) -> bool:
    """Whether this server of the ensemble leads it, by its own words."""
    host = zookeeper.host
    python = (sys.executable, "-S", "-E", "-c", _ASK)
    return "Mode: leader" in host.run(*python, host.name, str(_CLIENT_PORT))


def python_part(
    host: Host,
    name: str,
    module: str,
    settings: Mapping[str, Any],
    variables: Mapping[str, str] | None = None,
) -> Part:
    """Return a program of ours that is told its settings as JSON, and the secrets as variables."""
    command = [sys.executable, "-m", module, json.dumps(settings)]
    return Part(host, name, command, {**s3.settings().variables, **SECRETS, **(variables or {})})
