"""The Spark sink while leaders, ZooKeeper, tasks and writers die; one Spark session for all.

A writer dies here by an error that nothing handles: it stays as it is, a zombie that renews its
lock. Drivers that are really killed are in test_sink_kill.
"""

import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import Fenced, InvalidInput, OldEpoch
from foundation.failpoints import ENVIRONMENT_VARIABLE, arm
from server.client.remote_table import RemoteTable
from sink import executors
from sink.aggregate_sink import AggregateSink
from tests.conftest import SUMS
from tests.fault.cluster_load import LONGER, REPOSITORY, local_cluster, noted, rounds
from tests.fault.sink_events import QUERIES, SCHEMA, batch_of, check_exact
from tests.fault.test_sink_kill import (
    AFTER_A_BATCH,
    AT_A_START,
    IN_A_BATCH,
    IN_A_PROMISE,
    IN_AN_UNDO,
    SEED,
)
from tests.support.sinks import Killed, Sinks, sinks_of, stored
from tests.support.spark_session import quiet_spark
from tests.support.zookeeper_server import wait_until

pytestmark = pytest.mark.spark

ROUTES = ["driver", "executors"]
KEYS = range(12)
DEADLINE_S = 120.0

# Where a server dies while it serves the sink; the engine's own failpoints are all in test_kill.
OF_SERVERS = ["log.created:4"]
if LONGER:
    OF_SERVERS += ["put.planned:3", "put.applied:3"]
    OF_SERVERS += ["log.encoded:3", "storage.linked:4", "put.logged:3", "view.before_write:3"]
OF_TASKS = ["task.before_put", "task.put"]
# Between which steps a leader dies: all of them in a long run.
SOME_STEPS = IN_A_BATCH if LONGER else random.Random(5).sample(IN_A_BATCH, 3)


def routes_of(place: str) -> list[str]:
    """Return both routes, in a short run one of them."""
    return ROUTES if LONGER else [random.Random(place).choice(ROUTES)]


@pytest.fixture(scope="module")
def module_sinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sinks]:
    with (
        quiet_spark("local[2,3]") as spark,
        local_cluster(tmp_path_factory.mktemp("cluster")) as local,
        sinks_of(local, spark) as sinks,
    ):
        yield sinks


@pytest.fixture
def sinks(module_sinks: Sinks) -> Iterator[Sinks]:
    for server in module_sinks.local.servers:
        if not server.alive:
            server.start()
    module_sinks.local.wait_until_joined()
    yield module_sinks
    module_sinks.close()


def test_every_failpoint_of_the_writer_and_its_tasks_is_died_at() -> None:
    sources = [path for name in ("recovery", "sink") for path in (REPOSITORY / name).rglob("*.py")]
    names = [
        name for path in sources for name in re.findall(r'\bhit\("([^"]+)"\)', path.read_text())
    ]
    # Those of snapshots are `test_snapshot_faults`'s, those of parts `test_large_puts`'s, those of
    # copies in a lake `test_tiering_kill`'s.
    elsewhere = ("snapshot.", "put.", "lake.", "tier.")
    found = {name for name in names if not name.startswith(elsewhere)}
    of_starts = {*AT_A_START, *IN_AN_UNDO}
    assert found == {*of_starts, *IN_A_BATCH, *IN_A_PROMISE, *AFTER_A_BATCH, *OF_TASKS}


class Counting:
    """A sink that adds one to `a` and ten to `b` of all keys with every batch, and who checks."""

    def __init__(self, sinks: Sinks, **settings: Any) -> None:
        self.table = sinks.table(SUMS, buckets=4)
        self.sink = sinks.sink(
            self.table, ["a", "b"], owner_id="etl", deadline_s=DEADLINE_S, **settings
        )
        self._frame = sinks.frame(
            pa.table({"k": list(KEYS), "a": [1] * len(KEYS), "b": [10] * len(KEYS)}), parts=2
        )
        self.batches = 0

    def go_on(self, batches: int = 1) -> None:
        """Write so many batches."""
        for _ in range(batches):
            self.sink(self._frame, self.batches)
            self.batches += 1

    def check(self) -> None:
        """Compare the table with what was written."""
        expected = dict.fromkeys(KEYS, (self.batches, 10 * self.batches))
        assert stored(self.table, KEYS) == expected
        assert stored(self.table, KEYS, isolation="committed") == expected
        assert self.sink.status()["committed_batch"] == self.batches - 1


def once(action: Callable[[], None]) -> Callable[[], None]:
    """Return an action that is done at its first visit only."""
    waiting = [action]

    def act() -> None:
        if waiting:
            waiting.pop()()

    return act


@pytest.mark.parametrize(
    ("step", "route"), [(step, route) for step in SOME_STEPS for route in routes_of(step)]
)
def test_a_leader_that_dies_between_the_steps_of_a_batch(
    step: str, route: str, sinks: Sinks
) -> None:
    counting = Counting(sinks, route=route)
    counting.go_on()
    server = sinks.local.servers[1]

    def kill() -> None:
        """Until its session is over, what it answered counts: its rows are in the log."""
        gone = server.address
        server.kill()
        servers = sinks.client.coordinator.servers.all
        wait_until(lambda: gone not in {one.address for one in servers()}, "its session ended")
        server.start()

    with arm(step, once(kill)):
        counting.go_on()
    assert counting.sink.status()["starts"] > 1
    counting.go_on()
    counting.check()


@pytest.mark.parametrize(
    ("failpoint", "route"), [(point, route) for point in OF_SERVERS for route in routes_of(point)]
)
def test_a_server_that_dies_at(
    failpoint: str, route: str, sinks: Sinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Counting(sinks, route=route)
    counting.go_on()
    server = sinks.local.servers[0]
    server.kill()
    with monkeypatch.context() as patched:
        patched.setenv(ENVIRONMENT_VARIABLE, failpoint)
        server.start()
    sinks.local.wait_until_joined()
    for _ in range(20):
        counting.go_on()
        if not server.alive:
            break
    assert not server.alive, f"it never came to {failpoint}"
    server.start()
    counting.go_on()
    counting.check()


@pytest.mark.parametrize("failpoint", OF_TASKS)
def test_a_task_that_dies_at(
    failpoint: str, sinks: Sinks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Python worker of a task is killed, once in each batch; Spark runs the task again."""
    original = executors._putting

    def dying(job: executors.Job) -> Any:
        put_all = original(job)
        marker = tmp_path / f"batch-{job.grant.token.batch}"

        def die_once() -> None:
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        def put_and_die(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with arm(failpoint, die_once):
                yield from put_all(batches)

        return put_and_die

    monkeypatch.setattr(executors, "_putting", dying)
    counting = Counting(sinks, route="executors")
    counting.go_on(3)
    assert len(list(tmp_path.glob("batch-*"))) == 3
    counting.check()


def test_zookeeper_that_dies_between_batches_and_within_one(sinks: Sinks) -> None:
    counting = Counting(sinks)
    counting.go_on(2)
    zookeeper = sinks.local.zookeeper

    def restart() -> None:
        zookeeper.kill()
        zookeeper.start()

    restart()
    counting.go_on(2)
    with arm("writer.put", once(restart)):
        counting.go_on()
    counting.go_on()
    counting.check()


@pytest.mark.parametrize("route", ROUTES)
def test_a_source_that_has_other_rows_when_it_is_read_again(
    route: str, sinks: Sinks, tmp_path: Path
) -> None:
    """A leader is lost after the put; by the executors' route the source is read once more."""
    counting = Counting(sinks, route=route)
    counting.go_on()
    marker = str(tmp_path / "read")

    def other_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = Path(marker).exists()
        for batch in batches:
            yield batch.filter(pa.compute.less(batch.column("k"), 3 if found else 10))

    frame = counting._frame.mapInArrow(other_rows, counting._frame.schema)
    server = sinks.local.servers[0]

    def lose_leader() -> None:
        Path(marker).touch()
        server.kill()
        server.start()

    with arm("writer.put", once(lose_leader)):
        counting.sink(frame, 1)
    keys = range(3 if route == "executors" else 10)
    assert stored(counting.table, KEYS) == {
        key: (2, 20) if key in keys else (1, 10) for key in KEYS
    }


# --- Three queries at once --------------------------------------------------------------------


class Query(threading.Thread):
    """A query that dies at random steps, and comes back with its last batch."""

    def __init__(self, sinks: Sinks, table: RemoteTable, query: int, batches: int) -> None:
        super().__init__(name=f"query-{query}")
        self._sinks, self._table, self._query, self._batches = sinks, table, query, batches
        self._chance = random.Random(f"{SEED} {query}")
        self._frames: dict[int, Any] = {}
        self.done = 0
        self.deaths = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        """Write all batches, whatever happens."""
        try:
            self._write_all()
        except BaseException as exc:
            self.error = exc

    def maybe_die(self) -> None:
        """Die here, sometimes."""
        if self._chance.random() < 0.06:
            self.deaths += 1
            raise Killed

    def _write_all(self) -> None:
        sink, zombie = self._start(), None
        while self.done < self._batches:
            data = batch_of(SEED, self._query, self.done)
            try:
                sink(self._sinks.frame(data, parts=2), self.done)
            except Killed:
                # One that died while it started would start anew, and rightly so.
                zombie = zombie if sink.status().get("owner") is None else sink
                sink = self._start()
                continue
            self.done += 1
            if zombie is not None:
                # Its successor holds the lock: it writes nothing more, whatever it tries.
                with pytest.raises((Fenced, OldEpoch, InvalidInput)):
                    zombie(self._sinks.frame(data), self.done)
                zombie = None

    def _start(self) -> AggregateSink:
        return self._sinks.sink(
            self._table,
            list(QUERIES[self._query]),
            owner_id=self.name,
            route=self._chance.choice(ROUTES),
            deadline_s=DEADLINE_S,
        )


def test_three_queries_that_die_at_random_count_everything_once(sinks: Sinks) -> None:
    batches = rounds(6, per_round=5)
    table = sinks.table(SCHEMA, buckets=2)
    queries = [Query(sinks, table, number, batches) for number in range(len(QUERIES))]
    chance = random.Random(SEED)

    def die_perhaps() -> None:
        thread = threading.current_thread()
        if isinstance(thread, Query):
            thread.maybe_die()

    def progress() -> int:
        return sum(query.done for query in queries)

    with noted(SEED) as note, ExitStack() as armed:
        for step in [*AT_A_START, *IN_AN_UNDO, *IN_A_BATCH, *AFTER_A_BATCH]:
            armed.enter_context(arm(step, die_perhaps))
        for query in queries:
            query.start()
        for goal in range(batches, 3 * batches, batches):
            wait_until(
                lambda goal=goal: progress() >= goal or not any(q.is_alive() for q in queries),  # type: ignore[misc]
                f"{goal} batches",
                60 + 10 * batches,
            )
            server = chance.choice(sinks.local.servers)
            note(f"after {progress()} batches killed server {server.number}")
            server.kill()
            server.start()
        for query in queries:
            query.join(60 + 10 * batches)
            assert not query.is_alive(), f"{query.name} hangs after {query.done} batches"
            note(f"{query.name} died {query.deaths} times")
            if query.error is not None:
                raise query.error
        check_exact(table, SEED, dict.fromkeys(range(len(QUERIES)), batches))
        assert sum(query.deaths for query in queries) > 0
