"""A whole cluster on one machine: real ZooKeeper and tablet servers, as child processes.

with LocalCluster("data", servers=2) as cluster:
    orders = cluster.connect().create_table("orders", schema)
"""

import fcntl
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from foundation.errors import InvalidInput, ServerNotStarted
from locks.store.child_process import GuardedProcess
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from server.client.cluster import Cluster, connect
from server.launch.logs import last_words
from server.launch.revival import Revival
from server.protocol.environment import credentials_from

_START_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 60.0
# Servers of one machine that were started together are there together.
_SETTLE_S = 0.2


class LocalServer:
    """One tablet server of a local cluster: a process that can be started, stopped and killed."""

    def __init__(self, directory: Path, number: int, command: Sequence[str]) -> None:
        self.number = number
        self.log_path = directory / f"server-{number}.log"
        self._address_path = directory / f"server-{number}.address"
        self._command = [
            *command,
            *("--views", str(directory / f"views-{number}")),
            *("--address-file", str(self._address_path)),
        ]
        self._process: GuardedProcess | None = None
        self._said_before = 0

    @property
    def address(self) -> str | None:
        """Where it listens, once it has started; the same after a restart, unless it is taken."""
        with suppress(FileNotFoundError):
            return self._address_path.read_text()
        return None

    @property
    def pid(self) -> int:
        """Its process id, for those who want to stop or kill it by themselves."""
        if self._process is None:
            raise ServerNotStarted(f"server {self.number} is not running")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.alive

    @property
    def ended(self) -> str | None:
        """Why its process has ended by itself; None if it runs, or was stopped or killed here."""
        if self._process is None or self._process.alive:
            return None
        return self._process.killed_in_words or self.last_words

    @property
    def last_words(self) -> str:
        """What it logged last, of this run: why it ended, if it has."""
        return last_words(self.log_path, self._said_before)

    def start(self) -> None:
        """Start the process; it joins the cluster a moment later."""
        if self.alive:
            raise ServerNotStarted(f"server {self.number} runs already")
        self.kill()
        port = _port_of(self.address)
        self._address_path.unlink(missing_ok=True)
        self._said_before = self.log_path.stat().st_size if self.log_path.exists() else 0
        self._process = GuardedProcess([*self._command, "--port", str(port)], self.log_path)

    def stop(self) -> None:
        """Let it finish what is in flight and hand its buckets over."""
        self._end(politely=True)

    def begin_to_stop(self) -> None:
        """Tell it to stop, without waiting for it: `stop` does that."""
        if self._process is not None:
            self._process.ask_to_end()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(politely=False)

    def _end(self, *, politely: bool) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end(politely=politely, deadline_s=_STOP_DEADLINE_S)


class LocalCluster:
    """ZooKeeper and `servers` tablet servers on 127.0.0.1, with everything below one directory.

    Started again on the same directory it has the same data. The processes end with the context,
    or with this process, however that ends. `port`: ZooKeeper's; unless given, the one that it had
    in this directory, or any that is free. `options` go to the servers' command line.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        servers: int = 1,
        logs: str | None = None,
        session_timeout_s: float = 4.0,
        port: int | None = None,
        options: Sequence[str] = (),
    ) -> None:
        if servers < 1:
            raise InvalidInput(f"a cluster has at least one server, not {servers}")
        self._directory = Path(directory).resolve()
        self._directory.mkdir(parents=True, exist_ok=True)
        self.zookeeper = EmbeddedZooKeeper(self._directory / "zookeeper", port=port)
        self._count = servers
        self._options = [
            *("--logs", logs or str(self._directory / "logs")),
            *("--session-timeout", f"{session_timeout_s:g}"),
            *("--settle", f"{_SETTLE_S:g}"),
            *options,
        ]
        self.servers: list[LocalServer] = []
        self._revivals: list[Revival] = []
        self._lock: IO[bytes] | None = None

    @property
    def address(self) -> str:
        """ZooKeeper's address, which is what clients connect to."""
        return self.zookeeper.address

    def start(self) -> "LocalCluster":
        """Start all processes and wait until all servers have joined."""
        if self._lock is not None:
            raise ServerNotStarted(f"the cluster in {self._directory} runs already")
        self._lock = _locked(self._directory)
        try:
            self.zookeeper.start()
            command = [sys.executable, "-m", "server", "--zookeeper", self.address, *self._options]
            self.servers = [
                LocalServer(self._directory, number, command) for number in range(self._count)
            ]
            for server in self.servers:
                server.start()
            self.wait_until_joined()
        except BaseException:
            self.stop()
            raise
        self._revivals = [
            Revival("ZooKeeper", self.zookeeper),
            *(Revival(f"server {server.number}", server) for server in self.servers),
        ]
        return self

    def revive(self) -> list[str]:
        """Start again what has ended by itself; return what to tell people of it.

        For whoever keeps the cluster, every now and then. What was stopped or killed by these
        methods stays so. What ends again and again is started after longer and longer pauses.
        """
        return [line for revival in self._revivals for line in revival.look()]

    def stop(self) -> None:
        """Stop the servers, all at once, then ZooKeeper; the data stay."""
        self._revivals = []
        for server in self.servers:  # One after the other they would hand over to each other.
            server.begin_to_stop()
        for server in self.servers:
            server.stop()
        self.zookeeper.stop()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def connect(self, **arguments: object) -> Cluster:
        """Return a client; arguments as for `connect`.

        Where the environment has credentials for ZooKeeper, the servers have them, and so has it.
        """
        arguments.setdefault("credentials", credentials_from(os.environ))
        return connect(self.address, **arguments)  # type: ignore[arg-type]

    def wait_until_joined(self, deadline_s: float = _START_DEADLINE_S) -> None:
        """Return when all servers that run are known to ZooKeeper."""
        deadline = time.monotonic() + deadline_s
        with self.connect(create=True) as client:  # Before the servers have made it.
            while True:
                joined = {server.address for server in client.coordinator.servers.all()}
                missing = [server for server in self.servers if server.address not in joined]
                if not missing:
                    return
                for server in missing:
                    if not server.alive or time.monotonic() > deadline:
                        raise ServerNotStarted(
                            f"server {server.number} did not start; see {server.log_path}: "
                            f"{server.last_words}"
                        )
                time.sleep(0.02)

    def __repr__(self) -> str:
        runs = f"{len(self.servers)} servers run" if self.servers else "not started"
        return f"<LocalCluster in {self._directory}, {runs}>"

    def __enter__(self) -> "LocalCluster":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _locked(directory: Path) -> IO[bytes]:
    """Lock the directory for as long as the file is open: two ZooKeepers would ruin its data."""
    lock = (directory / "lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ServerNotStarted(
            f"another cluster runs in {directory}: connect to that one, or end it first"
        ) from None
    return lock


def _port_of(address: str | None) -> int:
    """Return the port that a server had, if it is free: so it keeps its buckets. Else any."""
    if address is None:
        return 0
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port
