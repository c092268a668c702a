"""What runs on an executor: one tablet server, as a child process of one Spark task."""

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kazoo.hosts import collect_hosts

from locks.store.child_process import GuardedProcess
from server.launch.logs import last_words

# As --host: whatever address the machine of the executor has.
AUTO_HOST = "auto"
_LOOK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A server to run. `number` tells it from the other servers of the application.

    `environment` is set for the server only, over that of the executor, and carries the secrets:
    options are seen by everybody on the machine.
    """

    number: int
    zookeeper: str
    logs: str
    views: Path | None
    host: str
    port: int
    options: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a server ended: why, as far as it said so; where it was, and how long it ran."""

    reason: str
    host: str
    log_path: str
    lasted_s: float


def serve(assignment: Assignment) -> Ended:
    """Run the server to its end, which is nobody's wish but an accident's, and say how it was.

    The server goes when this process goes, and this process when Spark's daemon does, which
    started it: a server must not outlive the executor that it was given.
    """
    directory = _directory(assignment)
    directory.mkdir(parents=True, exist_ok=True)
    log_path = directory / "server.log"
    said_before = log_path.stat().st_size if log_path.exists() else 0
    began, executor = time.monotonic(), os.getppid()
    packages = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    with _environment({**assignment.environment, "PYTHONPATH": path}):
        process = GuardedProcess(_command(assignment, directory), log_path)
    try:
        while process.alive and os.getppid() == executor:
            time.sleep(_LOOK_S)
        killed_by = process.killed_by
    finally:
        process.end(politely=False)
    words = last_words(log_path, said_before)
    return Ended(
        reason=words if killed_by is None else f"killed by {killed_by}, after it said: {words}",
        host=socket.gethostname(),
        log_path=str(log_path),
        lasted_s=time.monotonic() - began,
    )


def _command(assignment: Assignment, directory: Path) -> list[str]:
    host = assignment.host
    if host == AUTO_HOST:
        host = address_towards(assignment.zookeeper)
    address_file = directory / "address"
    return [
        *(sys.executable, "-m", "server"),
        *assignment.options,
        *("--zookeeper", assignment.zookeeper),
        *("--logs", assignment.logs),
        *("--views", str(directory / "views")),
        *("--host", host),
        *("--port", str(assignment.port or _port_before(address_file, host))),
        *("--address-file", str(address_file)),
    ]


def _directory(assignment: Assignment) -> Path:
    """Return a directory that no server of another executor uses.

    A server that Spark has given up may still be running, and hold its views open; its successor
    is on another executor. Spark's own directory is known to be on a disk that is meant for bulk,
    and is the executor's alone, so it also lends its name.
    """
    of_executor = Path(os.environ["SPARK_LOCAL_DIRS"].partition(",")[0])
    above = of_executor if assignment.views is None else assignment.views / of_executor.name
    return above / f"tallybook-server-{assignment.number}"


def _port_before(address_file: Path, host: str) -> int:
    """Return the port of the server that was here, if it is free: so it keeps its buckets."""
    with suppress(FileNotFoundError, ValueError, OSError):
        port = int(address_file.read_text().rpartition(":")[2])
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return port
    return 0


def address_towards(zookeeper: str) -> str:
    """Return the address of this machine in the network where ZooKeeper is; nothing is sent."""
    [(name, port), *_], _ = collect_hosts(zookeeper)
    [(family, kind, protocol, _, target), *_] = socket.getaddrinfo(
        name, port, type=socket.SOCK_DGRAM
    )
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for what is started in the block; other tasks may use this process later."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ.update(before)
