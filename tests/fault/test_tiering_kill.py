"""Tiering jobs killed with SIGKILL at each of their steps, and started again; executors, too.

Most are jobs whose tasks run in the driver: see `tiering_job`. In a short run they are killed at
some steps, chosen by a seed that a failure prints and TALLYBOOK_SEED repeats; with
TALLYBOOK_EXAMPLES at all of them, in all layouts.
"""

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foundation.failpoints import ENVIRONMENT_VARIABLE
from server.client.cluster import Cluster
from server.launch.local_cluster import LocalCluster
from sink.worker_connections import disconnect
from tests.fault.cluster_load import LONGER, REPOSITORY, client_of, local_cluster, noted
from tests.fault.lake_checks import left_over
from tests.fault.tiering_scene import JOB_S, SEED, WAYS, Running, Scene, Way
from tests.support.spark_session import needs_java, quiet_spark
from tests.support.zookeeper_server import wait_until

# Where a job can be killed, and with which visit, by what it does. Two buckets are written; a
# compaction passes some places once more.
OF_COPIES = ["tier.leased", "tier.files_written", "tier.files_written:2", "tier.gathered"]
OF_COPIES += ["lake.commit", "tier.committed", "tier.cleaned"]
OF_CHANGES = ["tier.planned", *OF_COPIES[1:]]
OF_VECTORS = ["lake.vectors_written"]
OF_COMPACTIONS = ["tier.files_written:3", "tier.gathered:2", "lake.commit:2", "tier.committed:2"]
ALL = {name.partition(":")[0] for name in (*OF_COPIES, *OF_CHANGES, *OF_VECTORS)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    needs_java()
    with local_cluster(tmp_path_factory.mktemp("cluster"), servers=1) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Cluster]:
    with client_of(cluster) as connected:
        yield connected
        disconnect(connected.recipe)


def kills(chance: random.Random, way: Way) -> list[tuple[str, str]]:
    """Return where to kill, and what the job does then."""
    vectors = OF_VECTORS if way.layout == "vectors" else []
    chosen = {
        "copies": OF_COPIES,
        "follows": [*OF_CHANGES, *vectors],
        "compacts": OF_COMPACTIONS,
        "begins again": OF_COPIES,
    }
    if not LONGER:
        chosen = {what: [chance.choice(names)] for what, names in chosen.items()}
    return [(what, name) for what, names in chosen.items() for name in names]


def test_every_failpoint_of_tiering_is_died_at() -> None:
    sources = [
        path for name in ("lake", "tiering") for path in (REPOSITORY / "sink" / name).glob("*.py")
    ]
    texts = [path.read_text() for path in sources]
    assert {name for text in texts for name in re.findall(r'\bhit\("([^"]+)"\)', text)} == ALL


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_job_that_is_killed_at_any_step_and_started_again_is_right(
    way: Way, cluster: LocalCluster, client: Cluster, tmp_path: Path
) -> None:
    scene = Scene(cluster, client, tmp_path, way)
    with noted(SEED) as note:
        for what, failpoint in kills(scene.chance, way):
            note(f"{way.format} {way.layout}: killed at {failpoint} as it {what}")
            if what == "copies":
                scene.move(tmp_path / failpoint)
            # Where rows only come, no file is written anew, and there are several to be merged.
            scene.change(new=what == "compacts")
            scene.kill(failpoint, begin_again=what == "begins again")
            scene.go_on()
            scene.check()
            scene.change()
            scene.go_on()
            scene.check()
            assert left_over(scene.path) == set()
            assert scene.leases() == [], "what the killed job held was taken up, and dropped"


# --- With Spark ---------------------------------------------------------------------------------

IN_A_TASK = "tier.files_written:1:pause"


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with quiet_spark("local[2]") as session:
        yield session


def asleep(below: int) -> list[int]:
    """Return the processes that sleep, of those that a process has started, or these in turn."""
    parents, states = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # It has just ended.
        parents[int(path.name)], states[int(path.name)] = int(parent), state

    def is_below(pid: int) -> bool:
        while pid in parents and pid != below:
            pid = parents[pid]
        return pid == below

    return [pid for pid, state in states.items() if state == "T" and is_below(pid)]


@pytest.mark.spark
def test_a_round_whose_task_is_killed_is_done_again_and_what_it_wrote_is_removed(
    cluster: LocalCluster, client: Cluster, spark: Any, tmp_path: Path
) -> None:
    scene = Scene(cluster, client, tmp_path, WAYS[0])
    if not LONGER:
        scene.go_on()
        scene.change()
    for what in ("a copy", "changes") if LONGER else ("changes",):
        steps = scene.steps()
        # Processes of another environment are other ones, which have not passed there yet.
        variables = {ENVIRONMENT_VARIABLE: IN_A_TASK, "TALLYBOOK_TEST": what}
        spark.sparkContext.environment.update(variables)
        try:
            with Running(scene.job(spark)) as running:
                wait_until(lambda: bool(asleep(os.getpid())), f"a task of {what} sleeps", JOB_S)
                os.kill(asleep(os.getpid())[0], signal.SIGKILL)
                while not running.ended.wait(0.1):  # The others, and those of the next attempt.
                    for pid in asleep(os.getpid()):
                        os.kill(pid, signal.SIGCONT)
            assert running.summary().failed == 1
        finally:
            for name in variables:
                del spark.sparkContext.environment[name]
        assert scene.steps() == steps + 1
        scene.check()
        scene.change()
    scene.go_on()
    scene.check()
    assert left_over(scene.path) == set()


@pytest.mark.spark
def test_a_driver_of_spark_that_is_killed_and_started_again_is_right(
    cluster: LocalCluster, client: Cluster, spark: Any, tmp_path: Path
) -> None:
    with noted(SEED) as note:
        for way in WAYS if LONGER else [random.Random(SEED).choice(WAYS)]:
            scene = Scene(cluster, client, tmp_path / f"{way.format}-{way.layout}", way)
            names = OF_COPIES[3:] if LONGER else [scene.chance.choice(OF_COPIES[3:])]
            for failpoint in names:
                note(f"{way}: killed at {failpoint}")
                scene.change()
                scene.kill(failpoint, spark=True)
            for _ in range(2):
                scene.job(spark).run()
                scene.check()
                scene.change()
            assert left_over(scene.path) == set()


@pytest.mark.spark
def test_a_command_that_is_told_to_end_in_a_round_ends_and_changes_nothing(
    cluster: LocalCluster, client: Cluster, tmp_path: Path
) -> None:
    scene = Scene(cluster, client, tmp_path, WAYS[0])
    scene.go_on()
    scene.change()
    steps = scene.steps()
    words = ["tier", scene.table.name, "--to", str(scene.path), "--master", "local[2]"]
    environment = {**os.environ, ENVIRONMENT_VARIABLE: IN_A_TASK, "PYTHONPATH": str(REPOSITORY)}
    with (
        (tmp_path / "command.log").open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tallybook", *words, "--zookeeper", cluster.address],
            cwd=REPOSITORY,
            env=environment,
            stdout=log,
            stderr=log,
        ) as command,
    ):
        sleeping: list[int] = []
        try:
            wait_until(lambda: bool(asleep(command.pid)), "a task sleeps", JOB_S)
            sleeping = asleep(command.pid)
            command.send_signal(signal.SIGTERM)
            assert command.wait(180) == 0, (tmp_path / "command.log").read_text()
        finally:
            command.kill()
            for pid in sleeping:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
    assert "0 rounds" in (tmp_path / "command.log").read_text()
    assert scene.steps() == steps
    scene.check()
    scene.go_on()
    scene.check()
    assert left_over(scene.path) == set()
    assert scene.leases() == []
