"""Which batch is which: replays, checkpoints that are set back, threads, several sinks."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InvalidInput, RewoundBatch
from server.launch.local_cluster import LocalCluster
from sink.aggregate_sink import AggregateSink
from tests.conftest import SUMS
from tests.support.sinks import KEYS, Sinks, counted, ones, sinks_of, stored, write_file
from tests.support.spark_session import quiet_spark

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def module_sinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sinks]:
    directory = tmp_path_factory.mktemp("sink")
    with (
        quiet_spark("local[2]") as spark,
        LocalCluster(directory, servers=1, session_timeout_s=2.0) as local,
        sinks_of(local, spark) as sinks,
    ):
        yield sinks


@pytest.fixture
def sinks(module_sinks: Sinks) -> Iterator[Sinks]:
    yield module_sinks
    module_sinks.close()


def restored(source: Path, target: Path) -> None:
    """Put a copy of a checkpoint where the checkpoint is."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


@pytest.mark.parametrize("recovery", ["undo", "redo"])
def test_a_checkpoint_that_was_set_back_by_one_batch_is_found_out(
    sinks: Sinks, tmp_path: Path, recovery: str
) -> None:
    table, chk = sinks.table(SUMS), tmp_path / "chk"
    settings = {"recovery": recovery, "redo_location": str(tmp_path / "redo")}

    def run(number: int) -> tuple[Any, AggregateSink]:
        write_file(tmp_path / "in", number, ones())
        sink = sinks.sink(table, ["a", "b"], **settings)
        query = sinks.run(sinks.source(tmp_path / "in", files=2), sink, chk)
        sink.close()
        return query, sink

    run(0)
    restored(chk, tmp_path / "old")
    run(1)
    restored(chk, tmp_path / "right")
    restored(tmp_path / "old", chk)
    query, _ = run(2)  # Spark plans batch 1 anew: of the files 1 and 2.
    assert "this is another batch of its number: it has the fingerprint " in query.failure
    assert stored(table, KEYS) == counted(2)
    # The checkpoint that belongs to the table: its last batch is a replay, and what is new counts.
    for name in ("1", ".1.crc"):
        (tmp_path / "right" / "commits" / name).unlink(missing_ok=True)
    restored(tmp_path / "right", chk)
    query, sink = run(3)
    assert (query.failure, sink.status()["skipped"]) == (None, 1)
    assert stored(table, KEYS) == counted(4)


def test_a_caller_tells_batches_apart_where_spark_does_not(sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    sink = sinks.sink(table, ["a", "b"], owner_id="etl")
    sink(sinks.frame(ones()), 7, fingerprint="offsets 0 to 100")
    sink(sinks.frame(ones()), 7, fingerprint="offsets 0 to 100")
    with pytest.raises(RewoundBatch, match="offsets 0 to 120, and the committed one offsets 0 to"):
        sink(sinks.frame(ones()), 7, fingerprint="offsets 0 to 120")
    assert stored(table, KEYS) == counted(1)


# --- Threads ----------------------------------------------------------------------------------


def inherits(sink: AggregateSink, frame: Any) -> Any:
    """Return the sink as Spark's documentation says that threads are to be given functions."""
    from pyspark import inheritable_thread_target  # noqa: PLC0415

    session = frame.sparkSession
    if session.version.startswith("3."):
        return inheritable_thread_target(sink)
    return inheritable_thread_target(session)(sink)


@pytest.mark.parametrize("inherited", [False, True])
def test_a_sink_that_is_called_in_another_thread_knows_its_query(
    sinks: Sinks, tmp_path: Path, inherited: bool
) -> None:
    table = sinks.table(SUMS)
    with ThreadPoolExecutor(1) as pool:
        for night in range(2):
            sink = sinks.sink(table, ["a", "b"], owner_id="nightly", handover=True)

            def write(frame: Any, batch: int, sink: AggregateSink = sink) -> None:
                call = inherits(sink, frame) if inherited else sink
                pool.submit(call, frame, batch).result()

            write_file(tmp_path / f"in-{night}", 0, ones())
            stream = sinks.source(tmp_path / f"in-{night}")
            query = sinks.run(stream, write, tmp_path / f"chk-{night}")
            assert query.failure is None
            assert stored(table, KEYS) == counted(night + 1)
            record = sinks.record(table, "nightly")
            assert (record.query_id, record.query_name) == (str(query.id), query.name)
            assert record.fingerprint
            sinks.wait_until_released(table, "nightly")


def test_a_frame_of_no_query_in_another_thread_is_refused_while_queries_are_active(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    sink = sinks.sink(table, ["a", "b"], owner_id="nightly")

    def write(frame: Any, batch: int) -> None:
        copy = sinks.frame([row.asDict() for row in frame.collect()])
        with ThreadPoolExecutor(1) as pool:
            pool.submit(sink, copy, batch).result()

    write_file(tmp_path / "in", 0, ones())
    query = sinks.run(sinks.source(tmp_path / "in"), write, tmp_path / "chk")
    assert "which of them this frame belongs to is not known" in query.failure
    assert "inheritable_thread_target" in query.failure
    assert stored(table, KEYS) == {}
    sink(sinks.frame(ones()), 0)  # No query is active any more.
    assert stored(table, KEYS) == counted(1)


def test_two_sinks_of_one_owner_outside_of_a_query_do_not_skip_each_others_batches(
    sinks: Sinks,
) -> None:
    table = sinks.table(SUMS)
    one = sinks.sink(table, ["a"], owner_id="etl", ignore_extra=True)
    other = sinks.sink(table, ["b"], owner_id="etl", ignore_extra=True)
    one(sinks.frame(ones()), 0)
    with pytest.raises(InvalidInput, match=r"another sink of this process writes other columns"):
        other(sinks.frame(ones()), 0)
    one(sinks.frame(ones()), 1)
    one.close()
    # It may come from another process, too, which knows nothing of this one.
    with pytest.raises(RewoundBatch, match=r"with columns a, and comes again with b, "):
        other(sinks.frame(ones()), 1)
    other(sinks.frame(ones()), 2)
    assert stored(table, KEYS) == dict.fromkeys(KEYS, (2, 10))
