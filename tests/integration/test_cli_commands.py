"""The commands of `tallybook` against one cluster, in this process: what they print and do."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyarrow import csv, ipc, parquet

from foundation.errors import AccessDenied, TallybookError
from merge_engine.schema.builder import SchemaBuilder
from recovery.writer.rows import Rows
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from server.protocol.environment import ADDRESS_VARIABLE
from tallybook import cli
from tallybook.commands.bench import PREFIX
from tests.conftest import SUMS
from tests.support.zookeeper_server import wait_until

_NUMBERS = count()
EVENTS = """
-- What customers did.
CREATE TABLE IF NOT EXISTS {name} (
    customer_id BIGINT,
    day DATE COMMENT 'in UTC, (always)',
    orders BIGINT,
    seen STRUCT<page: STRING, at: BIGINT>,
    PRIMARY KEY (customer_id, day) NOT ENFORCED
) PARTITIONED BY (day)
WITH ('fields.orders.agg' = 'sum', 'fields.seen.agg' = 'last_value',
      'buckets' = '2', 'column_locks' = 'false');
"""


class Said(NamedTuple):
    """What a command came to: its exit code, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Said]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cli"), servers=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(local: LocalCluster) -> Iterator[Cluster]:
    with local.connect() as client:
        yield client


@pytest.fixture
def run(
    local: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    monkeypatch.setenv(ADDRESS_VARIABLE, local.address)

    def run(*words: str) -> Said:
        capsys.readouterr()
        code = cli.main(words)
        printed = capsys.readouterr()
        return Said(code, printed.out, printed.err)

    return run


@pytest.fixture
def events(run: Run, cluster: Cluster, tmp_path: Path) -> Iterator[RemoteTable]:
    """A table with partitions and a nested column, of three rows."""
    name = f"events_{next(_NUMBERS)}"
    path = tmp_path / "events.sql"
    path.write_text(EVENTS.format(name=name))
    assert run("create", str(path)).code == 0
    again = run("create", str(path))
    assert re.fullmatch(rf"table {name} \(id \d+\) is there, with 2 buckets\n", again.out)
    table = cluster.table(name)
    table.put(
        {
            "customer_id": [7, 8, 7],
            "day": [date(2026, 11, 16), date(2026, 11, 17), date(2026, 11, 18)],
            "orders": [1, 2, 3],
            "seen": [{"page": "a", "at": 1}, None, {"page": "b, c", "at": None}],
        }
    )
    yield table
    cluster.drop_table(table.name, force=True)


@pytest.fixture
def sums(cluster: Cluster) -> Iterator[RemoteTable]:
    made = cluster.create_table(f"sums_{next(_NUMBERS)}", SUMS, buckets=2)
    yield made
    if made.name in cluster.list_tables():
        cluster.drop_table(made.name, force=True)


def test_a_table_is_created_from_json_described_altered_and_dropped(
    run: Run, cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "amounts.json"
    columns = [
        {"name": "k", "type": "BIGINT"},
        {"name": "amount", "type": "BIGINT", "function": "sum"},
    ]
    document = {"name": "amounts", "columns": columns, "primary_key": ["k"], "buckets": 3}
    path.write_text(json.dumps(document))
    created = run("create", str(path), "--buckets", "2")
    assert created.code == 0
    assert created.out.endswith("is there, with 2 buckets\n")
    assert run("create", str(path)).code == 1, "it is there already"
    [described] = [one for one in run("tables", "--json").json if one["name"] == "amounts"]
    assert described["columns"] == [
        {"name": "k", "type": "BIGINT", "role": "key"},
        {"name": "amount", "type": "BIGINT", "role": "sum"},
    ]
    assert run("describe", "amounts", "--json").json == described
    assert re.search(r"^amount +BIGINT +sum$", run("describe", "amounts").out, re.M)
    altered = run("alter", "amounts", "--add", "visits BIGINT sum", "--rename", "amount=total")
    assert altered.code == 0, altered.err
    names = cluster.table("amounts").schema.names
    assert names == ("k", "total", "visits")
    refused = run("alter", "amounts", "--drop", "visits")
    assert (refused.code, refused.out) == (2, "")
    assert "say --yes if it is meant" in refused.err
    assert cluster.table("amounts").schema.names == names
    assert run("alter", "amounts", "--drop", "visits", "--yes").code == 0
    assert cluster.table("amounts").schema.names == ("k", "total")
    assert run("rename", "amounts", "totals").code == 0
    assert "there is no table amounts" in run("rename", "amounts", "totals").err
    assert run("rename", "totals", "amounts").out.endswith("is called amounts\n")
    cluster.create_table("filled", SUMS, column_locks=False).put({"k": [1], "a": [1]})
    assert run("truncate", "filled").code == 2
    assert len(run("scan", "filled", "--json").out.splitlines()) == 1
    assert run("truncate", "filled", "--yes").code == 0
    assert run("scan", "filled", "--json").out == ""
    assert run("drop", "filled", "--yes").code == 0
    assert run("drop", "amounts").code == 2
    assert "amounts" in cluster.list_tables()
    assert run("drop", "amounts", "--yes").code == 0
    assert "amounts" not in cluster.list_tables()
    assert "there is no table amounts" in run("drop", "amounts", "--yes").err


def test_a_row_is_looked_up_by_the_values_of_its_key(run: Run, events: RemoteTable) -> None:
    found = run("lookup", events.name, "customer_id=7", "day=2026-11-18")
    assert found.code == 0
    assert re.search(r"^7 +2026-11-18 +3 +\{'page': 'b, c', 'at': None\}$", found.out, re.M)
    row = run("lookup", events.name, "customer_id=8", "day=2026-11-17", "--json").json
    assert (row["orders"], row["seen"]) == (2, None)
    missing = run("lookup", events.name, "customer_id=9", "day=2026-11-17", "--json")
    assert (missing.code, missing.json["_found"]) == (1, False)
    for words, why in (
        (("customer_id=7",), "needs a value for day, too"),
        (("customer_id=x", "day=2026-11-17"), "customer_id is a BIGINT, not 'x'"),
        (("customer=7", "day=2026-11-17"), "not for 'customer'; did you mean 'customer_id'?"),
        (
            ("customer_id=7", "day=2026-11-17", "customer_id=8"),
            "customer_id has a value already, and 'customer_id=8' is one too many",
        ),
    ):
        refused = run("lookup", events.name, *words)
        assert (refused.code, refused.out) == (1, "")
        assert why in refused.err


def test_rows_are_scanned_as_a_table_or_as_lines_of_json(run: Run, events: RemoteTable) -> None:
    shown = run("scan", events.name, "--columns", "orders")
    assert shown.out.splitlines()[0].split() == ["customer_id", "day", "orders"]
    assert len(shown.out.splitlines()) == 4
    rows = [json.loads(line) for line in run("scan", events.name, "--json").out.splitlines()]
    assert sorted(row["orders"] for row in rows) == [1, 2, 3]
    assert len(run("scan", events.name, "--json", "--limit", "2").out.splitlines()) == 2


def test_the_changelog_goes_on_from_a_cut(run: Run, events: RemoteTable) -> None:
    first = run("log", events.name, "--json")
    assert len(first.out.splitlines()) == 3
    cut = first.err.removeprefix("cut: ").strip()
    key = {"customer_id": [7], "day": [date(2026, 11, 18)]}
    events.put({**key, "orders": [5], "seen": [None]})
    some = run("log", events.name, "--limit", "2", "--json")
    assert len(some.out.splitlines()) == 2
    assert "there are more changes" in some.err
    assert "cut: " not in some.err, "it is that of changes which nobody has seen"
    assert "cut: " in run("log", events.name, "--limit", "9", "--json").err
    changes = [
        json.loads(line)
        for line in run("log", events.name, "--since", cut, "--json").out.splitlines()
    ]
    assert changes[-1]["orders"] == 8
    assert "orders" in run("log", events.name, "--since", cut).out.splitlines()[0]


def test_an_export_has_all_rows_in_each_format(
    run: Run, events: RemoteTable, tmp_path: Path
) -> None:
    paths = [tmp_path / f"events.{ending}" for ending in ("csv", "parquet", "arrow")]
    for path in paths:
        assert f"{path} has 3 rows" in run("export", events.name, str(path)).out
    assert sorted(one.name for one in tmp_path.glob("*events.*")) == [
        "events.arrow",
        "events.csv",
        "events.parquet",
        "events.sql",
    ]
    with ipc.open_file(paths[2]) as file:
        arrow = file.read_all()
    assert arrow.equals(events.to_arrow())
    key = [("customer_id", "ascending"), ("day", "ascending")]
    assert parquet.read_table(paths[1]).sort_by(key).equals(arrow.sort_by(key))
    found = csv.read_csv(paths[0]).sort_by(key).to_pylist()
    assert [json.loads(row["seen"]) for row in found if row["seen"]] == [
        {"page": "a", "at": 1},
        {"page": "b, c", "at": None},
    ]
    assert "say --overwrite" in run("export", events.name, str(paths[0])).err
    assert run("export", events.name, str(paths[0]), "--overwrite").code == 0
    assert "say --format" in run("export", events.name, str(tmp_path / "events")).err
    nowhere = tmp_path / "nowhere"
    refused = run("export", events.name, str(nowhere / "events.csv"))
    assert f"there is no directory {nowhere}: make it, or give another name" in refused.err
    missing = run("create", str(nowhere))
    assert missing.err == f"tallybook create: {nowhere}: No such file or directory\n"


def test_an_export_goes_through_links_and_pipes_and_leaves_them_what_they_are(
    run: Run, events: RemoteTable, tmp_path: Path
) -> None:
    kept, link = tmp_path / "kept.csv", tmp_path / "link.csv"
    kept.write_text("old")
    link.symlink_to(kept)
    assert "say --overwrite" in run("export", events.name, str(link)).err
    assert run("export", events.name, str(link), "--overwrite").code == 0
    assert link.is_symlink()
    lines = kept.read_text().splitlines()
    assert len(lines) == 4
    command = [sys.executable, "-m", "tallybook", "export", events.name, "--format", "csv"]
    for name in ("-", "/dev/stdout"):
        piped = subprocess.run(
            [*command, name], capture_output=True, text=True, timeout=180, check=True
        )
        assert sorted(piped.stdout.splitlines()) == sorted(lines)
    redirected = tmp_path / "redirected"
    with redirected.open("wb") as file:
        subprocess.run([*command, "/dev/stdout"], stdout=file, timeout=180, check=True)
    assert sorted(redirected.read_text().splitlines()) == sorted(lines)
    refused = run("export", events.name, str(tmp_path), "--format", "csv")
    assert f"{tmp_path} is a directory: give the name of a file in it" in refused.err


def test_dates_that_python_does_not_have_are_looked_up_scanned_listed_and_dropped(
    run: Run, cluster: Cluster
) -> None:
    schema = (
        SchemaBuilder()
        .column("day", "DATE")
        .column("k", "BIGINT")
        .agg_column("latest", "DATE", "max")
        .primary_key("day", "k")
        .partitioned_by("day")
        .build()
    )
    name = f"beyond_{next(_NUMBERS)}"
    table = cluster.create_table(name, schema, buckets=1, column_locks=False)
    days = pa.array([3_000_000, 0], pa.date32())
    table.put(pa.table({"day": days, "k": [1, 1], "latest": days}))
    assert [row["day"] for row in run("partitions", "list", name, "--json").json] == [
        *("1970-01-01", "10183-09-21"),
    ]
    assert "10183-09-21" in run("partitions", "list", name).out
    assert "10183-09-21  1  10183-09-21" in run("scan", name).out
    assert "10183-09-21" in run("log", name, "--json").out
    assert run("lookup", name, "day=1970-01-01", "k=1").code == 0
    table.drop_partition(day=days[0])
    assert "10183" not in run("partitions", "list", name).out
    cluster.drop_table(name, force=True)


def test_partitions_are_listed_and_dropped_one_or_all_that_are_older(
    run: Run, events: RemoteTable
) -> None:
    assert run("partitions", "list", events.name).out.splitlines() == [
        "day",
        "2026-11-16",
        "2026-11-17",
        "2026-11-18",
    ]
    assert run("partitions", "drop", events.name, "--older-than", "2026-11-18").code == 2
    dropped = run("partitions", "drop", events.name, "--older-than", "2026-11-17", "--yes")
    assert dropped.out.startswith("1 partition of table")
    assert dropped.out.endswith("dropped, all before 2026-11-17 00:00:00 UTC\n")
    assert run("partitions", "drop", events.name, "day=2026-11-17", "--yes").code == 0
    assert run("partitions", "list", events.name, "--json").json == [{"day": "2026-11-18"}]
    assert run("partitions", "drop", events.name).code == 2
    refused = run("partitions", "drop", events.name, "--older-than", "soon", "--yes")
    assert "'soon' is neither a date or time" in refused.err
    kept = run("partitions", "drop", events.name, "--older-than", "36500 days", "--yes")
    assert kept.out.startswith("0 partitions of table")
    assert run("alter", events.name, "--retention", "36500 days", "--yes").code == 0
    assert "retention=" in run("describe", events.name).out
    assert run("alter", events.name, "--retention", "none").code == 0
    assert "retention=" not in run("describe", events.name).out


def test_snapshots_and_leases_are_listed_and_a_lease_is_dropped(
    run: Run, sums: RemoteTable
) -> None:
    assert "no snapshot yet of 2 buckets: 0/0, 0/1" in run("snapshots", sums.name).out
    taken = run("snapshots", sums.name, "--take", "--json").json
    assert [one["bucket"] for one in taken] == ["0/0", "0/1"]
    assert "nobody has a lease" in run("leases", "list", sums.name).out
    sums.lease_latest("night", renew=False)
    [lease] = run("leases", "list", sums.name, "--json").json
    assert (lease["lease"], lease["snapshots"], lease["live"]) == ("night", 2, True)
    assert "did you mean 'night'?" in run("leases", "drop", sums.name, "nigth", "--yes").err
    assert run("leases", "drop", sums.name, "night").code == 2
    assert run("leases", "drop", sums.name, "night", "--yes").code == 0
    assert run("leases", "list", sums.name, "--json").json == []


def test_the_status_of_a_healthy_cluster_is_0_and_one_without_servers_1(
    run: Run, local: LocalCluster, sums: RemoteTable
) -> None:
    sums.end_offsets()  # All buckets are led.
    healthy = run("status")
    assert healthy.code == 0, healthy.out
    assert re.search(rf"{sums.name} +0/1 ", healthy.out)
    assert run("status", "--json").json["problems"] == []
    with sums.writer(owner_id="w", columns=["a"], ttl_ms=2000) as writer:
        writer.write(0, Rows(data={"k": [1], "a": [1]}))
        assert run("status").code == 0
    address = f"{local.address}/nowhere"
    for words in ((address,), ("--zookeeper", address)):
        wrong = run("status", *words, "--deadline", "1")
        assert (wrong.code, wrong.out) == (1, "")
        assert "there is no cluster below /nowhere" in wrong.err
    assert run("status", address, "--zookeeper", local.address).code == 2


def test_the_status_says_how_far_views_and_snapshots_are_behind(
    run: Run, sums: RemoteTable
) -> None:
    def lags() -> tuple[int, int]:
        [found] = [one for one in run("status", "--json").json["tables"] if one["id"] == table_id]
        return found["view_lag"], found["snapshots"]["lag"]

    table_id = sums.table_id
    with sums.writer(owner_id="w", columns=["a"]) as writer:
        writer.write(0, Rows(data={"k": list(range(20)), "a": [1] * 20}))
        view, snapshots = lags()
        assert view >= 20, "the rows are in memory, and in the log"
        assert snapshots >= 20
        assert run("snapshots", sums.name, "--take").code == 0
        assert lags() == (0, 0)
        assert run("status", "--snapshot-age", "0").code == 0
        writer.write(1, Rows(data={"k": list(range(20)), "a": [1] * 20}))
        assert all(lag >= 20 for lag in lags())

        def is_old() -> bool:
            found = run("status", "--snapshot-age", "0")
            return found.code == 1 and f"! table {sums.name}: the latest snapshot" in found.out

        wait_until(is_old, "a snapshot that lacks something is told of")


def test_a_running_job_is_told_that_its_table_was_truncated_and_a_new_one_counts_anew(
    run: Run, cluster: Cluster, sums: RemoteTable
) -> None:
    rows = Rows(data={"k": [1], "a": [1]})
    with suppress(TallybookError), sums.writer(owner_id="w", columns=["a"]) as writer:
        writer.write(0, rows)
        refused = run("truncate", sums.name, "--yes")
        assert (refused.code, refused.out) == (1, "")
        assert "--force" in refused.err
        assert run("truncate", sums.name, "--yes", "--force").code == 0
        with pytest.raises(TallybookError, match="dropped"):
            writer.write(1, rows)
    with cluster.table(sums.name).writer(owner_id="w", columns=["a"]) as again:
        again.write(0, rows)
    assert run("lookup", sums.name, "1", "--columns", "a", "--json").json["a"] == 1


def test_what_users_get_says_what_it_is(local: LocalCluster, sums: RemoteTable) -> None:
    assert repr(local) == f"<LocalCluster in {local._directory}, 2 servers run>"
    with sums.writer(owner_id="w", columns=["a"]) as writer:
        writer.write(0, Rows(data={"k": [1], "a": [1]}))
        assert repr(writer) == "<TableWriter of w: a; clean>"
    with sums.scan(["a"]) as scan:
        assert repr(scan) == "<TableScan of k, a; buckets: 2>"
    changes = sums.changes()
    assert repr(changes).startswith("<TableChanges from ")
    assert repr(changes).endswith(f" to {changes.until!r}; buckets: 2>")
    sums.snapshot()
    with sums.lease_latest("night", renew=False) as lease:
        assert repr(lease) == "<SnapshotLease night; snapshots: 2>"


def test_a_benchmark_counts_right_and_leaves_nothing(run: Run, cluster: Cluster) -> None:
    found = run("bench", "--seconds", "0.1", "--keys", "100", "--rows", "50", "--json")
    assert found.code == 0, found.err
    assert found.json["right"]
    assert found.json["total"] == 50 * found.json["puts"]["calls"] > 0
    assert not [name for name in cluster.list_tables() if name.startswith(PREFIX)]
    assert run("bench", "--seconds", "0.1").out.startswith("WHAT")


def test_the_doctor_finds_nothing_wrong_with_a_healthy_cluster(run: Run, tmp_path: Path) -> None:
    found = run("doctor", "--json", "--views", str(tmp_path))
    assert found.code == 0, found.out
    looked_at = {one["what"] for one in found.json}
    assert {"versions", "Java", "ZooKeeper", "cluster", "log store"} <= looked_at
    assert all(one["advice"] for one in found.json if one["health"] != "fine")


def test_the_doctor_says_what_to_do_about_what_is_wrong(run: Run, local: LocalCluster) -> None:
    port = local.address.rpartition(":")[2]
    taken = run("doctor", "--port", port)
    assert taken.code == 1
    assert re.search(rf"^port {port}: take another, or end what has it$", taken.out, re.M)
    gone = run("doctor", "--zookeeper", "127.0.0.1:1", "--deadline", "1", "--json")
    assert gone.code == 1
    [zookeeper] = [one for one in gone.json if one["what"] == "ZooKeeper"]
    assert zookeeper["health"] == "wrong"
    assert zookeeper["advice"]
    chroot = run("doctor", "--zookeeper", f"{local.address}/nowhere", "--deadline", "1")
    assert chroot.code == 1
    assert "no cluster below /nowhere" in chroot.out


def test_the_doctor_goes_on_where_servers_refuse_what_they_are_asked_with(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Cluster) -> None:
        raise AccessDenied("this server wants a token, and got no token")

    monkeypatch.setattr(Cluster, "status", refuse)
    found = run("doctor", "--json")
    assert found.code == 1
    [servers] = [one for one in found.json if one["what"] == "servers"]
    assert servers["found"] == "this server wants a token, and got no token"
    assert "--token-file" in servers["advice"]
    assert "log store" in {one["what"] for one in found.json}


def test_a_damaged_segment_and_a_damaged_snapshot_are_found(
    run: Run, sums: RemoteTable, local: LocalCluster
) -> None:
    with sums.writer(owner_id="w", columns=["a"]) as writer:
        writer.write(0, Rows(data={"k": list(range(20)), "a": [1] * 20}))
    sums.snapshot()
    whole = run("verify", sums.name)
    assert whole.code == 0, whole.out
    assert "nothing is damaged" in whole.out
    assert "20 rows" in whole.out
    directory = local._directory / "logs" / sums.definition.path(sums.bucket_ids()[0])
    segment = max(directory.glob("*.seg"))
    manifest_file = max(directory.glob("snapshots/*"), key=lambda one: one.stat().st_size)
    for path in (segment, manifest_file):
        data = path.read_bytes()
        path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    damaged = run("verify", sums.name, "--json")
    assert damaged.code == 1
    parts = {one["part"]: one for one in damaged.json["damages"]}
    assert set(parts) == {f"log, {segment.name}", "snapshot 1"}
    assert all(one["bucket"] == "0/0" and one["advice"] for one in parts.values())
    segment.unlink()
    gap = run("verify", sums.name, "--json")
    assert gap.code == 1
    assert damaged.json["segments"] + 1 >= gap.json["segments"]


def test_a_command_without_arguments_shows_its_help_and_a_wrong_one_is_2(run: Run) -> None:
    assert "Usage: tallybook" in run().out
    assert run("--version").out.startswith("tallybook ")
    assert run("tabels").code == 2
    assert run("scan").code == 2
    assert run("status", "--deadline", "-1").code == 2


def test_shell_completion_knows_commands_and_options(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TALLYBOOK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "tallybook locks rel")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert run("").out.split() == ["release"]
    monkeypatch.setenv("COMP_WORDS", "tallybook serve --drain-d")
    assert run("").out.split() == ["--drain-deadline"]
