"""A real ZooKeeper server as a child process, from the jars that PySpark ships.

For the local cluster, examples and tests; a production cluster has an ensemble of its own.
"""

import importlib.util
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from foundation.errors import ServerNotStarted
from locks.store.child_process import GuardedProcess, last_lines

MAIN_CLASS = "org.apache.zookeeper.server.ZooKeeperServerMain"
_TICK_MS = 500
# Of PySpark's jars, what these begin with: to look through all of them would take as long again.
_JARS = ("zookeeper", "netty", "slf4j", "log4j", "metrics-core", "snappy", "commons")
_PORTS_TO_TRY = 3
# It has little to do, and seldom for long: so it is there sooner, and takes less of the machine.
_JVM = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")


class EmbeddedZooKeeper:
    """A single ZooKeeper server on 127.0.0.1; its data and its port survive a restart.

    Ends with its context, or with the process that started it, however that ends.
    """

    def __init__(
        self, data_dir: str | Path, *, port: int | None = None, deadline_s: float = 60.0
    ) -> None:
        self._directory = Path(data_dir)
        self._port = port
        self._deadline_s = deadline_s
        self._process: GuardedProcess | None = None

    @property
    def address(self) -> str:
        """`host:port`, the same after a restart."""
        if self._port is None:
            raise ServerNotStarted("the embedded ZooKeeper has no address before its first start")
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The server's process id, for tests that stop it."""
        return 0 if self._process is None else self._process.pid

    @property
    def log_path(self) -> Path:
        """Where the server's log goes."""
        return self._directory / "zookeeper.log"

    @property
    def ended(self) -> str | None:
        """Why the server has ended by itself; None if it runs, or was stopped here."""
        if self._process is None or self._process.alive:
            return None
        return self._process.killed_in_words or last_lines(self.log_path, 1) or "it said nothing"

    def start(self) -> "EmbeddedZooKeeper":
        """Start the server and wait until it answers; on the same port again after a restart."""
        if self.ended is not None:
            self.kill()
        if self._process is not None:
            raise ServerNotStarted(f"the embedded ZooKeeper runs already, on {self.address}")
        command = [find_java(), *_JVM, "-cp", find_jars(), MAIN_CLASS]
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._port is not None:
            # Another ZooKeeper there would answer in the place of ours.
            if not _is_free(self._port):
                raise ServerNotStarted(
                    f"somebody else listens on {self.address}: stop that, or choose another port"
                )
            self._start(command)
            return self
        for attempt in range(_PORTS_TO_TRY):  # Somebody may take a free port before we do.
            self._port = (self._former_port() if attempt == 0 else None) or _free_port()
            try:
                self._start(command)
                break
            except ServerNotStarted:
                self._port = None
                if attempt + 1 == _PORTS_TO_TRY or not self._port_was_taken():
                    raise
        return self

    def stop(self) -> None:
        """Stop the server; its data stay."""
        self._end(politely=True)

    def kill(self) -> None:
        """End the server at once, as a crash would; its data stay."""
        self._end(politely=False)

    def _start(self, command: list[str]) -> None:
        configuration = self._directory / "zoo.cfg"
        configuration.write_text(self._configuration())
        self.log_path.unlink(missing_ok=True)
        try:
            self._process = GuardedProcess([*command, str(configuration)], self.log_path)
        except ServerNotStarted as exc:
            raise ServerNotStarted(
                f"{exc}, {java_words()}; set JAVA_HOME to a working Java"
            ) from exc
        self._wait_until_it_answers()

    def _end(self, *, politely: bool) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end(politely=politely)

    def __enter__(self) -> "EmbeddedZooKeeper":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _configuration(self) -> str:
        data = self._directory.resolve() / "data"
        return "\n".join(
            [
                f"dataDir={data}",
                "clientPortAddress=127.0.0.1",
                f"clientPort={self._port}",
                f"tickTime={_TICK_MS}",
                "maxClientCnxns=0",
                "admin.enableServer=false",
                "autopurge.purgeInterval=1",
                "",
            ]
        )

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + self._deadline_s
        while not self._answers():
            assert self._process is not None
            if not self._process.alive or time.monotonic() > deadline:
                self.kill()
                raise ServerNotStarted(
                    f"ZooKeeper did not start on {self.address}, with {java_words()}; see "
                    f"{self.log_path}:\n{last_lines(self.log_path)}"
                )
            time.sleep(0.02)

    def _answers(self) -> bool:
        """Ask for its state in the one way that needs no session: the four-letter word."""
        try:
            with socket.create_connection(("127.0.0.1", self._port or 0), timeout=1) as connection:
                connection.sendall(b"srvr")
                return b"Mode: standalone" in connection.makefile("rb").read()
        except OSError:
            return False

    def _former_port(self) -> int | None:
        """Return the port that this directory's server had, if it is free: clients know it."""
        with suppress(FileNotFoundError, ValueError):
            lines = (self._directory / "zoo.cfg").read_text().splitlines()
            settings = dict(line.split("=", 1) for line in lines)
            port = int(settings.get("clientPort", ""))
            return port if _is_free(port) else None
        return None

    def _port_was_taken(self) -> bool:
        return "BindException" in self.log_path.read_text(errors="replace")


def find_java() -> str:
    """Return the path of the Java to run ZooKeeper with; ServerNotStarted says where it looked."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not os.path.isfile(java) or not os.access(java, os.X_OK):
        raise ServerNotStarted(
            f"ZooKeeper needs Java 17 or newer, and {java_words()}: install it (Debian: "
            "openjdk-17-jre-headless), or set JAVA_HOME, or use a ZooKeeper of your own"
        )
    return java


def java_words() -> str:
    """Return which Java is run here, and why that one: for errors of whatever runs on Java."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = Path(home) / "bin" / "java"
        if not os.path.isfile(java):
            return f"JAVA_HOME is {home}, where there is no bin/java"
        if not os.access(java, os.X_OK):
            return f"JAVA_HOME is {home}, whose bin/java is no program that this user may run"
        return f"the Java of JAVA_HOME, {java}"
    found = shutil.which("java")
    return "there is none on the PATH" if found is None else f"the Java on the PATH, {found}"


def find_jars() -> str:
    """Return the class path that a ZooKeeper needs, from PySpark's jars."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise ServerNotStarted(
            "the embedded ZooKeeper uses the jars of PySpark: pip install 'tallybook[spark]'"
        )
    jars = (Path(found.origin).parent / "jars").glob("*.jar")
    return os.pathsep.join(str(jar) for jar in jars if jar.name.startswith(_JARS))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    """Return a port of 127.0.0.1 that is free for the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
