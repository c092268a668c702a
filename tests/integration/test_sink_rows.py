"""What goes through the Spark sink: types, functions, both routes, both recoveries, bad rows."""

import datetime as dt
import logging
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import (
    InvalidInput,
    InvalidKey,
    InvalidValue,
    Overflow,
    UnknownTable,
    WrongType,
)
from foundation.failpoints import arm
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from recovery.embedded.table import Table
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from sink.aggregate_sink import AggregateSink
from tests.conftest import SUMS, schema_of
from tests.support.aggregates import INT64_MAX, MAP, UTC
from tests.support.sinks import Killed, Sinks, counted, ones, parquet_rows, sinks_of, stored
from tests.support.spark_session import quiet_spark

pytestmark = pytest.mark.spark

ROUTES = ["driver", "executors"]
KEYS = range(8)


@pytest.fixture(scope="module")
def module_sinks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sinks]:
    directory = tmp_path_factory.mktemp("sink")
    with (
        # Not the time zone of the table, and less than a batch in one Arrow batch.
        quiet_spark(
            "local[2,3]",
            spark_sql_session_timeZone="Asia/Kathmandu",
            spark_sql_timestampType="TIMESTAMP_NTZ",
            spark_sql_execution_arrow_maxRecordsPerBatch=7,
        ) as spark,
        LocalCluster(directory, servers=2) as local,
        sinks_of(local, spark) as sinks,
    ):
        yield sinks


@pytest.fixture
def sinks(module_sinks: Sinks) -> Iterator[Sinks]:
    yield module_sinks
    module_sinks.close()


# --- Values -----------------------------------------------------------------------------------


def many_functions() -> Schema:
    """Return a table with most functions and types, also those that depend on the order."""
    return (
        SchemaBuilder()
        .column("k", "BIGINT")
        .agg_column("count", "BIGINT", "count")
        .agg_column("sum", "DECIMAL(18, 2)", "sum")
        .agg_column("avg", "DOUBLE", "avg")
        .agg_column("min", UTC, "min")
        .agg_column("max", "TIMESTAMP_NTZ", "max")
        .agg_column("largest", "DATE", "max")
        .agg_column("all", "BOOLEAN", "bool_and")
        .agg_column("last", "STRING", "last_value")
        .agg_column("first", "STRING", "first_value_ignore_nulls")
        .agg_column("latest", "STRING", "last_value", order_by="at")
        .agg_column("texts", "STRING", "string_agg", delimiter="|")
        .agg_column("items", pa.list_(pa.int32()), "array_agg", limit=20)
        .agg_column("pairs", MAP, "merge_map")
        .agg_column("bytes", "BINARY", "last_value_ignore_nulls")
        .agg_column("bits", "BIGINT", "rbm64")
        .agg_column("sketch", "BIGINT", "theta_sketch")
        .primary_key("k")
        .build()
    )


def values(number: int, rows: int = 40) -> pa.Table:
    """Return rows with nulls, each with a text of its own."""
    start = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
    data = []
    for at in range(rows):
        seen = number * rows + at
        some = None if at % 7 == 3 else seen
        when = start + dt.timedelta(hours=(seen * 37) % 1000, microseconds=seen)
        data.append(
            {
                "k": at % len(KEYS),
                "count": some,
                "sum": Decimal(seen * 3) / 4 if some is not None else None,
                "avg": seen,
                "min": when,
                "max": when.replace(tzinfo=None),
                "largest": when.date(),
                "all": None if some is None else seen % 11 != 0,
                "last": None if some is None else f"last {seen}",
                "first": None if some is None else f"first {seen}",
                "latest": f"latest {seen}",
                "at": when,
                "texts": f"ü{seen}",
                "items": some,
                "pairs": [(f"m{seen % 5}", seen)],
                "bytes": b"\x00%d" % seen,
                "bits": seen,
                "sketch": seen,
            }
        )
    schema = many_functions()
    types = {
        column.name: column.function.input_type or pa.int64()
        for column in schema.value_columns
        if column.function is not None
    }
    # A table of decimals takes fewer digits, and one of averages takes integers.
    types |= {"k": pa.int32(), "sum": pa.decimal128(12, 2), "avg": pa.int64(), "at": UTC}
    return pa.Table.from_pylist(data, pa.schema([(name, types[name]) for name in data[0]]))


def reference(tmp_path: Path, schema: Schema, batches: list[pa.Table]) -> list[dict[str, Any]]:
    """Return the rows of an embedded table that got the same rows, one batch after the other."""
    with Table.create(tmp_path / "reference", schema, buckets=1) as table:
        for data in batches:
            table.put(data)
        rows: list[dict[str, Any]] = table.lookup({"k": list(KEYS)}).to_pylist()
        return rows


@pytest.mark.parametrize(
    "settings",
    [
        {"route": "driver"},
        {"route": "driver", "local_aggregation": False},
        {"route": "executors"},
        {"route": "executors", "local_aggregation": False},
        {"recovery": "redo"},
    ],
    ids=str,
)
def test_all_ways_give_the_same_table(
    settings: dict[str, Any], sinks: Sinks, tmp_path: Path
) -> None:
    schema = many_functions()
    table = sinks.table(schema)
    columns = [column.name for column in schema.value_columns]
    if settings.get("recovery") == "redo":
        settings["redo_location"] = str(tmp_path / "redo")
    sink = sinks.sink(table, columns, owner_id="etl", **settings)
    batches = [values(number) for number in range(3)]
    for number, data in enumerate(batches):
        sink(sinks.frame(data, parts=2), number)
    found = table.lookup({"k": list(KEYS)}).to_pylist()
    assert found == reference(tmp_path, schema, batches)
    last = sink.status()["last"]
    assert last["rows"] == 40
    folded = settings.get("local_aggregation", True)
    parts = 2 if settings.get("route") == "executors" else 1
    assert last["keys"] == (parts * len(KEYS) if folded else 40)
    assert last["bytes"] > 0


def test_redo_rolls_a_promised_batch_forward(sinks: Sinks, tmp_path: Path) -> None:
    table = sinks.table(SUMS)
    settings = {"owner_id": "etl", "recovery": "redo", "redo_location": str(tmp_path / "redo")}

    def die() -> None:
        raise Killed

    for number, failpoint in enumerate(("writer.prepared", "writer.put", "writer.sealed")):
        sink = sinks.sink(table, ["a", "b"], **settings)
        with arm(failpoint, die), pytest.raises(Killed):
            sink(sinks.frame([{"k": key, "a": 1, "b": 10} for key in KEYS]), number)
        # Promised is promised: whatever the source has in the batch now.
        again = sinks.sink(table, ["a", "b"], **settings)
        again(sinks.frame([{"k": 0, "a": 100, "b": 100}]), number)
        assert again.status()["skipped"] == 1
        assert stored(table, KEYS) == dict.fromkeys(KEYS, (number + 1, 10 * (number + 1)))
    with arm("writer.redo_written", die), pytest.raises(Killed):
        sinks.sink(table, ["a", "b"], **settings)(sinks.frame([{"k": 0, "a": 9, "b": 9}]), 3)
    sinks.sink(table, ["a", "b"], **settings)(sinks.frame([{"k": 0, "a": 1, "b": 10}]), 3)
    assert stored(table, [0]) == {0: (4, 40)}
    assert not list((tmp_path / "redo").glob("**/*.redo"))


@pytest.mark.parametrize("large", [False, True])
def test_the_types_that_spark_gives_do_not_matter(large: bool, sinks: Sinks) -> None:
    table = sinks.table(
        schema_of(
            s=(pa.string(), "max"),
            b=(pa.binary(), "max"),
            texts=(pa.int64(), "hll_sketch"),
            nothing=(pa.int64(), "theta_sketch"),
            none=(pa.int64(), "rbm32"),
        )
    )
    columns = [column.name for column in table.schema.value_columns]
    sinks.spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", str(large).lower())
    try:
        for number, route in enumerate(ROUTES):
            sink = sinks.sink(table, columns, owner_id="etl", route=route)
            row = {"s": f"{number}", "b": b"%d" % number, "texts": f"{number}"}
            sink(sinks.frame([{"k": 1, **row, "nothing": None, "none": None}]), number)
            assert stored(table, [1]) == {1: (f"{number}", b"%d" % number, number + 1, 0, 0)}
            sink.close()
    finally:
        sinks.spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")


# --- Columns and partitions -------------------------------------------------------------------


def partitioned() -> Schema:
    return (
        SchemaBuilder()
        .column("day", "DATE")
        .column("k", "DECIMAL(9, 2)")
        .agg_column("a", "BIGINT", "sum")
        .primary_key("day", "k")
        .partitioned_by("day")
        .build()
    )


@pytest.mark.parametrize("route", ROUTES)
def test_all_keys_that_servers_refuse_are_set_aside_together(
    route: str, sinks: Sinks, tmp_path: Path
) -> None:
    check_set_aside_together(sinks, tmp_path, route=route)


def test_so_are_those_that_they_refuse_while_they_fold(sinks: Sinks, tmp_path: Path) -> None:
    """Each has two rows in the batch that do not go together; tasks would have folded them."""
    check_set_aside_together(sinks, tmp_path, route="driver", local_aggregation=False)


def check_set_aside_together(sinks: Sinks, tmp_path: Path, **settings: Any) -> None:
    table = sinks.table(SUMS)
    aside = {"bad_rows": "quarantine", "quarantine_path": str(tmp_path / "aside")}
    sink = sinks.sink(table, ["a", "b"], owner_id="etl", **settings, **aside)
    bad = range(0, 1_500, 3)
    sink(sinks.frame([{"k": key, "a": 2**63 - 1, "b": 0} for key in bad]), 0)
    starts = sink.status()["starts"]
    rows = [{"k": key, "a": 1, "b": 1} for key in range(1_500)]
    if not settings.get("local_aggregation", True):
        rows += [{"k": key, "a": 2**63 - 1, "b": 1} for key in bad]
    sink(sinks.frame(rows, parts=2), 1)
    assert sink.status()["last"]["refused"] == len(rows) - (1_500 - len(bad))
    assert sink.status()["starts"] == starts + 1, "it was undone once"
    assert {row["k"] for row in parquet_rows(tmp_path / "aside")} == {*bad}
    found = stored(table, range(1_500))
    assert found == {key: (2**63 - 1, 0) if key in bad else (1, 1) for key in range(1_500)}


@pytest.mark.parametrize("route", ROUTES)
def test_a_refused_batch_and_deletes_leave_no_partition(route: str, sinks: Sinks) -> None:
    """Refused of a new partition, or of an old one beside it; in one source partition or two."""
    schema = (
        SchemaBuilder()
        .column("day", "INT")
        .column("k", "BIGINT")
        .agg_column("a", "BIGINT", "sum")
        .primary_key("day", "k")
        .partitioned_by("day")
        .build()
    )
    table = sinks.table(schema)
    most = 2**63 - 1
    sink = sinks.sink(table, ["a"], owner_id="etl", route=route, operation_column="op")

    def rows(*given: tuple[int, int, str], parts: int = 1) -> Any:
        data = [{"day": day, "k": 1, "a": a, "op": op} for day, a, op in given]
        typed = pa.schema(
            [("day", pa.int32()), ("k", pa.int64()), ("a", pa.int64()), ("op", pa.string())]
        )
        return sinks.frame(pa.Table.from_pylist(data, typed), parts=parts)

    sink(rows((1, most, "upsert")), 0)
    for refused in (
        rows((1, 1, "upsert"), (2, 1, "upsert")),
        rows((2, most, "upsert"), (2, 1, "upsert")),
        rows((2, most, "upsert"), (2, 1, "upsert"), parts=2),
    ):
        with pytest.raises(Overflow, match="column 'a'"):
            sink(refused, 1)
    sink(rows((3, 0, "delete"), (1, -1, "upsert")), 1)
    assert table.partitions()["day"].to_pylist() == [1]
    sink(rows((3, 0, "delete"), (2, 5, "upsert"), (1, 0, "delete")), 2)
    assert table.partitions()["day"].to_pylist() == [1, 2]
    assert stored(table, [(1, 1), (2, 1), (3, 1)]) == {(2, 1): (5,)}


@pytest.mark.parametrize("route", ROUTES)
def test_partitions_that_appear_in_a_batch(route: str, sinks: Sinks) -> None:
    table = sinks.table(partitioned())
    sink = sinks.sink(table, ["a"], owner_id="etl", route=route)

    def days(*numbers: int) -> pa.Table:
        keys = pa.array([number * 100 for number in (1, 2, 3)] * len(numbers))
        data = {
            "day": pa.array([n for n in numbers for _ in range(3)], pa.int32()).cast(pa.date32()),
            "k": keys.cast(pa.decimal128(38, 0)).cast(pa.decimal128(9, 2)),
            "a": [1] * (3 * len(numbers)),
        }
        return pa.table(data)

    def total() -> dict[tuple[Any, ...], int]:
        keys = [(row["day"], row["k"]) for row in days(1, 2, 3, 4).to_pylist()]
        found = stored(table, keys)
        return {key: found.get(key, (0,))[0] for key in keys}

    sink(sinks.frame(days(1)), 0)

    def die() -> None:
        raise Killed

    # A new partition since the commit is undone from its beginning.
    with arm("writer.sealed", die), pytest.raises(Killed):
        sink(sinks.frame(days(1, 2, 3), parts=2), 1)
    sink = sinks.sink(table, ["a"], owner_id="etl", route=route)
    sink(sinks.frame(days(1, 2)), 1)
    counts = list(total().values())
    assert counts == [2] * 3 + [1] * 3 + [0] * 6
    # A partition that somebody drops, with what is not committed in it, is of no more interest.
    with arm("writer.sealed", die), pytest.raises(Killed):
        sink(sinks.frame(days(2, 4), parts=2), 2)
    table.drop_partition(day=days(4).column("day")[0].as_py())
    sink = sinks.sink(table, ["a"], owner_id="etl", route=route)
    sink(sinks.frame(days(2)), 2)
    assert list(total().values()) == [2] * 3 + [2] * 3 + [0] * 6


@pytest.mark.parametrize("route", ROUTES)
def test_renamed_columns_deletes_and_columns_that_are_ignored(route: str, sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    sink = sinks.sink(
        table,
        ["a", "b"],
        owner_id="etl",
        route=route,
        renamed={"k": "customer", "a": "orders `placed`.`"},
        operation_column="op",
        ignore_extra=True,
    )

    def rows(operations: list[tuple[int, str]]) -> Any:
        data = [
            {"customer": key, "orders `placed`.`": 1, "b": 10, "op": operation, "note": "-"}
            for key, operation in operations
        ]
        return sinks.frame(data, parts=2)

    sink(rows([(key, "upsert") for key in KEYS]), 0)
    # Only one of the two source partitions has deletes; key 1 is deleted and written again.
    sink(rows([(0, "DELETE"), (1, "delete"), (1, "upsert"), (2, "upsert"), (3, "upsert")] * 1), 1)
    expected = {**counted(1, KEYS), **counted(2, [2, 3])}
    del expected[0]
    assert stored(table, KEYS) == expected


def test_a_sink_says_which_columns_are_wrong(sinks: Sinks) -> None:
    table = sinks.table(SUMS)
    frame = sinks.frame(ones(KEYS))
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"columns": ["a"]}, frame, r"does not write: 'b'.*ignore_extra=True"),
        ({"columns": ["a", "b"]}, frame.drop("b"), "no column 'b'"),
        ({"columns": ["a", "b"]}, frame.withColumnRenamed("k", "kk"), r"no column 'k'.*'kk'"),
        ({"columns": ["a", "b"], "renamed": {"a": "x"}}, frame, r"no column 'x' \(for 'a'\)"),
        ({"columns": ["a", "nope"]}, frame, "nope"),
        ({"columns": ["k"]}, frame, "part of the key"),
        ({"columns": []}, frame, "at least one column"),
        ({"columns": ["a", "b"], "operation_column": "op"}, frame, "no column 'op'"),
        ({"columns": ["a", "b"], "renamed": {"zz": "a"}}, frame, "zz"),
    ]
    for settings, given, message in cases:
        with pytest.raises(InvalidInput, match=message):
            AggregateSink(sinks.local.address, table.name, owner_id="etl", **settings).check(given)
        unchecked = sinks.sink(table, owner_id="etl", check=False, **settings)
        with pytest.raises(InvalidInput, match=message):
            unchecked(given, 0)
        unchecked.close()
    assert stored(table, KEYS) == {}


def test_a_table_that_does_not_exist_is_an_error_and_leaves_no_connection(sinks: Sinks) -> None:
    how: dict[str, Any] = {"columns": ["a"], "owner_id": "etl"}
    with pytest.raises(UnknownTable, match="no_such_table"):
        AggregateSink(sinks.local.address, "no_such_table", **how)
    missing = AggregateSink(sinks.local.address, "no_such_table", check=False, **how)
    with pytest.raises(UnknownTable, match="no_such_table"):
        missing(sinks.frame(ones(KEYS)), 0)
    assert missing._session is None


def test_on_a_table_without_column_locks_the_sink_says_what_it_does_not_guarantee(
    sinks: Sinks, caplog: pytest.LogCaptureFixture
) -> None:
    table = sinks.table(SUMS, column_locks=False)
    with caplog.at_level(logging.WARNING, "sink"):
        sinks.sink(table, ["a", "b"], owner_id="etl")(sinks.frame(ones(KEYS)), 0)
    assert "at least once" in caplog.text
    assert stored(table, KEYS) == counted(1, KEYS)


# --- Bad rows ---------------------------------------------------------------------------------


def good(keys: Any = KEYS) -> list[dict[str, Any]]:
    return [{"k": key, "a": 1, "b": 10} for key in keys]


BAD: dict[str, tuple[list[dict[str, Any]], type[InvalidInput], str]] = {
    "a null key": ([{"k": None, "a": 77, "b": 1}], InvalidKey, r"'k' is null.*'a': 77"),
    "an overflow in the batch": (
        [{"k": 3, "a": INT64_MAX, "b": 1}, {"k": 3, "a": 5, "b": 2}],
        Overflow,
        r"'a', key k=3.*'k': 3",
    ),
    "an overflow in the table": (
        [{"k": 1_000, "a": INT64_MAX, "b": 5}],
        Overflow,
        r"'a', key k=1000.*'k': 1000",
    ),
}


@pytest.mark.parametrize(
    ("route", "aggregation"), [("driver", True), ("executors", True), ("executors", False)]
)
@pytest.mark.parametrize("kind", BAD)
def test_bad_rows_fail_the_batch_with_a_sample_or_are_set_aside(
    kind: str, route: str, aggregation: bool, sinks: Sinks, tmp_path: Path
) -> None:
    rows, error, message = BAD[kind]
    table = sinks.table(SUMS)
    settings = {"owner_id": "etl", "route": route, "local_aggregation": aggregation}
    sink = sinks.sink(table, ["a", "b"], **settings)
    sink(sinks.frame([{"k": 1_000, "a": 1, "b": 10}]), 0)
    bad = sinks.frame([*good(), *rows], parts=2)
    with pytest.raises(error, match=message):
        sink(bad, 1)
    everything = [*KEYS, 1_000]
    assert stored(table, everything) == {1_000: (1, 10)}
    sink.close()

    place = tmp_path / "aside"
    aside = {**settings, "bad_rows": "quarantine", "quarantine_path": str(place)}

    def die() -> None:
        raise Killed

    # By one route and killed, then by the other: the rows are set aside once.
    other = {**aside, "route": next(name for name in ROUTES if name != route)}
    with arm("writer.put", die), pytest.raises(Killed):
        sinks.sink(table, ["a", "b"], **other)(bad, 1)
    sink = sinks.sink(table, ["a", "b"], **aside)
    sink(bad, 1)
    refused = {row["k"] for row in rows}
    assert stored(table, everything) == {
        1_000: (1, 10),
        **{key: (1, 10) for key in KEYS if key not in refused},
    }
    kept = parquet_rows(place)
    expected = [row for row in [*good(), *rows] if row["k"] in refused]
    assert sorted((row["a"], row["b"]) for row in kept) == sorted(
        (row["a"], row["b"]) for row in expected
    )
    assert all(row["_reason"] for row in kept)
    assert sink.status()["refused"] == len(expected)
    # The replayed batch is skipped, the next one has files of its own.
    sink(bad, 1)
    sink(sinks.frame(good()), 2)
    assert len(parquet_rows(place)) == len(expected)


@pytest.mark.parametrize("bad_rows", ["fail", "quarantine"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_column_of_the_wrong_type_fails_the_batch(
    route: str, bad_rows: str, sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    sink = sinks.sink(
        table,
        ["a", "b"],
        owner_id="etl",
        route=route,
        bad_rows=bad_rows,
        quarantine_path=str(tmp_path / "aside"),
    )
    with pytest.raises(WrongType, match=r"'a' is BIGINT, but the batch has STRING.*'a': 'one'"):
        sink(sinks.frame([{"k": 1, "a": "one", "b": 2}]), 0)
    sink(sinks.frame(good()), 0)
    assert stored(table, KEYS) == dict.fromkeys(KEYS, (1, 10))


@pytest.mark.parametrize("route", ROUTES)
def test_unknown_operations_fail_the_batch_or_are_set_aside(
    route: str, sinks: Sinks, tmp_path: Path
) -> None:
    table = sinks.table(SUMS)
    rows = [{**row, "op": "upsert"} for row in good()] + [{"k": 1, "a": 1, "b": 1, "op": "merge"}]
    settings = {"owner_id": "etl", "route": route, "operation_column": "op"}
    sink = sinks.sink(table, ["a", "b"], **settings)
    with pytest.raises(InvalidInput, match="'merge'"):
        sink(sinks.frame(rows), 0)
    sink.close()
    sink = sinks.sink(
        table,
        ["a", "b"],
        **settings,
        bad_rows="quarantine",
        quarantine_path=(tmp_path / "aside").as_uri(),
    )
    sink(sinks.frame(rows), 0)
    assert stored(table, KEYS) == dict.fromkeys(KEYS, (1, 10))
    assert [row["op"] for row in parquet_rows(tmp_path / "aside")] == ["merge"]


def with_no_text(sinks: Sinks, columns: list[str]) -> Any:
    """Return rows of one key, of which some have text that is not UTF-8, each in one column."""
    good = {"day": "'d'", "k": "'k'", "text": "string(id)", "texts": "array(string(id))"}
    chosen = dict(good)
    for number, name in enumerate(columns, start=1):
        bad = "cast(X'FFFE41' as string)"
        bad = f"array({bad})" if name == "texts" else bad
        chosen[name] = f"if(id = {number}, {bad}, {good[name]})"
    listed = ", ".join(f"{expression} {name}" for name, expression in chosen.items())
    return sinks.spark.sql(f"select {listed} from range(0, 7, 1, 1)")


@pytest.mark.parametrize(
    ("route", "aggregation"), [("driver", True), ("executors", True), ("executors", False)]
)
def test_text_that_is_not_utf_8_fails_the_batch_by_name_or_is_set_aside(
    route: str, aggregation: bool, sinks: Sinks, tmp_path: Path
) -> None:
    schema = (
        SchemaBuilder()
        .column("day", "STRING")
        .column("k", "STRING")
        .agg_column("text", "STRING", "string_agg")
        .agg_column("texts", "ARRAY<STRING>", "last_value")
        .primary_key("day", "k")
        .partitioned_by("day")
        .build()
    )
    table = sinks.table(schema)
    settings = {"owner_id": "etl", "route": route, "local_aggregation": aggregation}
    sink = sinks.sink(table, ["text", "texts"], **settings)
    shown = r"not UTF-8: .*xff.xfeA.*A row of it: .*xff.xfeA"
    with pytest.raises(InvalidValue, match=rf"^column 'texts', key day='d', k='k': .*{shown}"):
        sink(with_no_text(sinks, ["texts"]), 0)
    with pytest.raises(InvalidKey, match=rf"^key column 'day' cannot be read .*{shown}"):
        sink(with_no_text(sinks, ["day"]), 0)
    sink.close()
    place, columns = tmp_path / "aside", ["day", "k", "text", "texts"]
    aside = {"bad_rows": "quarantine", "quarantine_path": str(place)}
    sink = sinks.sink(table, ["text", "texts"], **settings, **aside)
    sink(with_no_text(sinks, columns), 0)
    assert stored(table, [("d", "k")]) == {("d", "k"): ("0,5,6", ["6"])}
    assert len(table.partitions()) == 1
    assert sink.status()["refused"] == 4
    for name, row in zip(columns, parquet_rows(place), strict=True):
        assert row[name] in (b"\xff\xfeA", [b"\xff\xfeA"])
        assert row["_reason"].startswith(f"column '{name}' has text that is not UTF-8")
    assert sinks.spark.read.parquet(str(place)).count() == 4


@pytest.mark.parametrize("route", ROUTES)
def test_a_null_struct_goes_through_whatever_its_fields_say(route: str, sinks: Sinks) -> None:
    table = sinks.table(
        schema_of(
            one=(pa.struct([("a", pa.int32())]), "last_value"),
            many=(pa.list_(pa.struct([("b", pa.string())])), "last_value"),
        )
    )
    frame = sinks.spark.sql(
        "select id k, if(id = 1, null, named_struct('a', 1)) one, "
        "array(if(id = 1, null, named_struct('b', 'x'))) many from range(2)"
    )
    [one, many] = [field.dataType for field in frame.schema.fields[1:]]
    assert not one.fields[0].nullable
    assert not many.elementType.fields[0].nullable
    sinks.sink(table, ["one", "many"], owner_id="etl", route=route)(frame, 0)
    assert stored(table, [0, 1]) == {0: ({"a": 1}, [{"b": "x"}]), 1: (None, [None])}


def test_quarantine_takes_what_averages_round_and_time_stamps_that_do_not_fit(
    sinks: Sinks, tmp_path: Path
) -> None:
    schema = (
        SchemaBuilder()
        .column("k", "BIGINT")
        .agg_column("mean", "DOUBLE", "avg")
        .agg_column("seen", "BIGINT", "rbm32")
        .primary_key("k")
        .build()
    )
    table: RemoteTable = sinks.table(schema)
    for number, route in enumerate(ROUTES):
        place = tmp_path / route
        sink = sinks.sink(
            table,
            ["mean", "seen"],
            owner_id="etl",
            route=route,
            bad_rows="quarantine",
            quarantine_path=str(place),
        )
        rows = [{"k": key, "mean": 2**60 + key, "seen": 7} for key in KEYS]
        bad = [{"k": 100, "mean": 1, "seen": -1}, {"k": 101, "mean": 1, "seen": 2**40}]
        sink(sinks.frame([*rows, *bad], parts=2), number)
        assert sorted(row["k"] for row in parquet_rows(place)) == [100, 101]
        assert {row["_reason"].partition(",")[0] for row in parquet_rows(place)} == {
            "column 'seen'"
        }
        assert stored(table, [0, 100, 101]) == {0: (float(2**60), 1)}
        sink.close()
