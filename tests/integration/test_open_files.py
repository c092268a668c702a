"""Servers, and processes that open a table, have as many files open as they need and may."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rocksdict import Options, WriteBatch

import tallybook as tb
from foundation import open_files
from merge_engine.bucket import database as databases
from merge_engine.bucket.database import Database
from merge_engine.bucket.options import write_options
from tallybook.commands import machine_checks
from tallybook.commands.checks import Health
from tests.conftest import SUMS

SOFT, HARD = 256, 4096
BUCKETS = 60  # Of six files each, at the least.


def limited(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def low_limit() -> Iterator[None]:
    """This process's own limit, and so its children's, is low; the hard one stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FILLING = f"""
import sys
import tallybook as tb
schema = tb.SchemaBuilder().column("k", "BIGINT").agg_column("a", "BIGINT", "sum").primary_key("k")
with tb.Table.create(sys.argv[1], schema.build(), buckets={BUCKETS}) as table:
    for _ in range(2):
        table.put({{"k": list(range(5_000)), "a": [1] * 5_000}})
    print(table.to_arrow().num_rows, len(table.bucket_ids()))
"""


def fill_table(directory: Path, limits: Callable[[], None]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FILLING, str(directory)],
        preexec_fn=limits,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_table_of_many_buckets_opens_with_a_low_limit(tmp_path: Path) -> None:
    filled = fill_table(tmp_path / "table", limited(SOFT, HARD))
    assert filled.stdout.split() == ["5000", str(BUCKETS)], filled.stderr


def test_a_process_that_may_not_have_so_many_is_told_what_to_do(tmp_path: Path) -> None:
    filled = fill_table(tmp_path / "table", limited(SOFT, SOFT))
    assert filled.returncode == 1
    assert "foundation.errors.StorageUnavailable" in filled.stderr
    assert "as many files open as it may; raise the limit (ulimit -n" in filled.stderr


def test_a_server_raises_its_limit_and_serves_many_buckets(low_limit: None, tmp_path: Path) -> None:
    with tb.LocalCluster(tmp_path / "cluster", servers=1) as cluster, cluster.connect() as client:
        [server] = cluster.servers
        limits = Path(f"/proc/{server.pid}/limits").read_text()
        [line] = [line for line in limits.splitlines() if line.startswith("Max open files")]
        soft, hard = line.split()[3:5]
        assert soft == hard
        table = client.create_table("t", SUMS, buckets=BUCKETS, column_locks=False)
        for _ in range(2):
            table.put({"k": list(range(5_000)), "a": [1] * 5_000})
        assert table.scan().to_arrow().num_rows == 5_000
        assert len(os.listdir(f"/proc/{server.pid}/fd")) > SOFT


def open_of(directory: Path) -> int:
    """Return how many files of rows this process has open there."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # Closed meanwhile.
            continue
    return sum(name.startswith(str(directory)) and name.endswith(".sst") for name in names)


@pytest.mark.parametrize(("limit", "most"), [(1 << 20, 150), (1024, 64)])
def test_the_files_of_rows_keep_to_their_share(
    limit: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many files: all are open where there is room, and few where there is none; all are read."""
    monkeypatch.setattr(databases, "limits", lambda: (limit, limit))
    others = [Database(tmp_path / f"{n}", Options(raw_mode=True)) for n in range(10)]
    options = Options(raw_mode=True)
    options.set_disable_auto_compactions(True)
    database = Database(tmp_path / "database", options)
    keys = [b"r%03d" % number for number in range(150)]
    for key in keys:
        batch = WriteBatch(raw_mode=True)
        batch.put(key, key)
        database.write(batch, write_options())
        database.flush()
    assert database.get(keys) == keys
    assert database.keys_below(b"r") == keys
    assert open_of(tmp_path / "database") == 150 if most == 150 else 0 < open_of(tmp_path) <= most
    for one in (*others, database):
        one.close()
    assert open_of(tmp_path) == 0


def test_a_limit_is_raised_and_never_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    open_files.raise_limit.__wrapped__()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    open_files.raise_limit.__wrapped__()
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (infinite, infinite))
    open_files.raise_limit.__wrapped__()
    assert asked == [(4096, 4096)]


def test_a_system_that_takes_less_than_it_says_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS, whose hard limit is none, and which takes 10,240."""
    asked: list[int] = []

    def take(_: int, limits: tuple[int, int]) -> None:
        asked.append(limits[0])
        if limits[0] > 10_240:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", take)
    open_files.raise_limit.__wrapped__()
    assert asked == [1 << 20, 10_240]


def test_doctor_says_for_how_many_buckets_there_are_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "limits", lambda: (1024, 524_288))
    assert machine_checks.check_open_files().health is Health.FINE
    monkeypatch.setattr(machine_checks, "limits", lambda: (1024, 4096))
    low = machine_checks.check_open_files()
    assert low.health is Health.WARNING
    assert "341 buckets" in low.advice
