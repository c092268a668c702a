"""Tablet servers on Spark: killed, they come back; stopped, none is left."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InvalidInput
from foundation.ids import Token
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from server.client.cluster import Cluster, connect
from server.launch.on_spark import run
from server.launch.spark_task import address_towards
from tests.conftest import SUMS
from tests.support.moto_server import S3Server, s3_server
from tests.support.processes import is_running, parent_of
from tests.support.spark_session import needs_java, quiet_spark
from tests.support.zookeeper_server import chroot, wait_until, zookeeper_server

pytestmark = pytest.mark.spark

BUCKETS = 4
KEYS = 60
OPTIONS = ("--session-timeout", "2")


@contextmanager
def cluster_session(directory: Path, *, executors: int) -> Iterator[Any]:
    """Start a session with executors in processes of their own; all its files are in a directory.

    Workers keep their files in Spark's home, so this is one of links to the real one.
    """
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    real = Path(found.origin).parent
    home = directory / "spark-home"
    home.mkdir()
    for path in real.iterdir():
        if path.name != "work":
            (home / path.name).symlink_to(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(home))
        with quiet_spark(f"local-cluster[{executors},1,1024]") as session:
            application = session.sparkContext.applicationId
            yield session
    # There if tests before these have started the JVM: it knows the real home only.
    shutil.rmtree(real / "work" / application, ignore_errors=True)


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("on_spark")) as server:
        yield server


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with cluster_session(tmp_path_factory.mktemp("spark"), executors=2) as session:
        yield session


def pids(cluster: Cluster) -> set[int]:
    """Return the processes of the servers that answer."""
    return {server["pid"] for server in cluster.status() if "pid" in server}


def is_served(cluster: Cluster, *, servers: int, without: set[int]) -> bool:
    """Whether as many servers, none of them of these processes, lead all buckets."""
    answers = {server["pid"]: server for server in cluster.status() if "pid" in server}
    led = sum(len(server["buckets"]) for server in answers.values())
    return len(answers) == servers and led == BUCKETS and not without & set(answers)


class Load:
    """A client that puts batch after batch, and the table as it has to be."""

    def __init__(self, cluster: Cluster) -> None:
        self._table = cluster.create_table("t", SUMS, buckets=BUCKETS, column_locks=False)
        self._batch = 0
        self.longest_pause_s = 0.0
        self.expected = dict.fromkeys(range(KEYS), (0, 0))

    def put(self) -> None:
        """Put a batch that reaches all buckets. It is acknowledged once, and counts once."""
        number, self._batch = self._batch, self._batch + 1
        rows = {"k": list(range(KEYS)), "a": [1] * KEYS, "b": [number * key for key in range(KEYS)]}
        began = time.monotonic()
        self._table.put(rows, owner="etl", token=Token(1, number))
        self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - began)
        self.expected = {k: (a + 1, b + number * k) for k, (a, b) in self.expected.items()}

    def stored(self) -> dict[int, tuple[int, int]]:
        """Return the table as it is."""
        rows = self._table.lookup({"k": list(range(KEYS))}).to_pylist()
        return {row["k"]: (row["a"], row["b"]) for row in rows}


def test_killed_servers_come_back_and_clients_only_see_a_pause(
    spark: Any, zookeeper: EmbeddedZooKeeper, tmp_path: Path
) -> None:
    address = chroot(zookeeper)
    with (
        run(
            spark, servers=2, zookeeper=address, logs=str(tmp_path / "logs"), options=OPTIONS
        ) as servers,
        connect(address, patience_s=60) as cluster,
    ):
        load = Load(cluster)
        wait_until(lambda: is_served(cluster, servers=2, without=set()), "two servers", 40)
        killed: set[int] = set()

        def back() -> bool:
            load.put()
            return is_served(cluster, servers=2, without=killed)

        for victims in (1, 2, 2):
            for pid in sorted(pids(cluster))[:victims]:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            wait_until(back, "all buckets are served by two servers again", 30)
        assert len(killed) == 5

        # Spark itself has to notice this one: its executor goes, with everything below it.
        [pid, *_] = pids(cluster)
        guardian = parent_of(pid)
        worker = parent_of(guardian)
        daemon = parent_of(worker)
        os.kill(parent_of(daemon), signal.SIGKILL)
        killed.add(pid)
        wait_until(back, "the servers of a lost executor are back", 30)
        assert not any(map(is_running, killed))

        assert load.stored() == load.expected
        assert load.longest_pause_s < 20

        left = pids(cluster)
        servers.stop()
        wait_until(lambda: not any(map(is_running, left)), "no process is left", 1)
        assert servers.wait(0)
        servers.stop()


def test_servers_on_the_machines_address_want_the_token(
    spark: Any,
    zookeeper: EmbeddedZooKeeper,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = chroot(zookeeper)
    arguments: dict[str, Any] = {"servers": 1, "zookeeper": address, "views": tmp_path / "views"}
    arguments |= {"logs": str(tmp_path / "logs"), "options": [*OPTIONS, "--host", "auto"]}
    with pytest.raises(InvalidInput, match="give it a token"):
        run(spark, **arguments)
    monkeypatch.setenv("TALLYBOOK_TOKEN", "open-sesame")
    with pytest.raises(InvalidInput, match="is open to everybody who reaches it"):
        run(spark, **arguments)
    monkeypatch.setenv("TALLYBOOK_ZOOKEEPER_CREDENTIALS", "tallybook:sesame-too")
    access: dict[str, Any] = {"token": "open-sesame", "credentials": ("tallybook", "sesame-too")}
    with run(spark, **arguments), connect(address, patience_s=60, **access) as cluster:
        wait_until(lambda: len(pids(cluster)) == 1, "one server", 30)
        [status] = cluster.status()
        assert status["address"].startswith("127.0.0.1:")
        [command] = [Path(f"/proc/{status['pid']}/cmdline").read_text()]
        assert "sesame" not in command
        [log_path] = (tmp_path / "views").glob("*/tallybook-server-0/server.log")
        assert "joined as" in log_path.read_text()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An object store that the driver's variables lead to.

    The executors were started before these were set, and know nothing of them.
    """
    with s3_server() as server:
        for name, value in {**server.variables, "AWS_SECRET_ACCESS_KEY": "open-sesame"}.items():
            monkeypatch.setenv(name, value)
        yield server


def test_servers_run_the_drivers_python_and_reach_its_object_store(
    spark: Any, zookeeper: EmbeddedZooKeeper, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, context = chroot(zookeeper), spark.sparkContext
    monkeypatch.delenv("PYSPARK_PYTHON")
    monkeypatch.setattr(context, "pythonExec", "python3")  # As Spark has it if told nothing.
    logs = f"{s3.create_bucket()}/logs"
    with (
        run(spark, servers=1, zookeeper=address, logs=logs, options=OPTIONS),
        connect(address, patience_s=60) as cluster,
    ):
        load = Load(cluster)
        load.put()
        assert load.stored() == load.expected
        [pid] = pids(cluster)
        assert "sesame" not in Path(f"/proc/{pid}/cmdline").read_text()
    assert context.pythonExec == "python3", "other jobs of the session have what they had"


@dataclass(frozen=True)
class Ending:
    """How a server is brought to its end, and what the driver has to say of it."""

    words: str
    logs: str = ""
    options: tuple[str, ...] = ()
    python: str = sys.executable
    kill: bool = False


ENDINGS = {
    "a server that did not start": Ending(
        "the server did not start: the log store at s3://no-such-bucket/logs cannot be used: ",
        logs="s3://no-such-bucket/logs",
    ),
    "an error that nobody caught": Ending(
        "ValueError: Unknown level: 'NONSENSE'", options=("--log-level", "nonsense")
    ),
    "a server that was killed": Ending("killed by SIGKILL, after it said: ", kill=True),
    "no such Python": Ending("Cannot run program", python="/no/such/python"),
    "a Python without our packages": Ending("ModuleNotFoundError: No module named ", python="BARE"),
}


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("how", ENDINGS)
def test_why_a_server_ended_stands_in_the_drivers_log(
    spark: Any,
    zookeeper: EmbeddedZooKeeper,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    ending, address = ENDINGS[how], chroot(zookeeper)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    logs = ending.logs or str(tmp_path / "logs")
    options = (*OPTIONS, *ending.options)
    with pytest.MonkeyPatch.context() as patch:
        python = ending.python.replace("BARE", str(bare))
        patch.setattr(spark.sparkContext, "pythonExec", python)
        servers = run(spark, servers=1, zookeeper=address, logs=logs, options=options)
    with servers:
        if ending.kill:
            with connect(address, patience_s=60) as cluster:
                wait_until(lambda: len(pids(cluster)) == 1, "one server", 40)
                [pid] = pids(cluster)
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: bool(caplog.messages), "the driver says something", 60)
    why, _, where = caplog.messages[0].partition("(server 0")
    assert ending.words in why
    assert where.startswith((" on ", " was lost"))
    assert "{" not in why
    assert "sesame" not in caplog.text


def test_mistakes_are_told_before_anything_is_started(spark: Any) -> None:
    def start(**arguments: Any) -> None:
        run(spark, **{"servers": 2, "zookeeper": "127.0.0.1:1", "logs": "logs", **arguments})

    with pytest.raises(InvalidInput, match="Spark Connect cannot run servers"):
        run(object(), servers=1, zookeeper="127.0.0.1:1", logs="logs")
    with pytest.raises(InvalidInput, match="at least one server"):
        start(servers=0)
    with pytest.raises(InvalidInput, match="unrecognized arguments: --speed"):
        start(options=["--speed", "11"])
    with pytest.raises(InvalidInput, match="leave --port out"):
        start(options=["--port", "8815"])


def test_the_address_of_this_machine_is_the_one_that_leads_to_zookeeper() -> None:
    assert address_towards("127.0.0.1:2181,192.0.2.1:2181/chroot") == "127.0.0.1"
    assert address_towards("localhost") == "127.0.0.1"


DRIVER = """
import sys
from pathlib import Path
from server.launch.on_spark import run
from tests.integration.test_on_spark import OPTIONS, cluster_session

zookeeper, directory = sys.argv[1:]
with cluster_session(Path(directory), executors=1) as spark:
    run(spark, servers=1, zookeeper=zookeeper, logs=directory + "/logs", options=OPTIONS).wait()
"""


def test_a_driver_that_is_killed_takes_its_servers_along(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path
) -> None:
    needs_java()
    address = chroot(zookeeper)
    command = [sys.executable, "-c", DRIVER, address, str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment) as driver:
        try:
            with connect(address, patience_s=60) as cluster:
                wait_until(lambda: len(pids(cluster)) == 1, "one server", 60)
                [pid] = pids(cluster)
        finally:
            driver.kill()
    wait_until(lambda: not is_running(pid), "no process is left", 20)
