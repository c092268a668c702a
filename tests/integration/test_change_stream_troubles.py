"""Streams of tables that are altered, dropped, or whose logs are cleaned, while queries go on."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import CutTooOld, InvalidInput, UnknownTable
from locks.encoding.offsets import Offsets
from merge_engine.bucket.changelog import ChangeBatch
from recovery.writer.table_writer import TableWriter
from server.client.changelog import bucket_changes
from server.client.remote_table import RemoteTable
from sink.rolling_lease import RollingLease
from sink.source import tasks
from tests.conftest import SUMS
from tests.support.day_tables import DAYS
from tests.support.stream_scene import (
    APPLY,
    KEYS,
    Scene,
    leave_uncommitted,
    stream_scene,
    to_the_end,
    write,
)
from tests.support.streams import Cells, Died, apply_changes, dying, table_at
from tests.support.zookeeper_server import wait_until


@pytest.fixture(scope="module")
def module_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with stream_scene(tmp_path_factory.mktemp("streams")) as scene:
        yield scene


@pytest.fixture
def scene(module_scene: Scene) -> Iterator[Scene]:
    yield module_scene
    module_scene.close()


def clean_log(table: RemoteTable, writer: TableWriter, column: str = "a") -> None:
    """Have the log cleaned: snapshots are taken until those that were are kept no more."""
    before = starts(table)
    for _ in range(2):
        write(writer, **{column: 1})
        table.snapshot()
    assert all(now > then for now, then in zip(starts(table), before, strict=True))


def starts(table: RemoteTable) -> list[int]:
    status = table._cluster.status()  # type: ignore[attr-defined]
    return [
        bucket["start_offset"]
        for server in status
        for bucket in server["buckets"]
        if bucket["table_id"] == table.table_id
    ]


# --- Partitions -----------------------------------------------------------------------------------


def day_rows(day: str, amount: int) -> dict[str, Any]:
    return {"day": [day] * 3, "k": [1, 2, 3], "a": [amount] * 3}


@pytest.mark.parametrize("mode", ["changes", "upserts"])
def test_partitions_that_appear_later_are_read(scene: Scene, mode: str) -> None:
    table = scene.table(DAYS, buckets=2)
    stream = scene.stream(table, "full", mode=mode)
    assert stream.run() == [[]]
    writer = scene.writer(table, "w", "a")
    for number, day in enumerate(["monday", "tuesday", "monday"]):
        write(writer, day_rows(day, 1))
        stream.start()
        [records] = [stream.step()]
        assert records is not None
        shown = {row["day"] for row in records}
        assert shown == {day}, number
    assert {row["a"] for row in stream.batches[stream.committed - 1]} >= {2}


@pytest.mark.parametrize("mode", ["changes", "upserts"])
def test_of_a_partition_that_was_dropped_nothing_comes_any_more(scene: Scene, mode: str) -> None:
    table = scene.table(DAYS, buckets=2)
    writer = scene.writer(table, "w", "a")
    stream = scene.stream(table, "full", mode=mode, maxRowsPerTrigger=2)
    write(writer, day_rows("monday", 1))
    stream.run()
    for day in ("monday", "tuesday", "tuesday"):
        write(writer, day_rows(day, 1))
    stream.start()
    with pytest.raises(Died):
        stream.step(dying("planned"))
    table.drop_partition(day="monday")
    later = [row for batch in stream.run() for row in batch]
    assert {row["day"] for row in later} == {"tuesday"}
    assert table.scan().to_arrow().num_rows == 3


def test_a_partition_that_goes_between_planning_and_reading_has_no_rows(scene: Scene) -> None:
    for start in ("full", "earliest"):
        table = scene.table(DAYS, buckets=2)
        writer = scene.writer(table, "w", "a")
        for day in ("monday", "tuesday"):
            write(writer, day_rows(day, 1))
        stream = scene.stream(table, start)
        stream.start()

        def drop(step: str, table: RemoteTable = table) -> None:
            if step == "planned":
                table.drop_partition(day="monday")

        # Whether its leader has noticed already or not: it is no error.
        assert "tuesday" in {row["day"] for row in stream.step(drop) or ()}


def test_a_partition_that_was_created_anew_is_another(scene: Scene) -> None:
    for mode in ("changes", "upserts"):
        table = scene.table(DAYS, buckets=2)
        writer = scene.writer(table, "w", "a")
        write(writer, day_rows("monday", 1))
        stream = scene.stream(table, "full", mode=mode)
        stream.run()
        table.drop_partition(day="monday")
        writer.close()
        with table.writer(owner_id="w", columns=["a"]) as again:
            write(again, day_rows("monday", 5))
        [records] = stream.run()
        assert {row["_change_type"] for row in records} <= {"insert", "upsert"}
        assert {row["a"] for row in records} == {5}


# --- Tables that are altered ----------------------------------------------------------------------


def test_a_query_goes_on_with_its_columns_when_others_are_added_or_columns_renamed(
    scene: Scene,
) -> None:
    for mode in ("changes", "upserts"):
        table = scene.table()
        writer = scene.writer(table, "w", "ab")
        write(writer, a=1, b=1)
        stream = scene.stream(table, "full", mode=mode)
        stream.start(available_now=False)
        stream.step()
        table.add_column("c", pa.int64(), "sum")
        table.rename_column("a", "amount")
        write(writer, a=10, b=10)
        with table.writer(owner_id="v", columns=["c"]) as other:
            write(other, c=1)
        cells: Cells = {}
        to_the_end(stream)
        for records in stream.batches.values():
            APPLY[mode](cells, records)
        assert cells == {(k, name): 11 for k in KEYS for name in ("a", "b")}
        # A new run has the new names.
        write(writer, a=100, b=100)
        found = stream.run()[-1]
        assert {row["amount"] for row in found} >= {111}
        assert "c" in found[0]


def test_names_that_change_while_a_task_begins_lose_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = scene.table()
    writer = scene.writer(table, "w", "ab")
    stream = scene.stream(table, "earliest", maxRowsPerTrigger=2)
    for _ in range(3):
        write(writer, a=1, b=1)
    stream.start()
    renamed = iter([("a", "x"), ("b", "y"), ("x", "b"), ("y", "a")])

    def read(*arguments: Any) -> Iterator[ChangeBatch]:
        old_and_new = next(renamed, None)
        if old_and_new is not None:
            table.rename_column(*old_and_new)
        yield from bucket_changes(*arguments)

    monkeypatch.setattr(tasks, "bucket_changes", read)
    to_the_end(stream)
    cells: Cells = {}
    for number, records in sorted(stream.batches.items()):
        apply_changes(cells, records)
        assert set(cells.values()) == {number + 1}
    assert len(cells) == 2 * len(KEYS)


@pytest.mark.parametrize("mode", ["changes", "upserts"])
def test_a_column_that_is_dropped_ends_a_query_that_wants_it_and_no_other(
    scene: Scene, mode: str
) -> None:
    table = scene.table()
    writer = scene.writer(table, "w", "ab")
    write(writer, a=1, b=1)
    every = scene.stream(table, "full", mode=mode)
    some = scene.stream(table, "full", mode=mode, columns="k,a")
    for stream in (every, some):
        stream.start(available_now=False)
        stream.step()
    write(writer, a=10, b=10)
    write(writer, {"k": [1], "b": [7], "a": [0]})
    writer.close()
    table.drop_column("b")
    with pytest.raises(InvalidInput, match=r"column 'b' of table .* start the query again"):
        to_the_end(every)
    assert {row["a"] for row in to_the_end(some)} >= {11}
    # Started again, it goes on without the column, from where it was.
    again = [row for batch in every.run() for row in batch]
    assert {row["a"] for row in again} >= {11}
    assert "b" not in again[0]
    cells: Cells = {}
    for records in some.batches.values():
        APPLY[mode](cells, records)
    assert cells == table_at(table)


@pytest.mark.parametrize("mode", ["changes", "upserts"])
def test_a_column_added_in_the_place_of_a_dropped_one_is_another_column(
    scene: Scene, mode: str
) -> None:
    """Of the same name and type: how the function of a column is changed."""
    table = scene.table()
    one, other = scene.writer(table, "one", "a"), scene.writer(table, "other", "b")
    write(one, a=1)
    write(other, b=5)
    before = table.cut()
    running = scene.stream(table, "full", mode=mode)
    running.start(available_now=False)
    running.step()
    other.close()
    table.drop_column("b")
    table.add_column("b", "BIGINT", "max")
    with table.writer(owner_id="again", columns=["b"], handover=True) as again:
        write(again, b=7)
    write(one, a=1)
    expected = table_at(table)
    assert set(expected.values()) == {2, 7}
    then = {(k, "a"): 1 for k in KEYS}
    for start, cells in (("full", {}), ("earliest", {}), (before, {**then})):
        for records in scene.stream(table, start, mode=mode).run():
            APPLY[mode](cells, records)
        assert cells == expected, start
    # A query that began with the former column does not take the other one's values for its own.
    with pytest.raises(InvalidInput, match=r"column 'b' of table .* was dropped"):
        to_the_end(running)
    for records in running.run():
        APPLY[mode](then, records)
    assert then == expected, "started again, it has the new column"


def test_records_about_a_dropped_column_alone_are_none(scene: Scene) -> None:
    table = scene.table()
    one, other = scene.writer(table, "one", "a"), scene.writer(table, "other", "b")
    write(one, a=1)
    stream = scene.stream(table, "full")
    stream.run()
    write(other, b=1)
    other.close()
    table.drop_column("b")
    assert all(batch == [] for batch in stream.run())


# --- Tables that are dropped ----------------------------------------------------------------------


def test_a_table_that_is_dropped_ends_the_query_and_another_of_its_name_is_not_read(
    scene: Scene,
) -> None:
    for starts_at, lease in (("earliest", {}), ("latest", {"lease": "mine"})):
        table = scene.table()
        with table.writer(owner_id="w", columns=["a"]) as writer:
            write(writer, a=1)
        streams = [scene.stream(table, start, **lease) for start in ("full", starts_at)]
        for stream in streams:
            stream.start(available_now=False)
            assert stream.step() is not None
        replayed = scene.stream(table, "full")
        replayed.start()
        with pytest.raises(Died):
            replayed.step(dying("logged"))
        scene.client.drop_table(table.name)
        for stream in streams:
            with pytest.raises(UnknownTable, match=table.name):
                stream.step()
            with pytest.raises(UnknownTable, match=table.name):
                stream.start()
        new = scene.client.create_table(table.name, SUMS, buckets=3)
        with new.writer(owner_id="w", columns=["a"]) as writer:
            write(writer, a=500)
        for stream in [*streams, replayed]:
            before = dict(stream.batches)
            with pytest.raises(InvalidInput, match="new checkpoint"):
                stream.run()
            assert stream.batches == before


def test_a_cut_of_another_table_is_no_start(scene: Scene) -> None:
    table, other = scene.table(), scene.table()
    with pytest.raises(InvalidInput, match=r"another table|not of table"):
        scene.stream(table, other.cut()).run()


def test_a_checkpoint_that_is_ahead_of_the_table_is_refused(scene: Scene) -> None:
    for locked in (True, False):
        table = scene.table(column_locks=locked)
        if locked:
            write(scene.writer(table, "w", "a"), a=1)
        else:
            table.put({"k": [1], "a": [1]})
        now = table.cut()
        stream = scene.stream(table, "full")
        stream.run()
        owners = {owner: replace(one, batch=7) for owner, one in now.owners.items()}
        ends = now.ends and Offsets({one: at + 9 for one, at in now.ends.items()})
        cut = replace(now, owners=owners, ends=ends)
        stream.offsets[-1] = f'{{"cut": "{cut}"}}'
        with pytest.raises(InvalidInput, match=r"has not reached.*new checkpoint"):
            stream.run()


# --- The log that is still needed -----------------------------------------------------------------


def test_a_log_that_was_cleaned_beyond_the_checkpoint_is_a_clear_error(scene: Scene) -> None:
    table = scene.table()
    writer = scene.writer(table, "w", "a")
    write(writer, a=1)
    behind = scene.stream(table, "full")
    behind.run()
    replayed = scene.stream(table, "full")
    replayed.start()
    with pytest.raises(Died):
        replayed.step(dying("planned"))
    late = scene.stream(table, "earliest")
    clean_log(table, writer)
    for stream in (behind, replayed):
        with pytest.raises(CutTooOld, match=r"gone from the log.*new checkpoint.*\"lease\""):
            stream.run()
    # What there is can be had from the start of the logs on, in steps, and from all rows on.
    for _ in range(2):
        write(writer, a=1)
    late.options["maxRowsPerTrigger"] = "3"
    assert len(late.run()) > 1
    stream = scene.stream(table, "full")
    [rows] = stream.run()
    assert {row["a"] for row in rows} == {5}


def test_where_only_undone_work_was_cleaned_nothing_is_lost(scene: Scene) -> None:
    """A job that died after it wrote, and a reader that is slow: no cut has had that work."""
    table = scene.table()
    writer = scene.writer(table, "w", "a")
    write(writer, a=1)
    stream = scene.stream(table, "full")
    stream.run()
    cut, before = table.cut(), starts(table)
    for _ in range(2):  # The first is undone by the second's writer, and that by the last.
        leave_uncommitted(writer, a=1000)
        writer = scene.writer(table, "w", "a")
    ends = sum(table.end_offsets().values())

    def is_cleaned() -> bool:
        table.snapshot()
        return sum(starts(table)) >= ends - len(before)  # But for what a new leader writes.

    wait_until(is_cleaned, "the log is cleaned")
    assert table.changes(since=cut).to_arrow().num_rows == 0
    assert set(table.scan(at=cut).to_arrow()["a"].to_pylist()) == {1}
    looked_up = table.lookup({"k": list(KEYS)}, at=cut)
    assert set(looked_up["a"].to_pylist()) == {1}
    write(writer, a=1)
    records = [row for batch in stream.run() for row in batch]
    assert {row["a"] for row in records if row["_change_type"] == "update_postimage"} == {2}
    assert {row["_batch"] for row in records} == {1}
    assert set(table.scan(at=cut).to_arrow()["a"].to_pylist()) == {1}


def test_a_log_that_is_cleaned_while_a_task_reads_is_a_clear_error(scene: Scene) -> None:
    table = scene.table()
    writer = scene.writer(table, "w", "a")
    stream = scene.stream(table, "earliest")
    write(writer, a=1)
    stream.start()

    def clean(step: str) -> None:
        if step == "planned":
            clean_log(table, writer)

    with pytest.raises(CutTooOld, match=r"new checkpoint.*\"lease\""):
        stream.step(clean)


@pytest.mark.parametrize("locked", [True, False])
def test_with_a_lease_the_log_is_kept_over_restarts(scene: Scene, locked: bool) -> None:
    table = scene.table(column_locks=locked)
    writer = scene.writer(table, "w", "a") if locked else None

    def put() -> None:
        if writer is not None:
            write(writer, a=1)
        else:
            table.put({"k": list(KEYS), "a": [1] * len(KEYS)})

    put()
    stream = scene.stream(table, "full", lease="mine")
    stream.run()
    cells: Cells = {}
    for _ in range(2):
        for _ in range(3):
            put()
            table.snapshot()
        stream.options["maxRowsPerTrigger"] = "30"
        stream.start()
        stream.step()
        put()
        table.snapshot()
        # It dies, and comes back.
        stream.start()
        to_the_end(stream)
    for records in stream.batches.values():
        apply_changes(cells, records)
    assert cells == {(k, "a"): 9 for k in KEYS}
    leases = scene.client.coordinator.leases.all(table.table_id)
    assert len(leases) <= 2, "what is behind the stream was let go"


def leases(scene: Scene, table: RemoteTable) -> list[str]:
    """Return the ids of the leases that hold something of a table."""
    found = scene.client.coordinator.leases.all(table.table_id)
    return sorted(one.lease_id for one in found if one.live)


def test_a_lease_rolls_forward_with_its_stream(scene: Scene) -> None:
    table = scene.table()
    writer = scene.writer(table, "w", "a")
    write(writer, a=1)
    lease = RollingLease(table, "mine", 5_000)
    try:
        assert leases(scene, table) == ["mine.1"]
        behind = table.cut()
        write(writer, a=1)

        def has_next() -> bool:
            lease.advance(behind)
            return len(leases(scene, table)) == 2

        wait_until(has_next, "the next one is taken")
        assert leases(scene, table) == ["mine.1", "mine.2"]
        # Where the next one begins, the stream is not yet: what the first holds is renewed.
        expires_ms = expiry(scene, table, "mine.1")
        wait_until(lambda: expiry(scene, table, "mine.1") > expires_ms, "it is renewed")
        lease.advance(behind)
        assert leases(scene, table) == ["mine.1", "mine.2"]
        clean = list(starts(table))
        for _ in range(2):
            write(writer, a=1)
            table.snapshot()
        assert starts(table) == clean, "the log is kept"
        now = table.cut()
        lease.advance(now)
        assert "mine.1" not in leases(scene, table)
        assert {row["a"] for row in table.changes(behind).to_arrow().to_pylist()} == {1, 2, 3, 4}
    finally:
        lease.stop()


def expiry(scene: Scene, table: RemoteTable, lease_id: str) -> int:
    found = scene.client.coordinator.leases.all(table.table_id)
    return {one.lease_id: one.expires_ms for one in found}[lease_id]


def test_a_lease_goes_on_after_a_restart_and_begins_anew_if_it_has_expired(scene: Scene) -> None:
    table = scene.table()
    writer = scene.writer(table, "w", "a")
    write(writer, a=1)
    position = table.cut()
    write(writer, a=1)
    first = RollingLease(table, "mine", 60_000)
    first.stop()
    # Of others, whose names are nearly the same, nothing is held on to, or dropped.
    table.lease_latest("mine.other", 60.0, renew=False)
    table.lease_latest("yours.1", 60.0, renew=False)
    second = RollingLease(table, "mine", 3_000)
    assert leases(scene, table) == ["mine.1", "mine.2", "mine.other", "yours.1"]
    second.advance(position)
    assert "mine.1" in leases(scene, table), "the stream is still behind"
    second.advance(table.cut())
    assert leases(scene, table) == ["mine.2", "mine.other", "yours.1"]
    second.stop()
    wait_until(lambda: "mine.2" not in leases(scene, table), "nobody has renewed it")
    third = RollingLease(table, "mine", 60_000)
    assert set(leases(scene, table)) - {"mine.other", "yours.1"} <= {"mine.1", "mine.3"}
    third.advance(table.cut())
    third.stop()
    assert len(leases(scene, table)) == 3


def test_a_lease_has_partitions_that_appear_later(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    table = scene.table(DAYS, buckets=2)
    lease = RollingLease(table, "mine", 60_000)
    try:
        assert leases(scene, table) == [], "there is nothing to hold yet"
        lease._renew()
        assert not caplog.records
        writer = scene.writer(table, "w", "a")
        position = table.cut()
        for _ in range(2):
            write(writer, day_rows("monday", 1))
            lease.advance(position)
            position = table.cut()
        lease.advance(position)
        [held] = scene.client.coordinator.leases.all(table.table_id)
        assert sorted(held.snapshots) == table.bucket_ids()
        assert len(held.snapshots) == 2
    finally:
        lease.stop()


def test_a_lease_can_be_taken_anew_held_for_a_while_and_dropped(scene: Scene) -> None:
    table = scene.table()
    writer = scene.writer(table, "w", "a")
    write(writer, a=1)
    lease = RollingLease(table, "mine", 60_000)
    assert lease.holds
    assert lease.lease_id == "mine.1"
    behind = lease.begins_at
    write(writer, a=1)
    table.snapshot()
    lease.take()
    # What is there begins later; what was held until then is, until the reader has come to it.
    assert lease.lease_id == "mine.2"
    assert behind.is_before(lease.begins_at)
    assert leases(scene, table) == ["mine.1", "mine.2"]
    lease.advance(behind)
    assert leases(scene, table) == ["mine.1", "mine.2"]
    rows = table.borrow_lease(lease.lease_id).snapshots
    assert sorted(rows) == table.bucket_ids()
    lease.advance(table.cut())
    assert leases(scene, table) == ["mine.2"]
    # For as long as it is to be held, and no longer: nobody renews it any more.
    before_ms = expiry(scene, table, "mine.2")
    lease.hold(3_600_000)
    held_ms = expiry(scene, table, "mine.2")
    assert held_ms > before_ms + 3_000_000
    lease.take()
    lease.drop()
    assert leases(scene, table) == []
    lease.drop()
    assert leases(scene, table) == []


def test_a_lease_that_is_held_for_a_short_while_is_gone_after_it(scene: Scene) -> None:
    table = scene.table()
    write(scene.writer(table, "w", "a"), a=1)
    lease = RollingLease(table, "mine", 60_000)
    lease.hold(2_000)
    wait_until(lambda: not leases(scene, table), "it has expired")


def test_a_lease_of_a_table_without_partitions_is_none(scene: Scene) -> None:
    table = scene.table(DAYS, buckets=2)
    lease = RollingLease(table, "mine", 60_000)
    assert not lease.holds
    lease.take()
    lease.hold(5_000)
    lease.drop()
    assert leases(scene, table) == []
