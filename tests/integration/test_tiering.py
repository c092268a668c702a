"""Tiering on a real cluster, with Spark and deltalake: after every round, the copy is the table."""

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import tallybook as tb
from foundation.failpoints import arm
from merge_engine.schema.builder import SchemaBuilder
from recovery.writer.redo import RedoLog
from sink.rolling_lease import RollingLease
from sink.tiering.copying import TableCopy
from sink.tiering.progress import RoundKind
from tests.conftest import schema_of
from tests.integration.test_spark_read import EVERY, TYPES, arrow_rows
from tests.support.day_tables import DAYS
from tests.support.faulty_storage import interrupt
from tests.support.tiering import (
    KINDS,
    TieringScene,
    check_copy,
    clean_log,
    objects,
    shown,
    tiering_scene,
    write,
)

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def module_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieringScene]:
    with tiering_scene(tmp_path_factory.mktemp("tiering")) as scene:
        yield scene


@pytest.fixture
def scene(module_scene: TieringScene) -> Iterator[TieringScene]:
    yield module_scene
    module_scene.close()


# --- Rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("owners", [1, 2])
def test_after_every_round_the_copy_is_the_table(
    scene: TieringScene, kind: str, owners: int
) -> None:
    """By the records of one owner of all columns; with two, rows are looked up."""
    table, lake, how = scene.table(), scene.lake(), KINDS[kind]
    writers = [scene.writer(table)]
    if owners == 2:
        scene.close()
        writers = [scene.writer(table, [name], owner=name) for name in "ab"]
    names = [one.columns for one in writers]

    def commit(keys: list[int], amount: int | None = 1, op: str = "upsert") -> None:
        for writer in writers:
            values = {name: [amount] * len(keys) for name in writer.columns}
            write(writer, {"k": keys, "op": [op] * len(keys), **values})

    def tier(kind: RoundKind = RoundKind.CHANGES) -> Any:
        done = scene.tier(table, lake, **how).last
        check_copy(table, lake)
        assert done is not None
        assert done.kind is kind
        return done

    assert tier(RoundKind.COPY).table_rows == 0, names
    assert tier(RoundKind.NOTHING).version == 0
    commit(list(range(20)))
    assert tier().rows == 20
    commit([1, 2, 3], 5)
    commit([20, 21])
    done = tier()
    assert (done.rows, done.deleted) == (5, 0)
    commit([3, 4, 20], op="delete")
    done = tier()
    assert (done.rows, done.deleted, done.table_rows) == (0, 3, 19)
    # Deleted and written again in one round; written and deleted in one round; of many batches.
    commit([5, 6], op="delete")
    commit([5], 7)
    for _ in range(3):
        commit([100, 101, 7])
    commit([101], op="delete")
    commit([30], None)
    tier()
    assert tier(RoundKind.NOTHING).version == 4
    commit([*range(22), 30, 100], op="delete")
    assert tier().table_rows == 0
    commit([1])
    assert tier().table_rows == 1


def test_the_cluster_knows_how_far_a_copy_is_while_somebody_keeps_it(scene: TieringScene) -> None:
    table, lake = scene.table(), scene.lake()
    copies, table_id = table.caller.cluster.coordinator.copies, table.table_id
    writer = scene.writer(table)
    write(writer, {"k": [1], "op": ["upsert"], "a": [1], "b": [1]})
    scene.tier(table, lake, hold_s=60.0)  # Somebody will come back for it.
    [told] = copies.all(table_id).values()
    [batch] = told.batches.values()
    assert (told.location, told.format) == (str(lake), "delta")
    assert told.lag(told.batches, told.had_all_ms + 5_000) == (0, 0.0)
    write(writer, {"k": [1], "op": ["upsert"], "a": [1], "b": [1]})
    [(owner, committed)] = table.cut().batches.items()
    assert told.lag({owner: committed}, told.had_all_ms + 5_000) == (committed - batch, 5.0)
    scene.tier(table, lake)
    assert copies.all(table_id) == {}, "a job that ends in good order leaves nothing behind"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_all_types_are_copied_as_they_are(scene: TieringScene, kind: str) -> None:
    builder = SchemaBuilder().column("k", "BIGINT").primary_key("k")
    for name, data_type in TYPES.items():
        builder.agg_column(name, data_type, "last_value")
    table, lake = scene.table(builder.build(), buckets=2), scene.lake()
    writer = scene.writer(table)
    write(writer, arrow_rows(table.schema, EVERY))
    scene.tier(table, lake, **KINDS[kind])
    assert check_copy(table, lake).num_rows == len(EVERY)
    write(writer, arrow_rows(table.schema, [{**EVERY[0], "k": 2}, {**EVERY[1], "k": 0}]))
    scene.tier(table, lake, **KINDS[kind])
    check_copy(table, lake)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_may_be_of_several_columns_and_of_text(scene: TieringScene, kind: str) -> None:
    schema = (
        SchemaBuilder()
        .column("name", "STRING")
        .column("at", "TIMESTAMP")
        .column("price", "DECIMAL(10,2)")
        .agg_column("n", "BIGINT", "sum")
        .primary_key("at", "name", "price")
        .build()
    )
    table, lake, how = scene.table(schema, buckets=3), scene.lake(), KINDS[kind]
    writer = scene.writer(table)
    times = [datetime(2024, 1, 1, tzinfo=UTC), datetime(1, 1, 1, tzinfo=UTC)]
    rows = [
        {"name": name, "at": at, "price": price, "n": 1}
        for name in ("", "a", "a\0b", "Zoë🦆", "a b")
        for at in times
        for price in (Decimal("1.10"), Decimal("-1.10"))
    ]
    write(writer, arrow_rows(schema, rows))
    scene.tier(table, lake, **how)
    assert check_copy(table, lake).num_rows == 20
    write(writer, arrow_rows(schema, [*rows[:7], {**rows[0], "name": "new"}]))
    gone = arrow_rows(schema, rows[10:12])
    write(writer, gone.append_column("op", pa.array(["delete"] * 2)))
    scene.tier(table, lake, **how)
    assert check_copy(table, lake).num_rows == 19


@pytest.mark.parametrize("kind", ["vectors", "parquet"])
def test_a_table_without_column_locks_is_copied_too(scene: TieringScene, kind: str) -> None:
    table, lake, how = scene.table(column_locks=False), scene.lake(), KINDS[kind]
    table.put({"k": [1, 2, 3], "a": [1, 2, 3], "b": [1, 2, 3]}, owner="x")
    scene.tier(table, lake, **how)
    check_copy(table, lake)
    before = table.end_offsets()
    table.put({"k": [1, 2, 9], "a": [1, 2, 3], "b": [1, 2, 3]}, owner="y")
    table.put({"k": [1], "a": [70]}, columns=["a"], owner="x")
    table.delete({"k": [2]})
    scene.tier(table, lake, **how)
    assert check_copy(table, lake).num_rows == 3
    # What was in the copy already is undone.
    table.undo("y", ["a", "b"], before)
    scene.tier(table, lake, **how)
    rows = {row["k"]: row["a"] for row in check_copy(table, lake).to_pylist()}
    assert rows == {row["k"]: row["a"] for row in table.to_arrow().to_pylist()}


def test_the_first_round_asks_no_server_for_rows_and_needs_no_log(scene: TieringScene) -> None:
    table, lake = scene.table(), scene.lake()
    writer = scene.writer(table)
    keys = list(range(50))

    def commit() -> None:
        write(writer, {"k": keys, "a": [1] * 50, "b": [2] * 50})

    commit()
    clean_log(table, commit)
    before = scene.counted(table)
    done = scene.tier(table, lake)
    assert scene.counted(table) == before
    assert done.rows == 50
    rows = check_copy(table, lake)
    assert set(rows["a"].to_pylist()) == {3}


def test_a_round_takes_rows_from_records_of_all_columns_and_looks_up_others(
    scene: TieringScene,
) -> None:
    table, lake = scene.table(), scene.lake()
    writer = scene.writer(table)
    scene.tier(table, lake)
    before = scene.counted(table)
    write(writer, {"k": [1, 2], "a": [1, 1], "b": [1, 1]})
    scene.tier(table, lake)
    assert scene.counted(table) == before
    check_copy(table, lake)
    scene.close()
    one = scene.writer(table, ["a"], owner="one", handover=True)
    before = scene.counted(table)
    write(one, {"k": [1, 3], "a": [1, 1]})
    scene.tier(table, lake)
    found = scene.counted(table)
    assert found["keys_looked_up"] == before["keys_looked_up"] + 2
    assert found["rows_scanned"] == before["rows_scanned"]
    check_copy(table, lake)


@pytest.mark.parametrize("kind", ["vectors", "rewrite"])
def test_what_is_not_committed_or_was_undone_is_in_no_copy(
    scene: TieringScene, kind: str, tmp_path: Path
) -> None:
    table, lake, how = scene.table(), scene.lake(), KINDS[kind]

    def batch(amount: int) -> dict[str, Any]:
        return {"k": [1, 2, 3], "a": [amount] * 3, "b": [amount] * 3}

    def amounts() -> set[int]:
        scene.tier(table, lake, **how)
        return set(check_copy(table, lake)["a"].to_pylist())

    writer = scene.writer(table)
    with arm("writer.sealed", interrupt), pytest.raises(KeyboardInterrupt):
        write(writer, batch(1000))
    assert amounts() == set(), "not in the first round, from snapshots"
    write(writer, batch(1))
    with arm("writer.sealed", interrupt), pytest.raises(KeyboardInterrupt):
        write(writer, batch(1000))
    assert amounts() == {1}
    write(writer, batch(10))
    assert amounts() == {11}
    with arm("writer.sealed", interrupt), pytest.raises(KeyboardInterrupt):
        write(writer, {"k": [1, 2], "op": ["delete"] * 2, "a": [0, 0], "b": [0, 0]})
    scene.close()
    redo = RedoLog.open(str(tmp_path / "redo"))
    taker = scene.writer(table, owner="taker", handover=True, redo=redo)
    assert amounts() == {11}
    with arm("writer.prepared", interrupt), pytest.raises(KeyboardInterrupt):
        write(taker, batch(100))
    assert amounts() == {11}
    scene.writer(table, owner="taker", redo=redo)
    assert amounts() == {111}, "it was promised"


# --- Looking after it -----------------------------------------------------------------------------


def test_versions_can_be_read_through_compactions_and_checkpoints(scene: TieringScene) -> None:
    table, lake = scene.table(buckets=1), scene.lake()
    writer = scene.writer(table)
    expected: dict[int, list[str]] = {}
    compacted = 0
    for number in range(20):
        keys = [number, number % 5, 100 + number % 7]
        ops = ["upsert", "upsert", "delete" if number % 3 else "upsert"]
        write(writer, {"k": keys, "op": ops, "a": [1] * 3, "b": [number] * 3})
        if max(expected, default=0) == 9:  # Who looks after a lake passes versions over.
            said = json.dumps({"commitInfo": {"timestamp": 1, "operation": "VACUUM END"}})
            Path(lake, "_delta_log", f"{10:020}.json").write_text(said)
        done = scene.tier(table, lake).last
        assert done is not None
        compacted += done.compacted
        expected[done.version] = shown(check_copy(table, lake))
    assert compacted
    log = Path(lake, "_delta_log")
    checkpoints = sorted(int(one.name[:20]) for one in log.glob("*.checkpoint.parquet"))
    assert len(checkpoints) == max(expected) // 10
    for version, rows in expected.items():
        assert shown(pa.table(DeltaTable(lake, version=version).scan())) == rows, version
        assert shown(tb.tiering.find(lake, version).to_arrow()) == rows, version
    some = sorted(expected)[:: len(expected) // 3]
    for version in some:
        assert shown(scene.version(lake, version)) == expected[version]
    last = checkpoints[-1]
    for one in log.glob("*.json"):
        if int(one.name[:20]) < last:
            one.unlink()
    check_copy(table, lake)
    write(writer, {"k": [1], "a": [1], "b": [1]})
    scene.tier(table, lake)
    check_copy(table, lake)
    with pytest.raises(tb.errors.InvalidInput, match="has no version 1, or not any more"):
        tb.tiering.find(lake, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_version_needs_is_removed_after_the_retention(
    scene: TieringScene, kind: str
) -> None:
    table, lake, how = scene.table(buckets=1), scene.lake(), KINDS[kind]
    writer = scene.writer(table)
    for number in range(12):
        write(writer, {"k": [number, 0], "a": [1, 1], "b": [1, 1]})
        scene.tier(table, lake, **how)
    kept = len(objects(lake))
    write(writer, {"k": [99], "a": [1], "b": [1]})
    done = scene.tier(table, lake, retention_s=0, **how).last
    assert done is not None
    # What was replaced in the very millisecond has its turn later.
    write(writer, {"k": [98], "a": [1], "b": [1]})
    scene.tier(table, lake, retention_s=0, **how)
    check_copy(table, lake)
    copy = tb.tiering.find(lake)
    assert done.cleaned >= kept / 2
    needed = {Path(one).name for one in copy.files}
    left = {one for one in objects(lake) - needed if not one.startswith("deletion_vector")}
    assert len(left) <= 2
    if kind == "vectors":
        names = [one for one in objects(lake) if one.startswith("deletion_vector")]
        assert len(names) <= 2 + sum(bool(file.told) for file in copy._state.files.values())
    if kind == "parquet":
        assert len(list(Path(lake, "_tallybook").iterdir())) <= 2


def test_a_retention_of_months_outlasts_the_log_of_delta_which_forgets_in_a_week(
    scene: TieringScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, lake = scene.table(buckets=1), scene.lake()
    writer = scene.writer(table)
    now_ms, expected = TableCopy._now_ms, {}
    ago_ms = 40 * 24 * 3_600_000

    def tier(number: int) -> None:
        write(writer, {"k": [number, 0], "a": [1, 1], "b": [1, 1]})
        done = scene.tier(table, lake, layout="rewrite", retention_s=60 * 24 * 3600).last
        assert done is not None
        expected[done.version] = shown(table.to_arrow())

    with monkeypatch.context() as patched:
        patched.setattr(TableCopy, "_now_ms", lambda self: now_ms(self) - ago_ms)
        for number in range(7):
            tier(number)
        for one in Path(lake, "_delta_log").iterdir():
            os.utime(one, ns=2 * (one.stat().st_mtime_ns - ago_ms * 1_000_000,))
    for number in range(7):
        tier(number)
    assert list(Path(lake, "_delta_log").glob("*.checkpoint.parquet"))
    for version, rows in expected.items():
        assert shown(DeltaTable(lake, version=version).to_pyarrow_table()) == rows, version


# --- Schemas --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_are_added_dropped_and_renamed_follow(
    scene: TieringScene, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    table, lake, how = scene.table(buckets=1), scene.lake(), KINDS[kind]

    def commit(**values: int) -> None:
        with table.writer(owner_id="w", columns=list(values)) as writer:
            write(writer, {"k": [1, 2, 3], **{name: [one] * 3 for name, one in values.items()}})

    def tier(kind: RoundKind) -> list[str]:
        done = scene.tier(table, lake, **how).last
        assert done is not None
        assert done.kind is kind
        rows = check_copy(table, lake)
        assert tb.tiering.find(lake).to_arrow().schema.names == rows.schema.names
        return list(rows.schema.names)

    commit(a=1, b=1)
    assert tier(RoundKind.COPY) == ["k", "a", "b"]
    table.add_column("c", "DOUBLE", "sum")
    assert tier(RoundKind.CHANGES) == ["k", "a", "b", "c"], "without any rows that changed"
    with table.writer(owner_id="w", columns=["c"], handover=True) as writer:
        write(writer, {"k": [2, 4], "c": [0.5, 1.5]})
    tier(RoundKind.CHANGES)
    with table.writer(owner_id="w", columns=["b"], handover=True) as writer:
        write(writer, {"k": [9], "b": [1]})
    tier(RoundKind.CHANGES)
    assert not caplog.records
    table.drop_column("b")
    assert tier(RoundKind.COPY) == ["k", "a", "c"], "key 9 is gone with it"
    assert "is made anew: 'b' was dropped, and with it the rows that had nothing" in caplog.text
    table.rename_column("a", "amount")
    assert tier(RoundKind.COPY) == ["k", "amount", "c"]
    assert "is made anew: 'a' was renamed to 'amount'" in caplog.text
    table.drop_column("c")
    table.add_column("c", "STRING", "last_value")
    with table.writer(owner_id="w", columns=["c"], handover=True) as writer:
        write(writer, {"k": [2], "c": ["text"]})
    assert tier(RoundKind.COPY) == ["k", "amount", "c"]
    assert "is made anew: 'c' was dropped" in caplog.text
    table.drop_column("c")
    table.add_column("c", "STRING", "first_value")
    assert tier(RoundKind.COPY) == ["k", "amount", "c"]
    with table.writer(owner_id="w", columns=["amount", "c"], handover=True) as writer:
        write(writer, {"k": [2, 5], "amount": [1, 1], "c": ["other", "other"]})
    assert tier(RoundKind.CHANGES) == ["k", "amount", "c"], "of the same name and type"
    table.rename_column("k", "key")
    assert tier(RoundKind.COPY) == ["key", "amount", "c"]
    commit_key(table)
    assert tier(RoundKind.CHANGES) == ["key", "amount", "c"]


def commit_key(table: Any) -> None:
    with table.writer(owner_id="w", columns=["amount"], handover=True) as writer:
        write(writer, {"key": [1, 7], "amount": [5, 5]})


def test_a_column_that_is_renamed_while_a_round_begins_keeps_its_values(
    scene: TieringScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the schema and the cut."""
    table, lake = scene.table(buckets=1), scene.lake()
    writer = scene.writer(table)
    write(writer, {"k": [1, 2, 3], "a": [1, 2, 3], "b": [4, 5, 6]})
    scene.tier(table, lake)
    write(writer, {"k": [1], "a": [1], "b": [1]})
    scene.close()
    look = TableCopy._why_anew

    def rename_after(self: Any, schema: tb.Schema) -> Any:
        found = look(self, schema)
        if table.schema.names == ("k", "a", "b"):
            table.rename_column("a", "amount")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(TableCopy, "_why_anew", rename_after)
        scene.tier(table, lake)
    assert table.schema.names == ("k", "amount", "b")
    rows = check_copy(table, lake)
    assert sorted(rows["amount"].to_pylist()) == [2, 2, 3]


@pytest.mark.parametrize("kind", ["vectors", "parquet"])
def test_a_column_that_is_added_and_written_before_the_cut_of_a_copy_is_in_it(
    scene: TieringScene, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Between the look at the schema, which tells that all rows are to be copied, and the cut."""
    table, lake, how = scene.table(), scene.lake(), KINDS[kind]
    writer = scene.writer(table, ["a"])
    write(writer, {"k": [1, 2, 3], "a": [1, 2, 3]})
    scene.tier(table, lake, **how)
    table.drop_column("b")
    take = RollingLease.take

    def add_before(self: RollingLease) -> None:
        monkeypatch.setattr(RollingLease, "take", take)
        table.add_column("c", "BIGINT", "sum")
        with table.writer(owner_id="new", columns=["c"]) as another:
            write(another, {"k": [1, 2, 9], "c": [10, 20, 90]})
        take(self)

    monkeypatch.setattr(RollingLease, "take", add_before)
    assert (done := scene.tier(table, lake, **how).last)
    assert done.kind is RoundKind.COPY
    rows = check_copy(table, lake)
    assert sorted(rows.to_pylist(), key=lambda row: row["k"]) == [
        {"k": 1, "a": 1, "c": 10},
        {"k": 2, "a": 2, "c": 20},
        {"k": 3, "a": 3, "c": None},
        {"k": 9, "a": None, "c": 90},
    ]
    assert (done := scene.tier(table, lake, **how).last)
    assert done.kind is RoundKind.NOTHING
    write(writer, {"k": [1], "a": [1]})
    scene.tier(table, lake, **how)
    check_copy(table, lake)
    assert shown(scene.union(table, lake)) == shown(table.to_arrow())


def test_averages_and_sketches_are_finished_values_and_states_if_they_are_wanted(
    scene: TieringScene, caplog: pytest.LogCaptureFixture
) -> None:
    schema = schema_of(
        mean=(pa.float64(), "avg"),
        price=(pa.decimal128(10, 2), "avg"),
        visitors=(pa.binary(), "hll_sketch"),
        days=(pa.binary(), "rbm32"),
        tags=(pa.string(), "string_agg"),
        n=(pa.int64(), "sum"),
    )
    table = scene.table(schema, buckets=2)
    writer = scene.writer(table)

    def commit(keys: list[int]) -> None:
        count = len(keys)
        write(
            writer,
            pa.table(
                {
                    "k": keys,
                    "mean": [1.5 * key for key in keys],
                    "price": pa.array([Decimal("1.25")] * count, pa.decimal128(10, 2)),
                    "visitors": list(range(count)),
                    "days": pa.array(range(count), pa.int32()),
                    "tags": [f"t{key}" for key in keys],
                    "n": [1] * count,
                }
            ),
        )

    commit([1, 2, 3])
    for kind, how in KINDS.items():
        lake = scene.lake()
        scene.tier(table, lake, **how)
        check_copy(table, lake)
        commit([1, 4])
        scene.tier(table, lake, **how)
        check_copy(table, lake)
        caplog.clear()
        done = scene.tier(table, lake, states=True, **how).last
        assert done is not None
        assert done.kind is RoundKind.COPY, kind
        assert "is made anew: it has no states yet" in caplog.text
        check_copy(table, lake)
        commit([2, 5])
        commit([2])
        scene.tier(table, lake, states=True, **how)
        check_copy(table, lake)
        rows = tb.tiering.find(lake).to_arrow()
        states = [name for name in rows.schema.names if name.endswith("_state")]
        # Of sketches and bitmaps, the value is the state.
        assert states == ["mean_state", "price_state", "tags_state"]
        for row in rows.to_pylist():
            assert row["mean_state"]["sum"] / row["mean_state"]["count"] == row["mean"]
        # Merged elsewhere, they read as if all rows had been written there.
        other = scene.client.create_table(f"merged_{kind}", schema, buckets=1, column_locks=False)
        found = pa.table({"k": rows["k"], "mean": rows["mean_state"], "days": rows["days"]})
        other.put(found, columns=["mean", "days"], mode=tb.AggMode.MERGE_STATE)
        wanted = ["k", "mean", "days"]
        assert shown(other.to_arrow().select(wanted)) == shown(rows.select(wanted))
    # And without states again, as it was.
    scene.tier(table, lake, **how)
    check_copy(table, lake)
    assert "mean_state" not in tb.tiering.find(lake).to_arrow().schema.names


# --- Partitions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_partitions_that_come_go_and_come_again_follow(scene: TieringScene, kind: str) -> None:
    table, lake, how = scene.table(DAYS, buckets=2), scene.lake(), KINDS[kind]

    def commit(*days: str, amount: int = 1) -> None:
        with table.writer(owner_id="w", columns=["a"]) as writer:
            keys = [1, 2, 3] * len(days)
            named = [day for day in days for _ in range(3)]
            write(writer, {"day": named, "k": keys, "a": [amount] * len(keys)})

    def tier() -> list[tuple[str, int]]:
        scene.tier(table, lake, **how)
        rows = check_copy(table, lake).to_pylist()
        return sorted({(row["day"], row["a"]) for row in rows})

    assert tier() == []
    commit("monday", "tuesday")
    assert tier() == [("monday", 1), ("tuesday", 1)]
    commit("monday", "wednesday")
    assert tier() == [("monday", 2), ("tuesday", 1), ("wednesday", 1)]
    table.drop_partition(day="tuesday")
    assert tier() == [("monday", 2), ("wednesday", 1)], "though nothing was written"
    table.drop_partition(day="monday")
    commit("monday", amount=9)
    assert tier() == [("monday", 9), ("wednesday", 1)]
    for day in ("monday", "wednesday"):
        table.drop_partition(day=day)
    assert tier() == []
    commit("friday")
    assert tier() == [("friday", 1)]
