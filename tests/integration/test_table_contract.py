"""One contract for all tables: embedded, and on the servers of a cluster."""

import inspect
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, date, datetime, time, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pytest

import tallybook as tb
from foundation.errors import (
    HandoverNeeded,
    InvalidInput,
    LockHeld,
    NotFenced,
    OffsetOutOfRange,
    Overflow,
    UnknownColumn,
    WrongType,
)
from foundation.failpoints import arm
from tests.support.day_tables import DATED, DAYS
from tests.support.faulty_storage import interrupt
from tests.support.writer_table import MOST

SUMS = (
    tb.SchemaBuilder()
    .column("k", "BIGINT")
    .agg_column("a", "BIGINT", "sum")
    .agg_column("note", "STRING", "last_value")
    .primary_key("k")
    .build()
)
NAMES = [name for name in vars(tb.AnyTable) if not name.startswith("_")]
CONTEXT = ["__enter__", "__exit__"]


class Create(Protocol):
    """Creates a table; `locked`: one that is for writers."""

    def __call__(self, schema: tb.Schema = SUMS, *, locked: bool = False) -> tb.AnyTable: ...


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tb.Cluster]:
    with tb.LocalCluster(tmp_path_factory.mktemp("contract")) as local, local.connect() as client:
        yield client


@pytest.fixture(params=["embedded", "cluster"])
def create(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Create]:
    with ExitStack() as stack:

        def embedded(schema: tb.Schema = SUMS, *, locked: bool = False) -> tb.AnyTable:
            assert locked in (True, False)  # Writers and others share an embedded table.
            directory = tmp_path / uuid.uuid4().hex
            return stack.enter_context(tb.Table.create(directory, schema, buckets=2))

        def on_servers(schema: tb.Schema = SUMS, *, locked: bool = False) -> tb.AnyTable:
            client: tb.Cluster = request.getfixturevalue("cluster")
            name = f"t{uuid.uuid4().hex}"
            return client.create_table(name, schema, buckets=2, column_locks=locked)

        yield embedded if request.param == "embedded" else on_servers


@pytest.fixture
def table(create: Create) -> tb.AnyTable:
    return create()


def found(table: tb.AnyTable, keys: list[int], **arguments: Any) -> list[int | None]:
    values: list[int | None] = table.lookup({"k": keys}, ["a"], **arguments)["a"].to_pylist()
    return values


def records(table: tb.AnyTable, **arguments: Any) -> list[tuple[str, int, int]]:
    return sorted(
        (row["_change_type"], row["k"], row["a"])
        for bucket_id in table.bucket_ids()
        for batch in table.changelog(bucket_id, **arguments)
        for row in batch.to_pylist()
    )


# --- Signatures -----------------------------------------------------------------------------------


def both(embedded: tb.Table, remote: tb.RemoteTable) -> tuple[tb.AnyTable, tb.AnyTable]:
    """mypy takes both for the protocol."""
    return embedded, remote


@pytest.mark.parametrize("kind", [tb.Table, tb.RemoteTable])
@pytest.mark.parametrize("name", NAMES + CONTEXT)
def test_a_call_has_the_arguments_of_the_protocol(name: str, kind: type) -> None:
    expected = inspect.getattr_static(tb.AnyTable, name)
    if isinstance(expected, property):
        assert isinstance(inspect.getattr_static(kind, name), property)
        return
    asked, given = parameters(expected), parameters(getattr(kind, name))
    for more in list(given)[len(asked) :]:
        assert given[more].kind is inspect.Parameter.KEYWORD_ONLY
        assert given[more].default is not inspect.Parameter.empty
    shared = {parameter: given[parameter] for parameter in given if parameter in asked}
    assert list(shared) == list(asked)
    for parameter, wanted in asked.items():
        own = shared[parameter]
        assert (own.kind, own.default) == (wanted.kind, wanted.default), parameter


def parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(call).parameters)


# --- What a table is ------------------------------------------------------------------------------


def test_a_table_has_a_name_an_id_a_schema_and_buckets(create: Create) -> None:
    table, other = create(), create()
    assert table.name
    assert table.table_id != other.table_id
    assert table.schema.to_json() == SUMS.to_json()
    assert table.bucket_ids() == [tb.BucketId(0, 0), tb.BucketId(0, 1)]
    assert set(table.end_offsets()) == set(table.bucket_ids())
    assert table.partitions().num_rows == 0


def test_a_table_is_a_context_manager_and_closed_twice(create: Create) -> None:
    with create() as table:
        table.put({"k": [1], "a": [1]})
        assert found(table, [1]) == [1]
    table.close()


# --- Writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        {"k": [1, 2, 1], "a": [1, 2, 3]},
        [{"k": 1, "a": 1}, {"k": 2, "a": 2}, {"k": 1, "a": 3}],
        pa.record_batch({"k": [1, 2, 1], "a": [1, 2, 3]}),
        pa.table({"k": [1, 2, 1], "a": [1, 2, 3]}),
    ],
    ids=["columns", "rows", "batch", "table"],
)
def test_a_put_takes_columns_rows_batches_and_tables(table: tb.AnyTable, data: Any) -> None:
    result = table.put(data)
    assert isinstance(result, tb.PutResult)
    assert result.rows == 3
    assert sum(one.changed for one in result.buckets.values()) == 2
    assert set(result.buckets) <= set(table.bucket_ids())
    assert found(table, [2, 1, 3, 1]) == [2, 4, None, 4]


def test_a_put_takes_frames_relations_and_streams_of_other_libraries(table: tb.AnyTable) -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    duckdb = pytest.importorskip("duckdb")
    rows = {"k": [1, 2, 1], "a": [1, 2, 3], "note": ["x", "y", "z"]}
    frame = pandas.DataFrame(rows)
    batches = pa.table(rows).to_batches()
    for data in (
        frame,
        frame[frame["a"] > 0].iloc[::-1].iloc[::-1],  # Its index has lost its order.
        frame.set_index("k"),
        polars.DataFrame(rows),
        duckdb.sql("from frame"),
        pa.RecordBatchReader.from_batches(batches[0].schema, batches),
    ):
        assert table.put(data).rows == 3
    assert found(table, [1, 2]) == [24, 12]
    assert table.lookup(polars.DataFrame({"k": [2]}), ["note"])["note"].to_pylist() == ["y"]
    assert table.delete(frame[["k"]]).rows == 3
    assert table.to_arrow().num_rows == 0
    with pytest.raises(InvalidInput, match="no column 'b'"):
        table.put(polars.DataFrame({"k": [1], "b": [1]}))


def test_a_writer_takes_a_stream_that_can_be_read_only_once(create: Create) -> None:
    table = create(locked=True)
    batches = pa.table({"k": [1, 2], "a": [1, 2]}).to_batches()
    with table.writer(owner_id="etl", columns=["a"]) as writer:
        writer.write(0, pa.RecordBatchReader.from_batches(batches[0].schema, batches))
    assert found(table, [1, 2]) == [1, 2]


def test_one_key_is_looked_up_by_its_value(table: tb.AnyTable) -> None:
    table.put({"k": 7, "a": 5})
    for key in (7, pa.scalar(7)):
        assert table.lookup({"k": key}).to_pylist() == [{"k": 7, "a": 5, "note": None}]
    assert table.lookup({"k": 8}, isolation="committed")["a"].to_pylist() == [None]
    assert table.delete({"k": 7}).rows == 1
    assert found(table, [7]) == [None]
    with pytest.raises(InvalidInput, match="column 'a' has one value, and others have lists"):
        table.put({"k": [1], "a": 1})


def test_one_key_of_several_columns_is_looked_up_by_its_values(create: Create) -> None:
    table = create(DAYS)
    table.put({"day": ["mon", "tue"], "k": [1, 2], "a": [1, 2]})
    assert table.lookup({"day": "tue", "k": 2})["a"].to_pylist() == [2]
    assert table.lookup({"k": 2, "day": "mon"}, found=True)["_found"].to_pylist() == [False]
    with pytest.raises(InvalidInput, match="column 'day' has one value"):
        table.lookup({"day": "tue", "k": [2]})


@pytest.mark.parametrize("isolation", ["latest", "committed"])
def test_a_row_of_nulls_is_told_from_none(create: Create, isolation: str) -> None:
    schema = (
        tb.SchemaBuilder()
        .column("k", "BIGINT")
        .agg_column("n", "BIGINT", "count")
        .agg_column("note", "STRING", "last_value")
        .primary_key("k")
        .build()
    )
    table = create(schema)
    table.put({"k": [1, 2], "note": [None, "x"]})
    table.put({"k": [2, 3], "n": [None, 7]})
    rows = table.lookup({"k": [1, 2, 3, 4]}, ["n"], isolation=isolation, found=True)
    assert rows.schema.names == ["k", "n", "_found"]
    assert rows["_found"].to_pylist() == [True, True, True, False]
    assert rows["n"].to_pylist() == [None, 0, 1, None]
    at = table.lookup({"k": [1, 4]}, at=table.cut(), found=True)
    assert at["_found"].to_pylist() == [True, False]
    table.delete({"k": [1]})
    assert table.lookup({"k": 1}, isolation=isolation, found=True)["_found"].to_pylist() == [False]


@pytest.mark.parametrize(
    "data", [[], pa.table({"k": pa.array([], "int64"), "a": pa.array([], "int64")})]
)
def test_a_put_of_nothing_changes_nothing(table: tb.AnyTable, data: Any) -> None:
    result = table.put(data)
    assert (result.rows, dict(result.buckets)) == (0, {})


def test_a_token_counts_once_and_the_answer_says_so(table: tb.AnyTable) -> None:
    batch = {"k": list(range(20)), "a": [1] * 20}
    first = table.put(batch, owner="etl", token=tb.Token(1, 0))
    again = table.put(batch, owner="etl", token=tb.Token(1, 0))
    assert all(one.repeated for one in again.buckets.values())
    assert {key: one.base_offset for key, one in again.buckets.items()} == {
        key: one.base_offset for key, one in first.buckets.items()
    }
    assert set(found(table, list(range(20)))) == {1}


def test_modes_columns_and_operations_are_those_of_a_put(table: tb.AnyTable) -> None:
    table.put({"k": [1, 2], "a": [1, 1], "note": ["x", "y"]})
    table.put({"k": [1], "a": [9], "note": ["z"]}, columns=["a"], mode=tb.AggMode.REPLACE)
    table.put({"k": [2], "a": [0], "op": ["delete"]}, operation_column="op")
    rows = table.lookup({"k": [1, 2]}).to_pylist()
    assert rows == [{"k": 1, "a": 9, "note": "x"}, {"k": 2, "a": None, "note": "y"}]


def test_many_rows_of_few_keys_are_one_change_per_key(table: tb.AnyTable) -> None:
    """They are folded before they are sent, and deletes count by their place among the rows."""
    rows = 12_000
    data = {
        "k": [row % 7 for row in range(rows)],
        "a": [1] * rows,
        "note": [f"row {row}" for row in range(rows)],
        "op": ["delete" if row == rows - 9 else "upsert" for row in range(rows)],
    }
    result = table.put(data, operation_column="op")
    assert (result.rows, result.changed) == (rows, 7)
    deleted = (rows - 9) % 7
    each = [len(range(key, rows, 7)) for key in range(7)]
    each[deleted] = 1
    assert found(table, list(range(7))) == each
    last = table.lookup({"k": [deleted]})["note"].to_pylist()
    assert last == [f"row {rows - 2}"]
    too_many = {"k": data["k"], "a": [2**62] * rows}
    with pytest.raises(Overflow, match="column 'a', key k="):
        table.put(too_many)
    assert found(table, list(range(7))) == each


def test_a_delete_clears_columns_or_rows(table: tb.AnyTable) -> None:
    table.put({"k": [1, 2], "a": [1, 2], "note": ["x", "y"]})
    assert table.delete({"k": [1]}, columns=["a"]).rows == 1
    assert table.delete([{"k": 2}]).rows == 1
    assert table.to_arrow().to_pylist() == [{"k": 1, "a": None, "note": "x"}]


def test_bad_input_changes_nothing(table: tb.AnyTable) -> None:
    table.put({"k": [7], "a": [MOST]})
    ends = table.end_offsets()
    with pytest.raises(Overflow):
        table.put({"k": list(range(20)), "a": [1] * 20})
    with pytest.raises(UnknownColumn):
        table.put({"k": [1], "a": [1]}, columns=["b"])
    with pytest.raises(InvalidInput):
        table.lookup({"k": [1]}, isolation="dirty")
    for read in (table.scan, lambda **more: table.changelog(tb.BucketId(0, 0), **more)):
        with pytest.raises(InvalidInput, match="isolation is 'committed' or 'latest'"):
            read(isolation="dirty")
    assert table.end_offsets() == ends


def test_an_undo_brings_an_owner_back_and_leaves_the_others(table: tb.AnyTable) -> None:
    keys = list(range(10))
    table.put({"k": keys, "a": [1] * 10}, owner="etl", token=tb.Token(1, 0))
    offsets = table.end_offsets()
    table.put({"k": keys, "a": [5] * 10}, owner="etl", token=tb.Token(1, 1))
    table.put({"k": [1], "note": ["stays"]})
    results = table.undo("etl", ["a"], offsets)
    assert sum(one.changed for one in results.values()) == 10
    assert set(results) == set(table.bucket_ids())
    assert set(found(table, keys)) == {1}
    assert table.lookup({"k": [1]}, ["note"])["note"].to_pylist() == ["stays"]


def test_an_undo_without_a_lock_reaches_readers_that_have_had_what_it_takes_back(
    table: tb.AnyTable,
) -> None:
    keys = list(range(10))
    offsets = table.end_offsets()
    table.put({"k": keys, "a": [1] * 10}, owner="etl")
    logs = [table.changelog(bucket) for bucket in table.bucket_ids()]
    assert sum(batch.num_rows for log in logs for batch in log) == 10
    cut = table.cut()
    table.undo("etl", ["a"], offsets)
    resumed = [batch for log in logs for batch in log]
    between = table.changes(cut).to_arrow()
    for found in (pa.Table.from_batches(resumed), between):
        assert found["_change_type"].to_pylist() == ["delete"] * 10
        assert sorted(found["k"].to_pylist()) == keys
    assert len(records(table)) == 20


# --- Reading --------------------------------------------------------------------------------------


def test_a_scan_is_iterated_or_taken_whole_and_says_where_it_stands(table: tb.AnyTable) -> None:
    table.put({"k": list(range(50)), "a": list(range(50)), "note": ["x"] * 50})
    scan = table.scan(["note", "a"])
    assert scan.schema.names == ["k", "note", "a"]
    with scan:
        batches = list(scan)
    assert all(batch.schema.names == scan.schema.names for batch in batches)
    assert sorted(pa.Table.from_batches(batches)["k"].to_pylist()) == list(range(50))
    assert scan.cut is not None
    assert scan.cut.ends == table.end_offsets()
    whole = table.scan(isolation="latest")
    assert whole.to_arrow().sort_by("k").equals(table.to_arrow().sort_by("k"))
    assert whole.offsets == table.end_offsets()
    assert table.to_arrow(["a"]).schema.names == ["k", "a"]


def test_a_scan_has_a_limit_and_buckets(table: tb.AnyTable) -> None:
    assert table.to_arrow().num_rows == 0
    assert table.to_arrow().schema.names == ["k", "a", "note"]
    table.put({"k": list(range(50)), "a": [1] * 50})
    assert table.scan(limit=7).to_arrow().num_rows == 7
    assert sum(batch.num_rows for batch in table.scan(limit=7)) == 7
    parts = [table.scan(buckets=[bucket]).to_arrow() for bucket in table.bucket_ids()]
    assert sorted(k for part in parts for k in part["k"].to_pylist()) == list(range(50))
    with pytest.raises(InvalidInput, match="a limit is a number of rows"):
        table.scan(limit=-1)
    with pytest.raises(InvalidInput, match="the table has no buckets"):
        table.scan(buckets=[tb.BucketId(0, 9)])
    with pytest.raises(UnknownColumn):
        table.scan(["b"])


def test_a_scan_can_be_read_again_by_anybody_and_shows_the_same(table: tb.AnyTable) -> None:
    table.put({"k": list(range(50)), "a": list(range(50))})
    scan = table.scan(["a"])
    first = iter(scan)
    begun = next(first)
    table.put({"k": [1, 99], "a": [1_000, 1]})
    whole = pa.table(scan).sort_by("k")
    assert whole["a"].to_pylist() == list(range(50))
    assert pa.Table.from_batches([begun, *first]).sort_by("k").equals(whole), "both at a time"
    assert scan.to_pandas()["a"].sum() == sum(range(50))
    assert pa.schema(scan) == scan.schema == whole.schema
    scan.close()
    assert scan.to_reader().read_all().sort_by("k").equals(whole)


def test_other_libraries_read_scans_look_ups_and_changes_as_they_are(
    table: tb.AnyTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    table.put({"k": list(range(50)), "a": list(range(50)), "note": ["x"] * 50})
    scan, changes = table.scan(["a"]), table.changes()
    found = table.lookup({"k": [3, 99]})
    opened: list[tb.TableScan] = []
    to_stream = tb.TableScan.__arrow_c_stream__

    def counted(scan: tb.TableScan, *given: object) -> object:
        opened.append(scan)
        return to_stream(scan, *given)

    monkeypatch.setattr(tb.TableScan, "__arrow_c_stream__", counted)
    assert polars.DataFrame(scan).sort("k")["a"].to_list() == list(range(50))
    assert duckdb.sql("select sum(a)::bigint, count(*) from scan").fetchall() == [(1225, 50)]
    assert len(opened) == 2, "each has read it once"
    assert duckdb.sql("from changes where _change_type = 'insert'").fetchall()
    assert polars.DataFrame(changes)["_bucket"].n_unique() == 2
    assert polars.DataFrame(found)["a"].to_list() == [3, None]
    assert duckdb.sql("select k from found where a is null").fetchall() == [(99,)]


def test_a_scan_and_the_changelog_after_it_add_up(table: tb.AnyTable) -> None:
    table.put({"k": [1, 2], "a": [1, 2]})
    scan = table.scan(isolation="latest")
    assert scan.to_arrow().num_rows == 2
    table.put({"k": [1, 3], "a": [10, 3]})
    changes = [
        (row["_change_type"], row["k"], row["a"])
        for bucket, offset in scan.offsets.items()
        for batch in table.changelog(bucket, offset)
        for row in batch.to_pylist()
    ]
    assert sorted(changes) == [
        ("insert", 3, 3),
        ("update_postimage", 1, 11),
        ("update_preimage", 1, 1),
    ]


def test_a_changelog_is_gone_on_with_where_it_ended(table: tb.AnyTable) -> None:
    table.put({"k": [1], "a": [1]})
    [bucket] = [key for key, end in table.end_offsets().items() if end == max(ends(table))]
    changes = table.changelog(bucket)
    assert len(list(changes)) == 1
    assert changes.next_offset == table.end_offsets()[bucket]
    table.put({"k": [1], "a": [1]})
    assert [batch.num_rows for batch in table.changelog(bucket, changes.next_offset)] == [2]
    assert list(table.changelog(bucket, 0, 1)) == []
    with pytest.raises(OffsetOutOfRange):
        list(table.changelog(bucket, 999))


def ends(table: tb.AnyTable) -> list[int]:
    return list(table.end_offsets().values())


# --- Schema and partitions ------------------------------------------------------------------------


def test_columns_are_added_renamed_and_dropped(table: tb.AnyTable) -> None:
    table.put({"k": [1], "a": [1], "note": ["x"]})
    table.add_column("b", "BIGINT", "max")
    table.rename_column("a", "total")
    table.drop_column("note")
    table.put({"k": [1], "b": [7], "total": [1]})
    assert table.to_arrow().to_pylist() == [{"k": 1, "total": 2, "b": 7}]
    assert [column.name for column in table.schema.value_columns] == ["total", "b"]
    with pytest.raises(UnknownColumn):
        table.drop_column("note", force=True)


def test_partitions_are_created_listed_and_dropped(create: Create) -> None:
    table = create(DAYS)
    assert table.bucket_ids() == []
    monday = table.create_partition(day="mo")
    assert table.create_partition(day="mo") == monday
    table.put({"day": ["mo", "tu"], "k": [1, 1], "a": [1, 2]})
    assert table.partitions().to_pylist() == [{"day": "mo"}, {"day": "tu"}]
    assert len(table.bucket_ids()) == 4
    table.drop_partition(day="mo")
    assert table.partitions().to_pylist() == [{"day": "tu"}]
    assert table.to_arrow().to_pylist() == [{"day": "tu", "k": 1, "a": 2}]
    assert table.create_partition(day="mo") != monday
    with pytest.raises(InvalidInput, match="there is no partition"):
        table.drop_partition(day="we")
    with pytest.raises(InvalidInput, match="a value for each partition column"):
        table.create_partition(hour=3)


def test_what_is_refused_leaves_no_partition(create: Create) -> None:
    table, locked = create(DAYS), create(DAYS, locked=True)
    wrong = {"day": ["mo", "tu"], "k": [1, 2], "a": ["text", "text"]}
    with pytest.raises(WrongType, match="column 'a' is BIGINT"):
        table.put(wrong)
    with (
        locked.writer(owner_id="etl", columns=["a"]) as writer,
        pytest.raises(WrongType, match="column 'a' is BIGINT"),
    ):
        writer.write(0, tb.Rows(data=wrong))
    assert table.partitions().num_rows == locked.partitions().num_rows == 0


def row_by_row(rows: Any) -> Callable[[], Iterator[pa.Table]]:
    """Return a function that gives each row as a piece of its own."""
    table = pa.table(rows)
    return lambda: (table.slice(at, 1) for at in range(table.num_rows))


@pytest.mark.parametrize("redo", [False, True])
def test_what_buckets_refuse_leaves_no_partition(
    create: Create, tmp_path: Path, redo: bool
) -> None:
    """Of new partitions, or of old ones beside them; in one piece or in several."""
    table, locked = create(DAYS), create(DAYS, locked=True)
    first = {"day": ["mo"], "k": [1], "a": [MOST]}
    refused = [
        {"day": ["mo", "tu"], "k": [1, 1], "a": [1, 1]},
        {"day": ["tu", "tu"], "k": [1, 1], "a": [MOST, 1]},
    ]
    table.put(first)
    for rows in refused:
        with pytest.raises(Overflow, match="column 'a'"):
            table.put(rows)
    more = {"redo": tb.RedoLog.open(str(tmp_path / "redo"))} if redo else {}
    with locked.writer(owner_id="etl", columns=["a"], **more) as writer:
        writer.write(0, tb.Rows(data=first))
        for rows in refused:
            for data in (rows, row_by_row(rows)):
                with pytest.raises(Overflow, match="column 'a'"):
                    writer.write(1, tb.Rows(data=data))
        for one in (table, locked):
            assert one.partitions()["day"].to_pylist() == ["mo"]
        writer.write(1, tb.Rows(data={"day": ["mo", "tu"], "k": [1, 1], "a": [-1, 1]}))
    assert sorted(locked.to_arrow()["a"].to_pylist()) == [1, MOST - 1]


def test_a_delete_creates_no_partition(create: Create) -> None:
    table, locked = create(DAYS), create(DAYS, locked=True)
    deleted = table.delete({"day": ["mo"], "k": [1]})
    assert (deleted.rows, dict(deleted.buckets)) == (1, {})
    with pytest.raises(UnknownColumn):
        table.delete({"day": ["mo"], "k": [1]}, columns=["nothing"])
    rows = {"day": ["mo", "tu"], "k": [1, 1], "a": [1, 1], "op": ["delete", "upsert"]}
    table.put(rows, operation_column="op")
    with locked.writer(owner_id="etl", columns=["a"]) as writer:
        writer.write(0, tb.Rows(data=rows, operation_column="op"))
        writer.write(1, tb.Rows(data=row_by_row(rows), operation_column="op"))
    for one, total in ((table, 1), (locked, 2)):
        assert one.partitions()["day"].to_pylist() == ["tu"]
        assert one.to_arrow()["a"].to_pylist() == [total]


def test_who_has_no_lock_creates_no_partition(create: Create) -> None:
    table = create(DAYS, locked=True)
    with table.writer(owner_id="etl", columns=["a"]):
        with pytest.raises((NotFenced, LockHeld)):
            table.put({"day": ["mo"], "k": [1], "a": [1]})
        with pytest.raises((NotFenced, LockHeld)):
            table.delete({"day": ["mo"], "k": [1]})
    assert table.partitions().num_rows == 0


def test_partitions_older_than_a_date_or_an_age_are_dropped(create: Create) -> None:
    table = create(DATED)
    today = datetime.now(UTC).date()
    ages = (0, 1, 5, 30, 31)
    rows = [{"day": today - timedelta(days=age), "region": "eu", "k": 1, "a": age} for age in ages]
    table.put(rows)

    def left() -> list[int]:
        return sorted(table.to_arrow(["a"])["a"].to_pylist())

    dropped = table.drop_partitions(older_than=today - timedelta(days=30))
    assert dropped.to_pylist() == [{"day": rows[4]["day"], "region": "eu"}]
    assert left() == [0, 1, 5, 30]
    assert table.drop_partitions(older_than=str(today - timedelta(days=30))).num_rows == 0
    assert table.drop_partitions(older_than="10 days").num_rows == 1
    assert left() == [0, 1, 5]
    # A day is older than a moment if all of it is.
    noon = datetime.combine(today - timedelta(days=5), time(12), UTC)
    assert table.drop_partitions(older_than=noon).num_rows == 0
    assert table.drop_partitions(older_than=noon + timedelta(hours=12)).num_rows == 1
    assert table.drop_partitions(older_than=timedelta(days=2)).num_rows == 0
    assert left() == [0, 1]
    table.put(rows[2:3])
    assert left() == [0, 1, 5]
    for wrong in ("soon", "-3 days", timedelta(), 7, None, "2026-13-01"):
        with pytest.raises(InvalidInput, match=r"older_than|neither a date|a duration is"):
            table.drop_partitions(older_than=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="this table is partitioned by day STRING"):
        create(DAYS).drop_partitions(older_than="3 days")
    with pytest.raises(InvalidInput, match="this table is partitioned by nothing"):
        create(SUMS).drop_partitions(older_than="3 days")


# --- Writers --------------------------------------------------------------------------------------


def of(amount: int) -> tb.Rows:
    return tb.Rows(data={"k": list(range(10)), "a": [amount] * 10})


def test_a_writer_writes_each_batch_once(create: Create) -> None:
    table = create(locked=True)
    with table.writer(owner_id="etl", columns=["a"]) as writer:
        assert writer.batch == -1
        assert writer.write(0, of(1))
        assert not writer.write(0, of(1))
        with pytest.raises(LockHeld):
            table.writer(owner_id="other", columns=["a"]).start()
        with pytest.raises(LockHeld):
            table.drop_column("a")
        with table.writer(owner_id="other", columns=["note"]) as beside:
            assert beside.write(0, tb.Rows(data={"k": [1], "note": ["x"]}))
    with table.writer(owner_id="etl", columns=["a"]) as writer:
        assert writer.next_batch() == 1
    with pytest.raises(HandoverNeeded):
        table.writer(owner_id="new", columns=["a"]).start()
    assert set(found(table, list(range(10)))) == {1}


def test_what_a_writer_has_not_committed_is_latest_and_not_committed(create: Create) -> None:
    table, keys = create(locked=True), list(range(10))
    first = table.writer(owner_id="etl", columns=["a"]).start()
    first.write(0, of(1))
    with arm("writer.put", interrupt), pytest.raises(KeyboardInterrupt):
        first.write(1, of(5))
    assert set(found(table, keys)) == {6}
    assert set(found(table, keys, isolation="committed")) == {1}
    assert set(table.to_arrow(["a"])["a"].to_pylist()) == {1}
    assert set(table.scan(["a"], isolation="latest").to_arrow()["a"].to_pylist()) == {6}
    assert len(records(table)) == 10
    assert len(records(table, isolation="latest")) == 30
    with table.writer(owner_id="etl", columns=["a"]) as again:
        assert again.progress.undone_keys == 10
        assert set(found(table, keys)) == {1}
        assert again.write(1, of(2))
    assert [row[0] for row in records(table)].count("update_postimage") == 10
    assert set(found(table, keys)) == {3}
    first.close()


def test_a_cut_shows_the_table_as_it_was_in_all_buckets(create: Create) -> None:
    table, keys = create(locked=True), list(range(10))
    empty = table.cut()
    with table.writer(owner_id="etl", columns=["a"]) as writer:
        writer.write(0, of(1))
        first = str(table.cut())
        with arm("writer.sealed", lambda: taken.append(table.cut())):
            taken: list[tb.Cut] = []
            writer.write(1, of(5))
        second = table.cut()
    with table.writer(owner_id="other", columns=["note"]) as beside:
        beside.write(7, tb.Rows(data={"k": [1, 99], "note": ["x", "x"]}))
    last = table.cut()
    assert tb.Cut.of(first).batches == taken[0].batches == {"etl": 0}, "sealed is not committed"
    assert (second.batches, last.batches) == ({"etl": 1}, {"etl": 1, "other": 7})
    expected: list[tuple[tb.Cut | str, int | None, int]] = [
        (empty, None, 0),
        (first, 1, 10),
        (taken[0], 1, 10),
        (second, 6, 10),
        (last, 6, 11),
    ]
    for cut, value, rows in expected:
        assert set(found(table, keys, at=cut)) == {value}
        scan = table.scan(at=cut)
        assert scan.to_arrow().num_rows == rows
        assert scan.cut == tb.Cut.of(cut)
    assert table.lookup({"k": [99]}, ["note"], at=second)["note"].to_pylist() == [None]
    assert table.lookup({"k": [99]}, ["note"], at=last)["note"].to_pylist() == ["x"]


def test_changes_lead_from_one_cut_to_another(create: Create) -> None:
    table = create(locked=True)
    cuts = [table.cut()]
    with table.writer(owner_id="etl", columns=["a"]) as writer:
        for batch in range(3):
            writer.write(batch, of(batch + 1))
            cuts.append(table.cut())
    for at, (since, until) in enumerate(pairwise(cuts)):
        changes = table.changes(since, str(until))
        rows = changes.to_arrow().to_pylist()
        kinds = {"insert"} if at == 0 else {"update_preimage", "update_postimage"}
        assert {row["_change_type"] for row in rows} == kinds
        assert {(row["_owner"], row["_batch"]) for row in rows} == {("etl", at)}
        assert {row["_bucket"] for row in rows} == {str(one) for one in table.bucket_ids()}
        assert (changes.since, changes.until) == (since, until)
        [bucket, _] = table.bucket_ids()
        assert table.changes(since, until, buckets=[bucket]).to_arrow().num_rows < len(rows)
    assert table.changes(cuts[1], cuts[1]).to_arrow().num_rows == 0
    assert table.changes().to_arrow().num_rows == 10 + 2 * 20
    assert pa.table(table.changes(cuts[0])).num_rows == 10 + 2 * 20
    with pytest.raises(InvalidInput, match="`since` is not before `until`"):
        table.changes(cuts[2], cuts[1])


def test_changes_have_no_values_of_a_column_that_takes_the_place_of_theirs(
    create: Create,
) -> None:
    table = create()
    table.put({"k": list(range(20)), "note": ["old"] * 20})
    changes = table.changes()
    first, *_ = changes.buckets
    shown = {row["note"] for batch in changes.of_bucket(first) for row in batch.to_pylist()}
    assert shown == {"old"}
    table.drop_column("note")
    table.add_column("note", "STRING", "first_value")
    table.put({"k": list(range(20)), "note": ["new"] * 20})
    with pytest.raises(InvalidInput, match=r"was altered while its changes were read; begin again"):
        changes.to_arrow()
    again = table.changes().to_arrow()
    assert again.schema == changes.schema
    assert set(again["note"].to_pylist()) == {"new"}


def test_a_cut_that_is_none_or_of_another_table_is_refused(create: Create) -> None:
    table, other = create(), create()
    foreign = str(other.cut())
    for bad, why in (("yesterday", "is no cut"), (foreign, "is of another table")):
        for call in (
            lambda bad=bad: table.scan(at=bad),
            lambda bad=bad: table.lookup({"k": [1]}, at=bad),
            lambda bad=bad: table.changes(bad),
            lambda bad=bad: table.changes(None, bad),
        ):
            with pytest.raises(InvalidInput, match=why):
                call()


def test_a_cut_of_what_was_put_without_a_lock_goes_by_bucket(table: tb.AnyTable) -> None:
    table.put({"k": list(range(10)), "a": [1] * 10}, owner="x", token=tb.Token(7, 1))
    cut = table.cut()
    table.put({"k": list(range(20)), "a": [5] * 20}, owner="x", token=tb.Token(7, 2))
    table.delete({"k": [3]})
    assert set(found(table, list(range(10)), at=cut)) == {1}
    assert table.scan(at=cut).to_arrow().num_rows == 10
    assert set(found(table, [*range(3), *range(4, 10)], isolation="committed")) == {6}
    rows = table.changes(cut).to_arrow().to_pylist()
    assert [row["_change_type"] for row in rows].count("insert") == 10
    assert {row["k"] for row in rows if row["_change_type"] == "delete"} == {3}


def test_a_promised_batch_is_kept(create: Create, tmp_path: Path) -> None:
    table = create(locked=True)
    redo = tb.RedoLog.open(str(tmp_path / "redo"))
    first = table.writer(owner_id="etl", columns=["a"], redo=redo).start()
    with arm("writer.prepared", interrupt), pytest.raises(KeyboardInterrupt):
        first.write(0, of(5))
    with table.writer(owner_id="etl", columns=["a"], redo=redo) as again:
        assert not again.write(0, of(5))
    assert set(found(table, list(range(10)), isolation="committed")) == {5}
    first.close()


def test_a_writer_creates_the_partitions_of_its_rows(create: Create) -> None:
    table = create(DAYS, locked=True)
    with table.writer(owner_id="etl", columns=["a"]) as writer:
        writer.write(0, tb.Rows(data=[{"day": day, "k": 1, "a": 1} for day in ("mo", "tu")]))
    assert table.partitions()["day"].to_pylist() == ["mo", "tu"]
    assert table.to_arrow()["a"].to_pylist() == [1, 1]


# --- Wrong types ----------------------------------------------------------------------------------

ANYTHING: list[Any] = [
    None, 3, -1, 1.5, float("nan"), 10**30, True, "x", "", "a/b", "\ud800", b"x", [], [1], ["x"],
    [None], (1, 2, 3), {}, {"a": 1}, {1: [2]}, {"k": [1, "x"]}, set(), object(), lambda: 1,
    date(2026, 1, 1), pa.array([1]),
]  # fmt: skip


def hostile_calls(table: tb.AnyTable) -> dict[str, Callable[[Any], Any]]:
    """Return calls that take anything in one place, and what is right in all others."""
    bucket, row = table.bucket_ids()[0], {"day": "mo", "k": 1, "a": 1}
    key = {"day": "mo", "k": 1}

    def writer(**how: Any) -> None:
        settings: dict[str, Any] = {"owner_id": "w", "columns": ["a"], "deadline_s": 5.0} | how
        table.writer(**settings).start().close()

    def write(batch: Any, rows: Any) -> None:
        with table.writer(owner_id="w", columns=["a"]) as writing:
            writing.write(batch, rows)

    return {
        "put": table.put,
        "put of a value": lambda one: table.put(row | {"a": one}),
        "put of a key": lambda one: table.put(row | {"k": one}),
        "put into a partition": lambda one: table.put(row | {"day": one}),
        "columns of a put": lambda one: table.put(row, columns=one),
        "mode": lambda one: table.put(row, mode=one),
        "operation column": lambda one: table.put(row, operation_column=one),
        "owner": lambda one: table.put(row, owner=one, token=tb.Token(1, 1)),
        "token": lambda one: table.put(row, owner="o", token=one),
        "delete": table.delete,
        "lookup": table.lookup,
        "lookup in a partition": lambda one: table.lookup(key | {"day": one}),
        "columns of a lookup": lambda one: table.lookup(key, one),
        "isolation": lambda one: table.lookup(key, isolation=one),
        "cut": lambda one: table.lookup(key, at=one),
        "scan": lambda one: table.scan(one).to_arrow(),
        "limit": lambda one: table.scan(limit=one).to_arrow(),
        "buckets": lambda one: table.scan(buckets=one).to_arrow(),
        "changes": lambda one: table.changes(one, buckets=one),
        "changelog": lambda one: list(table.changelog(one)),
        "from_offset": lambda one: list(table.changelog(bucket, one)),
        "to_offset": lambda one: list(table.changelog(bucket, 0, one)),
        "undo": lambda one: table.undo("o", one, {bucket: 0}),
        "undo of an owner": lambda one: table.undo(one, ["a"], {bucket: 0}),
        "undo to offsets": lambda one: table.undo("o", ["a"], one),
        "undo to an offset": lambda one: table.undo("o", ["a"], {bucket: one}),
        "type": lambda one: table.add_column("n", one, "sum"),
        "function": lambda one: table.add_column("n", "BIGINT", one),
        "drop_column": table.drop_column,
        "rename_column": lambda one: table.rename_column(one, "z"),
        "create_partition": lambda one: table.create_partition(day=one),
        "drop_partition": lambda one: table.drop_partition(day=one),
        "drop_partitions": lambda one: table.drop_partitions(older_than=one),
        "owner of a writer": lambda one: writer(owner_id=one),
        "columns of a writer": lambda one: writer(columns=one),
        "ttl_ms": lambda one: writer(ttl_ms=one),
        "deadline_s": lambda one: writer(deadline_s=one),
        "redo": lambda one: writer(redo=one),
        "batch": lambda one: write(one, row),
        "rows": lambda one: write(0, one),
    }


def test_whatever_is_handed_over_errors_are_ours(create: Create) -> None:
    table = create(DAYS)
    table.create_partition(day="mo")
    for name, call in hostile_calls(table).items():
        refused = 0
        for value in ANYTHING:
            try:
                call(value)
            except tb.TallybookError:
                refused += 1
            except Exception as exc:
                raise AssertionError(f"{name} of {value!r}: {exc!r}") from exc
        assert refused, f"{name} takes anything"
    with pytest.raises(InvalidInput, match="3 is no value of partition column 'day', which is of"):
        table.create_partition(day=3)
    with pytest.raises(InvalidInput, match="column 'a' has a number that no type of Arrow holds"):
        table.put({"day": "mo", "k": 1, "a": 10**30})
    dated = create(DATED)
    for wrong in (20260101, datetime(2026, 1, 1, 12), "2026-01-01", True, None):
        with pytest.raises(InvalidInput, match="of partition column 'day', which is of type DATE"):
            dated.create_partition(day=wrong, region="eu")
    with pytest.raises(InvalidInput, match=r"\(day, region\), not for day"):
        dated.drop_partition(day=date(2026, 1, 1))
