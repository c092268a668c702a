"""200 scanners on one server, round after round, under writes; most of them are left behind.

`TALLYBOOK_EXAMPLES` makes a longer run.
"""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

from foundation.errors import UnknownOrExpiredScannerError
from foundation.ids import BucketId
from recovery.reader.isolation import Isolation
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.protocol.reads import Scan, ScanBegun
from tests.conftest import schema_of
from tests.fault.cluster_load import client_of, local_cluster, rounds, wait_until_led
from tests.support.zookeeper_server import wait_until

SCHEMA = schema_of(a=(pa.int64(), "sum"), note=(pa.string(), "last_value"))
SCANNERS, ROWS, TTL_S = 200, 4_000, 1.0
MEBIBYTE = 1 << 20
# A round sends 160 MB of rows. What allocators keep of that differs from round to round, by less
# than 10 MB where this was written. A batch kept per scanner that is left behind would be 100 MB in
# each round.
MOST_GROWTH = 64 * MEBIBYTE
OPTIONS = [
    *("--scanner-ttl", str(TTL_S), "--scanners-per-bucket", "200"),
    # Small, so that they are full after the first round.
    *("--block-cache-bytes", str(8 * MEBIBYTE), "--write-buffer-bytes", str(4 * MEBIBYTE)),
]


def test_scanners_that_are_left_behind_are_reaped_and_leave_nothing(tmp_path: Path) -> None:
    with (
        local_cluster(tmp_path, servers=1, options=OPTIONS) as cluster,
        client_of(cluster) as client,
    ):
        table = client.create_table("soak", SCHEMA, buckets=1, column_locks=False)
        wait_until_led(client, table)
        keys = list(range(ROWS))
        table.put({"k": keys, "a": [1] * ROWS, "note": ["z" * 200] * ROWS})
        address = cluster.servers[0].address
        assert address is not None
        resident = []
        with _writing(table) as puts:
            for number in range(rounds(3, 25)):
                before = puts[0]
                _one_round(table, address, random.Random(number))
                wait_until(lambda: _scanners(client) == 0, "all scanners are gone", 30)
                assert puts[0] > before, "nobody could write meanwhile"
                resident.append(_resident_bytes(cluster.servers[0].pid))
        assert table.scan().to_arrow().num_rows == ROWS
        # The first two rounds fill caches and start threads.
        assert max(resident[2:]) < resident[1] + MOST_GROWTH, resident


def _one_round(table: RemoteTable, address: str, chance: random.Random) -> None:
    """Open all scanners the server takes: read to the end, read in part, and not at all."""
    connections = [flight.FlightClient(f"grpc://{address}") for _ in range(8)]
    fates = ["read", "begun", "opened"] * (SCANNERS // 3) + ["opened"] * (SCANNERS % 3)
    chance.shuffle(fates)

    def open_one(at: int) -> None:
        if fates[at] == "read":
            scan = table.scan(["a"])
            try:
                assert sum(batch.num_rows for batch in scan) == ROWS
            except UnknownOrExpiredScannerError:  # It is slow here, and the time to live is short.
                assert table.scan(["a"]).to_arrow().num_rows == ROWS
            return
        stream = connections[at % 8].do_get(flight.Ticket(_scan(table).to_body()))
        assert ScanBegun.from_body(stream.read_chunk().app_metadata).offset > 0
        if fates[at] == "begun":
            stream.read_chunk()
        left_behind.append(stream)

    left_behind: list[Any] = []
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(open_one, range(SCANNERS)))
    # Half of the connections are dropped; the others stay, and nobody reads from them.
    for connection in connections[::2]:
        connection.close()
    assert len(left_behind) == fates.count("begun") + fates.count("opened")
    left_behind.clear()
    for connection in connections[1::2]:
        connection.close()


def _scan(table: RemoteTable) -> Scan:
    return Scan(
        table_id=table.table_id,
        schema_version=table.schema.version,
        bucket=BucketId(0, 0),
        columns=tuple(column.id for column in table.schema.value_columns),
        isolation=Isolation.COMMITTED,
    )


@contextmanager
def _writing(table: RemoteTable) -> Iterator[list[int]]:
    """Put rows that exist all the time; the yielded list has how many puts were done."""
    done, errors, stopping = [0], [], threading.Event()
    chance = random.Random(0)

    def write() -> None:
        try:
            while not stopping.is_set():
                keys = chance.sample(range(ROWS), 100)
                table.put({"k": keys, "a": [1] * 100})
                done[0] += 1
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield done
    finally:
        stopping.set()
        thread.join(180)
    assert errors == []


def _scanners(client: Cluster) -> int:
    [status] = client.status()
    return int(status["metrics"]["tallybook_scanners"])


def _resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024
