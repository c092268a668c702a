"""Handles on tables that were dropped or truncated: each call says so, and none waits for a leader.

The client's deadline is short, so that a call that does wait fails as one that found no leader.
"""

import asyncio
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tallybook as tb
from foundation.errors import Fenced, TallybookError, UnknownTable
from foundation.ids import Token
from merge_engine.schema.builder import SchemaBuilder
from server.client.remote_table import RemoteTable
from tests.support.zookeeper_server import wait_until

DEADLINE_S = 4.0
KEY = {"p": ["a"], "k": [1]}
ROW = {**KEY, "v": [1]}
Act = Callable[[RemoteTable, tb.Cut], object]

CALLS: dict[str, Act] = {
    "lookup": lambda table, _: table.lookup(KEY),
    "lookup, committed": lambda table, _: table.lookup(KEY, isolation="committed"),
    "lookup, found": lambda table, _: table.lookup(KEY, found=True),
    "lookup, at": lambda table, cut: table.lookup(KEY, at=cut),
    "lookup_async": lambda table, _: asyncio.run(table.lookup_async(KEY)),
    "put": lambda table, _: table.put(ROW),
    "put with a token": lambda table, _: table.put(ROW, owner="o", token=Token(1, 7)),
    "delete": lambda table, _: table.delete(KEY),
    "undo": lambda table, _: table.undo("o", ["v"], {tb.BucketId(0, 0): 0}),
    "scan": lambda table, _: table.scan().to_arrow(),
    "scan, latest": lambda table, _: table.scan(isolation="latest").to_arrow(),
    "scan, limit": lambda table, _: table.scan(limit=1).to_arrow(),
    "scan, at": lambda table, cut: table.scan(at=cut).to_arrow(),
    "scan, iterated": lambda table, cut: list(table.scan(at=cut)),
    "scan, log": lambda table, _: table.scan(source=tb.ScanSource.LOG).to_arrow(),
    "changes": lambda table, cut: table.changes(cut).to_arrow(),
    "changes, of all": lambda table, _: table.changes().to_arrow(),
    "changes, iterated": lambda table, cut: list(table.changes(cut, cut)),
    "changelog": lambda table, _: list(table.changelog(tb.BucketId(0, 0))),
    "cut": lambda table, _: table.cut(),
    "end_offsets": lambda table, _: table.end_offsets(),
    "snapshot": lambda table, _: table.snapshot(),
    "snapshots": lambda table, _: table.snapshots(),
    "lease_latest": lambda table, _: table.lease_latest("l"),
    "describe": lambda table, _: table.describe(),
    "add_column": lambda table, _: table.add_column("w", "BIGINT", "sum"),
}


def schema_of(*, partitioned: bool) -> tb.Schema:
    builder = SchemaBuilder().column("p", "STRING").column("k", "BIGINT")
    builder.agg_column("v", "BIGINT", "sum").primary_key("p", "k")
    return (builder.partitioned_by("p") if partitioned else builder).build()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tb.LocalCluster]:
    with tb.LocalCluster(tmp_path_factory.mktemp("dropped"), servers=2) as running:
        yield running


@pytest.fixture(scope="module")
def client(local: tb.LocalCluster) -> Iterator[tb.Cluster]:
    with local.connect() as connected:
        yield connected


@pytest.fixture(scope="module")
def other(local: tb.LocalCluster) -> Iterator[tb.Cluster]:
    """Another client, which does not know what the first one does."""
    with tb.connect(local.address, deadline_s=DEADLINE_S) as connected:
        yield connected


@pytest.fixture(scope="module", params=["plain", "partitioned"])
def partitioned(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "partitioned")


@pytest.fixture(scope="module", params=["dropped", "truncated"])
def gone(
    request: pytest.FixtureRequest, client: tb.Cluster, other: tb.Cluster, partitioned: bool
) -> tuple[RemoteTable, tb.Cut]:
    """A handle of the other client on what is no more, and a cut of that."""
    name = f"{request.param}_{partitioned}"
    schema = schema_of(partitioned=partitioned)
    table = client.create_table(name, schema, buckets=2, column_locks=False)
    table.put({"p": ["a", "b"], "k": [1, 2], "v": [1, 1]})
    handle = other.table(name)
    assert handle.lookup(KEY)["v"].to_pylist() == [1]
    cut = handle.cut()
    if request.param == "dropped":
        client.drop_table(name)
    else:
        table.truncate()
        table.put({**KEY, "v": [77]})
    wait_until(lambda: handle.table_id not in led_tables(client), "servers let go of it")
    return handle, cut


def led_tables(client: tb.Cluster) -> set[int]:
    """Return the ids of the tables whose buckets servers lead."""
    return {bucket["table_id"] for server in client.status() for bucket in server["buckets"]}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_says_so_at_once(gone: tuple[RemoteTable, tb.Cut], call: str) -> None:
    table, cut = gone
    if call == "changelog" and table.schema.partition_by:
        pytest.skip("it is of a partition, which there is no more: PartitionGone is as good")
    with pytest.raises(UnknownTable, match="was dropped"):
        CALLS[call](table, cut)


def test_a_copy_of_the_handle_in_another_process_does(gone: tuple[RemoteTable, tb.Cut]) -> None:
    with pickle.loads(pickle.dumps(gone[0])) as table, pytest.raises(UnknownTable):
        table.lookup(KEY)


def test_the_name_is_that_of_the_table_in_its_place(
    other: tb.Cluster, gone: tuple[RemoteTable, tb.Cut]
) -> None:
    name = gone[0].name
    if name.startswith("dropped"):
        with pytest.raises(UnknownTable, match="there is no table"):
            other.table(name)
    else:
        assert other.table(name).lookup(KEY)["v"].to_pylist() == [77]


@pytest.mark.parametrize("truncated", [False, True])
def test_writers_scans_and_leases_that_are_open_end(
    client: tb.Cluster, other: tb.Cluster, partitioned: bool, truncated: bool
) -> None:
    name = f"held_{partitioned}_{truncated}"
    table = client.create_table(name, schema_of(partitioned=partitioned), buckets=2)
    handle = other.table(name)
    writer = handle.writer(owner_id="w", columns=["v"], deadline_s=DEADLINE_S).start()
    writer.write(0, tb.Rows(data={"p": ["a"] * 9, "k": list(range(9)), "v": [1] * 9}))
    scan, cut = handle.scan(), handle.cut()
    lease = handle.lease_latest("mine", renew=False)
    if truncated:
        table.truncate(force=True)
    else:
        client.drop_table(name, force=True)
    wait_until(lambda: handle.table_id not in led_tables(client), "servers let go of it")
    ends: dict[str, Callable[[], Any]] = {
        "write": lambda: writer.write(1, tb.Rows(data=ROW)),
        "scan": scan.to_arrow,
        "changes": lambda: handle.changes(cut, cut).to_arrow(),
        "start": lambda: handle.writer(owner_id="v", columns=["v"]).start(),
        "lease": lambda: handle.lease_latest("mine"),
    }
    for what, end in ends.items():
        with pytest.raises(TallybookError, match="was dropped") as told:
            end()
        assert isinstance(told.value, UnknownTable | Fenced), what
    # Snapshots that are leased stay as long as the lease.
    source = tb.ScanSource.SNAPSHOT
    assert handle.scan(source=source, lease=lease, at=cut).to_arrow().num_rows == 9
    lease.drop()
    writer.close()
