"""The Spark sink as people use it: batch frames, stopped queries, what errors say, and the end."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tallybook as tb
from foundation.errors import (
    InvalidInput,
    LockHeld,
    RewoundBatch,
    TallybookError,
    Unavailable,
    UnknownColumn,
)
from foundation.failpoints import arm
from server.launch.local_cluster import LocalCluster
from sink import named_write, runs, session
from tests.conftest import SUMS
from tests.support.day_tables import DAYS
from tests.support.sinks import (
    KEYS,
    QUERY_S,
    Killed,
    Sinks,
    counted,
    ones,
    sinks_of,
    stored,
    write_file,
)
from tests.support.spark_session import quiet_spark

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def module_sinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sinks]:
    directory = tmp_path_factory.mktemp("sink")
    with (
        quiet_spark("local[2,3]") as spark,
        LocalCluster(directory, servers=2, session_timeout_s=2.0) as local,
        sinks_of(local, spark) as sinks,
    ):
        yield sinks


@pytest.fixture
def sinks(module_sinks: Sinks) -> Iterator[Sinks]:
    yield module_sinks
    module_sinks.close()


def die() -> None:
    raise Killed


# --- Batch frames -----------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["driver", "executors"])
def test_a_frame_is_written_once_under_its_name(route: str, sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    frame = sinks.frame(ones())
    first = tb.write(frame, table, name="monday", route=route)
    assert (first.skipped, first.rows, first.keys, first.route) == (False, 20, 20, route)
    again = tb.write(frame, table.name, name="monday", address=sinks.local.address)
    assert again == tb.WriteResult(name="monday", batch=0, skipped=True)
    assert stored(table, KEYS) == counted(1)
    assert not tb.write(frame, table, name="tuesday").skipped
    assert tb.write(frame, table, name="monday").skipped
    assert stored(table, KEYS) == counted(2)
    assert not any(lock.record.held for lock in sinks.client.coordinator.locks.all(_catalog(table)))


@pytest.mark.parametrize(
    ("failpoint", "counts"),
    [
        ("writer.acquired", False),
        ("writer.before_put", False),
        ("writer.put", False),
        ("writer.sealed", False),
        ("writer.committed", True),
    ],
)
def test_a_write_that_dies_half_way_is_undone_and_done_by_the_next_of_its_name(
    failpoint: str, counts: bool, sinks: Sinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = sinks.table(SUMS)
    with monkeypatch.context() as patched:
        # A process that is killed does not close its sink.
        patched.setattr("sink.named_write._NamedSink.close", lambda _: None)
        patched.setattr("atexit.register", lambda *_: None)
        patched.setattr("sink.aggregate_sink.close_at_end", lambda _: None)
        with arm(failpoint, die), pytest.raises(Killed):
            tb.write(sinks.frame(ones()), table, name="monday")
    fewer = range(5)
    again = tb.write(sinks.frame(ones(fewer)), table, name="monday")
    assert again.skipped is counts
    assert stored(table, KEYS) == counted(1, KEYS if counts else fewer)


@pytest.mark.parametrize("route", ["driver", "executors"])
def test_a_frame_makes_the_partitions_that_its_rows_need(route: str, sinks: Sinks) -> None:
    table = sinks.table(DAYS)
    rows = [{"day": f"2026-11-{1 + k % 3:02}", "k": k, "a": 1} for k in KEYS]
    result = tb.write(sinks.frame(rows, parts=2), table, name="all", route=route)
    assert (result.rows, result.route) == (len(KEYS), route)
    assert table.partitions()["day"].to_pylist() == ["2026-11-01", "2026-11-02", "2026-11-03"]
    assert stored(table, [(row["day"], row["k"]) for row in rows]) == {
        (row["day"], row["k"]): (1,) for row in rows
    }


def test_a_name_that_was_written_is_not_written_for_other_columns(sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    frame = sinks.frame(ones())
    tb.write(frame, table, name="a", columns=["a"], ignore_extra=True)
    for columns in (["b"], ["a", "b"]):
        with pytest.raises(RewoundBatch, match=r"with columns a, and comes again with b, which"):
            tb.write(frame, table, name="a", columns=columns, ignore_extra=True)
    assert tb.write(frame, table, name="a", columns=["a"], ignore_extra=True).skipped
    assert tb.write(frame, table, name="a").skipped, "the name says what it is"
    assert stored(table, KEYS) == dict.fromkeys(KEYS, (1, None))


def test_writes_of_one_name_are_numbered_and_each_counts_once(
    sinks: Sinks, caplog: pytest.LogCaptureFixture
) -> None:
    table = sinks.table(SUMS)
    frame = sinks.frame(ones())
    for day in (20261117, 20261117, 20261201):
        tb.write(frame, table, name="daily", batch=day)
    assert stored(table, KEYS) == counted(2)
    with pytest.raises(RewoundBatch, match=r"`daily` has written batch 20261201.*of its own"):
        tb.write(frame, table, name="daily", batch=20261117)
    assert stored(table, KEYS) == counted(2)
    assert "follows batch" not in caplog.text


def test_a_job_goes_on_after_a_write_to_its_columns_as_if_nothing_had_been(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    write_file(tmp_path / "in", 0, ones())
    job = sinks.sink(table, ["a", "b"])
    assert sinks.run(sinks.source(tmp_path / "in"), job, tmp_path / "chk").failure is None
    tb.write(sinks.frame(ones()), table, name="correction")
    write_file(tmp_path / "in", 1, ones())
    again = sinks.sink(table, ["a", "b"])
    assert sinks.run(sinks.source(tmp_path / "in"), again, tmp_path / "chk").failure is None
    assert stored(table, KEYS) == counted(3)


def test_a_write_to_columns_that_a_job_holds_is_refused_unless_it_is_done_already(
    sinks: Sinks,
) -> None:
    table = sinks.table(SUMS)
    tb.write(sinks.frame(ones()), table, name="before")
    job = sinks.sink(table, ["a", "b"], owner_id="job")
    job(sinks.frame(ones()), 0)
    with pytest.raises(LockHeld, match="`job`"):
        tb.write(sinks.frame(ones()), table, name="during")
    assert tb.write(sinks.frame(ones()), table, name="before").skipped
    assert stored(table, KEYS) == counted(2)


def test_a_write_says_what_is_wrong_with_it(sinks: Sinks, tmp_path: Path) -> None:
    table = sinks.table(SUMS)
    frame = sinks.frame(ones())
    write_file(tmp_path / "in", 0, ones())
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (frame, table, {"name": ""}, "has a name"),
        (frame, table.name, {"name": "x"}, "which cluster"),
        (frame, table, {"name": "x", "address": "127.0.0.1:1"}, "knows its cluster"),
        (frame, table, {"name": "x", "owner_id": "y"}, "no setting 'owner_id'"),
        (frame, table, {"name": "x/y"}, "it has a '/'"),
        (frame, table, {"name": "x", "columns": ["nope"]}, "nope"),
        (frame.select("k"), table, {"name": "x"}, "none of the value columns.*'a', 'b'"),
        (frame.drop("k"), table, {"name": "x"}, "no column 'k'"),
        (sinks.source(tmp_path / "in"), table, {"name": "x"}, "foreachBatch"),
    ]
    for given, where, settings, message in cases:
        with pytest.raises(InvalidInput, match=message):
            tb.write(given, where, **settings)
    assert stored(table, KEYS) == {}


# --- Stopped queries --------------------------------------------------------------------------


def test_a_query_on_the_columns_of_one_that_was_stopped_begins_at_once_and_quietly(
    sinks: Sinks, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Spark never tells that a query has ended: nobody waits for that.
    monkeypatch.setattr("sink.aggregate_sink.when_run_ends", lambda *_: None)
    table = sinks.table(SUMS)
    write_file(tmp_path / "in", 0, ones())
    stream = sinks.source(tmp_path / "in")

    def run(checkpoint: str, **settings: Any) -> Any:
        sink = sinks.sink(table, ["a", "b"], **settings)
        writing = stream.writeStream.foreachBatch(sink)
        query = writing.option("checkpointLocation", str(tmp_path / checkpoint)).start()
        query.processAllAvailable()
        query.stop()
        return sink

    first = run("one")
    held = sinks.record(table, first.status()["owner"])
    assert held.held
    write_file(tmp_path / "in", 1, ones())
    run("one")
    assert stored(table, KEYS) == counted(2)
    run("two", handover=True)
    assert stored(table, KEYS) == counted(4)
    assert not sinks.record(table, first.status()["owner"]).held
    assert [text for text in caplog.messages if "lock" in text or "tries again" in text] == []


def test_a_query_that_goes_on_keeps_its_columns(sinks: Sinks, tmp_path: Path) -> None:
    table = sinks.table(SUMS)
    write_file(tmp_path / "in", 0, ones())
    stream = sinks.source(tmp_path / "in")
    writing = stream.writeStream.foreachBatch(sinks.sink(table, ["a", "b"]))
    query = writing.option("checkpointLocation", str(tmp_path / "one")).start()
    try:
        query.processAllAvailable()
        other = sinks.sink(table, ["a", "b"], handover=True)
        assert "are held by" in sinks.run(stream, other, tmp_path / "two").failure
        write_file(tmp_path / "in", 1, ones())
        query.processAllAvailable()
    finally:
        query.stop()
    assert stored(table, KEYS) == counted(2)


def test_the_next_run_is_not_closed_by_late_news_of_the_last(
    sinks: Sinks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr("sink.aggregate_sink.when_run_ends", lambda *news: told.append(news[2]))
    table = sinks.table(SUMS)
    sink = sinks.sink(table, ["a", "b"])
    for number in range(2):
        write_file(tmp_path / "in", number, ones())
        sinks.run(sinks.source(tmp_path / "in"), sink, tmp_path / "chk")
    first, second = told
    first()
    assert sinks.record(table, sink.status()["owner"]).held
    second()
    assert not sinks.record(table, sink.status()["owner"]).held
    assert not [run for run in runs._runs.values() if run.columns.table == _catalog(table).uid]


# --- Errors -----------------------------------------------------------------------------------


def test_a_wrong_address_is_told_as_soon_as_by_connect(
    sinks: Sinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (session, named_write):
        monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    told = "no ZooKeeper at 127.0.0.1:1 within 0.2 s"
    with pytest.raises(Unavailable, match=told):
        tb.AggregateSink("127.0.0.1:1", "t", columns=["a"])
    frame = sinks.spark.createDataFrame([(1, 2)], "k BIGINT, a BIGINT")
    with pytest.raises(Unavailable, match=told):
        tb.write(frame, "t", name="load", address="127.0.0.1:1")


def test_what_is_wrong_with_table_or_columns_is_found_when_the_sink_is_made(sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    address = sinks.local.address
    with pytest.raises(UnknownColumn, match=r"nope"):
        tb.AggregateSink(address, table.name, columns=["nope"])
    with pytest.raises(TallybookError, match=r"127\.0\.0\.1:1"):
        tb.AggregateSink("127.0.0.1:1", "t", columns=["a"], connection={"deadline_s": 1.0})


def test_a_place_for_bad_rows_that_cannot_be_made_is_found_before_anything_is_written(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "bad")
    settings = {"bad_rows": "quarantine", "quarantine_path": place, "owner_id": "etl"}
    told = re.escape(f"bad rows cannot be set aside below quarantine_path '{place}'")
    with pytest.raises(InvalidInput, match=told):
        sinks.sink(table, ["a", "b"], **settings)
    with pytest.raises(InvalidInput, match="quarantine_path 'nowhere://bad'"):
        sinks.sink(table, ["a", "b"], **{**settings, "quarantine_path": "nowhere://bad"})
    later = sinks.sink(table, ["a", "b"], **settings, check=False)
    with pytest.raises(InvalidInput, match=told):
        later(sinks.frame(ones()), 0)
    assert sinks.client.coordinator.locks.record(_catalog(table), "etl") is None
    (tmp_path / "file").unlink()
    later(sinks.frame(ones()), 0)
    assert [*Path(place).iterdir()] == []
    assert stored(table, KEYS) == counted(1)


def test_the_message_of_a_failed_batch_is_first_and_last(
    sinks: Sinks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = sinks.table(SUMS)
    write_file(tmp_path / "in", 0, ones())
    sink = sinks.sink(table, ["a", "b"], renamed={"a": "x"})
    failure = sinks.run(sinks.source(tmp_path / "in"), sink, tmp_path / "chk").failure
    said = "MissingColumn: the input has no column 'x' (for 'a'); it has k, a, b"
    first, *others = failure.split("\n")
    assert first.endswith(said)
    assert sum(said in line for line in others) == 1
    traceback = failure[failure.index("Traceback") :]
    assert len(re.findall(r'File ".*/sink/', traceback)) == 1, "only the function that Spark calls"
    assert f"batch 0 of table {table.name} failed: the input has no column 'x'" in caplog.text


_JOB = """
import sys
from pyspark.sql import SparkSession
import tallybook as tb

directory, address, table, *ends = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
stream = spark.readStream.schema("k BIGINT, a BIGINT, b BIGINT").parquet(f"{directory}/in")
for end in ends:
    renamed = {"a": "x"} if end == "fails" else {}
    how = {"columns": ["a", "b"], "owner_id": end, "renamed": renamed, "handover": True}
    writing = stream.writeStream.foreachBatch(tb.AggregateSink(address, table, **how))
    query = writing.option("checkpointLocation", f"{directory}/{end}").start()
    query.processAllAvailable()
    if end == "stopped":
        query.stop()
"""


def run_job(sinks: Sinks, directory: Path, table: Any, *ends: str) -> Any:
    """Run queries in a program that ends without stopping Spark."""
    arguments = [str(directory), sinks.local.address, table.name, *ends]
    return subprocess.run(
        [sys.executable, "-c", _JOB, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=QUERY_S,
    )


def test_a_program_that_ends_without_stopping_anything_ends_quietly(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    write_file(tmp_path / "in", 0, ones())
    done = run_job(sinks, tmp_path, table, "stopped", "running")
    assert "Exception" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
    assert stored(table, KEYS) == counted(2)
    assert not sinks.record(table, "stopped").held
    assert not sinks.record(table, "running").held


def test_a_program_that_ends_by_a_failed_batch_says_so_in_its_last_line(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    write_file(tmp_path / "in", 0, ones())
    done = run_job(sinks, tmp_path, table, "fails")
    last = done.stderr.strip().rpartition("\n")[2]
    said = "the input has no column 'x' (for 'a'); it has k, a, b"
    assert last == f"tallybook: batch 0 of table {table.name} failed: {said}"
    assert done.returncode == 1


# --- The Python of tasks ----------------------------------------------------------------------

_TASKS = """
import sys
from pyspark.sql import SparkSession
import tallybook as tb

address, table, lake = sys.argv[1:]
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
spark = builder.config("spark.driver.host", "127.0.0.1").getOrCreate()
frame = spark.range(20).selectExpr("id AS k", "1 AS a", "10 AS b")
print(tb.write(frame, table, name="all", address=address, route="executors").rows)
if not spark.version.startswith(("3.", "4.0.", "4.1.")):
    print(tb.spark.read(spark, table, zookeeper=address).count())
    print(tb.tiering.run(spark, table, lake, zookeeper=address, once=True).rounds)
"""


def run_with_a_foreign_python(sinks: Sinks, directory: Path, table: Any, **variables: str) -> Any:
    """Run tasks in a shell whose `python3` has none of our packages, as outside of a venv."""
    foreign = directory / "bin" / "python3"
    foreign.parent.mkdir()
    foreign.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    foreign.chmod(0o755)
    environment = {**os.environ, "PATH": f"{foreign.parent}:{os.environ['PATH']}"}
    environment.pop("PYSPARK_PYTHON", None)
    environment |= variables
    lake = str(directory / "lake")
    return subprocess.run(
        [sys.executable, "-c", _TASKS, sinks.local.address, table.name, lake],
        capture_output=True,
        text=True,
        check=False,
        timeout=QUERY_S,
        env=environment,
    )


def test_tasks_run_this_python_in_an_environment_that_is_not_activated(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    done = run_with_a_foreign_python(sinks, tmp_path, table)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[:1] == ["20"]
    assert stored(table, KEYS) == counted(1)


def test_who_gives_spark_a_python_without_our_packages_is_told_so(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    done = run_with_a_foreign_python(sinks, tmp_path, table, PYSPARK_PYTHON="python3")
    assert done.returncode == 1
    last = [line for line in done.stderr.splitlines() if "InvalidInput" in line][-1]
    assert "the Python of Spark's executors has no package" in last
    assert "set PYSPARK_PYTHON to a Python that has it" in last


# --- Versions of Spark ------------------------------------------------------------------------


def test_readers_say_which_spark_they_need(sinks: Sinks) -> None:
    if sinks.spark.version.startswith(("3.", "4.0.", "4.1.")):
        with pytest.raises(InvalidInput, match=r"takes Spark 4\.2 or newer"):
            tb.spark.register(sinks.spark)
        return
    table = sinks.table(SUMS)
    tb.write(sinks.frame(ones()), table, name="all")
    tb.spark.register(sinks.spark)
    where = {"zookeeper": sinks.local.address, "table": table.name}
    assert sinks.spark.read.format("tallybook").options(**where).load().count() == len(KEYS)


def _catalog(table: Any) -> Any:
    return table.definition.table
