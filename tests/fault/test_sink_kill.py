"""Spark drivers killed with SIGKILL at the writer's steps, and restarted on their checkpoint.

A start of Spark takes seconds, so one job is killed at several steps in a row, on one table: in a
short run at some, chosen by a seed that a failure prints and TALLYBOOK_SEED repeats; with
TALLYBOOK_EXAMPLES at all of them.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from foundation.failpoints import ENVIRONMENT_VARIABLE
from merge_engine.aggregates.registry import AggFunction
from server.client.cluster import Cluster
from server.launch.local_cluster import LocalCluster
from tests.fault.cluster_load import LONGER, REPOSITORY, client_of, local_cluster, noted
from tests.fault.sink_events import QUERIES, SCHEMA, check_exact, write_source
from tests.support.spark_session import needs_java
from tests.support.zookeeper_server import wait_until

pytestmark = pytest.mark.spark

SEED = int(os.environ.get("TALLYBOOK_SEED", random.randrange(1 << 32)))
JOB_S = 240.0

# A batch is killed at these; what it leaves is owed when the job starts again.
IN_A_BATCH = ["writer.before_put", "writer.put", "writer.sealed"]
IN_A_PROMISE = ["writer.redo_written", "writer.prepared"]
AT_A_START = [
    *("writer.acquired", "writer.fenced", "writer.paid", "writer.recovered", "writer.ready"),
]
IN_AN_UNDO = ["writer.undone"]
AFTER_A_BATCH = ["writer.committed"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    needs_java()
    with local_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Cluster]:
    with client_of(cluster) as connected:
        yield connected


class Job:
    """A driver program that can be started again and again on its checkpoint."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self._log_path = directory / "job.log"
        self._settings = settings

    @contextmanager
    def running(self, failpoint: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
        """Start the driver; at the end of the block it has ended, and its JVM with it."""
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        environment.pop(ENVIRONMENT_VARIABLE, None)
        if failpoint is not None:
            environment[ENVIRONMENT_VARIABLE] = failpoint
        command = [sys.executable, "-m", "tests.fault.sink_job", json.dumps(self._settings)]
        with self._log_path.open("ab") as log:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def run(self, failpoint: str | None = None) -> int:
        """Run the driver until it ends by itself, or at the failpoint; return how it ended."""
        with self.running(failpoint) as process:
            return process.wait(JOB_S)

    def committed(self) -> int:
        """Return how many batches Spark has noted as done."""
        return len(list(Path(self._settings["checkpoint"], "commits").glob("[0-9]*")))

    def log(self) -> str:
        """Return the end of what it printed."""
        return self._log_path.read_text(errors="replace")[-3000:]


def job_of(cluster: LocalCluster, directory: Path, query: int, table: str, **sink: Any) -> Job:
    return Job(
        directory,
        {
            "address": cluster.address,
            "table": table,
            "columns": list(QUERIES[query]),
            "source": str(directory / "source"),
            "checkpoint": str(directory / "checkpoint"),
            "sink": {"deadline_s": 60.0, **sink},
        },
    )


def steps(chance: random.Random, recovery: str) -> list[str]:
    """Return where to kill, each with the visit: what is owed at a start was left before it."""
    of_batches = IN_A_BATCH + (IN_A_PROMISE if recovery == "redo" else [])
    at_a_start = AT_A_START + (IN_AN_UNDO if recovery == "undo" else [])
    if not LONGER:
        starts = chance.choice(at_a_start)
        left = [*of_batches, *AFTER_A_BATCH]
        if starts in ("writer.undone", "writer.paid"):  # It needs a batch that was left behind.
            left = ["writer.prepared"] if recovery == "redo" else ["writer.put", "writer.sealed"]
        chosen = [chance.choice(left), starts]
    else:
        chosen = []
        for start in at_a_start:
            chosen += ["writer.sealed", start]
        rest = [*of_batches, *AFTER_A_BATCH]
        chance.shuffle(rest)
        chosen += rest
    return [f"{name}:{1 if name in at_a_start else chance.choice((1, 2))}" for name in chosen]


def test_the_three_queries_have_every_function() -> None:
    assert {function for query in QUERIES for _, function, _ in query.values()} == set(AggFunction)


def _recoveries() -> Sequence[str]:
    return ["undo", "redo"] if LONGER else [random.Random(SEED).choice(["undo", "redo"])]


def test_a_driver_that_is_killed_at_any_step_and_started_again_counts_everything_once(
    cluster: LocalCluster, client: Cluster, tmp_path: Path
) -> None:
    for recovery in _recoveries():
        chance = random.Random(f"{SEED} {recovery}")
        query = chance.randrange(len(QUERIES))
        directory = tmp_path / recovery
        table = client.create_table(f"killed_{recovery}", SCHEMA, buckets=2)
        chosen = steps(chance, recovery)
        batches = 2 * len(chosen) + 1
        write_source(directory / "source", SEED, query, batches)
        job = job_of(
            cluster,
            directory,
            query,
            table.name,
            route=chance.choice(["driver", "auto" if recovery == "redo" else "executors"]),
            recovery=recovery,
            redo_location=str(directory / "redo"),
        )
        with noted(SEED) as note:
            for step in chosen:
                note(f"{recovery}: killed at {step}")
                assert job.run(step) == -signal.SIGKILL, job.log()
            assert job.run() == 0, job.log()
            check_exact(table, SEED, {query: batches})


class KilledNowAndThen:
    """A job that is killed when it has committed some batches more, a number of times."""

    def __init__(self, job: Job, chance: random.Random, kills: int) -> None:
        self._job, self._chance = job, chance
        self._kills = kills
        self._running: Any = None
        self.start()

    def start(self) -> None:
        """Start it, and set the goal of this run."""
        self._running = self._job.running()
        self._process: subprocess.Popen[bytes] = self._running.__enter__()
        self._goal = self._job.committed() + self._chance.randrange(1, 8)

    def is_due(self) -> bool:
        """Whether it has ended, or is to be killed now."""
        due = self._kills > 0 and self._job.committed() >= self._goal
        return due or self._process.poll() is not None

    def end(self) -> bool:
        """Kill it, unless it has ended; True if it has got all its source."""
        code = self._process.poll()
        self.close()
        self._kills -= 1
        assert code in (None, 0), self._job.log()
        return code == 0

    def close(self) -> None:
        """End the process."""
        self._running.__exit__(None, None, None)


@pytest.mark.skipif(not LONGER, reason="TALLYBOOK_EXAMPLES: three Sparks at once take minutes")
def test_three_drivers_that_are_killed_at_any_time_count_everything_once(
    cluster: LocalCluster, client: Cluster, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    batches = 20 + LONGER // 5
    table = client.create_table("three_drivers", SCHEMA, buckets=2)
    running: dict[int, KilledNowAndThen] = {}
    with noted(SEED) as note:
        try:
            for query in range(len(QUERIES)):
                directory = tmp_path / f"query-{query}"
                write_source(directory / "source", SEED, query, batches)
                route = chance.choice(["driver", "executors"])
                job = job_of(cluster, directory, query, table.name, route=route)
                running[query] = KilledNowAndThen(job, chance, kills=batches // 8)
            while running:
                jobs = list(running.items())
                wait_until(
                    lambda jobs=jobs: any(job.is_due() for _, job in jobs),  # type: ignore[misc]
                    "a job goes on",
                    JOB_S,
                )
                for query, job_running in jobs:
                    if not job_running.is_due():
                        continue
                    if job_running.end():
                        del running[query]
                        continue
                    note(f"killed query {query}")
                    job_running.start()
                if chance.random() < 0.2:
                    server = chance.choice(cluster.servers)
                    note(f"killed server {server.number}")
                    server.kill()
                    server.start()
        finally:
            for job_running in running.values():
                job_running.close()
        check_exact(table, SEED, dict.fromkeys(range(len(QUERIES)), batches))
