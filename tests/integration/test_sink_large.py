"""Micro-batches over every limit of a put, by both routes and with both ways of recovery.

The servers take 500 rows or 60 KB in a put; a task folds 700 rows at a time.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import Overflow
from foundation.failpoints import arm
from server.client.remote_table import RemoteTable
from server.client.uploads import LargePut
from server.launch.local_cluster import LocalCluster
from sink import aggregate_sink, executors, tasks_work
from sink.aggregate_sink import AggregateSink
from sink.frames import TooLarge, collected, known_bytes
from sink.watching import BatchWatch
from tests.conftest import schema_of
from tests.fault.cluster_load import LONGER
from tests.fault.test_large_puts import LIMITS
from tests.support.sinks import Killed, Sinks, parquet_rows, sinks_of, stored, write_file
from tests.support.spark_session import quiet_spark
from tests.support.zookeeper_server import wait_until

pytestmark = pytest.mark.spark

ROUTES = ["driver", "executors"]
WAYS = [(route, recovery) for route in ROUTES for recovery in ("undo", "redo")]
SCHEMA = schema_of(total=(pa.int64(), "sum"), last=(pa.string(), "last_value"))
COLUMNS = ["total", "last"]
KEYS = range(3_000)
DRIVER_FAILPOINTS = [
    *("writer.redo_written", "writer.prepared", "writer.before_put", "writer.put"),
    *("writer.sealed", "writer.committed"),
]
ONLY_REDO = ["writer.redo_written", "writer.prepared"]
PROMISED = DRIVER_FAILPOINTS[1:]
# Each failpoint by two of the ways, in turn; all in a long run.
DEATHS = [
    (failpoint, way)
    for at, failpoint in enumerate(DRIVER_FAILPOINTS)
    for number, way in enumerate(WAYS)
    if LONGER
    or (way[1] == "redo" if failpoint in ONLY_REDO else (at + number // 2 + number) % 2 == 0)
]
MakeSink = Callable[..., AggregateSink]


@pytest.fixture(scope="module")
def module_sinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sinks]:
    directory = tmp_path_factory.mktemp("sink")
    with (
        quiet_spark("local[2,3]") as spark,
        LocalCluster(directory, servers=2, session_timeout_s=2.0, options=LIMITS) as local,
        sinks_of(local, spark) as sinks,
    ):
        yield sinks


@pytest.fixture
def sinks(module_sinks: Sinks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sinks]:
    # Not in the tasks, which are other processes: those fold a whole partition as one piece.
    monkeypatch.setattr("sink.executors._PIECE_ROWS", 700)
    yield module_sinks
    module_sinks.close()


def rows(batch: int, *extra: dict[str, Any]) -> pa.Table:
    """Every key three times, with the text that counts in the end."""
    keys = [key for turn in range(3) for key in KEYS]
    texts = [f"{turn} of batch {batch}" for turn in range(3) for _ in KEYS]
    table = pa.table({"k": keys, "total": [1] * len(keys), "last": texts})
    return pa.concat_tables([table, pa.Table.from_pylist(list(extra), table.schema)])


def expected(batches: int) -> dict[int, tuple[int, str]]:
    return dict.fromkeys(KEYS, (3 * batches, f"2 of batch {batches - 1}"))


@pytest.fixture
def large(sinks: Sinks, tmp_path: Path) -> Callable[..., AggregateSink]:
    """Make sinks of a table that all write as the same owner."""

    def make(table: RemoteTable, way: tuple[str, str], **settings: Any) -> AggregateSink:
        route, recovery = way
        if recovery == "redo":
            settings["redo_location"] = str(tmp_path / "redo")
        return sinks.sink(
            table, COLUMNS, owner_id="etl", route=route, recovery=recovery, **settings
        )

    return make


def left_in_redo_log(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "redo").rglob("*") if path.is_file()]


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_over_every_limit_is_written_in_order(
    way: tuple[str, str], fold: bool, sinks: Sinks, large: MakeSink, tmp_path: Path
) -> None:
    table = sinks.table(SCHEMA, buckets=4)
    sink = large(table, way, local_aggregation=fold)
    route, _ = way
    for batch in range(2):
        sink(sinks.frame(rows(batch)), batch)
        assert sink.status()["last"]["route"] == route
        assert sink.status()["last"]["rows"] == 3 * len(KEYS)
    assert stored(table, KEYS) == expected(2)
    assert left_in_redo_log(tmp_path) == []


@pytest.mark.parametrize("way", WAYS)
def test_one_bad_row_near_the_end_leaves_nothing_of_the_batch(
    way: tuple[str, str], sinks: Sinks, large: MakeSink
) -> None:
    table = sinks.table(SCHEMA, buckets=4)
    sink = large(table, way)
    sink(sinks.frame(rows(0)), 0)
    bad = {"k": 2_999, "total": 2**63 - 5, "last": "too much"}
    with pytest.raises(Overflow, match="key k=2999"):
        sink(sinks.frame(rows(1, bad)), 1)
    assert stored(table, KEYS) == expected(1)


@pytest.mark.parametrize("way", WAYS)
def test_in_quarantine_it_is_set_aside_and_the_rest_is_written(
    way: tuple[str, str], sinks: Sinks, large: MakeSink, tmp_path: Path
) -> None:
    table = sinks.table(SCHEMA, buckets=4)
    sink = large(table, way, bad_rows="quarantine", quarantine_path=str(tmp_path / "bad"))
    sink(sinks.frame(rows(0)), 0)
    bad = {"k": 2_999, "total": 2**63 - 5, "last": "too much"}
    sink(sinks.frame(rows(1, bad)), 1)
    found = stored(table, KEYS)
    assert found.pop(2_999) == expected(1)[2_999]
    assert found == {key: row for key, row in expected(2).items() if key != 2_999}
    assert {row["k"] for row in parquet_rows(tmp_path / "bad")} == {2_999}


@pytest.mark.parametrize(("failpoint", "way"), DEATHS)
def test_a_driver_that_dies_anywhere_in_a_large_batch_counts_it_once(
    way: tuple[str, str], failpoint: str, sinks: Sinks, large: MakeSink, tmp_path: Path
) -> None:
    """A promised batch is rolled forward as it was, any other one is written as it is now."""
    table = sinks.table(SCHEMA, buckets=4)
    first = large(table, way)
    first(sinks.frame(rows(0)), 0)
    died = True
    try:
        with arm(failpoint, _die):
            first(sinks.frame(rows(7)), 1)
            died = False
    except Killed:
        again = large(table, way)
        again(sinks.frame(rows(1)), 1)
    assert died == (way[1] == "redo" or failpoint not in ONLY_REDO)
    promised = way[1] == "redo" and failpoint in PROMISED
    batch = 7 if not died or promised or failpoint == "writer.committed" else 1
    found = stored(table, KEYS)
    assert found == dict.fromkeys(KEYS, (6, f"2 of batch {batch}"))
    assert stored(table, KEYS, isolation="committed") == found
    assert left_in_redo_log(tmp_path) == []


def _die() -> None:
    raise Killed


@pytest.mark.parametrize("way", WAYS)
def test_what_a_large_batch_has_written_is_not_read_before_its_commit(
    way: tuple[str, str],
    sinks: Sinks,
    large: MakeSink,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Parts of each bucket are written when the driver dies, or all; then it counts once."""
    route, recovery = way
    table = sinks.table(SCHEMA, buckets=4)
    first = large(table, way)
    first(sinks.frame(rows(0)), 0)
    original = executors.put_from_executors

    def killed(*arguments: Any, **settings: Any) -> Any:
        if (route, recovery) == ("executors", "undo"):
            original(*arguments, **settings)
        raise Killed

    def cut_off(self: LargePut, *arguments: Any) -> Any:
        for upload in self._all():
            self._send(upload)
            self._call(upload, self._to_advance(upload, try_only=False))
        raise Killed

    with monkeypatch.context() as patched:
        if way == ("executors", "undo"):
            patched.setattr(tasks_work, "put_from_executors", killed)
        else:
            patched.setattr(LargePut, "put", cut_off)
        with pytest.raises(Killed):
            first(sinks.frame(rows(7)), 1)
    assert stored(table, KEYS, isolation="committed") == expected(1)
    again = large(table, way)
    again(sinks.frame(rows(1)), 1)
    batch = 7 if recovery == "redo" else 1
    assert stored(table, KEYS) == dict.fromkeys(KEYS, (6, f"2 of batch {batch}"))
    assert left_in_redo_log(tmp_path) == []


def test_a_batch_that_turns_out_too_large_for_the_driver_goes_by_the_executors(
    sinks: Sinks,
) -> None:
    table = sinks.table(SCHEMA, buckets=4)
    sink = sinks.sink(table, COLUMNS, owner_id="etl", driver_max_bytes=20_000_000)
    frame = sinks.frame(rows(0))
    sink(frame, 0)
    assert sink.status()["last"]["route"] == "driver"
    sink.close()
    small = sinks.sink(table, COLUMNS, owner_id="etl", driver_max_bytes=50_000, route="driver")
    small(sinks.frame(rows(1)), 1)
    assert small.status()["last"]["route"] == "executors"
    assert stored(table, KEYS) == expected(2)


def test_a_collect_ends_as_soon_as_it_has_more_than_it_may(sinks: Sinks) -> None:
    # Of unknown size to Spark, as a batch of most streaming sources is.
    frame = sinks.spark.range(0, 500_000, 1, 2).rdd.map(lambda row: (row.id,)).toDF("k bigint")
    assert known_bytes(frame) is None
    with pytest.raises(TooLarge):
        collected(frame, {"k": "k"}, 100_000)
    assert collected(frame, {"k": "k"}, 10_000_000).num_rows == 500_000


def test_a_file_that_is_known_to_be_too_large_is_not_collected(
    sinks: Sinks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "in", 0, rows(0))
    table = sinks.table(SCHEMA, buckets=4)
    sink = sinks.sink(table, COLUMNS, owner_id="etl", driver_max_bytes=10_000)
    monkeypatch.setattr(
        aggregate_sink, "collected", lambda *_: pytest.fail("the driver has collected it")
    )
    query = sinks.run(sinks.source(tmp_path / "in"), sink, tmp_path / "checkpoint")
    assert query.failure is None
    assert sink.status()["last"]["route"] == "executors"
    assert stored(table, KEYS) == expected(1)


def test_the_status_says_how_far_a_large_batch_is(
    sinks: Sinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = sinks.table(SCHEMA, buckets=4)
    sink = sinks.sink(table, COLUMNS, owner_id="etl", route="driver")
    seen: list[dict[str, Any]] = []
    real = LargePut.put

    def put(self: LargePut) -> Any:
        for upload in self._uploads.values():
            self._send(upload)
        watch = sink._watch
        assert isinstance(watch, BatchWatch)
        wait_until(lambda: watch.told.get("rows") == len(KEYS), "all rows are at the servers")
        seen.append(sink.status()["current"])
        return real(self)

    monkeypatch.setattr(LargePut, "put", put)
    monkeypatch.setattr("sink.watching._ASK_S", 0.05)
    monkeypatch.setattr(BatchWatch.__init__, "__kwdefaults__", {"interval_s": 0.05})
    sink(sinks.frame(rows(0)), 0)
    [told] = seen
    assert (told["batch"], told["rows"], told["rows_done"]) == (0, len(KEYS), 0)
    assert told["bytes"] > 0
    assert sink.status()["current"] is None
