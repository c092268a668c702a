"""`tallybook locks`: what an operator sees of column locks, and does about them."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import Fenced, HandoverNeeded, LockHeld, OldEpoch
from foundation.failpoints import arm
from locks.column_locks.records import LockRecord
from locks.coordinator import Coordinator
from recovery.writer.redo import RedoLog
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from server.protocol.environment import ADDRESS_VARIABLE
from tallybook import cli
from tallybook.commands import releasing
from tests.conftest import SUMS
from tests.support.coordinators import DEFINITION
from tests.support.faulty_storage import interrupt
from tests.support.zookeeper_server import chroot, session, wait_until

KEYS = [1, 2, 3]
_NUMBERS = count()

# A job that adds 1 to `a` with every batch, and is killed where its environment says.
_JOB = """
import sys
import tallybook as tb
from recovery.writer.redo import RedoLog
from recovery.writer.rows import Rows

address, table, redo = sys.argv[1:]
with tb.connect(address) as cluster:
    settings = {"redo": RedoLog.open(redo)} if redo else {}
    with cluster.writer(table, owner_id="etl-1", columns=["a"], **settings) as writer:
        for batch in range(3):
            writer.write(batch, Rows(data={"k": [1, 2, 3], "a": [1, 1, 1]}))
"""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("locks_command")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(local: LocalCluster) -> Iterator[Cluster]:
    with local.connect() as client:
        yield client


@pytest.fixture
def table(cluster: Cluster) -> Iterator[RemoteTable]:
    made = cluster.create_table(f"customers_{next(_NUMBERS)}", SUMS, buckets=2)
    yield made
    if made.name in cluster.list_tables():
        cluster.drop_table(made.name, force=True)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def locks(
    local: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Return what runs `tallybook locks` in this process: exit code, output, errors."""
    monkeypatch.setenv(ADDRESS_VARIABLE, local.address)

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(["locks", *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def added(value: int = 1) -> Rows:
    return Rows(data={"k": KEYS, "a": [value] * len(KEYS)})


def values(table: RemoteTable, **settings: Any) -> list[int | None]:
    return [row["a"] for row in table.lookup({"k": KEYS}, ["a"], **settings).to_pylist()]


def record_of(cluster: Cluster, table: RemoteTable, owner: str) -> LockRecord:
    record = cluster.coordinator.locks.record(table.definition.table, owner)
    assert record is not None
    return record


def dies(writer: TableWriter, batch: int, *, at: str = "writer.sealed") -> None:
    """Let a writer's process die in the middle of a batch: nobody renews its lock any more."""
    with arm(at, interrupt), pytest.raises(KeyboardInterrupt):
        writer.write(batch, added(1000))
    writer._stop_renewal()


def expired(cluster: Cluster, table: RemoteTable, owner: str) -> None:
    """Wait until an owner's TTL has passed."""

    def is_over() -> bool:
        locks = cluster.coordinator.locks.all(table.definition.table)
        return not any(lock.live for lock in locks if lock.owner == owner)

    wait_until(is_over, f"the lock of `{owner}` expires")


# --- A job that was killed ------------------------------------------------------------------------


def run_until_killed(cluster: Cluster, table: RemoteTable, redo: str, failpoint: str) -> None:
    """Run the job in a process of its own, until it dies at the failpoint."""
    killed = subprocess.run(
        [sys.executable, "-c", _JOB, cluster.address, table.name, redo],
        env={**os.environ, "TALLYBOOK_FAILPOINT": failpoint},
        check=False,
        timeout=180,
    )
    assert killed.returncode == -signal.SIGKILL


@pytest.mark.parametrize("recovery", ["undo", "redo"])
def test_a_killed_job_is_released_and_goes_on_after_what_it_committed(
    cluster: Cluster, table: RemoteTable, locks: Run, tmp_path: Path, recovery: str
) -> None:
    if recovery == "undo":
        run_until_killed(cluster, table, "", "writer.sealed:3")
        batch, undone = 1, 3
    else:
        run_until_killed(cluster, table, str(tmp_path / "redo"), "writer.prepared:3")
        batch, undone = 2, 0
    committed = [batch + 1] * len(KEYS)

    # Nobody knows that it is gone: its lock is live.
    code, out, err = locks("release", table.name, "etl-1")
    assert (code, out) == (1, "")
    [line] = err.splitlines()
    assert re.search(
        rf"`etl-1` holds columns a of table {table.name} \(epoch 1\) until "
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC, and its job may be running: .* would stop that job "
        r"for good\. .* say --force$",
        line,
    )
    assert record_of(cluster, table, "etl-1").epoch == 1

    assert locks("release", table.name, "etl-1", "--force")[:2] == (
        0,
        f"columns a of table {table.name}, which `etl-1` held, are free; {undone} keys were "
        f"undone; its last committed batch is {batch}, and it may go on after it\n",
    )
    assert values(table) == values(table, isolation="committed") == committed
    record = record_of(cluster, table, "etl-1")
    assert (record.held, record.batch, record.debts) == (False, batch, ())

    # Another one needs to say that it goes on where this one ended; the owner itself does not.
    with pytest.raises(HandoverNeeded, match="last committed by `etl-1`"):
        table.writer(owner_id="etl-2", columns=["a"]).start()
    with table.writer(owner_id="etl-1", columns=["a"]) as again:
        assert not again.write(batch, added())
        assert again.write(batch + 1, added())
    assert values(table) == [batch + 2] * len(KEYS)
    with table.writer(owner_id="etl-2", columns=["a"], handover=True) as other:
        other.write(0, added())
    assert values(table) == [batch + 3] * len(KEYS)


def test_a_job_that_runs_is_stopped_for_good_by_force_only(
    table: RemoteTable, locks: Run, cluster: Cluster
) -> None:
    job = table.writer(owner_id="etl-1", columns=["a"]).start()
    job.write(0, added())
    assert locks("release", table.name, "etl-1")[0] == 1
    job.write(1, added())
    assert locks("release", table.name, "etl-1", "--force")[0] == 0
    with pytest.raises((Fenced, OldEpoch), match="stop for good"):
        job.write(2, added())
    job.close()
    assert values(table) == [2, 2, 2]
    assert record_of(cluster, table, "etl-1").batch == 1


def test_an_expired_lock_is_released_right_away(
    table: RemoteTable, locks: Run, cluster: Cluster
) -> None:
    job = table.writer(owner_id="etl-1", columns=["a"], ttl_ms=2000).start()
    job.write(0, added())
    dies(job, 1)
    assert values(table) == [1001] * 3
    expired(cluster, table, "etl-1")
    assert re.search(
        r" expired with debts +\S+ \S+ UTC +0, .* ago\)$", locks("list", table.name)[1], re.M
    )
    assert locks("release", table.name, "etl-1")[0] == 0
    assert values(table) == [1] * 3


def test_an_abandoned_lock_is_released_right_away_and_with_it_what_it_owes_of_others(
    table: RemoteTable, locks: Run, cluster: Cluster
) -> None:
    first = table.writer(owner_id="etl-1", columns=["a"]).start()
    first.write(0, added())
    dies(first, 1)
    first._held().abandon()
    # The next one takes over, and dies before it has paid.
    second = table.writer(owner_id="etl-2", columns=["a", "b"], handover=True)
    with arm("writer.fenced", interrupt), pytest.raises(KeyboardInterrupt):
        second.start()
    second._held().abandon()
    assert "etl-1" not in locks("list", table.name)[1], "a former owner"
    listed = json.loads(locks("list", table.name, "--all", "--json")[1])
    assert [(one["owner"], one["columns"], one["state"], one["debts"]) for one in listed] == [
        ("etl-1", ["a"], "released", []),
        ("etl-2", ["a", "b"], "abandoned with debts", ["undo of etl-1 (a)"]),
    ]
    code, out, _ = locks("show", table.name, "etl-2")
    assert code == 0
    assert re.search(r"^state +abandoned with debts$", out, re.M)
    assert re.search(r"^debt +undo of etl-1 \(a\)$", out, re.M)
    assert locks("release", table.name, "etl-1")[:2] == (
        0,
        f"`etl-1` holds nothing of table {table.name}; its last committed batch is 0, and it may "
        "go on after it\n",
    )
    assert values(table) == [1001] * 3
    # Its columns are another's, by handover, and it has committed nothing: that is all its own.
    assert locks("release", table.name, "etl-2")[:2] == (
        0,
        f"columns a, b of table {table.name}, which `etl-2` held, are free; 3 keys were undone; it "
        "has committed nothing yet\n",
    )
    assert values(table) == [1] * 3
    with table.writer(owner_id="etl-1", columns=["a"]) as again:
        again.write(1, added())
    assert values(table) == [2] * 3


def test_a_promised_batch_that_another_has_to_keep_is_listed(
    table: RemoteTable, locks: Run, tmp_path: Path
) -> None:
    redo = RedoLog.open(str(tmp_path / "redo"))
    first = table.writer(owner_id="etl-1", columns=["a"], redo=redo).start()
    dies(first, 0, at="writer.prepared")
    first._held().abandon()
    second = table.writer(owner_id="etl-2", columns=["a"], handover=True)
    with arm("writer.fenced", interrupt), pytest.raises(KeyboardInterrupt):
        second.start()
    assert "redo of batch 0 of etl-1 (a)\n" in locks("show", table.name, "etl-2")[1]
    assert locks("release", table.name, "etl-2", "--force")[0] == 0
    assert values(table) == [1000] * 3


def test_a_query_keeps_its_count_and_comes_back_without_a_handover(
    table: RemoteTable, locks: Run, cluster: Cluster
) -> None:
    with table.writer(owner_id="nightly", columns=["a"], query_id="monday") as query:
        query.write(0, added())
        query.write(1, added())
    tuesday = table.writer(owner_id="nightly", columns=["a"], query_id="tuesday", handover=True)
    tuesday.start()
    tuesday.write(0, added())
    dies(tuesday, 1)
    before = record_of(cluster, table, "nightly")
    assert (before.query_id, before.query_start, before.batch) == ("tuesday", 2, 2)
    assert locks("release", table.name, "nightly", "--force")[0] == 0
    after = record_of(cluster, table, "nightly")
    assert (after.query_id, after.query_start, after.batch) == ("tuesday", 2, 2)
    assert after.committed == before.committed
    with table.writer(owner_id="nightly", columns=["a"], query_id="tuesday") as again:
        assert again.batch == 0
        assert not again.write(0, added())
        assert again.write(1, added())
    assert values(table) == [4] * 3


def test_what_an_operator_is_told_of_a_lock_names_its_query(
    table: RemoteTable, locks: Run, cluster: Cluster
) -> None:
    settings = {"query_id": "0ab532e7", "query_name": "nightly load"}
    job = table.writer(owner_id="etl", columns=["a"], **settings).start()
    job.write(0, added())
    query = "query nightly load (0ab532e7)"
    assert "nightly load (0ab532e7)" in locks("show", table.name, "etl")[1]
    code, _, told = locks("release", table.name, "etl")
    assert code == 1
    assert f"`etl`, for {query}, holds columns a of table {table.name} " in told
    with pytest.raises(LockHeld, match=rf"are held by `etl` for {re.escape(query)} until "):
        table.writer(owner_id="other", columns=["a"]).start()
    dies(job, 1)
    released = locks("release", table.name, "etl", "--force")[1]
    assert f"which `etl` held for {query}, are free; " in released
    again = json.loads(locks("release", table.name, "etl", "--json")[1])
    assert (again["query_name"], again["query_id"]) == ("nightly load", "0ab532e7")
    assert f"`etl` for {query} holds nothing" in locks("release", table.name, "etl")[1]
    assert (
        f"has forgotten `etl`, of {query}, whose" in locks("forget", table.name, "etl", "--yes")[1]
    )


def test_columns_that_were_renamed_or_dropped_do_not_matter(
    table: RemoteTable, locks: Run, cluster: Cluster
) -> None:
    job = table.writer(owner_id="etl-1", columns=["a", "b"]).start()
    job.write(0, Rows(data={"k": KEYS, "a": [1, 1, 1], "b": [1, 1, 1]}))
    dies(job, 1)
    table.rename_column("a", "orders")
    table.drop_column("b", force=True)
    assert " orders, #" in locks("list", table.name)[1]
    assert locks("release", table.name, "etl-1", "--force")[0] == 0
    table.refresh()
    assert table.lookup({"k": [1]}, ["orders"]).to_pylist() == [{"k": 1, "orders": 1}]


# --- When something comes between -----------------------------------------------------------------


def test_a_job_that_comes_back_meanwhile_is_left_alone(
    table: RemoteTable, locks: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = table.writer(owner_id="etl-1", columns=["a"]).start()
    dies(job, 0)
    job._held().abandon()
    again = table.writer(owner_id="etl-1", columns=["a"])
    check = releasing._check_releasable

    def and_back(*found: Any, **settings: Any) -> None:
        check(*found, **settings)
        again.start()

    monkeypatch.setattr(releasing, "_check_releasable", and_back)
    code, _, err = locks("release", table.name, "etl-1")
    assert code == 1
    assert "`etl-1` came back, or somebody else released its lock" in err
    again.write(0, added())
    again.close()
    assert values(table) == [1] * 3


def test_a_release_that_is_interrupted_can_be_done_again(
    table: RemoteTable, locks: Run, cluster: Cluster
) -> None:
    job = table.writer(owner_id="etl-1", columns=["a"]).start()
    dies(job, 0)
    with arm("writer.fenced", interrupt):
        code, _, err = locks("release", table.name, "etl-1", "--force")
    assert (code, err) == (130, "tallybook locks release: interrupted\n")
    assert record_of(cluster, table, "etl-1").abandoned
    assert locks("release", table.name, "etl-1")[0] == 0
    assert values(table) == [None] * 3


def test_without_a_server_nothing_is_released_and_no_job_is_stopped(
    local: LocalCluster, locks: Run
) -> None:
    address = chroot(local.zookeeper)
    with session(address) as store:
        coordinator = Coordinator(store)
        lock = coordinator.locks.acquire(
            coordinator.tables.create("lonely", DEFINITION), "etl-1", ["orders"]
        )
        code, _, err = locks("release", "lonely", "etl-1", "--force", "--zookeeper", address)
        assert code == 1
        assert "no tablet server runs" in err
        lock.check()


# --- Names, addresses, and the other commands -----------------------------------------------------


def test_an_owner_is_forgotten_when_it_holds_nothing(table: RemoteTable, locks: Run) -> None:
    job = table.writer(owner_id="etl 1", columns=["a"]).start()
    job.write(0, added())
    code, _, err = locks("forget", table.name, "etl 1")
    assert code == 1
    assert f"`tallybook locks release {table.name} 'etl 1' --force`" in err
    job.close()
    code, out, err = locks("forget", table.name, "etl 1")
    assert (code, out) == (2, "")
    assert "say --yes if it is meant" in err
    code, out, _ = locks("forget", table.name, "etl 1", "--yes")
    assert (code, out) == (
        0,
        f"table {table.name} has forgotten `etl 1`, whose last committed batch was 0\n",
    )
    assert locks("list", table.name)[:2] == (
        0,
        f"nobody holds columns of table {table.name}; --all lists former owners\n",
    )
    assert locks("forget", table.name, "etl 1")[0] == 1


def test_all_tables_are_listed_unless_one_is_named(
    cluster: Cluster, table: RemoteTable, locks: Run
) -> None:
    other = cluster.create_table("visits", SUMS, buckets=1)
    try:
        with (
            table.writer(owner_id="etl-1", columns=["a"]),
            other.writer(owner_id="etl-2", columns=["b"]),
        ):
            _, everything, _ = locks("list")
            _, one, _ = locks("list", "visits")
        assert re.search(
            rf"^{table.name} +etl-1 +- +a +ready +\S+ \S+ UTC +- .* UTC \(in 9 min\)$",
            everything,
            re.M,
        )
        assert re.search(r"^visits +etl-2 +- +b +ready ", everything, re.M)
        assert [line.split()[0] for line in one.splitlines()] == ["TABLE", "visits"]
    finally:
        cluster.drop_table("visits")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("list", "custmers"), r"there is no table custmers; .*; did you mean 'customers_\d+'\?"),
        (("list", "no/table"), r"'no/table' is not a table name"),
        (("release", "TABLE", "etl-2"), r"has no owner `etl-2`; .*: `etl-1`; did you mean 'etl-1'"),
        (("release", "TABLE", "Spark"), r"has no owner `Spark`; its owners are: `etl-1`$"),
        (("forget", "TABLE", "etl1"), r"has no owner `etl1`; .* did you mean 'etl-1'\?"),
        (("forget", "nowhere", "etl-1"), r"there is no table nowhere; the tables are: "),
        (("list", "--zookeeper", "127.0.0.1:x"), r"'127.0.0.1:x' is no address of ZooKeeper"),
        (("list", "--zookeeper", "127.0.0.1:1", "--deadline", "0.2"), "no ZooKeeper at 127.0.0.1:"),
        (("list", "--token-file", "/no/such/file"), "No such file or directory"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(
    table: RemoteTable, locks: Run, words: tuple[str, ...], message: str
) -> None:
    table.writer(owner_id="etl-1", columns=["a"]).start().close()
    named = [table.name if word == "TABLE" else word for word in words]
    code, out, err = locks(*named)
    assert (code, out) == (1, "")
    [line] = err.splitlines()
    assert line.startswith(f"tallybook locks {words[0]}: ")
    assert re.search(message, line)


def test_without_an_address_it_says_where_to_give_it(
    locks: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE)
    code, _, err = locks("list")
    assert code == 1
    assert "give it as --zookeeper, in the variable TALLYBOOK_ZOOKEEPER" in err
    assert cli.main(["status"]) == 1
    assert "give it as --zookeeper, in the variable" in capsys.readouterr().err


def test_the_status_finds_the_cluster_by_the_variable_too(
    local: LocalCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, local.address)
    assert cli.main(["status"]) == 0
    assert str(local.servers[0].address) in capsys.readouterr().out
