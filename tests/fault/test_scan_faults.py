"""Scans while connections break, leaders move, servers die and ZooKeeper is away.

Every row comes exactly once. At a cut that is so whatever happens; without one, a scan whose leader
goes says that it is to be begun again.
`TALLYBOOK_EXAMPLES` makes a longer run; a failure prints its seed.
"""

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import UnknownOrExpiredScannerError
from foundation.ids import BucketId
from recovery.reader.table_scan import RowStream
from server.client.bucket_rows import BucketRows
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster, LocalServer
from server.tablet.limits import ScannerLimits
from server.tablet.tablet_server import TabletServer
from tests.conftest import schema_of
from tests.fault.cluster_load import (
    ATTEMPT_S,
    leaders,
    noted,
    paused,
    rounds,
    wait_until_led,
)
from tests.support.flight_proxy import FlightProxy, lead_through
from tests.support.raw_flight import client_of, running
from tests.support.zookeeper_server import chroot, wait_until, zookeeper_server

SCHEMA = schema_of(a=(pa.int64(), "sum"), note=(pa.string(), "last_value"))
# More than goes over the wire before anybody reads it, so that a scan can be met in the middle.
WIDE_ROWS, WIDE = 200, "x" * 200_000
_numbers = count()


def fill_wide(table: RemoteTable) -> dict[int, int]:
    """Fill a table with rows that take many batches; return what a scan has to show.

    The table is a patient client's: a put of so much takes long on a slow machine.
    """
    for start in range(0, WIDE_ROWS, 50):
        keys = list(range(start, start + 50))
        table.put({"k": keys, "a": keys, "note": [WIDE] * 50})
    return {key: key for key in range(WIDE_ROWS)}


def values_of(batches: list[pa.RecordBatch]) -> dict[int, int]:
    keys = [key for batch in batches for key in batch["k"].to_pylist()]
    assert len(set(keys)) == len(keys), "a row came twice"
    sums = [value for batch in batches for value in batch["a"].to_pylist()]
    return dict(zip(keys, sums, strict=True))


# --- Connections --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TabletServer]]:
    """Run a server in this process; return ZooKeeper's address, too."""
    directory = tmp_path_factory.mktemp("scans")
    with ExitStack() as stack:
        address = chroot(stack.enter_context(zookeeper_server(directory)))
        # A scanner whose very first word is lost with the connection counts until it expires.
        limits = ScannerLimits(max_per_bucket=100)
        yield address, stack.enter_context(running(address, directory / "server", scanners=limits))


@pytest.mark.parametrize("seed", range(rounds(4)))
def test_a_connection_that_breaks_again_and_again_gives_every_row_once(
    seed: int, server: tuple[str, TabletServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    zookeeper, running_server = server
    keys = list(range(3_000))
    sizes = [chance.randrange(1, 200_000) for _ in range(6)]
    batch_rows = chance.choice([10, 100, 1_000])
    monkeypatch.setattr("server.tablet.scanning._MOST_BATCH_ROWS", batch_rows)
    with ExitStack() as stack:
        stack.enter_context(noted(seed))(f"batches of {batch_rows} rows, cuts after {sizes} bytes")
        writer = stack.enter_context(client_of(zookeeper))
        table = writer.create_table(f"cut-{next(_numbers)}", SCHEMA, buckets=2, column_locks=False)
        table.put({"k": keys, "a": [7] * len(keys), "note": ["y" * 300] * len(keys)})
        proxy = stack.enter_context(FlightProxy(running_server.address))
        lead_through(monkeypatch, running_server.address, proxy)
        reader = stack.enter_context(client_of(zookeeper))
        for whole in (False, True):
            scan = reader.table(table.name).scan(isolation=chance.choice(["committed", "latest"]))
            proxy.cut_after(*sizes)
            batches = []
            for batch in scan.to_arrow().to_batches() if whole else scan:
                batches.append(batch)
                if not whole and len(batches) < 20:
                    _take_out_and_put_back(table, chance.sample(keys, 10))
            assert values_of(batches) == dict.fromkeys(keys, 7)
            assert proxy.cuts > 1


def _take_out_and_put_back(table: RemoteTable, keys: list[int]) -> None:
    table.delete({"k": keys})
    table.put({"k": keys, "a": [7] * len(keys)})


def test_a_scan_is_taken_up_at_its_server_also_when_zookeeper_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        zookeeper = stack.enter_context(zookeeper_server(tmp_path))
        address = chroot(zookeeper)
        there = stack.enter_context(running(address, tmp_path / "server"))
        proxy = stack.enter_context(FlightProxy(there.address))
        lead_through(monkeypatch, there.address, proxy)
        client = stack.enter_context(client_of(address, deadline_s=60.0))
        table = client.create_table("t", SCHEMA, buckets=1, column_locks=False)
        expected = fill_wide(table)
        scan = iter(table.scan())
        found = [next(scan)]
        zookeeper.kill()
        # Several times in a row. Who asks ZooKeeper at once where the leader is waits for long,
        # and the server leaves the cluster meanwhile.
        proxy.cut_after(1, 1, 1)
        proxy.cut()
        found += scan
        assert values_of(found) == expected
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(lambda: table.scan().to_arrow())
            zookeeper.start()
            assert values_of(later.result(180).to_batches()) == expected


# --- Leaders ------------------------------------------------------------------------------------


@pytest.fixture
def table(client: Cluster) -> RemoteTable:
    return client.create_table(f"scans-{next(_numbers)}", SCHEMA, buckets=4, column_locks=False)


@pytest.fixture
def one_bucket(client: Cluster) -> RemoteTable:
    """Create a table whose only bucket takes many batches."""
    name = f"scans-{next(_numbers)}"
    table = client.create_table(name, SCHEMA, buckets=1, column_locks=False)
    wait_until_led(client, table)
    return table


def leader_of(cluster: LocalCluster, client: Cluster, table: RemoteTable) -> LocalServer:
    [address] = leaders(client, table).values()
    [leader] = [server for server in cluster.servers if server.address == address]
    return leader


def open_rows(table: RemoteTable, bucket: BucketId) -> RowStream:
    """Open a bucket's scanner; not a row has come when this returns."""
    rows = table.scan(buckets=[bucket], isolation="latest")._open_rows(bucket, None)
    assert rows.offset > 0
    return rows


@pytest.mark.parametrize("how", ["stop", "kill", "kill and start"])
def test_a_leader_that_goes_in_the_middle_of_a_scan_ends_it_unless_it_is_at_a_cut(
    how: str, cluster: LocalCluster, client: Cluster, patient: Cluster, one_bucket: RemoteTable
) -> None:
    # Where a connection breaks, nobody has to lose patience.
    table = patient.table(one_bucket.name)
    expected = fill_wide(table)
    leader = leader_of(cluster, client, table)
    seen, at_a_cut = iter(table.scan(isolation="latest")), iter(table.scan())
    first, begun = next(seen), [next(at_a_cut)]
    table.put({"k": [*range(0, WIDE_ROWS, 2), -1], "a": [1] * (WIDE_ROWS // 2 + 1)})
    table.delete({"k": list(range(1, WIDE_ROWS, 4))})
    now = values_of(table.scan(["a"]).to_arrow().to_batches())
    unseen = open_rows(table, BucketId(0, 0))
    # As if its connection had broken before the first row was here.
    unseen._stream = None  # type: ignore[attr-defined]
    if how == "stop":
        leader.stop()
    else:
        leader.kill()
    if how == "kill and start":
        leader.start()
    with pytest.raises(UnknownOrExpiredScannerError, match="begin the scan again"):
        # What was on its way still comes.
        _read_to_the_end(seen, at_most=WIDE_ROWS - first.num_rows)
    if how == "kill and start":  # It gets the bucket back: not while the next one is read.
        wait_until(lambda: [*leaders(client, table).values()] == [leader.address], "it leads again")
    # The next leader has later rows, and shows those of the cut, from where the last one ended.
    assert values_of([*begun, *at_a_cut]) == expected
    # Nobody has seen a row of this one: it begins again by itself, behind the new leader's mark.
    before = unseen.offset
    assert values_of(list(unseen)) == now
    assert unseen.offset > before
    assert values_of(table.scan().to_arrow().to_batches()) == now


def test_a_leader_that_hangs_is_left_for_the_next_one(
    cluster: LocalCluster, client: Cluster, patient: Cluster, one_bucket: RemoteTable
) -> None:
    expected = fill_wide(patient.table(one_bucket.name))
    leader = leader_of(cluster, client, one_bucket)
    seen, at_a_cut = iter(one_bucket.scan(isolation="latest")), iter(one_bucket.scan())
    first, begun = next(seen), [next(at_a_cut)]
    with paused(leader.pid):
        with pytest.raises(UnknownOrExpiredScannerError, match="leads the bucket by now"):
            _read_to_the_end(seen, at_most=WIDE_ROWS - first.num_rows)
        assert values_of([*begun, *at_a_cut]) == expected
        assert values_of(one_bucket.scan().to_arrow().to_batches()) == expected


def test_a_reader_who_takes_longer_than_a_stream_lasts_gets_every_row_once(
    patient: Cluster, one_bucket: RemoteTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fill_wide(patient.table(one_bucket.name))
    resumed: list[BucketRows] = []
    resume = BucketRows._resume

    def counted(rows: BucketRows) -> None:
        resumed.append(rows)
        resume(rows)

    monkeypatch.setattr(BucketRows, "_resume", counted)
    batches = []
    for batch in one_bucket.scan():
        batches.append(batch)
        if len(resumed) < 2:
            _let_pass(1.2 * ATTEMPT_S)
    assert values_of(batches) == expected
    assert len(resumed) > 1


def _let_pass(seconds: float) -> None:
    until = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > until, "some time passes")


def _read_to_the_end(batches: Iterator[pa.RecordBatch], at_most: int) -> None:
    assert sum(batch.num_rows for batch in batches) < at_most


def test_rows_that_are_taken_whole_come_while_leaders_move(
    cluster: LocalCluster, client: Cluster, patient: Cluster, table: RemoteTable
) -> None:
    wait_until_led(client, table, cluster.servers)
    expected = fill_wide(patient.table(table.name))
    stopping = threading.Event()
    isolations = cycle(["committed", "latest"])
    counted = []

    def read() -> None:
        while not stopping.is_set():
            scan = table.scan(isolation=next(isolations))
            assert values_of(scan.to_arrow().to_batches()) == expected
            assert scan.cut or scan.offsets.keys() == set(table.bucket_ids())
            counted.append(1)

    def more_scans(number: int) -> None:
        wanted = len(counted) + number
        wait_until(lambda: reading.done() or len(counted) >= wanted, "more scans", 60)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            for server, end in zip(cluster.servers, ("stop", "kill"), strict=True):
                more_scans(1)
                getattr(server, end)()
                more_scans(2)
                server.start()
                cluster.wait_until_joined()
                more_scans(2)
        finally:
            stopping.set()
        reading.result(180)


def test_scanners_do_not_keep_a_bucket_from_moving_there_and_back(
    cluster: LocalCluster, client: Cluster, patient: Cluster, table: RemoteTable
) -> None:
    stays, comes = cluster.servers
    comes.stop()
    wait_until_led(client, table, [stays])
    expected = fill_wide(patient.table(table.name))
    began = len(stays.log_path.read_text())
    for _ in range(2):
        held: list[Any] = []
        for bucket in table.bucket_ids():
            scan = iter(table.scan(buckets=[bucket]))
            next(scan)
            held += [scan, open_rows(table, bucket)]  # One half read, one never.
        comes.start()
        cluster.wait_until_joined()
        wait_until_led(client, table, cluster.servers)
        comes.stop()
        wait_until_led(client, table, [stays])
        assert values_of(table.scan().to_arrow().to_batches()) == expected
        for scan in held:
            scan.close()
    log = stays.log_path.read_text()[began:]
    assert "handed bucket" in log
    assert "cannot be opened" not in log, log
    comes.start()


# --- ZooKeeper ----------------------------------------------------------------------------------


def test_a_scan_goes_on_while_zookeeper_is_away(
    cluster: LocalCluster, patient: Cluster, one_bucket: RemoteTable
) -> None:
    expected = fill_wide(patient.table(one_bucket.name))
    scan = iter(one_bucket.scan())
    found = [next(scan)]
    cluster.zookeeper.kill()
    try:
        found += scan
    finally:
        cluster.zookeeper.start()
    assert values_of(found) == expected
    assert values_of(one_bucket.scan().to_arrow().to_batches()) == expected
