"""The Spark sink on Spark Connect: pickled, run beside a real server, killed and stopped."""

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tallybook as tb
from foundation.errors import InvalidInput, UnknownColumn
from server.launch.local_cluster import LocalCluster
from tests.conftest import SUMS
from tests.support.connect_server import connect_server
from tests.support.sinks import KEYS, QUERY_S, Sinks, counted, ones, sinks_of, stored, write_file
from tests.support.zookeeper_server import wait_until

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def module_sinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sinks]:
    directory = tmp_path_factory.mktemp("connect")
    with (
        connect_server() as server,
        LocalCluster(directory, servers=2, session_timeout_s=2.0) as local,
        server.session() as spark,
        sinks_of(local, spark) as sinks,
    ):
        yield sinks


@pytest.fixture
def sinks(module_sinks: Sinks) -> Iterator[Sinks]:
    yield module_sinks
    for query in module_sinks.spark.streams.active:
        query.stop()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a directory with one file, which is one batch."""
    write_file(tmp_path / "in", 0, ones())
    return tmp_path / "in"


def started(sinks: Sinks, source: Path, sink: Any, *, name: str = "", checkpoint: str = "") -> Any:
    """Start a query on the files of a directory, which goes on until it is stopped."""
    writer = sinks.source(source).writeStream.foreachBatch(sink)
    if name:
        writer = writer.queryName(name)
    return writer.option("checkpointLocation", f"{source}-chk{checkpoint}").start()


def failure_of(query: Any) -> str:
    """Return what a query fails with."""
    with pytest.raises(Exception, match="STREAM_FAILED") as failed:
        query.awaitTermination(QUERY_S)
    return str(failed.value)


def at_failpoint(
    sink: tb.AggregateSink, failpoint: str, batch: int, act: Callable[[], None]
) -> Callable[[Any, int], None]:
    """Return a function that writes, and in one batch acts when the writer is there."""

    def write(frame: Any, number: int) -> None:
        from foundation.failpoints import arm  # noqa: PLC0415

        with arm(failpoint if number == batch else "nowhere", act):
            sink(frame, number)

    return write


def die() -> None:
    """End the process; named here, and sent along by value."""
    import os  # noqa: PLC0415
    import signal  # noqa: PLC0415

    os.kill(os.getpid(), signal.SIGKILL)


def test_batches_count_once_over_a_stop_and_a_restart_and_the_lock_is_released_each_time(
    sinks: Sinks, source: Path
) -> None:
    table = sinks.table(SUMS)
    sink = sinks.sink(table, ["a", "b"], owner_id="orders")
    for run in (1, 2):
        query = started(sinks, source, sink, name="hourly")
        query.processAllAvailable()
        assert stored(table, KEYS) == counted(run)
        record = sinks.record(table, "orders")
        assert (record.held, record.query_id, record.query_name) == (True, query.id, "hourly")
        query.stop()
        sinks.wait_until_released(table, "orders")
        write_file(source, run, ones())
    assert sink.status()["batches"] == 0, "what it does is done elsewhere"
    # Another checkpoint is another query: its batch 0 is no replay, and is not skipped either.
    failure = failure_of(started(sinks, source, sink, checkpoint="2"))
    assert "HandoverNeeded" in failure
    assert stored(table, KEYS) == counted(2)


def test_a_batch_in_which_the_process_is_killed_twice_counts_once(
    sinks: Sinks, source: Path
) -> None:
    table = sinks.table(SUMS)
    sink = sinks.sink(table, ["a", "b"], owner_id="orders")
    write_file(source, 1, ones())
    for failpoint, committed in (("writer.put", 0), ("writer.committed", 1)):
        query = started(sinks, source, at_failpoint(sink, failpoint, 1, die))
        assert "worker exited unexpectedly" in failure_of(query)
        assert stored(table, KEYS) == counted(2), "the batch was put"
        assert sinks.record(table, "orders").batch == committed
    write_file(source, 2, ones())
    query = started(sinks, source, sink)
    query.processAllAvailable()
    assert sinks.record(table, "orders").batch == 2
    assert stored(table, KEYS) == counted(3)


def test_a_query_that_is_stopped_within_a_batch_leaves_its_columns_to_anybody(
    sinks: Sinks, source: Path, tmp_path: Path
) -> None:
    there = str(tmp_path / "there")

    def wait() -> None:
        import time  # noqa: PLC0415

        Path(there).touch()
        time.sleep(60)

    # Beside another query of the session: then it is known by its name.
    tables = [sinks.table(SUMS), sinks.table(SUMS)]
    made = [sinks.sink(table, ["a", "b"], owner_id=f"of {table.name}") for table in tables]
    functions = [made[0], at_failpoint(made[1], "writer.put", 0, wait)]
    queries = [
        started(sinks, source, function, name=f"of {table.name}", checkpoint=table.name)
        for function, table in zip(functions, tables, strict=True)
    ]
    wait_until(Path(there).exists, "the batch was put")
    queries[1].stop()
    table, owner = tables[1], f"of {tables[1].name}"
    wait_until(lambda: sinks.record(table, owner).abandoned, "the lock was abandoned")
    assert not tb.write(sinks.spark.createDataFrame(ones()), table, name="after").skipped
    assert stored(table, KEYS) == counted(1)
    queries[0].processAllAvailable()
    assert stored(tables[0], KEYS) == counted(1)
    for query, at in zip(queries, tables, strict=True):
        assert sinks.record(at, f"of {at.name}").query_id == query.id


def test_what_cannot_work_is_refused_before_the_query_starts(sinks: Sinks, source: Path) -> None:
    table = sinks.table(SUMS)
    stream = sinks.source(source)
    with pytest.raises(InvalidInput, match=r"give the sink an owner_id.*\.queryName"):
        stream.writeStream.foreachBatch(sinks.sink(table, ["a"]))
    by_executors = sinks.sink(table, ["a"], owner_id="orders", route="executors")
    with pytest.raises(InvalidInput, match="by the driver's route only"):
        stream.writeStream.foreachBatch(by_executors)
    with pytest.raises(UnknownColumn, match="'c'"):
        sinks.sink(table, ["c"], owner_id="orders")
    with pytest.raises(UnknownColumn, match="'b'"):
        sinks.sink(table, ["a"], owner_id="orders").check(stream)


def test_a_frame_of_connect_is_written_once_under_its_name(sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    data = ones().rename_columns(["k", "a", "ten"])
    frame = sinks.spark.createDataFrame(data.append_column("more", pa.array(["x"] * len(KEYS))))
    given: dict[str, Any] = {"renamed": {"b": "ten"}, "ignore_extra": True}
    first = tb.write(frame, table, name="monday", **given)
    assert (first.skipped, first.rows, first.route) == (False, len(KEYS), "driver")
    assert tb.write(frame, table, name="monday", **given).skipped
    assert stored(table, KEYS) == counted(1)
    with pytest.raises(InvalidInput, match="by the driver's route only"):
        tb.write(frame, table, name="tuesday", route="executors", **given)
    with pytest.raises(InvalidInput, match=r"more than 100 bytes.*maxFilesPerTrigger"):
        tb.write(frame, table, name="tuesday", driver_max_bytes=100, **given)
    assert stored(table, KEYS) == counted(1)


def test_a_pickled_sink_is_its_settings_and_says_no_secrets(sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    sink = sinks.sink(table, ["a", "b"], owner_id="orders", connection={"token": "secret"})
    sink(sinks.spark.createDataFrame(ones()), 0)
    copy = pickle.loads(pickle.dumps(sink))
    assert sink.status()["batches"] == 1
    assert copy.status()["batches"] == 0
    assert "secret" not in repr(copy.__getstate__())
    copy(sinks.spark.createDataFrame(ones()), 0)
    copy(sinks.spark.createDataFrame(ones()), 1)
    copy.close()
    assert stored(table, KEYS) == counted(2)
