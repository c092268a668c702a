"""Three real ZooKeepers on 127.0.0.1, from the jars that PySpark ships."""

import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from foundation.errors import ServerNotStarted
from locks.store.child_process import GuardedProcess, last_lines
from locks.store.embedded_zookeeper import find_jars, find_java

_MAIN_CLASS = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
_TICK_MS = 500
_DEADLINE_S = 60.0


class Ensemble:
    """A context that runs the three; they end with it, or with this process."""

    def __init__(self, directory: Path, members: int = 3) -> None:
        self._directory = directory
        self._members = members
        self._ports = _free_ports(3 * members)
        self._processes: list[GuardedProcess] = []

    @property
    def address(self) -> str:
        """`host:port,host:port,host:port`."""
        return ",".join(f"127.0.0.1:{port}" for port in self._ports[: self._members])

    def __enter__(self) -> "Ensemble":
        with ExitStack() as unless_started:
            unless_started.callback(self._end)
            for number in range(self._members):
                self._processes.append(self._start(number))
            self._wait_until_one_leads()
            unless_started.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()

    def log_bytes(self) -> int:
        """Return how much the first one has written to its log of transactions, up to now.

        Files are longer than what is in them: ZooKeeper fills them with zeros ahead.
        """
        logs = (self._directory / "1" / "data" / "version-2").glob("log.*")
        return sum(len(log.read_bytes().rstrip(b"\0")) for log in logs)

    def monitor(self) -> list[dict[str, str]]:
        """Return what each says of itself (`mntr`)."""
        found = []
        for port in self._ports[: self._members]:
            lines = (line.split("\t", 1) for line in _ask(port, b"mntr").splitlines())
            found.append({line[0].removeprefix("zk_"): line[-1] for line in lines})
        return found

    def memory_mib(self) -> list[float]:
        """Return the resident memory of each."""
        return [resident_mib(process.pid) for process in self._processes]

    def _start(self, number: int) -> GuardedProcess:
        directory = self._directory / str(number + 1)
        (directory / "data").mkdir(parents=True)
        (directory / "data" / "myid").write_text(str(number + 1))
        count, ports = self._members, self._ports
        peers = [
            f"server.{n + 1}=127.0.0.1:{ports[count + n]}:{ports[2 * count + n]}"
            for n in range(count)
        ]
        lines = [
            f"dataDir={directory / 'data'}",
            "clientPortAddress=127.0.0.1",
            f"clientPort={ports[number]}",
            f"tickTime={_TICK_MS}",
            "initLimit=60",
            "syncLimit=20",
            "maxClientCnxns=0",
            "admin.enableServer=false",
            "4lw.commands.whitelist=srvr,mntr",
            *peers,
        ]
        configuration = directory / "zoo.cfg"
        configuration.write_text("\n".join([*lines, ""]))
        command = [find_java(), "-Xmx768m", "-cp", find_jars(), _MAIN_CLASS, str(configuration)]
        return GuardedProcess(command, directory / "log")

    def _wait_until_one_leads(self) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not all(self._modes()) or "leader" not in self._modes():
            if time.monotonic() > deadline:
                raise ServerNotStarted(
                    f"no leader within {_DEADLINE_S:g} s: "
                    f"{last_lines(self._directory / '1' / 'log')}"
                )
            time.sleep(0.1)

    def _modes(self) -> list[str]:
        answers = (_ask(port, b"srvr") for port in self._ports[: self._members])
        return [answer.partition("Mode: ")[2].partition("\n")[0] for answer in answers]

    def _end(self) -> None:
        for process in self._processes:
            process.end(politely=False)
        self._processes = []


def resident_mib(pid: int | str = "self") -> float:
    """Return the memory of a process that is in use and in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _ask(port: int, word: bytes) -> str:
    """Ask in the one way that needs no session: a four-letter word."""
    with (
        suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=5) as connection,
    ):
        connection.sendall(word)
        return connection.makefile("rb").read().decode()
    return ""


def _free_ports(count: int) -> list[int]:
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
