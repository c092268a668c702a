"""Spark's batch reader on a real cluster: rows, columns, filters, where it stands, bad input."""

import io
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tallybook as tb
from foundation.errors import InvalidInput
from foundation.failpoints import arm
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from recovery.reader.table_scan import ScanSource
from recovery.writer.rows import Rows
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from tests.conftest import SUMS
from tests.support.certificates import make_certificate
from tests.support.day_tables import DAYS
from tests.support.raw_flight import client_of, running
from tests.support.sinks import Killed
from tests.support.spark_session import quiet_spark
from tests.support.zookeeper_server import chroot

pytestmark = pytest.mark.spark

Row = dict[str, Any]


@dataclass(frozen=True)
class World:
    """A cluster and two sessions: `spark` is registered and pushes filters, `plain` is as it is."""

    local: LocalCluster
    client: Cluster
    spark: Any
    plain: Any
    tables: dict[str, RemoteTable] = field(default_factory=dict)

    def table(self, name: str, schema: Schema, rows: Sequence[Row] = (), **how: Any) -> RemoteTable:
        """Return a table with these rows, which is made when it is first asked for."""
        if name not in self.tables:
            self.tables[name] = self.client.create_table(name, schema, **{"buckets": 2, **how})
            if rows:
                write(self.tables[name], 0, rows)
        return self.tables[name]

    def reader(self, table: str, *, plain: bool = False, **options: str) -> Any:
        """Return a reader of a table that is still to be loaded."""
        session = self.plain if plain else self.spark
        reader = session.read.format("tallybook").option("zookeeper", self.local.address)
        return reader.options(table=table, **options)

    def read(self, table: str, **options: Any) -> Any:
        """Return a frame."""
        return self.reader(table, **options).load()

    def wide(self, table: str, columns: Sequence[str] | None = None, **options: Any) -> Any:
        """Return a frame that reads these columns only."""
        return tb.spark.read(self.plain, table, columns, zookeeper=self.local.address, **options)

    def counted(self, table: RemoteTable) -> tuple[int, int]:
        """Return how many keys of a table were looked up, and how many rows were scanned."""
        found = [one["metrics"] for one in self.client.status()]
        names = (
            f'{one}_total{{table="{table.name}"}}' for one in ("keys_looked_up", "rows_scanned")
        )
        looked_up, scanned = (
            sum(int(metrics.get(f"tallybook_{name}", 0)) for metrics in found) for name in names
        )
        return looked_up, scanned

    def refusal(self, act: Callable[[], Any]) -> str:
        """Return what a user is told last, which is ours, and has no secret anywhere."""
        with pytest.raises(Exception, match=r"foundation\.errors") as refused:
            act()
        assert "hush" not in str(refused.value)
        lines = [line for line in str(refused.value).splitlines() if "SQLSTATE" not in line]
        last = next(line for line in reversed(lines) if line.strip())
        assert last.startswith("foundation.errors."), last
        return last.removeprefix("foundation.errors.")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("read")
    with (
        quiet_spark("local[2]") as spark,
        LocalCluster(directory, servers=2, session_timeout_s=2.0) as local,
        local.connect() as client,
    ):
        plain = spark.newSession()
        tb.spark.register(spark)
        yield World(local, client, spark, plain)


def write(table: RemoteTable, batch: int, rows: Sequence[Row]) -> None:
    """Commit rows as one batch of the table's only owner."""
    values = [column.name for column in table.schema.value_columns]
    with table.writer(owner_id="etl", columns=values) as writer:
        writer.write(batch, Rows(data=arrow_rows(table.schema, rows)))


def arrow_rows(schema: Schema, rows: Sequence[Row]) -> pa.Table:
    return pa.table(
        {
            one.name: pa.array([row.get(one.name) for row in rows], one.type)
            for one in schema.columns
        }
    )


def shown(rows: Any) -> list[str]:
    """Return rows such that they can be compared, whatever their order: NaN equals NaN."""
    found = rows if isinstance(rows, pa.Table) else rows.toArrow()
    return sorted(repr(row) for row in found.to_pylist())


def matches(words: str, text: str) -> None:
    assert re.search(words, text), text


def balances(rows: Any) -> dict[int, int]:
    return {row["k"]: row["a"] for row in rows.collect()}


# --- Types ----------------------------------------------------------------------------------------

INSTANT = pa.timestamp("us", tz="UTC")
TYPES: dict[str, pa.DataType] = {
    "tiny": pa.int8(),
    "small": pa.int16(),
    "middle": pa.int32(),
    "big": pa.int64(),
    "single": pa.float32(),
    "double": pa.float64(),
    "price": pa.decimal128(10, 2),
    "wide": pa.decimal128(38, 10),
    "text": pa.string(),
    "bytes": pa.binary(),
    "flag": pa.bool_(),
    "day": pa.date32(),
    "at": INSTANT,
    "local": pa.timestamp("us"),
    "list": pa.list_(pa.int32()),
    "map": pa.map_(pa.string(), pa.int64()),
    "pair": pa.struct([("x", pa.int64()), ("y", pa.string())]),
    "deep": pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.list_(pa.float64())))])),
    "nothing": pa.string(),
}
SPRING = datetime(2024, 3, 31, 1, 30, 0, 123456, tzinfo=UTC)
EVERY: list[Row] = [
    {
        "k": 0,
        "tiny": -128,
        "small": -(2**15),
        "middle": -(2**31),
        "big": -(2**63),
        "single": float("nan"),
        "double": float("nan"),
        "price": Decimal("-1.10"),
        "wide": Decimal("1234567890123456789012345678.0000000001"),
        "text": "",
        "bytes": b"",
        "flag": True,
        "day": date(1, 1, 1),
        "at": datetime(1970, 1, 1, tzinfo=UTC),
        "local": datetime(2024, 2, 29, 12),
        "list": [],
        "map": [],
        "pair": {"x": 1, "y": None},
        "deep": [{"m": [("a", [1.0, None])]}, None],
    },
    {
        "k": 1,
        "tiny": 127,
        "small": 2**15 - 1,
        "middle": 2**31 - 1,
        "big": 2**63 - 1,
        "single": -0.0,
        "double": float("-inf"),
        "price": Decimal("99999999.99"),
        "text": "Zoë\0🦆",
        "bytes": b"\0\xff",
        "flag": False,
        "day": date(9999, 12, 31),
        "at": SPRING,
        "local": datetime(1, 1, 1),
        "list": [1, None, 3],
        "map": [("a", 1), ("b", None)],
        "pair": {"x": None, "y": ""},
        "deep": [],
    },
    {"k": 2},
    {"k": -5, "text": "x"},
]


def every(world: World) -> RemoteTable:
    builder = SchemaBuilder().column("k", "BIGINT").primary_key("k")
    for name, data_type in TYPES.items():
        builder.agg_column(name, data_type, "last_value")
    return world.table("every", builder.build(), EVERY, buckets=3)


def test_rows_of_all_types_are_those_of_a_scan_on_both_ways(world: World) -> None:
    table = every(world)
    expected = shown(table.scan().to_arrow())
    assert len(expected) == len(EVERY)
    # Nobody has registered anything in this session: Spark finds the source by itself.
    frame = world.read("every", plain=True)
    assert shown(frame) == expected
    assert shown(world.wide("every")) == expected


def test_an_instant_is_the_same_in_any_time_zone_of_the_session(world: World) -> None:
    every(world)
    world.plain.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    # What TIMESTAMP means in a text is another setting, and changes nothing either.
    world.plain.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        by_source = world.read("every", plain=True, columns="at,local,k")
        by_helper = world.wide("every", ["at", "local", "k"])
        for frame in (by_source, by_helper):
            [row] = (
                frame.where("k = 1").selectExpr("at", "string(at) s", "string(local) l").collect()
            )
            assert row["at"].astimezone(UTC) == SPRING
            assert (row["s"], row["l"]) == ("2024-03-31 03:30:00.123456", "0001-01-01 00:00:00")
    finally:
        world.plain.conf.unset("spark.sql.timestampType")
        world.plain.conf.set("spark.sql.session.timeZone", "UTC")


def test_an_empty_table_has_its_columns_and_no_rows(world: World) -> None:
    world.table("empty", SUMS)
    for frame in (world.read("empty"), world.wide("empty")):
        assert frame.columns == ["k", "a", "b"]
        assert frame.collect() == []
    world.table("no_days", DAYS)
    for frame in (world.read("no_days"), world.wide("no_days")):
        assert frame.collect() == []


# --- Columns --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "columns"),
    [
        ("text,k,flag", ["text", "k", "flag"]),
        ("k", ["k"]),
        ('["price"]', ["price"]),
    ],
)
def test_columns_are_read_as_they_are_named(world: World, option: str, columns: list[str]) -> None:
    expected = shown(every(world).scan().to_arrow().select(columns))
    frame = world.read("every", columns=option)
    assert frame.columns == columns
    assert shown(frame) == expected
    assert shown(world.wide("every", columns)) == expected


def test_a_users_schema_chooses_columns(world: World) -> None:
    every(world)
    schema = "list array<int>, map map<string, bigint>, pair struct<x: bigint, y: string>, k bigint"
    frame = world.reader("every").schema(schema).load()
    expected = every(world).scan().to_arrow().select(["list", "map", "pair", "k"])
    assert shown(frame) == shown(expected)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("k int", "InvalidInput: 'k' is BIGINT in the table, and INT in the schema"),
        ("k bigint, txt string", "InvalidInput: the schema names 'txt', .*did you mean 'text'"),
        ("k bigint, text string not null", "'text' is NOT NULL in the schema"),
    ],
)
def test_a_users_schema_that_does_not_fit_is_refused(world: World, schema: str, words: str) -> None:
    every(world)
    refusal = world.refusal(world.reader("every").schema(schema).load().collect)
    matches(words, refusal)


# --- Where it stands ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ledger:
    """A table after two commits, and a third batch whose writer died before it committed it."""

    table: RemoteTable
    after_one: str


@pytest.fixture(scope="module")
def ledger(world: World) -> Ledger:
    table = world.table("ledger", SUMS)
    rows = [{"k": key, "a": 1, "b": 1} for key in range(10)]
    write(table, 0, rows)
    cut = str(table.cut())
    write(table, 1, rows)

    def die() -> None:
        raise Killed

    writer = table.writer(owner_id="etl", columns=["a", "b"]).start()
    with arm("writer.put", die), pytest.raises(Killed):
        writer.write(2, Rows(data=arrow_rows(SUMS, rows)))
    writer._stop_renewal()
    return Ledger(table, cut)


def times(count: int) -> dict[int, int]:
    return dict.fromkeys(range(10), count)


def test_a_read_has_what_is_committed_or_all_or_what_there_was_at_a_cut(
    world: World, ledger: Ledger
) -> None:
    for read in (world.read, world.wide):
        assert balances(read("ledger")) == times(2)
        assert balances(read("ledger", isolation="latest")) == times(3)
        assert balances(read("ledger", at=ledger.after_one)) == times(1)
    by_key = world.read("ledger", at=ledger.after_one, pushFilters="true").where("k in (3, 99)")
    assert balances(by_key) == {3: 1}
    by_key = world.read("ledger", isolation="latest", pushFilters="true").where("k in (3, 99)")
    assert balances(by_key) == {3: 3}


def test_a_frame_stands_where_it_was_loaded_whatever_filters_are_offered(world: World) -> None:
    """Spark that offers filters plans each query anew, and each use of a frame in a query."""
    rows = [{"k": key, "a": 1, "b": 1} for key in range(10)]
    table = world.table("standing", SUMS, rows)
    frame, joined, united = (world.read("standing") for _ in range(3))
    # Spark does not ask for a schema that the user gives: such a frame stands where it is used.
    latest = world.read("standing", isolation="latest")
    given = world.reader("standing").schema("k BIGINT, a BIGINT, b BIGINT").load()
    write(table, 1, rows)
    assert balances(frame) == times(1)
    assert balances(latest) == balances(given) == times(2)
    for batch in (2, 3):
        write(table, batch, rows)
        assert balances(frame.where("k = 3")) == {3: 1}
        assert balances(frame) == times(1)
        pairs = joined.alias("x").join(joined.alias("y"), "k").selectExpr("k", "x.a - y.a AS a")
        assert balances(pairs) == times(0)
        assert balances(united.where("k < 5").unionAll(united.where("k >= 5"))) == times(1)


def test_a_frame_and_a_view_stand_where_they_were_loaded(world: World) -> None:
    rows = [{"k": key, "a": 1, "b": 1} for key in range(10)]
    table = world.table("moving", SUMS, rows)
    frame, helper = world.read("moving", plain=True), world.wide("moving")
    create_view(world.plain, "moving_view", world, "moving")
    sql = "SELECT sum(a) AS a, min(k) AS k FROM moving_view"
    for batch in (1, 2):
        assert balances(frame) == balances(helper) == times(1)
        assert balances(world.plain.sql(sql)) == {0: 10}
        assert balances(frame.join(helper.select("k"), "k")) == times(1)
        write(table, batch, rows)
    assert balances(world.read("moving", plain=True)) == times(3)
    create_view(world.plain, "moving_view", world, "moving")
    assert balances(world.plain.sql(sql)) == {0: 30}


def test_a_frame_of_a_table_that_was_created_again_has_no_rows_of_the_new_one(world: World) -> None:
    rows = [{"k": key, "a": 1, "b": 1} for key in range(10)]
    world.table("reborn", SUMS, rows)
    planned, helper, loaded = (world.read("reborn"), world.wide("reborn"), world.read("reborn"))
    assert balances(planned) == balances(helper) == times(1)
    world.client.drop_table("reborn", force=True)
    matches("UnknownTable: there is no table reborn", world.refusal(loaded.collect))
    del world.tables["reborn"]
    world.table("reborn", SUMS, [{"k": 1, "a": 7, "b": 7}])
    began = time.monotonic()
    for frame in (planned, helper):
        told = world.refusal(frame.select("k", "a").collect)
        matches("UnknownTable: table reborn was dropped after .* load a frame of that", told)
    assert time.monotonic() - began < 20  # Servers are not asked for it until the deadline.


def test_keys_are_looked_up_whatever_else_is_done_with_the_frame(world: World) -> None:
    rows = [{"k": key, "a": 1, "b": 1} for key in range(10)]
    world.table("looked_up", SUMS, rows)
    frame = world.read("looked_up", keys='{"k": [4, 99, 7]}')
    found = world.wide("looked_up", keys={"k": [4, 99, 7]})
    assert balances(frame) == balances(found) == {4: 1, 7: 1}
    for keys, shown_keys in (([4], {4: 1}), ([99], {})):
        again = tb.spark.read(world.plain, "looked_up", keys={"k": keys}, cluster=world.client)
        assert balances(again) == shown_keys
    whole = tb.spark.read(world.plain, "looked_up", cluster=world.client)
    assert balances(whole) == dict.fromkeys(range(10), 1)
    assert balances(frame.where("k = 4")) == {4: 1}
    assert balances(frame.where("k = 5")) == {}
    assert balances(frame) == {4: 1, 7: 1}
    matches("`keys` is no JSON", world.refusal(lambda: world.read("looked_up", keys="k")))
    told = world.refusal(world.read("looked_up", keys='{"b": [1]}').collect)
    matches("`keys` names 'b', which is no column of the key", told)
    numbers = tb.spark.read(
        world.plain, "looked_up", keys={"k": np.array([4, 99])}, cluster=world.client
    )
    assert balances(numbers) == {4: 1}
    for wrong in ([], [4], "k", {"k": 4}, {"k": "4"}):
        with pytest.raises(InvalidInput, match="`keys` has a list of values per column"):
            tb.spark.read(world.plain, "looked_up", keys=wrong, cluster=world.client)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="is BIGINT and has no such value"):
        tb.spark.read(world.plain, "looked_up", keys={"k": [1 << 63]}, cluster=world.client)


def test_a_lease_is_read_from_its_snapshots(world: World) -> None:
    rows = [{"k": key, "a": 1, "b": 1} for key in range(10)]
    table = world.table("leased", SUMS, rows)
    with table.lease_latest("nightly", 60.0) as lease:
        write(table, 1, rows)
        for read in (world.read, world.wide):
            assert balances(read("leased", lease="nightly", at=str(lease.cut))) == times(1)
        # Without a cut it is one of now: the log since the snapshots is held as well.
        borrowed = table.scan(source=ScanSource.SNAPSHOT, lease=table.borrow_lease("nightly"))
        found = world.read("leased", lease="nightly", pushFilters="true").where("k = 4")
        assert balances(found) == {4: 2}
        assert shown(world.read("leased", lease="nightly")) == shown(borrowed.to_arrow())
    gone = world.refusal(world.read("leased", lease="nightly").collect)
    matches("UnknownLease: there is no lease `nightly` on this table.*lease_latest", gone)


def test_cuts_that_do_not_go_with_the_read_are_refused(world: World, ledger: Ledger) -> None:
    both = world.read("ledger", at=ledger.after_one, isolation="latest")
    matches("InvalidInput: .*leave `isolation`, or `at`", world.refusal(both.collect))
    every(world)
    other = world.read("every", at=ledger.after_one)
    matches("InvalidInput: this cut is of another table than every", world.refusal(other.collect))


# --- Filters --------------------------------------------------------------------------------------

Passes = Callable[[Row], bool]


def keyed(data_type: str) -> Schema:
    builder = SchemaBuilder().column("k", data_type).agg_column("a", "BIGINT", "sum")
    return builder.primary_key("k").build()


PAIRS = (
    SchemaBuilder()
    .column("x", "INT")
    .column("y", "STRING")
    .agg_column("a", "BIGINT", "sum")
    .primary_key("x", "y")
    .build()
)


def none(_: Row) -> bool:
    return False


def rows_of(name: str, keys: Sequence[Any]) -> list[Row]:
    return [{name: key, "a": number} for number, key in enumerate(keys)]


PRICES = [Decimal(25 * number).scaleb(-2) for number in range(-4, 8)]
FILTERED: dict[str, tuple[Schema, list[Row], dict[str, Passes]]] = {
    "ints": (
        keyed("BIGINT"),
        rows_of("k", range(-3, 9)),
        {
            "k = 5": lambda row: row["k"] == 5,
            "k <=> 5": lambda row: row["k"] == 5,
            "K = 5": lambda row: row["k"] == 5,
            "k = 77": none,
            "k IN (1, 2, 77, NULL)": lambda row: row["k"] in (1, 2),
            "k IN (1, 2, 3) AND k IN (2, 3, 4) AND a < 6": lambda row: row["k"] == 2,
            "k = 1 OR k = 2": lambda row: row["k"] in (1, 2),
            "k = 1 OR a = 3": lambda row: row["k"] == 1 or row["a"] == 3,
            "k > 2 AND k <= 4": lambda row: 2 < row["k"] <= 4,
            "NOT k = 5": lambda row: row["k"] != 5,
            "k NOT IN (1, 2)": lambda row: row["k"] not in (1, 2),
            "k = 1 AND k = 2": none,
            "k IS NULL": none,
            "k = NULL": none,
            "k = '5'": lambda row: row["k"] == 5,
            "k = 5.0D": lambda row: row["k"] == 5,
            "k = 5.5": none,
            "k = 9223372036854775808": none,
            "abs(k) = 2": lambda row: abs(row["k"]) == 2,
            "a = 3": lambda row: row["a"] == 3,
            "a IN (3, 4) AND k = 1": lambda row: row["k"] == 1 and row["a"] in (3, 4),
            "a IS NULL": lambda row: row["a"] is None,
        },
    ),
    "texts": (
        keyed("STRING"),
        rows_of("k", ["", "a", "A", "b ", "ab", "Zoë", "7"]),
        {
            "k = ''": lambda row: row["k"] == "",
            "k = 'a'": lambda row: row["k"] == "a",
            "k IN ('Zoë', 'b', 'b ')": lambda row: row["k"] in ("Zoë", "b "),
            "k LIKE 'a%'": lambda row: row["k"].startswith("a"),
            "k = CAST(7 AS STRING)": lambda row: row["k"] == "7",
            "k COLLATE UTF8_LCASE = 'A'": lambda row: row["k"] in ("a", "A"),
        },
    ),
    "prices": (
        keyed("DECIMAL(10,2)"),
        rows_of("k", PRICES),
        {
            "k = 0.5": lambda row: row["k"] == Decimal("0.5"),
            "k = 1": lambda row: row["k"] == 1,
            "k IN (0.25, 0.250, -1, 0.255)": lambda row: row["k"] in (Decimal("0.25"), -1),
            "k = 0.255": none,
            "k = 0.5D": lambda row: row["k"] == Decimal("0.5"),
        },
    ),
    "dates": (
        keyed("DATE"),
        rows_of("k", [date(1, 1, 1), date(2024, 2, 29), date(2024, 3, 1), date(9999, 12, 31)]),
        {
            "k = DATE'2024-02-29'": lambda row: row["k"] == date(2024, 2, 29),
            "k IN (DATE'0001-01-01', DATE'9999-12-31')": lambda row: row["k"].year in (1, 9999),
            "k = '2024-03-01'": lambda row: row["k"] == date(2024, 3, 1),
            "k = TIMESTAMP'2024-03-01 00:00:00'": lambda row: row["k"] == date(2024, 3, 1),
            "k >= DATE'2024-03-01'": lambda row: row["k"] >= date(2024, 3, 1),
        },
    ),
    "pairs": (
        PAIRS,
        [{"x": x, "y": y, "a": x} for x in range(4) for y in ("l", "r", "")],
        {
            "x = 1 AND y = 'l'": lambda row: (row["x"], row["y"]) == (1, "l"),
            "x IN (1, 2) AND y IN ('', 'r')": lambda row: row["x"] in (1, 2) and row["y"] != "l",
            "x = 1": lambda row: row["x"] == 1,
            "y = 'r' AND a > 1": lambda row: row["y"] == "r" and row["a"] > 1,
            "x = 1 AND x = 2": none,
            "(x, y) IN ((1, 'l'), (3, ''))": lambda row: (
                (row["x"], row["y"]) in ((1, "l"), (3, ""))
            ),
        },
    ),
    "days": (
        DAYS,
        [{"day": day, "k": k, "a": k} for day in ("mon", "tue", "wed") for k in range(4)],
        {
            "day = 'tue'": lambda row: row["day"] == "tue",
            "day IN ('mon', 'wed', 'sun') AND k > 1": lambda row: (
                row["day"] in ("mon", "wed") and row["k"] > 1
            ),
            "day = 'sun'": none,
            "day = 'tue' AND k = 2": lambda row: (row["day"], row["k"]) == ("tue", 2),
            "k = 2": lambda row: row["k"] == 2,
            "day = 'tue' AND a = 1": lambda row: row["day"] == "tue" and row["a"] == 1,
            "day > 'mon'": lambda row: row["day"] > "mon",
        },
    ),
}


def filtered_table(world: World, name: str) -> RemoteTable:
    schema, rows, _ = FILTERED[name]
    return world.table(name, schema, rows)


@pytest.mark.parametrize("name", FILTERED)
@pytest.mark.parametrize("pushed", [True, False])
def test_filters_have_the_rows_that_pass_them(world: World, name: str, pushed: bool) -> None:
    schema, rows, filters = FILTERED[name]
    filtered_table(world, name)

    def read() -> Any:
        return world.read(name, plain=not pushed, pushFilters="true")

    # A frame of its own for each filter that is pushed; the others share one.
    frames = [read() for _ in filters] if pushed else [read()] * len(filters)
    parts = [
        frame.where(one).selectExpr(f"{number} AS n", "*")
        for number, (frame, one) in enumerate(zip(frames, filters, strict=True))
    ]
    together = reduce(lambda one, other: one.union(other), parts).toArrow()
    for number, (one, passes) in enumerate(filters.items()):
        found = together.filter(pc.equal(together["n"], number)).drop(["n"])
        expected = arrow_rows(schema, [row for row in rows if passes(row)])
        assert shown(found) == shown(expected.select(found.column_names)), one


@pytest.mark.parametrize(
    ("name", "where", "keys", "days"),
    [
        ("ints", "k IN (1, 2, 3, 4, 5)", 5, []),
        ("ints", "a = 3", 0, None),
        ("days", "day = 'tue' AND k IN (1, 2)", 2, []),
        ("days", "day IN ('tue', 'wed')", 0, ["tue", "wed"]),
        ("days", "k = 1", 0, None),
    ],
)
def test_filters_by_key_and_partition_read_what_they_need(
    world: World, name: str, where: str, keys: int, days: list[str] | None
) -> None:
    """If Spark renames the module by which we know that it offers filters, this notices."""
    table = filtered_table(world, name)
    rows = sum(1 for row in FILTERED[name][1] if days is None or row.get("day") in days)
    before = world.counted(table)
    world.read(name, pushFilters="true").where(where).collect()
    looked_up, read = (now - then for now, then in zip(world.counted(table), before, strict=True))
    assert (looked_up, read) == (keys, rows)


def test_a_frame_that_was_filtered_has_all_rows_for_its_other_uses(world: World) -> None:
    filtered_table(world, "ints")
    frame = world.read("ints")
    assert frame.where("k = 1").count() == 1
    assert frame.count() == 12
    either = frame.where("k = 2").union(frame.where("k = 3"))
    assert sorted(row["k"] for row in either.collect()) == [2, 3]


def test_spark_plans_a_frame_once_for_all_of_its_uses(world: World) -> None:
    """Why filters are not pushed unless a frame says so. If this fails, Spark was mended."""
    filtered_table(world, "ints")
    frame = world.read("ints", pushFilters="true")
    assert frame.where("k = 1").count() == 1
    assert frame.count() == 1


# --- SQL ------------------------------------------------------------------------------------------


def create_view(session: Any, view: str, world: World, table: str) -> None:
    session.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW {view} USING tallybook "
        f"OPTIONS (zookeeper '{world.local.address}', table '{table}')"
    )


def test_views_are_queried_in_sql(world: World) -> None:
    filtered_table(world, "days")
    create_view(world.plain, "by_day", world, "days")
    sql = "SELECT day, sum(a) AS total FROM by_day WHERE k > 0 GROUP BY day ORDER BY day"
    rows = [tuple(row) for row in world.plain.sql(sql).collect()]
    assert rows == [("mon", 6), ("tue", 6), ("wed", 6)]


def test_tables_of_sparks_own_catalog_are_refused(world: World) -> None:
    filtered_table(world, "days")
    options = f"OPTIONS (zookeeper '{world.local.address}', table 'days')"
    told = world.refusal(lambda: world.spark.sql(f"CREATE TABLE t USING tallybook {options}"))
    matches("InvalidInput: CREATE TABLE cannot be used.*CREATE TEMPORARY VIEW", told)
    world.spark.sql(f"CREATE TABLE t (k bigint) USING tallybook {options}")
    told = world.refusal(lambda: world.spark.sql("SELECT * FROM t").collect())
    matches("InvalidInput: which table.*CREATE TEMPORARY VIEW", told)
    world.spark.sql("DROP TABLE t")


def test_frames_are_not_written_by_the_format(world: World) -> None:
    filtered_table(world, "ints")
    target = {"zookeeper": world.local.address, "table": "ints"}
    writer = world.spark.range(1).write.format("tallybook").mode("append").options(**target)
    matches(
        "InvalidInput: the format `tallybook` only reads.*AggregateSink", world.refusal(writer.save)
    )


# --- Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"table": ""}, r"InvalidInput: which table\? Say"),
        ({"table": "evry"}, "UnknownTable: there is no table evry; the tables are: .*every"),
        ({"colums": "k"}, "InvalidInput: there is no option 'colums'; did you mean 'columns'"),
        ({"columns": "k,txt"}, "`columns` names 'txt', which .*; did you mean 'text'"),
        ({"columns": "k,k"}, "`columns` names 'k' twice"),
        ({"columns": " "}, "`columns` names none"),
        ({"at": "cut-nonsense"}, "InvalidInput: this is no cut"),
        ({"mode": "upserts"}, "`mode`: only for streams"),
        ({"deadline": "soon"}, "deadline = 'soon' is no duration"),
    ],
)
def test_what_is_wrong_is_said_when_the_frame_is_made(
    world: World, options: dict[str, str], words: str
) -> None:
    every(world)
    matches(words, world.refusal(world.reader("every").options(**options).load))


def test_a_batch_does_not_start_anywhere(world: World) -> None:
    every(world)
    told = world.refusal(world.read("every", start="full").collect)
    matches("InvalidInput: `start` is for streams: leave it, or use spark.readStream", told)


def test_the_helper_says_the_same(world: World) -> None:
    every(world)
    for columns, options, words in (
        (["k", "txt"], {}, "'txt', which the table does not have; did you mean 'text'"),
        (["k"], {"start": "full"}, "`start` is for streams"),
        (["k"], {"tabel": "x"}, "no option 'tabel'; did you mean 'table'"),
    ):
        with pytest.raises(tb.TallybookError, match=words):
            world.wide("every", columns, **options)


def test_a_cluster_that_is_not_there_is_an_error_within_seconds_without_secrets(
    world: World,
) -> None:
    secrets = {"token": "hush-1", "zookeeperUser": "me", "zookeeperPassword": "hush-2"}
    options = {"zookeeper": "127.0.0.1:1", **secrets}
    reader = world.reader("every").options(**options)
    began = time.monotonic()
    matches(r"Unavailable: no ZooKeeper at 127\.0\.0\.1:1 within 5 s", world.refusal(reader.load))
    assert time.monotonic() - began < 20


# --- Secrets --------------------------------------------------------------------------------------

TOKEN = "hush-hush-4711"


def test_a_token_opens_servers_that_speak_tls_and_is_not_shown(
    world: World, tmp_path: Path
) -> None:
    address = chroot(world.local.zookeeper)
    root, key = tmp_path / "root.pem", tmp_path / "root.key"
    make_certificate(root, key)
    guarded: dict[str, Any] = {"token": TOKEN, "credentials": ("me", "hush-0815")}
    tls = {"tls_certificate": root, "tls_key": key}
    with (
        running(address, tmp_path, **guarded, **tls),
        client_of(address, **guarded, tls_root=root) as client,
    ):
        table = client.create_table("guarded", SUMS, buckets=1)
        write(table, 0, [{"k": 1, "a": 2, "b": 3}])
        own = {"zookeeper": address, "zookeeperUser": "me", "zookeeperPassword": "hush-0815"}
        own["tlsRoot"] = str(root)
        frame = world.reader("guarded", token=TOKEN).options(**own).load()
        assert balances(frame.where("a = 2")) == {1: 2}
        plans = io.StringIO()
        with redirect_stdout(plans):
            frame.where("k = 1").explain(True)
        for text in (plans.getvalue(), frame._jdf.queryExecution().toString(), repr(frame)):
            assert "hush" not in text
        wrong = world.reader("guarded", token="hush-wrong").options(**own).load()
        told = world.refusal(wrong.collect)
        matches("AccessRefused: this server wants a token, and got a wrong token", told)
        own["zookeeperPassword"] = "hush-4712"
        unknown = world.reader("guarded", token=TOKEN).options(**own)
        matches("AccessDenied", world.refusal(unknown.load))
