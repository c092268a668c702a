"""Speculative execution on a real Spark cluster: copies of tasks put, and so do the late originals.

Spark starts no copy on the host that has the original, so there are two workers, at 127.0.0.1 and
127.0.0.2. When one attempt has ended it gives the other one up, whose Python process goes on for a
while (`spark.python.task.killTimeout`, long here): its put arrives whenever it does.
"""

import json
import os
import random
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from foundation.failpoints import ENVIRONMENT_VARIABLE
from locks.store.child_process import GuardedProcess, last_lines
from server.launch.local_cluster import LocalCluster
from tests.conftest import SUMS
from tests.fault.cluster_load import REPOSITORY, local_cluster
from tests.fault.speculating_job import Wait, command
from tests.support.java_classes import FASTER
from tests.support.processes import is_running
from tests.support.sinks import parquet_rows, stored, write_file
from tests.support.spark_session import needs_java
from tests.support.zookeeper_server import wait_until

# Longer than other tests may take: it runs a Spark cluster, on a machine that may be busy.
pytestmark = [pytest.mark.spark, pytest.mark.timeout(3900)]

HOSTS = ("127.0.0.1", "127.0.0.2")
KEYS = range(40)
START_S, JOB_S = 600.0, 3000.0
# Two buckets are two tasks; when one has ended, the other one is slow.
BUCKETS = 2
SPECULATING = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "100ms",
    "spark.speculation.efficiency.enabled": "false",
    # Else all tasks would wait for a place beside the only one that has read the source.
    "spark.locality.wait": "0s",
    # Two seconds by default: a busy machine would miss what is to arrive late.
    "spark.python.task.killTimeout": "1200s",
    # A task that waited in vain ends the test.
    "spark.task.maxFailures": "1",
}
SMALL = {
    "spark.cores.max": str(len(HOSTS)),
    "spark.eventLog.compress": "false",
    "spark.eventLog.enabled": "true",
    "spark.executor.memory": "512m",
    "spark.executorEnv.PYTHONPATH": str(REPOSITORY),
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
}


class Task(NamedTuple):
    """A task of the putting stage."""

    batch: int
    partition: int

    def attempt(self, number: int) -> str:
        """Return how its attempt is called."""
        return f"{self.batch}-{self.partition}-{number}"


# The originals of these wait, and so Spark starts copies of them.
WHILE_OPEN, AFTER_COMMIT, AFTER_THE_NEXT, AFTER_RESTART = SLOW = [
    *(Task(0, 0), Task(1, 1), Task(2, 0), Task(4, 1)),
]
RUNS = (range(5), range(5, 7))


def waits(notes: Path, commits: Path) -> Iterator[Wait]:
    """Yield what makes originals slow, and who waits until their puts have arrived."""

    def outcome(task: Task) -> str:
        return str(notes / f"outcome-{task.attempt(0)}")

    # Both attempts put, before either has ended.
    path = str(notes / f"put-{WHILE_OPEN.attempt(1)}")
    yield Wait(*WHILE_OPEN, 0, "task.before_put", path)
    yield Wait(*WHILE_OPEN, 1, "task.put", outcome(WHILE_OPEN))
    # The put arrives when a batch is committed: its own, which is still the last one of its bucket;
    # the next one; the first one of the query's next run. The batch after that waits for it.
    for task, batch in ((AFTER_COMMIT, 1), (AFTER_THE_NEXT, 3), (AFTER_RESTART, 5)):
        yield Wait(*task, 0, "task.before_put", str(commits / str(batch)))
        yield Wait(batch + 1, None, None, "task.before_put", outcome(task))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Start a cluster whose leaders stay: what is slow here is not theirs to answer for."""
    needs_java()
    needs_hosts()
    directory = tmp_path_factory.mktemp("cluster")
    with local_cluster(directory, servers=1, session_timeout_s=20.0) as running:
        yield running


def needs_hosts() -> None:
    """Skip the test where loopback is one address only."""
    for host in HOSTS:
        with socket.socket() as listening:
            try:
                listening.bind((host, 0))
            except OSError as exc:
                pytest.skip(f"a second host on this machine needs the address {host}: {exc}")


# --- A Spark cluster ----------------------------------------------------------------------------


def spark_home() -> Path:
    """Return where PySpark keeps its jars."""
    found = find_spec("pyspark")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@contextmanager
def daemon(
    log_path: Path, host: str, directory: Path, name: str, *arguments: str
) -> Iterator[GuardedProcess]:
    """Run a master or worker; at the end of the block it has ended."""
    java_home = os.environ.get("JAVA_HOME")
    java = str(Path(java_home, "bin", "java")) if java_home else shutil.which("java")
    assert java is not None
    environment = {
        "SPARK_HOME": spark_home(),
        "SPARK_LOCAL_IP": host,
        "SPARK_LOCAL_DIRS": directory,
        # As Spark's own scripts say; executors are not started without it.
        "SPARK_SCALA_VERSION": "2.13",
    }
    command = [
        *("env", "-u", ENVIRONMENT_VARIABLE, *(f"{key}={at}" for key, at in environment.items())),
        *(java, "-Xmx192m", *FASTER.split(), "-cp", f"{spark_home()}/jars/*"),
        *(f"org.apache.spark.deploy.{name}", "--host", host, "--port", "0", "--webui-port", "0"),
        *arguments,
    ]
    process = GuardedProcess(command, log_path)
    try:
        yield process
    finally:
        process.end(politely=True)


def wait_for_line(process: GuardedProcess, log_path: Path, pattern: str) -> str:
    """Return what the log of a daemon says, as soon as it does."""
    found: list[str] = []

    def said() -> bool:
        assert process.alive, last_lines(log_path, 20)
        found[:] = re.findall(pattern, log_path.read_text(errors="replace"))
        return bool(found)

    wait_until(said, f"{pattern!r} in {log_path}", START_S)
    return found[0]


@contextmanager
def spark_cluster(directory: Path) -> Iterator[str]:
    """Run a standalone master, and one worker of one core on each host; yields its address."""
    directory.mkdir()
    with ExitStack() as running:
        log_path = directory / "master.log"
        master = running.enter_context(daemon(log_path, HOSTS[0], directory, "master.Master"))
        address = wait_for_line(master, log_path, r"Starting Spark master at (spark://[\d.:]+)")
        workers = {}
        for host in HOSTS:
            path = directory / f"worker-{host}.log"
            options = ["--cores", "1", "--memory", "1g", "--work-dir", str(directory / host)]
            workers[path] = running.enter_context(
                daemon(path, host, directory, "worker.Worker", *options, address)
            )
        for path, worker in workers.items():
            wait_for_line(worker, path, "Successfully registered with master")
        yield address


# --- The test -----------------------------------------------------------------------------------


def write_files(directory: Path) -> list[list[str]]:
    """Write a file per batch, with several rows of every key; returns those of each run."""
    chance = random.Random(0)
    for number in [number for run in RUNS for number in run]:
        keys = [*KEYS, *chance.choices(KEYS, k=30)]
        amounts = [chance.randrange(1 << 40) for _ in keys]
        write_file(directory, number, pa.table({"k": keys, "a": [1] * len(keys), "b": amounts}))
    return [[str(directory / f"{number:05}.parquet") for number in run] for run in RUNS]


def expected(directory: Path) -> dict[int, tuple[int, int]]:
    """Return the sums of all rows that were written."""
    rows, amounts = Counter[int](), Counter[int]()
    for row in parquet_rows(directory):
        rows[row["k"]] += row["a"]
        amounts[row["k"]] += row["b"]
    return {key: (rows[key], amounts[key]) for key in rows}


def run_job(settings: dict[str, Any], log_path: Path) -> None:
    """Run the driver to its end."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environment.pop(ENVIRONMENT_VARIABLE, None)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command(settings), cwd=REPOSITORY, env=environment, stdout=log, stderr=log
        )
    try:
        assert process.wait(JOB_S) == 0, last_lines(log_path, 40)
    finally:
        process.kill()
        process.wait()


def attempts(directory: Path) -> dict[int, dict[str, Any]]:
    """Return what Spark's event log has of each attempt at a task, by its id."""
    events = [
        json.loads(line)
        for path in directory.rglob("events_*")
        for line in path.read_text().splitlines()
    ]
    return {
        event["Task Info"]["Task ID"]: {**event["Task Info"], **event.get("Task End Reason", {})}
        for event in events
        if event["Event"] in ("SparkListenerTaskStart", "SparkListenerTaskEnd")
    }


def test_copies_of_slow_tasks_and_their_late_originals_count_everything_once(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    files, notes, events = (tmp_path / name for name in ("files", "notes", "events"))
    for directory in (notes, events):
        directory.mkdir()
    checkpoint = tmp_path / "checkpoint"
    with cluster.connect() as client, spark_cluster(tmp_path / "spark") as master:
        table = client.create_table("speculated", SUMS, buckets=BUCKETS)
        settings = {
            "master": master,
            "address": cluster.address,
            "table": table.name,
            "columns": ["a", "b"],
            "source": str(tmp_path / "source"),
            "checkpoint": str(checkpoint),
            "notes": str(notes),
            "runs": write_files(files),
            "waits": list(waits(notes, checkpoint / "commits")),
            "spark": {**SPECULATING, **SMALL, "spark.eventLog.dir": events.as_uri()},
        }
        run_job(settings, tmp_path / "job.log")
        sums = expected(files)
        assert set(sums) == set(KEYS)
        assert stored(table, KEYS) == sums
        assert stored(table, KEYS, isolation="committed") == sums

    outcomes = {
        path.name.removeprefix("outcome-"): json.loads(path.read_text())
        for path in notes.glob("outcome-*")
    }
    known = attempts(events)
    for task in SLOW:
        check_speculated(task, outcomes, known)
    for task in (WHILE_OPEN, AFTER_COMMIT):
        check_repeated(task, outcomes)
    assert outcomes[AFTER_THE_NEXT.attempt(0)]["error"] == "SealedBatch"
    assert outcomes[AFTER_RESTART.attempt(0)]["error"] == "OldEpoch"
    # Nothing was cured by writing a batch again.
    for run, batches in enumerate(RUNS):
        status = json.loads((notes / f"status-{run}").read_text())
        assert (status["starts"], status["batches"]) == (1, len(batches))
        assert status["undone_keys"] == 0
    workers = {outcome["pid"] for outcome in outcomes.values()}
    wait_until(lambda: not any(map(is_running, workers)), "the Python workers have ended")


def check_speculated(
    task: Task, outcomes: dict[str, dict[str, Any]], known: dict[int, dict[str, Any]]
) -> None:
    """Spark made a copy on the other host, and did not wait for an original that is late."""
    original, copy = (known[outcomes[task.attempt(number)]["task_id"]] for number in (0, 1))
    assert (original["Index"], original["Attempt"]) == (task.partition, 0)
    assert (copy["Index"], copy["Attempt"]) == (task.partition, 1)
    assert not original["Speculative"]
    assert copy["Speculative"]
    assert {original["Host"], copy["Host"]} == set(HOSTS)
    if task is not WHILE_OPEN:
        # Killed; the last one's end may be too late for the log.
        assert original.get("Reason") in ("TaskKilled", None)
        assert copy["Reason"] == "Success"


def check_repeated(task: Task, outcomes: dict[str, dict[str, Any]]) -> None:
    """The copy's put was the first; the original's changed nothing, and was told the same."""
    original, copy = (outcomes[task.attempt(number)]["results"] for number in (0, 1))
    assert copy
    assert all(not repeated for *_, repeated in copy)
    assert original == [[*result, 1] for *result, _ in copy]
