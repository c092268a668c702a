"""Spark on a bed: a standalone master with a driver that runs two sinks, and a worker per server.

A worker is on the host of a tablet server, so that what fails there fails for both.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.multihost.hosts import REPOSITORY, Host, command_line
from tests.multihost.parts import SECRETS, Part, python_part
from tests.support.java_classes import SHORT_LIVED
from tests.support.zookeeper_server import wait_until

MASTER = "spark"
URL = f"spark://{MASTER}:7077"
_START_DEADLINE_S = 60.0
_DEPLOY = "org.apache.spark.deploy"


def master_on(host: Host) -> Part:
    """Return the master."""
    return _daemon(host, "master", f"{_DEPLOY}.master.Master", "--port", "7077")


def worker_on(host: Host) -> Part:
    """Return a worker with one core."""
    more = ("--cores", "1", "--memory", "1g", "--work-dir", host.inside("work"), URL)
    return _daemon(host, "worker", f"{_DEPLOY}.worker.Worker", *more)


def driver_on(host: Host, settings: dict[str, Any]) -> Part:
    """Return the driver, whose two queries write a column each, by one route each."""
    where = {"master": URL, "host": host.address, "checkpoints": host.inside("checkpoints")}
    return python_part(host, "driver", "tests.multihost.sink_job", {**settings, **where})


def wait_until_up(master: Part, workers: Sequence[Part]) -> None:
    """Return when all workers have told the master."""
    wait_until(
        lambda: _registered(master.program.log_path) >= len(workers),
        f"{len(workers)} workers are there",
        _START_DEADLINE_S,
        every_s=0.1,
    )


def executors_of(host: Host) -> list[int]:
    """Return the processes of Spark's executors on a host."""
    name = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
    return [pid for pid in host.processes() if name in command_line(pid)]


def spark_home() -> Path:
    """Return where Spark is."""
    found = importlib.util.find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def _registered(log_path: Path) -> int:
    return log_path.read_text(errors="replace").count("Registering worker")


def _daemon(host: Host, name: str, main: str, *arguments: str) -> Part:
    home = spark_home()
    command = [str(home / "bin" / "spark-class"), main, "--host", host.name, *arguments]
    variables = {
        **SECRETS,
        "PYTHONPATH": str(REPOSITORY),
        "SPARK_DAEMON_JAVA_OPTS": SHORT_LIVED,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_DIRS": host.inside("tmp"),
        "SPARK_LOCAL_IP": host.address,
        "SPARK_NO_DAEMONIZE": "1",
    }
    return Part(host, name, command, variables)
