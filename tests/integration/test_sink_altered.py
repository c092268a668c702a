"""The Spark sink while its table is altered, its source moves, or another driver takes over."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import (
    Fenced,
    InvalidInput,
    NotLeader,
    OldEpoch,
    UnknownColumn,
    UnknownOutcome,
)
from foundation.failpoints import arm
from locks.column_locks.column_lock import ColumnLock
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from server.client.remote_table import RemoteTable
from server.client.table_caller import TableCaller
from server.launch.local_cluster import LocalCluster
from sink.aggregate_sink import AggregateSink
from sink.quarantine import Quarantine
from tests.conftest import SUMS
from tests.support.sinks import KEYS, Sinks, counted, ones, parquet_rows, sinks_of, stored
from tests.support.spark_session import quiet_spark
from tests.support.zookeeper_server import wait_until

pytestmark = pytest.mark.spark

ROUTES = ["driver", "executors"]


@pytest.fixture(scope="module")
def module_sinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sinks]:
    directory = tmp_path_factory.mktemp("sink")
    with (
        quiet_spark("local[2,3]") as spark,
        LocalCluster(directory, servers=2) as local,
        sinks_of(local, spark) as sinks,
    ):
        yield sinks


@pytest.fixture
def sinks(module_sinks: Sinks) -> Iterator[Sinks]:
    yield module_sinks
    module_sinks.close()


# --- Columns that come, go and change their names ---------------------------------------------


def wait_until_told(sink: AggregateSink) -> None:
    """Return when the sink has been told that its table was altered."""
    session = sink._session
    assert session is not None
    wait_until(session._watch._changed.is_set, "the sink was told that its table was altered")


def started(sinks: Sinks, table: RemoteTable, columns: list[str], **settings: Any) -> AggregateSink:
    """Return a sink that has written a batch."""
    sink = sinks.sink(table, columns, owner_id="etl", ignore_extra=True, **settings)
    sink(sinks.frame(ones()), 0)
    return sink


@pytest.mark.parametrize("route", ROUTES)
def test_columns_of_others_come_and_go_while_a_sink_runs(route: str, sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    # What the input calls a column of somebody else is of no interest once that is gone.
    sink = started(sinks, table, ["a"], route=route, renamed={"b": "theirs"})
    changes: list[Callable[[], None]] = [
        lambda: table.add_column("c", pa.int64(), "max"),
        lambda: table.rename_column("b", "bb"),
        lambda: table.drop_column("bb"),
    ]
    for batch, alter in enumerate(changes, start=1):
        alter()
        wait_until_told(sink)
        sink(sinks.frame(ones()), batch)
    assert stored(table, KEYS) == dict.fromkeys(KEYS, (4, None))
    assert sink.status()["starts"] == 1
    assert sink._session is not None
    assert sink._session.table.schema.version == table.schema.version


@pytest.mark.parametrize("recovery", ["undo", "redo"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_sink_whose_columns_are_renamed_goes_on_under_the_names_that_it_started_with(
    route: str, recovery: str, sinks: Sinks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = sinks.table(SUMS)
    settings = {"recovery": recovery, "redo_location": str(tmp_path)} if recovery == "redo" else {}
    sink = started(sinks, table, ["a", "b"], route=route, **settings)
    table.rename_column("a", "orders")
    table.rename_column("k", "customer")
    wait_until_told(sink)
    sink(sinks.frame(ones()), 1)
    told = [one for one in caplog.messages if "by now. The query goes on" in one]
    assert len(told) == 2
    assert "column 'a' (BIGINT, sum)" in told[1]
    assert "'orders' by now" in told[1]
    assert "renamed={'orders': 'a'}" in told[1]
    # Cut off when all of it was put, it is undone, or gone on with; and the batch counts once.
    with arm("writer.sealed", once_not_leader()):
        sink(sinks.frame(ones()), 2)
    assert renamed_rows(table) == dict.fromkeys(KEYS, (3, 30))
    assert sink.status()["starts"] == 2
    # Another name on top of it, and a run of its own of the same sink.
    table.rename_column("orders", "total")
    sink.close()
    assert not sinks.record(table, "etl").held
    sink(sinks.frame(ones()), 3)
    assert renamed_rows(table) == dict.fromkeys(KEYS, (4, 40))
    sink.close()
    # A program that is started anew knows only what it is told.
    with pytest.raises(UnknownColumn, match="no column 'a'"):
        sinks.sink(table, ["a", "b"], owner_id="etl", **settings)
    names = {"total": "a", "customer": "k"}
    again = sinks.sink(
        table, ["total", "b"], owner_id="etl", renamed=names, route=route, **settings
    )
    again(sinks.frame(ones()), 4)
    assert renamed_rows(table) == dict.fromkeys(KEYS, (5, 50))


def once_not_leader() -> Callable[[], None]:
    """Return what fails the first time, as a leader that has moved."""
    left = iter([NotLeader("the leader has moved")])

    def fail() -> None:
        for error in left:
            raise error

    return fail


def renamed_rows(table: RemoteTable) -> dict[int, tuple[int, ...]]:
    """Return the values of all rows by key, in the order in which the columns were declared."""
    table.refresh()
    rows = table.scan().to_arrow().to_pylist()
    return {key: tuple(values) for key, *values in (row.values() for row in rows)}


def test_a_column_of_a_running_sink_that_is_dropped_is_an_error_that_names_it(
    sinks: Sinks,
) -> None:
    table = sinks.table(SUMS)
    sink = started(sinks, table, ["a", "b"])
    table.drop_column("a", force=True)
    wait_until_told(sink)
    with pytest.raises(UnknownColumn, match=r"'a' \(BIGINT, sum\).* was dropped while .* ran;"):
        sink(sinks.frame(ones()), 1)
    # Another column of its name is not the one that was locked.
    table.add_column("a", pa.string(), "max")
    wait_until_told(sink)
    with pytest.raises(UnknownColumn, match=r"dropped .*a new one \(STRING, max\) has its name"):
        sink(sinks.frame(ones()), 1)
    sink.close()
    assert stored(table, KEYS) == dict.fromkeys(KEYS, (10, None))


@pytest.mark.parametrize("route", ROUTES)
def test_columns_that_swap_their_names_while_a_batch_is_under_way_get_what_is_theirs(
    route: str, sinks: Sinks
) -> None:
    table = sinks.table(SUMS)
    sink = started(sinks, table, ["a", "b"], route=route)

    def swap() -> None:
        table.rename_column("a", "c")
        table.rename_column("b", "a")
        table.rename_column("c", "b")
        stored(table, KEYS)  # Now the servers know.

    with arm("writer.before_put", swap):
        sink(sinks.frame(ones()), 1)
    assert stored(table, KEYS) == counted(2)
    wait_until_told(sink)
    sink(sinks.frame(ones()), 2)
    assert stored(table, KEYS) == counted(3)


@pytest.mark.parametrize("route", ROUTES)
def test_a_sink_starts_with_the_columns_that_it_has_checked_whatever_has_their_names(
    route: str, sinks: Sinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = sinks.table(SUMS)
    real = TableCaller.refresh

    def refresh(known: TableCaller) -> None:
        """Between the columns that the sink has checked, and the lock."""
        monkeypatch.undo()
        table.rename_column("a", "c")
        table.rename_column("b", "a")
        real(known)

    monkeypatch.setattr(TableCaller, "refresh", refresh)
    sink = started(sinks, table, ["a"], route=route)
    [record] = sinks.client.coordinator.locks.records(table.definition.table).values()
    assert record.columns == (SUMS.column("a").id,)
    sink(sinks.frame(ones()), 1)
    assert stored(table, KEYS) == dict.fromkeys(KEYS, (2, None))


@pytest.mark.parametrize("route", ROUTES)
def test_a_batch_that_starts_over_under_other_names_is_written_once(
    route: str, sinks: Sinks
) -> None:
    table = sinks.table(SUMS)
    sink = started(sinks, table, ["a", "b"], route=route)

    def rename_and_move() -> None:
        if "a" in table.schema.names:
            table.rename_column("a", "c")
            raise NotLeader("the leader has moved")

    with arm("writer.put", rename_and_move):
        sink(sinks.frame(ones()), 1)
    assert stored(table, KEYS) == counted(2)
    assert sink.status()["starts"] == 2


@pytest.mark.parametrize("route", ROUTES)
def test_a_batch_that_starts_over_looks_at_its_columns_before_anything_of_it_is_written(
    route: str, sinks: Sinks
) -> None:
    table = sinks.table(SUMS)
    sink = started(sinks, table, ["a", "b"], route=route)

    def drop_and_move() -> None:
        if "a" in table.schema.names:
            table.drop_column("a", force=True)
            raise NotLeader("the leader has moved")

    with (
        arm("writer.put", drop_and_move),
        pytest.raises(UnknownColumn, match=r"'a' .* was dropped while"),
    ):
        sink(sinks.frame(ones()), 1)
    assert stored(table, KEYS) == dict.fromkeys(KEYS, (10,))


@pytest.mark.parametrize("route", ROUTES)
def test_a_column_that_is_dropped_while_a_batch_is_under_way_leaves_nothing_of_it(
    route: str, sinks: Sinks
) -> None:
    table = sinks.table(SUMS)
    sink = started(sinks, table, ["a", "b"], route=route)

    def drop() -> None:
        table.drop_column("a", force=True)
        stored(table, KEYS)  # Now the servers know.

    with (
        arm("writer.before_put", drop),
        pytest.raises(UnknownColumn, match=r"'a' \(BIGINT, sum\) .* was dropped while"),
    ):
        sink(sinks.frame(ones()), 1)
    assert stored(table, KEYS) == dict.fromkeys(KEYS, (10,))
    assert sink.status()["state"] == "clean"


# --- Partitions that are not there the next time ----------------------------------------------


def by_day() -> Schema:
    return (
        SchemaBuilder()
        .column("day", "BIGINT")
        .column("k", "BIGINT")
        .agg_column("a", "BIGINT", "sum")
        .primary_key("day", "k")
        .partitioned_by("day")
        .build()
    )


def moving(sinks: Sinks, directory: Path, last_day: int) -> Any:
    """Return rows of day 0, and as many of a day that is later with every read until the last."""
    reads = directory / "reads"

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with reads.open("ab") as file:
            file.write(b".")
        day = min(reads.stat().st_size, last_day)
        for batch in batches:
            keys = batch.column("k")
            days = [0 if key % 2 else day for key in keys.to_pylist()]
            yield pa.record_batch(
                {"day": pa.array(days, pa.int64()), "k": keys, "a": batch.column("a")}
            )

    return sinks.frame(ones()).mapInArrow(read, "day BIGINT, k BIGINT, a BIGINT")


def test_partitions_that_only_the_tasks_meet_are_created_and_the_batch_is_written_again(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(by_day())
    sink = sinks.sink(table, ["a"], owner_id="etl", route="executors")
    sink(moving(sinks, tmp_path, last_day=5), 0)
    # Two stages found a new day, the third did not: what the first two put was undone. Each comes
    # after one that tried the batch, since there were partitions to be created.
    found = stored(table, [(day, key) for day in range(7) for key in KEYS])
    assert found == {(0 if key % 2 else 5, key): (1,) for key in KEYS}
    assert (sink.status()["starts"], sink.status()["last"]["rows"]) == (3, len(KEYS))
    assert (tmp_path / "reads").stat().st_size == 7
    sink(moving(sinks, tmp_path, last_day=5), 1)
    assert sink.status()["starts"] == 3


def test_a_source_with_new_partitions_at_every_read_is_an_error_that_says_what_to_do(
    sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(by_day())
    sink = sinks.sink(table, ["a"], owner_id="etl", route="executors")
    message = r"'day' had new values in each of 4 reads of batch 0, .*'day': 9.*route='driver'"
    with pytest.raises(InvalidInput, match=message):
        sink(moving(sinks, tmp_path, last_day=1_000), 0)
    keys = [(day, key) for day in range(12) for key in KEYS]
    assert stored(table, keys) == {}
    sink.close()
    sink = sinks.sink(table, ["a"], owner_id="etl", route="driver")
    sink(moving(sinks, tmp_path, last_day=1_000), 0)
    assert stored(table, keys) == {(0 if key % 2 else 10, key): (1,) for key in KEYS}


# --- Bad rows of several tables, drivers and promises -----------------------------------------


BAD_ROWS = [{"k": 1, "a": 1, "b": 10}, {"k": None, "a": 33, "b": 33}]


def setting_aside(sinks: Sinks, table: RemoteTable, place: Path, **settings: Any) -> AggregateSink:
    """Return a sink whose bad rows go to the place."""
    return sinks.sink(
        table,
        ["a", "b"],
        owner_id="etl",
        bad_rows="quarantine",
        quarantine_path=str(place),
        **settings,
    )


def test_tables_of_one_owner_share_a_place_for_bad_rows(sinks: Sinks, tmp_path: Path) -> None:
    for table in (sinks.table(SUMS), sinks.table(SUMS)):
        setting_aside(sinks, table, tmp_path)(sinks.frame(BAD_ROWS), 0)
    assert [row["a"] for row in parquet_rows(tmp_path)] == [33, 33]


@pytest.mark.parametrize("route", ROUTES)
def test_a_driver_that_was_paused_does_not_touch_its_successors_bad_rows(
    route: str, sinks: Sinks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = sinks.table(SUMS)
    frame = sinks.frame(BAD_ROWS)
    old, new = (setting_aside(sinks, table, tmp_path, route=route) for _ in range(2))
    real = Quarantine.clear
    meanwhile: Iterator[Callable[[], None]] = iter([lambda: new(frame, 0)])

    def clear(place: Quarantine) -> None:
        for happens in meanwhile:
            happens()
        real(place)

    monkeypatch.setattr(Quarantine, "clear", clear)
    with pytest.raises((Fenced, OldEpoch)):
        old(frame, 0)
    assert [row["a"] for row in parquet_rows(tmp_path)] == [33]
    assert stored(table, [1]) == {1: (1, 10)}


def test_bad_rows_of_a_promise_that_a_successor_keeps_stay_where_they_are(
    sinks: Sinks, tmp_path: Path
) -> None:
    table, place = sinks.table(SUMS), tmp_path / "aside"
    redo = {"recovery": "redo", "redo_location": str(tmp_path / "redo")}
    old, new = (setting_aside(sinks, table, place, **redo) for _ in range(2))
    frame = sinks.frame(BAD_ROWS)
    with arm("writer.prepared", lambda: new(frame, 0)), pytest.raises((Fenced, OldEpoch)):
        old(frame, 0)
    assert new.status()["skipped"] == 1
    assert [row["a"] for row in parquet_rows(place)] == [33]
    assert stored(table, [1]) == {1: (1, 10)}


def test_bad_rows_of_a_commit_that_went_unanswered_stay_where_they_are(
    sinks: Sinks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = sinks.table(SUMS)
    old, new = (setting_aside(sinks, table, tmp_path) for _ in range(2))
    frame, real = sinks.frame(BAD_ROWS), ColumnLock.commit

    def commit(lock: ColumnLock, *arguments: Any, **settings: Any) -> None:
        real(lock, *arguments, **settings)
        monkeypatch.undo()
        new(frame, 0)
        raise UnknownOutcome("no answer")

    monkeypatch.setattr(ColumnLock, "commit", commit)
    with pytest.raises(Fenced):
        old(frame, 0)
    assert new.status()["skipped"] == 1
    assert [row["a"] for row in parquet_rows(tmp_path)] == [33]
    assert stored(table, [1]) == {1: (1, 10)}


@pytest.mark.parametrize("recovery", ["undo", "redo"])
def test_bad_rows_are_set_aside_before_a_batch_is_promised(
    recovery: str, sinks: Sinks, tmp_path: Path
) -> None:
    table, place = sinks.table(SUMS), tmp_path / "aside"
    settings = {"recovery": recovery, "redo_location": str(tmp_path / "redo")}
    sink = setting_aside(sinks, table, place, **settings)
    sink(sinks.frame(BAD_ROWS), 0)
    for file in [*place.rglob("*")]:
        file.unlink()
    place.rmdir()
    place.write_text("not a directory")
    with pytest.raises(OSError, match="aside"):
        sink(sinks.frame(BAD_ROWS), 1)
    sink.close()
    place.unlink()
    sink = setting_aside(sinks, table, place, **settings)
    sink(sinks.frame(BAD_ROWS), 1)
    assert sink.status()["skipped"] == 0
    assert [row["a"] for row in parquet_rows(place)] == [33]
    assert stored(table, [1]) == {1: (2, 20)}
