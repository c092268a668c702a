"""Reads that take a copy in a lake: the union with what changed since, and former versions."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

import tallybook as tb
from foundation.errors import InvalidInput, TallybookError
from merge_engine.schema.builder import SchemaBuilder
from server.client.remote_table import RemoteTable
from sink.lake.opening import Place
from sink.source.data_source import TallybookSource
from sink.source.planning import RowsPlan, plan_rows
from sink.worker_connections import disconnect
from tests.integration.test_spark_read import EVERY, TYPES, arrow_rows
from tests.support.day_tables import DAYS
from tests.support.tiering import (
    KINDS,
    TieringScene,
    check_copy,
    clean_log,
    shown,
    tiering_scene,
    write,
)

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def module_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieringScene]:
    with tiering_scene(tmp_path_factory.mktemp("lake_read")) as scene:
        yield scene


@pytest.fixture
def scene(module_scene: TieringScene) -> Iterator[TieringScene]:
    yield module_scene
    module_scene.close()


def check_union(scene: TieringScene, table: RemoteTable, lake: str) -> pa.Table:
    """Check that a read with the copy is the table at one cut, in both ways; return the rows."""
    cut = table.cut()
    expected = table.scan(at=cut).to_arrow()
    assert shown(scene.union(table, lake, at=str(cut))) == shown(expected)
    wide = tb.spark.read(scene.spark, table.name, cluster=scene.client, lake=lake)
    assert shown(wide.toArrow()) == shown(expected)
    return expected


def refusal(act: Callable[..., Any], *arguments: Any, **options: str) -> str:
    with pytest.raises(Exception, match="foundation") as refused:
        act(*arguments, **options)
    return str(refused.value)


@pytest.mark.parametrize("kind", ["vectors", "parquet"])
def test_a_read_with_a_copy_is_the_table_at_one_cut(scene: TieringScene, kind: str) -> None:
    table, lake, how = scene.table(buckets=3), scene.lake(), KINDS[kind]
    one, other = (scene.writer(table, [name], owner=name) for name in "ab")

    def commit(keys: list[int], op: str = "upsert") -> None:
        for writer, name in ((one, "a"), (other, "b")):
            write(writer, {"k": keys, "op": [op] * len(keys), name: [1] * len(keys)})

    scene.tier(table, lake, **how)
    assert check_union(scene, table, lake).num_rows == 0, "nothing anywhere"
    commit(list(range(30)))
    before = scene.counted(table)["rows_scanned"]
    check_union(scene, table, lake)
    assert scene.counted(table)["rows_scanned"] > before, "the copy has no bucket of it"
    scene.tier(table, lake, **how)
    expected = shown(table.to_arrow())
    counted = scene.counted(table)
    assert shown(scene.union(table, lake)) == expected
    assert scene.counted(table) == counted, "the copy is all"
    commit([1, 2, 40, 41])
    commit([3, 4, 40], op="delete")
    write(one, {"k": [50, 5], "a": [7, 7]})
    write(other, {"k": [5, 6], "op": ["delete"] * 2, "b": [0, 0]})
    check_union(scene, table, lake)
    commit([*range(60)], op="delete")
    assert check_union(scene, table, lake).num_rows == 0
    scene.tier(table, lake, **how)
    commit([1])
    assert check_union(scene, table, lake).num_rows == 1
    check_copy(table, lake)


def test_columns_that_are_wanted_are_read_of_all_rows_that_there_are(scene: TieringScene) -> None:
    """A row is there if any column of it is: also one that is not wanted."""
    table, lake = scene.table(buckets=1), scene.lake()
    one, other = (scene.writer(table, [name], owner=name) for name in "ab")
    write(one, {"k": [1, 2], "a": [1, 1]})
    write(other, {"k": [2, 3], "b": [1, 1]})
    scene.tier(table, lake)
    write(other, {"k": [4, 3], "op": ["upsert", "delete"], "b": [1, 0]})
    write(one, {"k": [1], "op": ["delete"], "a": [0]})
    expected = table.scan(["a"]).to_arrow()
    assert sorted(expected["k"].to_pylist()) == [2, 4]
    for columns in ("k,a", "a", "b", "k", "b,k,a"):
        names = columns.split(",")
        wanted = table.to_arrow().select(names)
        assert shown(scene.union(table, lake, columns=columns)) == shown(wanted), columns
        wide = tb.spark.read(scene.spark, table.name, names, cluster=scene.client, lake=lake)
        assert shown(wide.toArrow()) == shown(wanted), columns
        assert wide.columns == names


def test_rows_that_went_with_a_column_before_the_cut_are_not_read_from_a_copy(
    scene: TieringScene, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever plans the read may have looked at the schema before the column was dropped."""
    table, lake = scene.table(), scene.lake()
    one, other = (scene.writer(table, [name], owner=name) for name in "ab")
    write(one, {"k": [1, 2], "a": [1, 1]})
    write(other, {"k": [2, 3], "b": [1, 1]})
    scene.tier(table, lake)
    planner = scene.client.table(table.name)
    scene.close()
    table.drop_column("b")
    plan = RowsPlan(columns=["k", "a"], lake=Place.of(lake))
    tasks = plan_rows(planner, scene.client.recipe, plan)
    found = [row for task in tasks for batch in task.batches() for row in batch.to_pylist()]
    disconnect(scene.client.recipe)
    assert sorted(row["k"] for row in found) == [1, 2] == sorted(table.to_arrow()["k"].to_pylist())
    assert "column 'b' was dropped since the copy" in caplog.text


def test_rows_of_all_types_are_read_from_a_copy(scene: TieringScene) -> None:
    builder = SchemaBuilder().column("k", "BIGINT").primary_key("k")
    for name, data_type in TYPES.items():
        builder.agg_column(name, data_type, "last_value")
    table, lake = scene.table(builder.build()), scene.lake()
    writer = scene.writer(table)
    write(writer, arrow_rows(table.schema, EVERY))
    scene.tier(table, lake)
    at_first = shown(table.to_arrow())
    write(writer, arrow_rows(table.schema, [{**EVERY[0], "k": 2}, {**EVERY[1], "k": 7}]))
    check_union(scene, table, lake)
    assert shown(scene.version(lake, 0)) == at_first


def test_a_table_without_column_locks_is_read_with_its_copy(scene: TieringScene) -> None:
    table, lake = scene.table(column_locks=False), scene.lake()
    table.put({"k": [1, 2, 3], "a": [1, 2, 3], "b": [1, 2, 3]}, owner="x")
    scene.tier(table, lake)
    check_union(scene, table, lake)
    table.put({"k": [1, 9], "a": [1, 2], "b": [1, 2]}, owner="x")
    table.delete({"k": [2]})
    check_union(scene, table, lake)


def test_columns_altered_since_the_copy_are_read_as_they_are_now(scene: TieringScene) -> None:
    table, lake = scene.table(), scene.lake()
    with table.writer(owner_id="w", columns=["a", "b"]) as writer:
        write(writer, {"k": [1, 2, 3], "a": [1, 2, 3], "b": [4, 5, 6]})
    scene.tier(table, lake)
    table.add_column("c", "BIGINT", "sum")
    check_union(scene, table, lake)
    with table.writer(owner_id="w", columns=["c"], handover=True) as writer:
        write(writer, {"k": [2, 4], "c": [1, 1]})
    check_union(scene, table, lake)
    assert shown(scene.union(table, lake, columns="c")) == shown(table.to_arrow().select(["c"]))
    table.rename_column("a", "amount")
    table.drop_column("b")
    assert check_union(scene, table, lake).schema.names == ["k", "amount", "c"]
    table.rename_column("c", "b")
    table.rename_column("amount", "c")
    table.rename_column("k", "key")
    rows = check_union(scene, table, lake)
    assert {row["key"]: row["c"] for row in rows.to_pylist()} == {1: 1, 2: 2, 3: 3, 4: None}
    table.drop_column("c")
    table.add_column("c", "STRING", "last_value")
    check_union(scene, table, lake)
    table.drop_column("c")
    table.add_column("c", "STRING", "first_value")
    scene.tier(table, lake)
    with table.writer(owner_id="w", columns=["c"], handover=True) as writer:
        write(writer, {"key": [2, 4], "c": ["x", "y"]})
    rows = check_union(scene, table, lake)
    assert {row["key"]: row["c"] for row in rows.to_pylist()} == {2: "x", 4: "y"}


def test_partitions_that_came_or_went_since_the_copy(scene: TieringScene) -> None:
    table, lake = scene.table(DAYS, buckets=2), scene.lake()

    def commit(*days: str, amount: int = 1) -> None:
        with table.writer(owner_id="w", columns=["a"]) as writer:
            for day in days:
                write(writer, {"day": [day] * 3, "k": [1, 2, 3], "a": [amount] * 3})

    scene.tier(table, lake)
    check_union(scene, table, lake)
    commit("monday", "tuesday")
    check_union(scene, table, lake)
    scene.tier(table, lake)
    commit("tuesday", "wednesday")
    assert check_union(scene, table, lake).num_rows == 9
    table.drop_partition(day="monday")
    assert check_union(scene, table, lake).num_rows == 6
    table.drop_partition(day="tuesday")
    commit("tuesday", amount=9)
    rows = check_union(scene, table, lake)
    assert {row["a"] for row in rows.to_pylist() if row["day"] == "tuesday"} == {9}


def test_a_copy_whose_changes_are_gone_from_the_log_is_left_aside(scene: TieringScene) -> None:
    table, lake = scene.table(), scene.lake()
    writer = scene.writer(table)
    keys = list(range(40))

    def commit() -> None:
        write(writer, {"k": keys, "a": [1] * 40, "b": [1] * 40})

    commit()
    scene.tier(table, lake)
    for _ in range(2):
        clean_log(table, commit)
    cut = tb.tiering.find(lake).cut
    with pytest.raises(tb.errors.CutTooOld):
        table.changes(since=cut).to_arrow()
    check_union(scene, table, lake)
    # And the next round copies all rows, from snapshots.
    done = scene.tier(table, lake).last
    assert done is not None
    assert done.kind is tb.tiering.RoundKind.COPY
    check_copy(table, lake)
    check_union(scene, table, lake)


def test_what_goes_with_no_copy_is_refused(scene: TieringScene) -> None:
    table, lake, other = scene.table(), scene.lake(), scene.table()
    before = table.cut()
    writer = scene.writer(table)
    write(writer, {"k": [1], "a": [1], "b": [1]})
    cut = table.cut()
    nothing = scene.lake()
    assert "has no copy of a table" in refused(scene, table, lake=nothing)
    write(writer, {"k": [1], "a": [1], "b": [1]})
    scene.tier(table, lake)
    for at in (before, cut):
        found = refused(scene, table, lake=lake, at=str(at))
        assert re.search("is at Cut.*, which is later than Cut.*: leave `at`, or `lake`", found)
    found = refused(scene, other, lake=lake)
    assert f"has a copy of table {table.name}, and not of {other.name}" in found
    for options, words in (
        ({"keys": '{"k": [1]}'}, "is of all rows: leave `keys`"),
        ({"lease": "x"}, "is of all rows: leave `lease`"),
        ({"start": "full"}, "leave `start`"),
        ({"isolation": "latest"}, "stands at a cut: leave `isolation`"),
        ({"lakes": "x"}, "there is no option 'lakes'; did you mean 'lake'?"),
        ({"lakeVersion": "0"}, "is read as it was: leave `zookeeper`"),
    ):
        found = refused(scene, table, lake=lake, **options)
        assert words in found
    for options, words in (
        ({"lakeVersion": "0"}, "say where: `lake`"),
        ({"lakeVersion": "-1", "lake": lake}, "is a number of the lake's own, not '-1'"),
        ({"lakeVersion": "7", "lake": lake}, "has no version 7, or not any more; it is at 0"),
        ({"lakeVersion": "0", "lake": lake, "at": str(cut)}, "leave `at`"),
        ({"lakeVersion": "0", "lake": lake, "table": other.name}, f"a copy of table {table.name}"),
        ({"lakeVersion": "0", "lake": nothing}, "has no copy of a table"),
        ({"lakeVersion": "0", "lake": lake, "columns": "nope"}, "nope"),
    ):
        assert words in refused(scene, None, **options)
    with pytest.raises(InvalidInput, match="lakeVersion"):
        tb.spark.read(scene.spark, table.name, cluster=scene.client, lake=lake, lakeVersion="0")


def refused(scene: TieringScene, of: RemoteTable | None, /, **options: str) -> str:
    """Return why a read is refused, by what Spark asks for it, without Spark."""
    place = {} if of is None else {"zookeeper": scene.local.address, "table": of.name}

    def plan() -> None:
        source = TallybookSource({**place, **options})
        source.reader(source.schema()).partitions()

    with pytest.raises(TallybookError) as found:
        plan()
    return str(found.value)


def test_an_altered_copy_is_refused_and_a_version_before_that_is_read(
    scene: TieringScene,
) -> None:
    table, lake = scene.table(), scene.lake()
    write(scene.writer(table), {"k": [1, 2], "a": [1, 1], "b": [1, 1]})
    scene.tier(table, lake, layout="rewrite")
    write_deltalake(lake, tb.tiering.find(lake).to_arrow(), mode="append")
    assert "was altered by somebody else" in refusal(scene.union, table, lake)
    assert "was altered by somebody else" in refusal(scene.version, lake, 1)
    assert shown(scene.version(lake, 0)) == shown(table.to_arrow())


@pytest.mark.parametrize("kind", KINDS)
def test_each_round_can_be_read_as_it_was_by_the_version_of_the_lake(
    scene: TieringScene, kind: str
) -> None:
    """With the columns of then, whatever has become of the table."""
    table, lake, how = scene.table(), scene.lake(), KINDS[kind]
    expected: dict[int, pa.Table] = {}

    def tier() -> None:
        done = scene.tier(table, lake, **how).last
        assert done is not None
        expected[done.version] = check_copy(table, lake)

    with table.writer(owner_id="w", columns=["a", "b"]) as writer:
        for number in range(3):
            write(writer, {"k": [number, 0], "a": [1, 1], "b": [1, 1]})
            tier()
    table.add_column("c", "BIGINT", "sum")
    tier()
    table.rename_column("a", "amount")
    tier()
    table.drop_column("b")
    tier()
    scene.client.drop_table(table.name)
    for version, rows in expected.items():
        found = scene.version(lake, version)
        assert found.schema.names == rows.schema.names
        assert shown(found) == shown(rows), version
        last = rows.schema.names[-1]
        found = scene.version(lake, version, columns=last)
        assert shown(found) == shown(rows.select([last])), version
        assert scene.version(lake, version, columns="k").num_rows == rows.num_rows
