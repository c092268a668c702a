"""Tiering jobs that meet one another, sleep, lose their lease or an answer, or their servers.

Their tasks run in the driver: see `tiering_job`. The servers take snapshots all the time and keep
no more of the log than somebody holds, so a job that holds too little has to begin again.
"""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tallybook as tb
from foundation.errors import (
    AlreadyExists,
    CutTooOld,
    LakeTaken,
    StorageUnavailable,
    UnknownLease,
    UnknownOutcome,
)
from foundation.failpoints import arm
from merge_engine.storage.objects import LocalStorage
from recovery.writer.rows import Rows
from server.client.cluster import Cluster
from server.launch.local_cluster import LocalCluster
from sink.lake import log as lake_log
from sink.lake import opening
from sink.rolling_lease import RollingLease
from sink.tiering import copying
from sink.tiering.cleaning import clean
from sink.tiering.progress import Round, RoundKind, Summary, Underway
from sink.worker_connections import disconnect
from tests.fault.cluster_load import LONGER, client_of, local_cluster, noted, rounds
from tests.fault.lake_checks import check_steps, commits, left_over, marks
from tests.fault.moving_writer import TOTAL, Movers, rows_of, table_schema, writer_of
from tests.fault.tiering_job import eager_compaction, tasks_in_this_process
from tests.fault.tiering_scene import JOB_S, SEED, WAYS, Running, Scene
from tests.support.zookeeper_server import wait_until

LEASE_S = 2.0
# Where a lease has to be renewed in time, on a machine that is busy with something else.
RENEWED_LEASE_S = 4.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    options = ["--snapshot-interval", "0.5", "--log-ttl", "0"]
    with local_cluster(tmp_path_factory.mktemp("cluster"), options=options) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: LocalCluster) -> Iterator[Cluster]:
    with client_of(cluster) as connected:
        yield connected
        disconnect(connected.recipe)


@pytest.fixture
def spark() -> Iterator[Any]:
    """Stand for Spark; rounds are followed by a compaction whenever there is something to merge."""
    with tasks_in_this_process() as session, eager_compaction():
        yield session


@pytest.fixture(params=WAYS if LONGER else WAYS[:1], ids="-".join)
def scene(
    request: pytest.FixtureRequest, cluster: LocalCluster, client: Cluster, tmp_path: Path
) -> Iterator[Scene]:
    made = Scene(cluster, client, tmp_path, request.param)
    made.options |= {"hold_s": 600.0}
    with noted(SEED):
        yield made
    client.drop_table(made.table.name)


class Gate:
    """Stops one thread at a failpoint, once, until it is opened."""

    def __init__(self, thread: str) -> None:
        self._thread = thread
        self.reached, self._opened = threading.Event(), threading.Event()

    def __call__(self) -> None:
        if threading.current_thread().name != self._thread or self.reached.is_set():
            return
        self.reached.set()
        assert self._opened.wait(JOB_S)

    def wait(self) -> None:
        """Wait until it stands there."""
        assert self.reached.wait(JOB_S), f"{self._thread} has not come"

    def open(self) -> None:
        """Let it go on."""
        self._opened.set()


# --- Two jobs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["a copy", "changes"])
@pytest.mark.parametrize("winner", [0, 1], ids=["the first wins", "the second wins"])
def test_of_two_jobs_that_have_planned_the_same_round_one_goes_on_and_one_stops(
    what: str, winner: int, scene: Scene, spark: Any, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "changes":
        scene.go_on()
        scene.change()
    names = ["first", "second"]
    gates = [Gate(name) for name in names]
    told: list[Any] = []
    caplog.set_level("WARNING")

    def at_gates() -> None:
        for gate in gates:
            gate()

    with ExitStack() as stack:
        stack.enter_context(arm("tier.gathered", at_gates))
        jobs = []
        for number, (name, gate) in enumerate(zip(names, gates, strict=True)):
            report = told.append if number == winner else None
            settings = {"once": number != winner, "interval_s": 0.1, "lease_s": RENEWED_LEASE_S}
            job = scene.job(spark, report, **settings)
            jobs.append(stack.enter_context(Running(job, name)))
            gate.wait()
        gates[winner].open()
        wait_until(lambda: bool(told), "the winner has committed", JOB_S)
        gates[1 - winner].open()
        with pytest.raises(LakeTaken, match="was committed by another tiering job"):
            jobs[1 - winner].summary()
        # The winner goes on, by what has changed: what it holds was not taken from it.
        scene.change()
        wait_until(lambda: told[-1].cut.has_same_work(scene.table.cut()), "it goes on", JOB_S)
        pass_time(scene, RENEWED_LEASE_S)
        scene.change()
        scene.table.snapshot()
        wait_until(lambda: told[-1].cut.has_same_work(scene.table.cut()), "it goes on", JOB_S)
    scene.check()
    assert RoundKind.COPY not in [done.kind for done in told[1:]]
    assert "may be cleaned" not in caplog.text
    scene.go_on()  # What the other has left may have come after the last look at all objects.
    assert left_over(scene.path) == set()


def pass_time(scene: Scene, seconds: float) -> None:
    """Wait until the store's clock, by which leases end, has gone on so far."""
    store = scene.client.coordinator.store
    end = store.now_ms() + 1000 * seconds
    wait_until(lambda: store.now_ms() >= end, "time passes", JOB_S)


# --- Zombies ------------------------------------------------------------------------------------


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("failpoint", ["tier.gathered", "lake.commit"])
def test_a_job_that_sleeps_before_its_commit_while_another_does_the_round_commits_nothing(
    failpoint: str, scene: Scene
) -> None:
    scene.go_on()
    scene.change()
    with scene.running(f"{failpoint}:1:pause") as zombie:
        wait_until(lambda: stopped(zombie.pid), f"it sleeps at {failpoint}", JOB_S)
        for _ in range(2):
            scene.go_on()
            scene.change()
        steps = scene.steps()
        os.kill(zombie.pid, signal.SIGCONT)
        assert zombie.wait(JOB_S) == 1
    assert "LakeTaken" in scene.log()
    assert scene.steps() == steps
    scene.check()
    scene.go_on()
    scene.check()
    assert left_over(scene.path) == set()


@pytest.mark.parametrize("failpoint", ["tier.planned", "lake.commit"])
@pytest.mark.parametrize("rounds_of_other", [1, 4])
@pytest.mark.parametrize("scene", WAYS[1:], ids="-".join, indirect=True)
def test_a_job_that_sleeps_while_another_removes_what_it_has_replaced_is_told_of_it(
    failpoint: str, rounds_of_other: int, scene: Scene
) -> None:
    """With a retention of nothing: what it wants to read is gone, or a later version is there."""
    scene.go_on()
    scene.change()
    with scene.running(f"{failpoint}:1:pause") as zombie:
        wait_until(lambda: stopped(zombie.pid), f"it sleeps at {failpoint}", JOB_S)
        for _ in range(rounds_of_other):
            scene.go_on(retention_s=0.0)
            scene.change()
        version = tb.tiering.find(str(scene.path)).version
        os.kill(zombie.pid, signal.SIGCONT)
        assert zombie.wait(JOB_S) == 1
    log = scene.log()
    assert "LakeTaken" in log.strip().splitlines()[-1]
    assert tb.tiering.find(str(scene.path)).version == version
    scene.go_on(retention_s=0.0)
    copy = tb.tiering.find(str(scene.path)).to_arrow().sort_by("k")
    assert copy.equals(
        scene.table.to_arrow().select(copy.schema.names).sort_by("k").cast(copy.schema)
    )


def test_a_job_that_sleeps_before_it_cleans_deletes_nothing_that_is_needed(
    scene: Scene, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate("zombie")

    def clean_late(*arguments: Any) -> int:
        gate()
        return clean(*arguments)

    monkeypatch.setattr(copying, "clean", clean_late)
    scene.go_on()
    scene.change()
    with Running(scene.job(spark), "zombie") as zombie:
        gate.wait()
        for new in (False, True, False):
            scene.change(new=new)
            scene.go_on()
        gate.open()
        zombie.summary()
    assert left_over(scene.path) == set()
    scene.check()


# --- Commits of which nobody knows whether they were made ----------------------------------------


class DoubtfulLake(LocalStorage):
    """A lake whose commits go wrong in ways that are given one by one.

    "done": it was made; "not done"; "late": it is made when the `late` ones are let arrive.
    """

    def __init__(self, directory: str | Path, doubts: list[str], late: list[Any]) -> None:
        super().__init__(directory)
        self._doubts, self._late = doubts, late

    def child(self, path: str) -> LocalStorage:
        return DoubtfulLake(self._directory / path, self._doubts, self._late)

    def create(self, name: str, data: bytes) -> None:
        doubt = self._doubts.pop(0) if name.endswith(".json") and self._doubts else None
        if doubt in (None, "done"):
            super().create(name, data)
        if doubt == "late":
            self._late.append(lambda: LocalStorage.create(self, name, data))
        if doubt is not None:
            raise UnknownOutcome(f"{name}: the connection broke")


class Doubts:
    """What is still to go wrong, and what is still on its way."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.late: list[Callable[[], None]] = []

    def arrive(self) -> None:
        """Let what is on its way arrive: the first of it is made, if none is there."""
        for create in self.late:
            try:
                create()
            except AlreadyExists:
                continue
        self.late.clear()


@pytest.fixture
def doubts(monkeypatch: pytest.MonkeyPatch) -> Doubts:
    made = Doubts()

    def open_doubtful(location: str, **_: Any) -> LocalStorage:
        return DoubtfulLake(location, made.left, made.late)

    monkeypatch.setattr(opening, "open_storage", open_doubtful)
    monkeypatch.setattr(lake_log, "_PAUSE_S", 0.01)
    return made


GIVEN_UP = ["late"] * 5


@pytest.mark.parametrize("scene", [WAYS[0], WAYS[2]], ids="-".join, indirect=True)
def test_a_commit_of_which_nobody_knows_whether_it_was_made_is_made_once(
    scene: Scene, doubts: Doubts, tmp_path: Path
) -> None:
    cases: list[tuple[list[str], int]] = [
        (["done"], 0),
        (["not done"] * 4 + ["done"], 0),
        (GIVEN_UP, 1),
    ]
    if LONGER:
        cases += [(["not done"], 0), (["not done"] * 5, 1)]
    for wrong, failed in cases:
        for path in (tmp_path / f"copy-{len(wrong)}-{wrong[-1]}", tmp_path / "followed"):
            scene.move(path)
            scene.change()
            doubts.left += wrong
            summary = scene.go_on()
            assert doubts.left == []
            assert (summary.failed, summary.rounds) == (failed, 1), wrong
            doubts.arrive()
            scene.check()
            scene.change()
            scene.go_on()
            scene.check()
            assert left_over(scene.path) == set()


def test_a_lake_that_does_not_answer_after_a_round_has_failed_is_asked_again(
    scene: Scene, doubts: Doubts, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, calls = copying.TableCopy.load, count()

    def load_or_fail(copy: copying.TableCopy) -> None:
        if next(calls) == 1:
            raise StorageUnavailable("no answer")
        load(copy)

    monkeypatch.setattr(copying.TableCopy, "load", load_or_fail)
    doubts.left += ["not done"] * 4 + ["done"]
    monkeypatch.setattr(lake_log, "_TRIES", 4)
    assert scene.go_on().failed == 2
    assert scene.steps() == 1
    scene.check()


@pytest.mark.parametrize("scene", [WAYS[0], WAYS[2]], ids="-".join, indirect=True)
@pytest.mark.parametrize("when", ["before it is tried again", "before the next attempt commits"])
def test_a_commit_that_arrives_late_is_made_once(when: str, scene: Scene, doubts: Doubts) -> None:
    soon = when == "before it is tried again"
    for what in ("a copy", "changes"):
        doubts.left += ["late"] if soon else GIVEN_UP

        def arrive() -> None:
            if doubts.left == []:
                doubts.arrive()

        if soon:
            with pytest.MonkeyPatch.context() as patch:
                pausing = SimpleNamespace(sleep=lambda _: doubts.arrive())
                patch.setattr(lake_log, "time", pausing)
                summary = scene.go_on()
        else:
            with arm("lake.commit", arrive):
                summary = scene.go_on()
        assert doubts.late == []
        assert summary.failed == (0 if soon else 2), what
        scene.check()
        scene.change()
    scene.go_on()
    scene.check()
    assert left_over(scene.path) == set()


# --- Leases -------------------------------------------------------------------------------------


def is_too_old(scene: Scene) -> bool:
    """Whether the log that leads on from the copy is cleaned."""
    try:
        for _ in scene.table.changes(since=tb.tiering.find(str(scene.path)).cut):
            pass
    except CutTooOld:
        return True
    return False


def outlive(scene: Scene, lease_s: float) -> None:
    """Change the table until the snapshots that there are were retired, and a lease is over."""
    for _ in range(4):
        scene.change()
        scene.table.snapshot()
    pass_time(scene, lease_s)


def kind_of(summary: Summary) -> RoundKind:
    assert summary.last is not None
    return summary.last.kind


@pytest.mark.parametrize("failpoint", ["tier.leased", "tier.files_written"])
def test_a_copy_whose_lease_expires_under_it_begins_again(
    failpoint: str, scene: Scene, spark: Any
) -> None:
    gate = Gate("late")
    with arm(failpoint, gate), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RollingLease, "_renew", lambda _: None)
        with Running(scene.job(spark, lease_s=LEASE_S), "late") as late:
            gate.wait()
            before = {key: found[-1] for key, found in scene.table.snapshots().items()}
            outlive(scene, LEASE_S)
            wait_until(
                lambda: all(
                    before[key] not in found for key, found in scene.table.snapshots().items()
                ),
                "the snapshots are gone",
                JOB_S,
            )
            patch.undo()
            gate.open()
            assert late.summary().failed == 1
    scene.check()
    assert left_over(scene.path) == set()


def test_a_round_that_takes_longer_than_the_lease_is_done_at_the_first_attempt(
    scene: Scene, spark: Any
) -> None:
    for failpoint in ("tier.leased", "tier.planned"):
        gate = Gate("slow")
        with (
            arm(failpoint, gate),
            Running(scene.job(spark, lease_s=RENEWED_LEASE_S), "slow") as slow,
        ):
            gate.wait()
            outlive(scene, 2 * RENEWED_LEASE_S)
            gate.open()
            assert slow.summary().failed == 0
            kind = RoundKind.COPY if failpoint == "tier.leased" else RoundKind.CHANGES
            assert kind_of(slow.summary()) is kind
        scene.go_on()
        scene.check()
        scene.change()


def test_a_copy_whose_next_changes_are_gone_is_made_anew_and_says_so(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.go_on(hold_s=0.0)
    assert scene.leases() == []
    outlive(scene, 0)
    wait_until(lambda: is_too_old(scene), "the log is cleaned", JOB_S)
    caplog.set_level("WARNING")
    assert kind_of(scene.go_on()) is RoundKind.COPY
    assert "is made anew: changes that are not in it are gone from the log" in caplog.text
    scene.check()


@pytest.mark.parametrize("failpoint", ["tier.planned", "tier.committed"])
def test_a_job_that_was_killed_holds_the_log_that_the_next_one_goes_on_with(
    failpoint: str, scene: Scene
) -> None:
    scene.go_on(hold_s=60.0)
    scene.change()
    scene.kill(failpoint, lease_s=3600.0)
    in_half_an_hour_ms = scene.client.coordinator.store.now_ms() + 1_800_000
    found = scene.client.coordinator.leases.all(scene.table.table_id)
    assert all(one.expires_ms > in_half_an_hour_ms for one in found), "those that it found, too"
    outlive(scene, 0)
    assert kind_of(scene.go_on(hold_s=0.0)) is RoundKind.CHANGES
    scene.check()
    assert scene.leases() == []


def test_a_lease_that_cannot_be_taken_leaves_the_one_that_there_is(
    scene: Scene, client: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = client.table(scene.table.name)
    lease = RollingLease(table, "reader", 600_000)
    try:
        with monkeypatch.context() as patch:

            def fail(*_: Any, **__: Any) -> Any:
                raise StorageUnavailable("no answer")

            patch.setattr(table, "lease_latest", fail)
            with pytest.raises(StorageUnavailable):
                lease.take()
        held = lease.lease_id
        lease.advance(table.cut())
        assert held in scene.leases(), "it is the latest, and was dropped as a former one"
        lease.take()
        lease.advance(table.cut())
        assert scene.leases() == [lease.lease_id] != [held]
    finally:
        lease.drop()
    assert scene.leases() == []
    with pytest.raises(UnknownLease):
        table.borrow_lease(held).snapshots  # noqa: B018


# --- Outages ------------------------------------------------------------------------------------


@contextmanager
def moved(cluster: LocalCluster, client: Cluster, path: Path) -> Iterator[tuple[Any, Movers]]:
    table = client.create_table("moved", table_schema(), buckets=4)
    for column in "ab":
        with writer_of(table, column) as writer:
            writer.write(0, Rows(data=rows_of(column, 0, 0)))
    with Movers(cluster, table, SEED, path / "redo") as movers:
        yield table, movers


def test_every_version_has_whole_batches_whatever_is_killed(
    cluster: LocalCluster, client: Cluster, spark: Any, tmp_path: Path
) -> None:
    chance, path = random.Random(SEED), tmp_path / "lake"
    told: list[Any] = []
    with ExitStack() as stack:
        note = stack.enter_context(noted(SEED))
        table, movers = stack.enter_context(moved(cluster, client, tmp_path))
        options = tb.tiering.TieringOptions(
            table=table.name, to=str(path), interval_s=0.2, attempts=20, lease_s=60.0
        )

        def report(done: Round | Underway) -> None:
            told.extend([done] if isinstance(done, Round) else [])

        job = tb.tiering.TieringJob(spark, client, options, report)
        running = stack.enter_context(Running(job))
        for fault in chance.sample(["server 0", "server 1", "zookeeper", "writer a"], 4) * rounds(
            1
        ):
            note(fault)
            fail(fault, cluster, movers)
            wanted = len(told) + 3
            wait_until(
                lambda wanted=wanted: running.ended.is_set() or len(told) >= wanted,  # type: ignore[misc]
                f"rounds follow on {fault}",
                JOB_S,
            )
            assert not running.ended.is_set(), running.error
    running.summary()
    check_steps(path)
    assert [done.kind for done in told].count(RoundKind.COPY) == 1
    for version in commits(path):
        rows = tb.tiering.find(str(path), version).to_arrow()
        sums = tuple(sum(rows[column].to_pylist()) for column in "ab")
        assert sums == (TOTAL, TOTAL), f"version {version}: {marks(path)[version]}"
    assert len(commits(path)) > 4
    assert left_over(path) == set()


def fail(fault: str, cluster: LocalCluster, movers: Movers) -> None:
    """Kill something, and start it again."""
    what, _, which = fault.partition(" ")
    if what == "writer":
        movers.kill(which)
        return
    killed = cluster.zookeeper if what == "zookeeper" else cluster.servers[int(which)]
    killed.kill()
    killed.start()
    if what == "server":
        cluster.wait_until_joined()
