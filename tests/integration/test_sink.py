"""The Spark sink on a real cluster: batches, replays, owners, and what users get wrong."""

import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import (
    Fenced,
    HandoverNeeded,
    InvalidInput,
    LockHeld,
    OldEpoch,
    RewoundBatch,
    SealedBatch,
    UnknownColumn,
)
from foundation.failpoints import arm
from recovery.writer.access import GrantedRows
from recovery.writer.rows import Rows
from server.client.writer_access import RemoteAccess
from server.launch.local_cluster import LocalCluster
from sink import executors, tasks_work
from sink.aggregate_sink import AggregateSink
from sink.routing import RecentBatches, count_executors
from tallybook.commands.releasing import release
from tests.conftest import SUMS, schema_of
from tests.support.faulty_storage import interrupt
from tests.support.sinks import KEYS, Killed, Sinks, counted, ones, sinks_of, stored, write_file
from tests.support.spark_session import quiet_spark
from tests.support.zookeeper_server import wait_until

pytestmark = pytest.mark.spark

ROUTES = ["driver", "executors"]


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


# --- Streaming queries ------------------------------------------------------------------------


def test_a_stream_is_written_once_and_its_lock_is_released_at_the_end(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    for number in range(3):
        write_file(tmp_path / "in", number, ones())
    sink = sinks.sink(table, ["a", "b"])
    query = sinks.run(sinks.source(tmp_path / "in"), sink, tmp_path / "chk")
    assert query.failure is None
    assert stored(table, KEYS) == counted(3)
    sinks.wait_until_released(table, str(query.id))
    assert sinks.record(table, str(query.id)).batch == 2
    assert sinks.record(table, str(query.id)).query_name == f"query at {tmp_path / 'chk'}"
    status = sink.status()
    assert status["owner"] == str(query.id)
    assert (status["batches"], status["rows"], status["skipped"]) == (3, 60, 0)
    assert status["committed_batch"] == 2
    assert sorted(status["last"]["offsets"]) == ["0/0", "0/1", "0/2"]
    assert status["last"]["route"] == "driver"
    assert (status["last"]["keys"], status["last"]["rows"]) == (20, 20)
    assert {"collect", "fold", "put", "seal", "commit", "total"} <= set(
        status["last"]["milliseconds"]
    )

    # The same sink serves the next run of the query: the checkpoint has the same id.
    write_file(tmp_path / "in", 3, ones())
    assert sinks.run(sinks.source(tmp_path / "in"), sink, tmp_path / "chk").failure is None
    assert stored(table, KEYS) == counted(4)
    sinks.wait_until_released(table, str(query.id))


def test_what_failed_before_the_first_commit_is_undone_and_written_by_the_next_run(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    write_file(tmp_path / "in", 0, ones())
    seen: list[dict[Any, Any]] = []

    def fail() -> None:
        seen.append(stored(table, KEYS))
        raise RuntimeError("the disk of the driver is full")

    with arm("writer.sealed", fail):
        query = sinks.run(
            sinks.source(tmp_path / "in"), sinks.sink(table, ["a", "b"]), tmp_path / "chk"
        )
    assert "the disk of the driver is full" in query.failure
    assert seen == [counted(1)]
    assert stored(table, KEYS) == {}
    again = sinks.run(
        sinks.source(tmp_path / "in"), sinks.sink(table, ["a", "b"]), tmp_path / "chk"
    )
    assert again.failure is None
    assert stored(table, KEYS) == counted(1)


def test_a_batch_that_spark_replays_is_skipped_and_another_checkpoint_is_no_replay(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    for number in range(2):
        write_file(tmp_path / "in", number, ones())
    first = sinks.sink(table, ["a", "b"])
    query = sinks.run(sinks.source(tmp_path / "in"), first, tmp_path / "chk")
    # Spark had not noted that the last batch was done.
    (tmp_path / "chk" / "commits" / "1").unlink()
    (tmp_path / "chk" / "commits" / ".1.crc").unlink(missing_ok=True)
    second = sinks.sink(table, ["a", "b"])
    assert sinks.run(sinks.source(tmp_path / "in"), second, tmp_path / "chk").failure is None
    assert (second.status()["skipped"], second.status()["rows"]) == (1, 0)
    assert set(second.status()["last"]["milliseconds"]) == {"total"}
    assert stored(table, KEYS) == counted(2)
    sinks.wait_until_released(table, str(query.id))

    # The checkpoint is gone: a new query id.
    fresh = sinks.run(
        sinks.source(tmp_path / "in"), sinks.sink(table, ["a", "b"]), tmp_path / "other"
    )
    assert "was last committed by" in fresh.failure
    assert "handover=True" in fresh.failure
    assert stored(table, KEYS) == counted(2)
    taken = sinks.sink(table, ["a", "b"], handover=True)
    assert sinks.run(sinks.source(tmp_path / "in"), taken, tmp_path / "other").failure is None
    assert stored(table, KEYS) == counted(4)


def test_a_new_checkpoint_under_a_named_owner_is_another_query_and_no_replay(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)

    def night(number: int, **settings: Any) -> tuple[Any, AggregateSink]:
        write_file(tmp_path / f"in-{number}", number, ones())
        sink = sinks.sink(table, ["a", "b"], owner_id="nightly-load", **settings)
        source = sinks.source(tmp_path / f"in-{number}")
        query = sinks.run(source, sink, tmp_path / f"chk-{number}")
        sink.close()
        return query, sink

    assert night(1)[0].failure is None
    refused, _ = night(2)
    assert "`nightly-load` last wrote table" in refused.failure
    assert "pass handover=True if this one begins where that one ended" in refused.failure
    for number in (2, 3):
        query, sink = night(number, handover=True)
        assert query.failure is None
        assert (sink.status()["rows"], sink.status()["skipped"]) == (len(KEYS), 0)
        assert stored(table, KEYS) == counted(number)
    # The same checkpoint once more: that is a replay, with or without a handover. And one of a
    # night before is none: it was handed over.
    for settings in ({}, {"handover": True}):
        for number in (2, 3):
            for name in ("0", ".0.crc"):
                (tmp_path / f"chk-{number}" / "commits" / name).unlink(missing_ok=True)
            query, sink = night(number, **settings)
            if number == 3:
                assert (query.failure, sink.status()["skipped"]) == (None, 1)
            else:
                assert "and `nightly-load` was handed over to query" in query.failure
    assert stored(table, KEYS) == counted(3)


def test_a_batch_of_a_query_is_no_replay_to_a_script_under_the_same_owner(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    write_file(tmp_path / "in", 0, ones())
    query = sinks.sink(table, ["a", "b"], owner_id="nightly-load")
    assert sinks.run(sinks.source(tmp_path / "in"), query, tmp_path / "chk").failure is None
    query.close()
    script = sinks.sink(table, ["a", "b"], owner_id="nightly-load")
    for batch in (0, 1):
        with pytest.raises(HandoverNeeded, match="are counted by query"):
            script(sinks.frame(ones()), batch)
    script.close()
    assert stored(table, KEYS) == counted(1)


def test_a_query_whose_lock_an_operator_released_goes_on_by_its_checkpoint(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    write_file(tmp_path / "in", 0, ones())
    query = sinks.run(
        sinks.source(tmp_path / "in"), sinks.sink(table, ["a", "b"]), tmp_path / "chk"
    )
    owner = str(query.id)
    sinks.wait_until_released(table, owner)
    # Its driver comes back, and dies in the next batch: as the sink does, but without a process.
    driver = table.writer(owner_id=owner, columns=["a", "b"], query_id=owner).start()
    with arm("writer.sealed", interrupt), pytest.raises(KeyboardInterrupt):
        driver.write(1, Rows(data=ones()))
    driver._stop_renewal()
    assert stored(table, KEYS) == counted(2)

    release(sinks.client, table.name, owner, force=True, deadline_s=30.0)
    assert stored(table, KEYS) == counted(1)
    write_file(tmp_path / "in", 1, ones())
    sink = sinks.sink(table, ["a", "b"])
    assert sinks.run(sinks.source(tmp_path / "in"), sink, tmp_path / "chk").failure is None
    assert (sink.status()["batches"], sink.status()["skipped"]) == (1, 0)
    assert stored(table, KEYS) == counted(2)


def test_two_sinks_of_one_query_need_an_owner_each(sinks: Sinks, tmp_path: Path) -> None:
    table = sinks.table(SUMS)
    for number in range(2):
        write_file(tmp_path / "in", number, ones())

    def both(one: AggregateSink, other: AggregateSink) -> Callable[[Any, int], None]:
        def write(frame: Any, batch: int) -> None:
            one(frame, batch)
            other(frame, batch)

        return write

    same = both(
        sinks.sink(table, ["a"], ignore_extra=True), sinks.sink(table, ["b"], ignore_extra=True)
    )
    query = sinks.run(sinks.source(tmp_path / "in"), same, tmp_path / "chk")
    assert "needs an owner_id of its own" in query.failure
    own = both(
        sinks.sink(table, ["a"], ignore_extra=True),
        sinks.sink(table, ["b"], ignore_extra=True, owner_id="the b column"),
    )
    assert sinks.run(sinks.source(tmp_path / "in"), own, tmp_path / "chk").failure is None
    assert stored(table, KEYS) == counted(2)


# --- Owners -----------------------------------------------------------------------------------


def test_a_rewound_batch_is_an_error_that_says_what_to_do(sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    sink = sinks.sink(table, ["a", "b"], owner_id="etl")
    frame = sinks.frame(ones())
    for batch in (0, 1):
        sink(frame, batch)
    with pytest.raises(RewoundBatch, match=r"batch 0 of `etl` .* source was rewound.*handover"):
        sink(frame, 0)
    sink(frame, 2)
    assert stored(table, KEYS) == counted(3)


def test_a_gap_in_the_batch_numbers_is_logged(
    sinks: Sinks, caplog: pytest.LogCaptureFixture
) -> None:
    sink = sinks.sink(sinks.table(SUMS), ["a", "b"], owner_id="etl")
    sink(sinks.frame(ones()), 3)
    with caplog.at_level(logging.WARNING):
        sink(sinks.frame(ones()), 7)
    warnings = [text for text in caplog.messages if "batch 7" in text]
    assert len(warnings) == 1
    assert "batch 7 of etl follows batch 3" in warnings[0]


def test_two_jobs_that_ask_for_the_same_column(sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    sinks.sink(table, ["a", "b"], owner_id="first")(sinks.frame(ones()), 0)
    second = sinks.sink(table, ["b"], owner_id="second", ignore_extra=True)
    with pytest.raises(LockHeld, match=r"`first`.*b"):
        second(sinks.frame(ones()), 0)
    sinks.close()
    with pytest.raises(HandoverNeeded, match="`first`"):
        second(sinks.frame(ones()), 0)


def test_an_expired_owners_uncommitted_work_is_undone_by_whoever_takes_its_columns(
    sinks: Sinks,
) -> None:
    table = sinks.table(SUMS)
    gone = sinks.sink(table, ["a", "b"], owner_id="gone", ttl_ms=2_000)
    gone(sinks.frame(ones()), 0)

    def die() -> None:
        raise Killed

    with arm("writer.put", die), pytest.raises(Killed):
        gone(sinks.frame(ones()), 1)
    assert stored(table, KEYS) == counted(2)
    assert stored(table, KEYS, isolation="committed") == counted(1)
    assert gone._session is not None
    gone._session.writer._stop_renewal()
    locks = sinks.client.coordinator
    wait_until(
        lambda: not any(lock.live for lock in locks.locks.all(table.definition.table)),
        "the lock of `gone` expired",
    )
    heir = sinks.sink(table, ["a"], owner_id="heir", handover=True, ignore_extra=True)
    heir(sinks.frame(ones()), 0)
    assert stored(table, KEYS) == dict.fromkeys(KEYS, (2, 10))
    assert heir.status()["last"]["undone_keys"] == len(KEYS)
    with pytest.raises((Fenced, OldEpoch)):
        gone(sinks.frame(ones()), 1)
    with pytest.raises(InvalidInput, match="was fenced: another incarnation"):
        gone(sinks.frame(ones()), 1)
    assert stored(table, KEYS) == dict.fromkeys(KEYS, (2, 10))


def test_an_owner_that_comes_back_undoes_what_its_former_self_left(sinks: Sinks) -> None:
    table = sinks.table(SUMS)

    def die() -> None:
        raise Killed

    for failpoint in ("writer.before_put", "writer.put", "writer.sealed"):
        with arm(failpoint, die), pytest.raises(Killed):
            sinks.sink(table, ["a", "b"], owner_id="etl")(sinks.frame(ones()), 0)
    # The replayed batch has other rows than the first attempts.
    fewer = range(5)
    sinks.sink(table, ["a", "b"], owner_id="etl")(sinks.frame(ones(fewer)), 0)
    assert stored(table, KEYS) == counted(1, fewer)
    with arm("writer.committed", die), pytest.raises(Killed):
        sinks.sink(table, ["a", "b"], owner_id="etl")(sinks.frame(ones()), 1)
    last = sinks.sink(table, ["a", "b"], owner_id="etl")
    last(sinks.frame(ones(fewer)), 1)
    assert last.status()["skipped"] == 1
    assert stored(table, KEYS) == {**counted(1), **counted(2, fewer)}


def test_a_table_that_was_created_again_owes_nothing_of_the_old_one(sinks: Sinks) -> None:
    table = sinks.table(SUMS)

    def die() -> None:
        raise Killed

    with arm("writer.put", die), pytest.raises(Killed):
        sinks.sink(table, ["a", "b"], owner_id="etl")(sinks.frame(ones()), 5)
    sinks.close()
    sinks.client.drop_table(table.name, force=True)
    again = sinks.client.create_table(table.name, SUMS, buckets=2)
    sink = sinks.sink(again, ["a", "b"], owner_id="etl")
    sink(sinks.frame(ones()), 0)
    assert stored(again, KEYS) == counted(1)
    assert sink.status()["undone_keys"] == 0


# --- Tasks ------------------------------------------------------------------------------------


def test_a_task_that_succeeded_and_is_run_again_changes_nothing(
    sinks: Sinks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = sinks.table(SUMS)
    marker = tmp_path / "marker"
    original = executors._putting

    def putting_twice(job: executors.Job) -> Any:
        put_all = original(job)

        def put_and_fail(batches: Any) -> Any:
            outcomes = list(put_all(batches))
            if outcomes and not marker.exists():
                marker.touch()
                raise RuntimeError("this task is lost after its put")
            yield from outcomes

        return put_and_fail

    monkeypatch.setattr(executors, "_putting", putting_twice)
    sink = sinks.sink(table, ["a", "b"], owner_id="etl", route="executors")
    sink(sinks.frame(ones(), parts=2), 0)
    assert marker.exists()
    assert sink.status()["starts"] == 1
    assert stored(table, KEYS) == counted(1)
    assert sink.status()["last"]["rows"] == 20
    sink(sinks.frame(ones(), parts=2), 1)
    assert stored(table, KEYS) == counted(2)


def test_a_task_that_fails_for_good_leaves_nothing_and_the_next_run_goes_on(
    sinks: Sinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = sinks.table(SUMS)
    original = executors._putting

    def failing(job: executors.Job) -> Any:
        put_all = original(job)

        def put_and_fail(batches: Any) -> Any:
            if list(put_all(batches)):
                raise RuntimeError("this task never ends well")
            yield from ()

        return put_and_fail

    sink = sinks.sink(table, ["a", "b"], owner_id="etl", route="executors")
    with monkeypatch.context() as patched:
        patched.setattr(executors, "_putting", failing)
        with pytest.raises(Exception, match="never ends well"):
            sink(sinks.frame(ones()), 0)
    assert stored(table, KEYS) == {}
    sink(sinks.frame(ones()), 0)
    assert stored(table, KEYS) == counted(1)


def test_a_task_that_arrives_after_its_batch_was_committed_is_refused(
    sinks: Sinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = sinks.table(SUMS)
    jobs: list[executors.Job] = []
    original = executors.put_from_executors

    def noting(frame: Any, job: executors.Job, partitions: int) -> executors.Outcome:
        jobs.append(job)
        return original(frame, job, partitions)

    monkeypatch.setattr(tasks_work, "put_from_executors", noting)
    sink = sinks.sink(table, ["a", "b"], owner_id="etl", route="executors")
    few = [0]
    sink(sinks.frame(ones(few)), 0)
    late = pickle.loads(pickle.dumps(jobs[0].grant))
    # The bucket that has the batch says so; those that have not do not take it any more.
    access = RemoteAccess(sinks.client, table)
    answers = access.put(GrantedRows(late, Rows(data=ones(few), columns=["a", "b"])))
    assert [result.repeated for result in answers.results.values()] == [True]
    with pytest.raises(SealedBatch):
        access.put(GrantedRows(late, Rows(data=ones(), columns=["a", "b"])))
    sink(sinks.frame(ones()), 1)
    with pytest.raises(SealedBatch):
        access.put(GrantedRows(late, Rows(data=ones(few), columns=["a", "b"])))
    again = sinks.sink(table, ["a", "b"], owner_id="etl")
    again(sinks.frame(ones()), 2)
    with pytest.raises(OldEpoch):
        access.put(GrantedRows(late, Rows(data=ones(), columns=["a", "b"])))
    assert stored(table, KEYS) == {**counted(2), 0: (3, 30)}


@pytest.mark.parametrize("recovery", ["undo", "redo"])
def test_a_driver_that_was_superseded_while_its_tasks_ran_is_told_so(
    sinks: Sinks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recovery: str
) -> None:
    """Its successor has cleared away what the tasks have staged, or written down."""
    table = sinks.table(SUMS)
    original = executors.put_from_executors
    rows = pa.concat_tables([ones(), pa.table({"k": [None], "a": [1], "b": [1]}, ones().schema)])
    settings: dict[str, Any] = {
        "owner_id": "etl",
        "recovery": recovery,
        "bad_rows": "quarantine",
        "quarantine_path": str(tmp_path / "bad"),
    }
    if recovery == "redo":
        settings["redo_location"] = str(tmp_path / "redo")

    def succeeded(*arguments: Any) -> executors.Outcome:
        outcome = original(*arguments)
        sinks.sink(table, ["a", "b"], **settings, route="driver")(sinks.frame(rows), 0)
        return outcome

    monkeypatch.setattr(tasks_work, "put_from_executors", succeeded)
    first = sinks.sink(table, ["a", "b"], **settings, route="executors")
    with pytest.raises(Fenced, match="stop for good"):
        first(sinks.frame(rows), 0)
    assert stored(table, KEYS) == counted(1)
    assert len(list((tmp_path / "bad").glob("*.parquet"))) == 1


def test_a_batch_that_the_driver_cannot_collect_goes_by_the_executors(sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    sink = sinks.sink(table, ["a", "b"], owner_id="etl")
    conf = sinks.spark.sparkContext._jsc.sc().conf()
    frame = sinks.frame(ones(range(3000)), parts=2)
    conf.set("spark.driver.maxResultSize", "2k")
    try:
        sink(frame, 0)
    finally:
        conf.set("spark.driver.maxResultSize", "1g")
    assert sink.status()["last"]["route"] == "executors"
    assert stored(table, range(3000)) == counted(1, range(3000))
    sink(frame, 1)
    assert sink.status()["last"]["route"] == "driver"


def test_large_batches_go_by_the_executors(sinks: Sinks) -> None:
    sink = sinks.sink(sinks.table(SUMS), ["a", "b"], owner_id="etl", driver_max_rows=15)
    routes = []
    for batch, rows in enumerate((20, 10, 10)):
        sink(sinks.frame(ones(range(rows))), batch)
        routes.append(sink.status()["last"]["route"])
    assert routes == ["driver", "executors", "driver"]


@pytest.mark.parametrize(("executors", "route"), [(1, "driver"), (4, "executors")])
def test_more_executors_get_smaller_batches(executors: int, route: str, sinks: Sinks) -> None:
    sink = sinks.sink(sinks.table(SUMS), ["a", "b"], owner_id="etl")
    sink._recent = RecentBatches(40_000, count=lambda _: executors)
    for batch in range(2):
        sink(sinks.frame(ones(range(12_000))), batch)
    assert sink.status()["last"]["route"] == route


def test_in_local_mode_there_are_no_executors(sinks: Sinks) -> None:
    context = sinks.spark.sparkContext
    assert count_executors(context) == 0
    # What a cluster is asked knows of the driver only.
    assert context._jsc.sc().getExecutorMemoryStatus().size() == 1


@pytest.mark.parametrize("route", ROUTES)
def test_empty_batches_are_committed(route: str, sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    sink = sinks.sink(table, ["a", "b"], owner_id="etl", route=route)
    sink(sinks.frame(ones().slice(0, 0)), 0)
    sink(sinks.frame(ones()).where("k < 0"), 1)
    sink(sinks.frame(ones()), 2)
    assert sink.status()["committed_batch"] == 2
    assert stored(table, KEYS) == counted(1)


# --- Options ----------------------------------------------------------------------------------


def test_options_have_the_names_of_the_configuration(sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    options = {"client.column-lock.owner-id": "etl", "client.column-lock.ttl": "5 min"}
    sink = sinks.sink(table, ["a", "b"], options=options)
    sink(sinks.frame(ones()), 0)
    assert sinks.record(table, "etl").ttl_ms == 300_000


def test_outside_of_a_query_a_sink_needs_an_owner(sinks: Sinks) -> None:
    with pytest.raises(InvalidInput, match="owner_id"):
        sinks.sink(sinks.table(SUMS), ["a", "b"])(sinks.frame(ones()), 0)


def test_a_sink_that_is_closed_twice_and_used_again(sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    sink = sinks.sink(table, ["a", "b"], owner_id="etl")
    sink(sinks.frame(ones()), 0)
    sink.close()
    sink.close()
    assert sink.status()["state"] == "closed"
    assert not sinks.record(table, "etl").held
    sink(sinks.frame(ones()), 1)
    assert stored(table, KEYS) == counted(2)


def test_unknown_columns_of_the_sink_are_found_when_columns_were_dropped(sinks: Sinks) -> None:
    table = sinks.table(schema_of(a=(pa.int64(), "sum"), b=(pa.int64(), "sum")))
    sinks.sink(table, ["a", "b"], owner_id="etl")(sinks.frame(ones()), 0)
    sinks.close()
    table.drop_column("b")
    with pytest.raises((UnknownColumn, InvalidInput), match="b"):
        sinks.sink(table, ["a", "b"], owner_id="etl")(sinks.frame(ones()), 1)
    sinks.sink(table, ["a"], owner_id="etl", ignore_extra=True)(sinks.frame(ones()), 1)
    assert stored(table, KEYS) == dict.fromkeys(KEYS, (2,))
