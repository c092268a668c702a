"""Streams of changes as Spark runs them: restarts, replays, limits, and what ends a query.

`test_change_stream.py` has the rest, with Spark's part played by hand: a micro-batch of Spark's
takes half a second.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from tests.conftest import SUMS
from tests.fault.cluster_load import LONGER
from tests.support.sinks import QUERY_S, Sinks, sinks_of
from tests.support.spark_session import quiet_spark
from tests.support.stream_scene import EAGER
from tests.support.streams import (
    Cells,
    Record,
    apply_changes,
    apply_upserts,
    as_sorted,
    table_at,
)
from tests.support.zookeeper_server import wait_until

pytestmark = pytest.mark.spark

KEYS = range(8)


class Streams(Sinks):
    """A cluster whose logs go as soon as no snapshot needs them, and streams of its tables."""

    def stream(self, table: RemoteTable, start: object, **options: Any) -> Any:
        """Return a stream of a table's changes."""
        given = {"zookeeper": self.local.address, "table": table.name, "start": start, **options}
        reader = self.spark.readStream.format("tallybook")
        return reader.options(**{name: str(value) for name, value in given.items()}).load()

    def follow(self, table: RemoteTable, seen: "Seen", start: object, **options: Any) -> str:
        """Run a query to its end; return why it failed, or nothing."""
        query = self.run(self.stream(table, start, **options), seen, seen.checkpoint)
        return query.failure or ""


class Seen:
    """What a query's sink has, by micro-batch; one that comes again must be the same."""

    def __init__(self, checkpoint: Path, check: Callable[[list[Record]], None] | None = None):
        self.checkpoint = checkpoint
        self.batches: dict[int, list[Record]] = {}
        self.fails_at: int | None = None
        self.check = check
        self.calls = 0

    def __call__(self, frame: Any, number: int) -> None:
        self.calls += 1
        records = frame.toArrow().to_pylist()
        if number in self.batches:
            assert as_sorted(records) == as_sorted(self.batches[number]), "the same when repeated"
        elif self.check is not None:
            self.check(records)
        self.batches[number] = records
        if number == self.fails_at:
            self.fails_at = None
            raise RuntimeError("the sink is full")

    @property
    def records(self) -> list[Record]:
        return [row for number in sorted(self.batches) for row in self.batches[number]]


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Streams]:
    directory = tmp_path_factory.mktemp("streams")
    with (
        quiet_spark("local[2]") as spark,
        LocalCluster(directory, servers=2, session_timeout_s=2.0, options=EAGER) as local,
        sinks_of(local, spark) as sinks,
    ):
        yield Streams(local, sinks.client, spark)


def write(writer: TableWriter, *keys: int, **values: int | list[int]) -> None:
    """Write a batch: in each column one value for all of these keys, or a list of them."""
    chosen = list(keys) or list(KEYS)
    rows = {
        name: one if isinstance(one, list) else [one] * len(chosen) for name, one in values.items()
    }
    writer.write(writer.next_batch(), Rows(data={"k": chosen, **rows}))


def is_whole(cells: Cells) -> bool:
    """Whether amounts were moved between keys only."""
    return sum(cells.values()) == 200 * len(KEYS)


@pytest.mark.parametrize("mode", ["changes", "upserts"] if LONGER else ["changes"])
def test_a_stream_is_exact_over_restarts_and_every_micro_batch_is_whole_batches(
    streams: Streams, tmp_path: Path, mode: str
) -> None:
    table = streams.table(SUMS, buckets=4)
    cells: Cells = {}

    def check(records: list[Record]) -> None:
        (apply_changes if mode == "changes" else apply_upserts)(cells, records)
        assert is_whole(cells)

    seen = Seen(tmp_path, check)
    options = {"mode": mode, "maxRowsPerTrigger": 10}
    one, other = (table.writer(owner_id=name, columns=[name]) for name in ("a", "b"))
    with one, other:
        write(one, a=100)
        write(other, b=100)
        assert not streams.follow(table, seen, "full", **options)
        assert cells == table_at(table)
        for number in range(3):
            write(one, number, number + 1, number + 4, a=[5, 5, -10])
            write(other, number, number + 5, b=[-7, 7])
        seen.fails_at = 2
        assert "the sink is full" in streams.follow(table, seen, "full", **options)
        write(one, 0, 7, a=[1, -1])
        # Where it starts is in the checkpoint: the option does not count any more.
        assert not streams.follow(table, seen, "latest", **options)
    assert cells == table_at(table)
    assert len(seen.batches) > 3
    assert all(len(records) <= 10 for records in list(seen.batches.values())[1:])


@pytest.mark.parametrize(
    ("start", "first"), [("full", {1}), ("latest", set())] if LONGER else [("full", {1})]
)
def test_batch_0_that_is_repeated_has_what_it_had(
    streams: Streams, tmp_path: Path, start: str, first: set[int]
) -> None:
    table = streams.table(SUMS)
    seen = Seen(tmp_path)
    seen.fails_at = 0
    with table.writer(owner_id="w", columns=["a"]) as writer:
        write(writer, a=1)
        assert "the sink is full" in streams.follow(table, seen, start)
        write(writer, a=10)
        assert not streams.follow(table, seen, start)
    assert {row["a"] for row in seen.batches[0]} == first
    assert len(seen.batches[0]) == (len(KEYS) if first else 0)
    assert sorted(row["a"] for row in seen.batches[1]) == [1] * len(KEYS) + [11] * len(KEYS)


def test_records_are_those_of_changes_from_a_cut_on_and_a_schema_chooses_columns(
    streams: Streams, tmp_path: Path
) -> None:
    table = streams.table(SUMS)
    seen, narrow = Seen(tmp_path / "all"), Seen(tmp_path / "some")
    one, other = (table.writer(owner_id=name, columns=[name]) for name in ("a", "b"))
    with one, other:
        write(one, a=1)
        cut = table.cut()
        write(one, 1, 2, a=10)
        write(other, 2, 3, b=10)
        assert not streams.follow(table, seen, cut)
        assert not streams.follow(table, narrow, cut, columns="k,b")
    expected = table.changes(cut).to_arrow().to_pylist()
    assert as_sorted(seen.records) == as_sorted(expected)
    assert len(expected) == 6
    assert sorted((row["k"], row["b"]) for row in narrow.records) == [(2, 10), (3, 10)]
    assert "a" not in narrow.records[0]
    # The locks were released, and else nothing has happened: there is no micro-batch.
    calls = seen.calls
    assert not streams.follow(table, seen, cut)
    assert seen.calls == calls


def test_a_running_query_goes_on_with_its_columns_until_one_is_dropped(
    streams: Streams, tmp_path: Path
) -> None:
    table = streams.table(SUMS)
    seen = Seen(tmp_path / "checkpoint")
    writer = table.writer(owner_id="w", columns=["a", "b"]).start()
    write(writer, a=1, b=1)
    query = (
        streams.stream(table, "full")
        .writeStream.foreachBatch(seen)
        .option("checkpointLocation", str(seen.checkpoint))
        .start()
    )
    try:
        wait_until(lambda: bool(seen.records), "all rows", QUERY_S)
        table.add_column("c", "BIGINT", "sum")
        table.rename_column("a", "amount")
        write(writer, a=10, b=10)
        wait_until(lambda: len(seen.records) == 3 * len(KEYS), "the changes", QUERY_S)
        assert {(row["a"], row["b"]) for row in seen.records} == {(1, 1), (11, 11)}
        writer.renew()
        writer.close()
        table.drop_column("amount")
        with table.writer(owner_id="w", columns=["b"]) as again:
            write(again, b=100)
        with pytest.raises(Exception, match=r"column 'a' of table .* was dropped"):
            query.awaitTermination(QUERY_S)
    finally:
        query.stop()
    assert not streams.follow(table, seen, "full")
    assert {row["b"] for row in seen.batches[max(seen.batches)]} == {11, 111}


def test_another_table_of_the_name_is_never_read(streams: Streams, tmp_path: Path) -> None:
    table = streams.table(SUMS)
    seen = Seen(tmp_path)
    for amount in (1, 1000):
        with table.writer(owner_id="w", columns=["a"]) as writer:
            write(writer, a=amount)
        failure = streams.follow(table, seen, "full")
        assert ("Start the stream with a new checkpoint" in failure) == (amount > 1)
        assert {row["a"] for row in seen.records} == {1}
        streams.client.drop_table(table.name)
        table = streams.client.create_table(table.name, SUMS, buckets=2)


def test_a_log_that_was_cleaned_is_a_clear_error_and_a_lease_keeps_it(
    streams: Streams, tmp_path: Path
) -> None:
    table = streams.table(SUMS)
    plain, leased = Seen(tmp_path / "plain"), Seen(tmp_path / "leased")
    with table.writer(owner_id="w", columns=["a"]) as writer:
        write(writer, a=1)
        assert not streams.follow(table, plain, "full")
        assert not streams.follow(table, leased, "full", lease="mine")
        for _ in range(3):
            write(writer, a=1)
            table.snapshot()
        # The stream that holds them has come to where the others begin, and lets them go.
        assert not streams.follow(table, leased, "full", lease="mine", leaseDuration="2 s")
        assert {row["a"] for row in leased.records} == {1, 2, 3, 4}
        for _ in range(2):
            write(writer, a=1)
            table.snapshot()

    def live() -> list[str]:
        leases = streams.client.coordinator.leases.all(table.table_id)
        return [one.lease_id for one in leases if one.live]

    wait_until(lambda: not live(), "the process that renewed the lease has ended")
    assert 'Start it with a new checkpoint, and .option("start", "full")' in streams.follow(
        table, plain, "full"
    )


def test_a_stream_says_where_it_starts(streams: Streams, tmp_path: Path) -> None:
    table = streams.table(SUMS)
    options = {"zookeeper": streams.local.address, "table": table.name}
    frame = streams.spark.readStream.format("tallybook").options(**options).load()
    with pytest.raises(Exception, match="where does the stream start"):
        streams.start(frame, Seen(tmp_path), tmp_path).awaitTermination(QUERY_S)
    reader = streams.spark.readStream.format("tallybook").options(**options, start="soon")
    with pytest.raises(Exception, match='`start` is "full"'):
        reader.load()
