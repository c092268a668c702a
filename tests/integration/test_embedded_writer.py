"""Writers of an embedded table: exactly once, over restarts, beside everybody else."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import recovery.embedded.table
import tallybook as tb
from foundation.errors import (
    Closed,
    CorruptRecord,
    HandoverNeeded,
    InUse,
    InvalidInput,
    LockHeld,
    Overflow,
    RewoundBatch,
    UnknownColumn,
)
from foundation.failpoints import arm
from merge_engine.bucket.options import MEBIBYTE
from merge_engine.storage.objects import open_storage
from recovery.writer.parts import PartSizes
from recovery.writer.redo import RedoLog
from tests.support.day_tables import DAYS
from tests.support.faulty_storage import interrupt
from tests.support.writer_table import MOST

SCHEMA = (
    tb.SchemaBuilder()
    .column("k", "BIGINT")
    .agg_column("a", "BIGINT", "sum")
    .agg_column("b", "BIGINT", "sum")
    .primary_key("k")
    .build()
)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[tb.Table]:
    with tb.Table.create(tmp_path / "t", SCHEMA, buckets=2) as made:
        yield made


def rows(amount: int, keys: int = 10) -> tb.Rows:
    return tb.Rows(data={"k": list(range(keys)), "a": [amount] * keys})


def values(table: tb.Table, column: str = "a", isolation: str = "latest") -> list[int]:
    return sorted(table.scan([column], isolation=isolation).to_arrow()[column].to_pylist())


def writer(table: tb.Table, owner: str = "etl", columns: Any = ("a",), **settings: Any) -> Any:
    return table.writer(owner_id=owner, columns=list(columns), deadline_s=5, **settings)


def die_at(failpoint: str, writer: tb.TableWriter, batch: int, given: tb.Rows) -> None:
    """Let a writer stop there as if its process had died: it neither releases nor abandons."""
    with arm(failpoint, interrupt), pytest.raises(KeyboardInterrupt):
        writer.write(batch, given)
    writer._stop_renewal()


def test_each_batch_counts_once_also_after_the_table_was_opened_again(tmp_path: Path) -> None:
    with tb.Table.create(tmp_path / "t", SCHEMA, buckets=2) as table, writer(table) as first:
        assert first.write(0, rows(1))
        assert first.write(1, rows(1))
        assert not first.write(1, rows(1))
    with tb.Table.open(tmp_path / "t") as table, writer(table) as again:
        assert again.batch == 1
        assert not again.write(1, rows(1))
        with pytest.raises(RewoundBatch):
            again.write(0, rows(1))
        assert again.write(2, rows(1))
        assert values(table, isolation="committed") == [3] * 10


@pytest.mark.parametrize("failpoint", ["writer.before_put", "writer.put", "writer.sealed"])
def test_what_was_not_committed_is_undone_when_the_owner_comes_back(
    failpoint: str, tmp_path: Path
) -> None:
    with tb.Table.create(tmp_path / "t", SCHEMA, buckets=2) as table:
        first = writer(table).start()
        first.write(0, rows(1))
        die_at(failpoint, first, 1, rows(5))
        assert values(table, isolation="committed") == [1] * 10
        keys = {"k": list(range(10))}
        assert set(table.lookup(keys, isolation="committed")["a"].to_pylist()) == {1}
    with tb.Table.open(tmp_path / "t") as table, writer(table) as again:
        assert values(table) == [1] * 10
        assert again.write(1, rows(5))
        assert values(table) == [6] * 10


def test_with_a_redo_log_what_was_promised_is_kept(tmp_path: Path) -> None:
    redo = RedoLog.open(str(tmp_path / "redo"))
    with tb.Table.create(tmp_path / "t", SCHEMA, buckets=2) as table:
        die_at("writer.prepared", writer(table, redo=redo).start(), 0, rows(5))
        assert values(table) == []
    with tb.Table.open(tmp_path / "t") as table, writer(table, redo=redo) as again:
        assert not again.write(0, rows(5))
        assert values(table) == [5] * 10


@pytest.mark.parametrize("with_redo", [False, True])
def test_a_batch_of_any_size_goes_in_parts_and_is_not_held_in_memory(
    with_redo: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = PartSizes(rows=5_000, bytes=MEBIBYTE // 8, waiting_bytes=MEBIBYTE // 2)
    monkeypatch.setattr(recovery.embedded.table, "_SIZES", sizes)
    storage = open_storage(tmp_path / "redo")
    redo = RedoLog(storage, object_bytes=MEBIBYTE // 4) if with_redo else None
    pieces, keys_each = 30, 20_000  # 9 MiB of keys and amounts.
    allocated: list[int] = []

    def data() -> Iterator[pa.Table]:
        for number in range(pieces):
            allocated.append(pa.total_allocated_bytes())
            start = number * keys_each
            keys, ones = np.arange(start, start + keys_each), np.ones(keys_each, int)
            yield pa.table({"k": keys, "a": ones})

    with tb.Table.create(tmp_path / "t", SCHEMA, buckets=2) as table:
        with writer(table, redo=redo) as one:
            assert one.write(0, tb.Rows(data=data))
            assert max(allocated) - allocated[0] < 5 * MEBIBYTE
            assert not one.write(0, tb.Rows(data=data))
            assert one.progress.keys_changed == pieces * keys_each
        assert table.to_arrow(["a"])["a"].to_numpy().sum() == pieces * keys_each
        assert len(list((tmp_path / "t" / "log" / "table" / "0").glob("*.seg"))) > 50


def test_a_large_batch_that_fails_half_way_leaves_nothing(table: tb.Table) -> None:
    keys = 120_000
    table.put({"k": [keys - 1], "a": [MOST]})
    with writer(table) as one:
        with pytest.raises(Overflow):
            one.write(0, tb.Rows(data=pa.table({"k": range(keys), "a": [1] * keys})))
        assert values(table) == [MOST]
        assert one.write(0, rows(1))


def test_columns_of_a_writer_are_refused_to_others_and_free_when_it_is_closed(
    table: tb.Table,
) -> None:
    table.put({"k": [1], "a": [1], "b": [1]})
    offsets = table.end_offsets()
    with writer(table) as one:
        for call in (
            lambda: table.put({"k": [1], "a": [1]}),
            lambda: table.delete({"k": [1]}),
            lambda: table.undo("", ["a"], offsets),
            lambda: table.put({"k": [1], "b": [1]}, owner="etl"),
        ):
            with pytest.raises(LockHeld, match=r"columns a .* locked by the writer of `etl`"):
                call()
        with pytest.raises(LockHeld):
            writer(table, "other", ("a", "b")).start()
        table.put({"k": [1], "b": [1]})
        table.delete({"k": [1]}, columns=["b"])
        with writer(table, "other", ("b",)) as beside:
            beside.write(0, tb.Rows(data={"k": [1], "b": [7]}))
        one.write(0, rows(1))
    table.put({"k": [1], "a": [1]})
    assert table.lookup({"k": [1]}).to_pylist() == [{"k": 1, "a": 3, "b": 7}]


def test_what_a_writer_has_committed_is_undone_by_hand_as_a_change(table: tb.Table) -> None:
    offsets = table.end_offsets()
    with writer(table) as one:
        one.write(0, rows(1))
    logs = [table.changelog(bucket) for bucket in table.bucket_ids()]
    committed = pa.Table.from_batches([batch for log in logs for batch in log])
    cut = table.cut()
    table.undo("etl", ["a"], offsets)
    resumed = pa.Table.from_batches([batch for log in logs for batch in log])
    for found in (resumed, table.changes(cut).to_arrow()):
        assert found["_change_type"].to_pylist() == ["delete"] * committed.num_rows
        assert sorted(found["k"].to_pylist()) == sorted(committed["k"].to_pylist())
    assert table.to_arrow().num_rows == 0


def test_a_lock_whose_writer_is_gone_keeps_its_columns_until_somebody_recovers(
    tmp_path: Path,
) -> None:
    with tb.Table.create(tmp_path / "t", SCHEMA, buckets=2) as table:
        die_at("writer.put", writer(table).start(), 0, rows(5))
    with tb.Table.open(tmp_path / "t") as table:
        with pytest.raises(LockHeld, match=r"If it is gone, start table\.writer"):
            table.put({"k": [1], "a": [1]})
        with pytest.raises(LockHeld, match=r"held by `etl` until .*table\.writer\(owner_id='etl'"):
            writer(table, "other").start()
        writer(table).start().close()
        table.put({"k": [1], "a": [1]})
        assert values(table) == [1]


def test_another_owner_takes_over_by_a_handover(table: tb.Table) -> None:
    with writer(table) as one:
        one.write(0, rows(1))
    with pytest.raises(HandoverNeeded, match="last committed by `etl`"):
        writer(table, "other").start()
    with writer(table, "other", handover=True) as other:
        other.write(0, rows(1))
    assert values(table) == [2] * 10


def test_a_writer_goes_on_under_another_name_of_its_column(table: tb.Table) -> None:
    with writer(table) as one:
        one.write(0, rows(1))
        table.rename_column("a", "total")
        table.add_column("a", "BIGINT", "sum")
        one.write(1, rows(1))
    assert values(table, "total") == [2] * 10


def test_a_pinned_column_is_dropped_by_force_only(table: tb.Table) -> None:
    with writer(table) as one:
        one.write(0, rows(1))
        with pytest.raises(LockHeld):
            table.drop_column("a")
        table.add_column("c", "BIGINT", "sum")
        table.drop_column("b")
        table.drop_column("a", force=True)
        with pytest.raises((UnknownColumn, InvalidInput)):
            one.write(1, rows(1))


def test_partitions_come_with_a_batch_and_may_go_beside_a_writer(tmp_path: Path) -> None:
    def of(*days: str) -> tb.Rows:
        return tb.Rows(data=[{"day": day, "k": k, "a": 1} for day in days for k in range(5)])

    with tb.Table.create(tmp_path / "t", DAYS, buckets=2) as table:
        with writer(table) as one:
            one.write(0, of("mo", "tu"))
            table.drop_partition(day="mo")
            one.write(1, of("tu", "we"))
        die_at("writer.put", writer(table).start(), 2, of("we", "th"))
        table.drop_partition(day="we")
    with tb.Table.open(tmp_path / "t") as table, writer(table) as again:
        assert table.partitions()["day"].to_pylist() == ["th", "tu"]
        assert values(table) == [2] * 5
        again.write(2, of("th"))
        assert values(table) == [1] * 5 + [2] * 5


def test_cleaning_keeps_what_may_have_to_be_undone(tmp_path: Path) -> None:
    with tb.Table.create(tmp_path / "t", SCHEMA, buckets=2) as table:
        one = writer(table).start()
        for batch in range(3):
            one.write(batch, rows(1))
        die_at("writer.put", one, 3, rows(5))
        table.flush()
        table.clean()
        assert all(table.bucket(bucket).start_offset > 0 for bucket in table.bucket_ids())
    with tb.Table.open(tmp_path / "t") as table, writer(table):
        assert values(table) == [3] * 10


def test_a_writer_of_a_closed_table_says_so(table: tb.Table) -> None:
    one = writer(table).start()
    one.write(0, rows(1))
    table.close()
    with pytest.raises(Closed, match="the table is closed"):
        one.write(1, rows(1))
    one.close()


def test_writers_and_others_work_side_by_side_in_threads(table: tb.Table) -> None:
    table.add_column("c", "BIGINT", "sum")
    batches, keys = 8, list(range(40))

    def write(column: str) -> None:
        with writer(table, f"of {column}", (column,)) as one:
            for batch in range(batches):
                one.write(batch, tb.Rows(data={"k": keys, column: [1] * len(keys)}))

    def put() -> None:
        for _ in range(batches):
            table.put({"k": keys, "c": [1] * len(keys)})

    def scan() -> None:
        for _ in range(batches):
            for bucket in table.bucket_ids():
                found = table.scan(buckets=[bucket]).to_arrow()
                for column in "abc":
                    assert len(set(found[column].to_pylist())) <= 1, "a batch in part"

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(write, "a"), pool.submit(write, "b"), pool.submit(put)]:
            pool.submit(scan).result()
            future.result()
    for column in "abc":
        assert values(table, column) == [batches] * len(keys)


def test_a_process_that_cannot_have_the_table_disturbs_nobody(
    table: tb.Table, tmp_path: Path
) -> None:
    with writer(table) as one:
        one.write(0, rows(1))
        child = subprocess.run(
            [sys.executable, "-c", _SECOND, str(tmp_path / "t")],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert "InUse" in child.stderr.splitlines()[-1], child.stderr
        one.write(1, rows(1))
    assert values(table) == [2] * 10


_SECOND = """
import sys, tallybook as tb
with tb.Table.open(sys.argv[1]) as table:
    table.writer(owner_id="etl", columns=["a"], deadline_s=5).start()
"""


def test_of_two_processes_with_other_views_the_last_one_writes(
    table: tb.Table, tmp_path: Path
) -> None:
    first = writer(table).start()
    first.write(0, rows(1))
    with tb.Table.open(tmp_path / "t", view_directory=tmp_path / "views") as other:
        with writer(other) as second:
            second.write(1, rows(1))
            for _ in range(2):
                with pytest.raises(InUse, match="another process"):
                    first.write(1, rows(7))
            second.write(2, rows(1))
        first.close()
        assert values(other) == [3] * 10


def test_who_only_read_elsewhere_is_told_by_name_too(table: tb.Table, tmp_path: Path) -> None:
    first = writer(table).start()
    with tb.Table.open(tmp_path / "t", view_directory=tmp_path / "views") as other:
        assert values(other) == []
        with pytest.raises(InUse, match="has opened this table since"):
            first.write(0, rows(7))
        with writer(other) as second:
            second.write(0, rows(1))
        assert values(other) == [1] * 10
    first.close()


def test_damaged_locks_are_an_error_that_says_which_file(tmp_path: Path) -> None:
    with tb.Table.create(tmp_path / "t", SCHEMA, buckets=2) as table, writer(table) as one:
        one.write(0, rows(1))
    newest = sorted((tmp_path / "t" / "locks").iterdir())[-1]
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    with pytest.raises(CorruptRecord, match=rf"{newest.name} .*damaged.*restore"):
        tb.Table.open(tmp_path / "t")
