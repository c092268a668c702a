"""Overload, endless streams, and the end of servers and clients: whole puts or none of them."""

import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import (
    BatchTooLarge,
    Overloaded,
    Retryable,
    ServerUnavailable,
    TallybookError,
    UnknownOutcome,
)
from foundation.ids import Token
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from recovery.leader.fenced_writers import Writer
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.client.writer_access import RemoteAccess
from server.launch.local_cluster import LocalCluster
from server.protocol import wire
from server.tablet.limits import Limits
from server.tablet.tablet_server import TabletServer
from tests.support.raw_flight import (
    ROWS,
    SCHEMA,
    JsonLog,
    Stranger,
    client_of,
    held_put,
    json_log,
    running,
)
from tests.support.zookeeper_server import chroot, wait_until, zookeeper_server

MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedZooKeeper]:
    with zookeeper_server(tmp_path_factory.mktemp("limits")) as server:
        yield server


@dataclass(frozen=True)
class Small:
    """A server that takes one put, or very few bytes, at a time."""

    address: str
    server: TabletServer
    cluster: Cluster
    table: RemoteTable
    stranger: Stranger
    log: JsonLog

    def metric(self, name: str) -> float:
        return float(self.server.status()["metrics"][f"tallybook_{name}"])


@pytest.fixture
def small(
    request: pytest.FixtureRequest, zookeeper: EmbeddedZooKeeper, tmp_path: Path
) -> Iterator[Small]:
    """Return a server with the limits that the test is given."""
    address = chroot(zookeeper)
    with ExitStack() as stack:
        log = stack.enter_context(json_log())
        server = stack.enter_context(
            running(address, tmp_path, limits=request.param, metrics_port=0)
        )
        cluster = stack.enter_context(client_of(address))
        table = cluster.create_table("t", SCHEMA, buckets=2, column_locks=False)
        table.put({"k": list(range(100)), "a": [0] * 100})
        stranger = stack.enter_context(closing(Stranger(server.address, table)))
        yield Small(address, server, cluster, table, stranger, log)


def rows(count: int, value: int = 1) -> pa.RecordBatch:
    """Return as many rows with the keys from 0."""
    return pa.record_batch([pa.array(range(count)), pa.array([value] * count)], schema=ROWS)


ONE_PUT = Limits(max_puts=1)
FEW_BYTES = Limits(max_bytes_in_flight=20_000)


@pytest.mark.parametrize(
    ("small", "words"),
    [(ONE_PUT, r"1 puts are under way.*--max-puts"), (FEW_BYTES, "bytes are in flight, near the")],
    indirect=["small"],
    ids=["puts", "bytes"],
)
def test_a_server_at_its_limit_refuses_and_clients_come_back(small: Small, words: str) -> None:
    threads, puts = 6, 4
    with (
        ThreadPoolExecutor(threads) as pool,
        client_of(small.address, deadline_s=0.3) as hasty,
    ):
        with held_put(small.stranger, rows(1_200)):
            wait_until(lambda: small.metric("bytes_in_flight") > 0, "the put is held")
            message = _refusal(hasty, words)
            assert "no leader took the call within 0.3 s" in message
            assert "nothing was written, try again" in message
            written = [
                pool.submit(lambda: [small.table.put(rows(100)) for _ in range(puts)])
                for _ in range(threads)
            ]
            before = small.metric("calls_refused_for_load")
            wait_until(lambda: small.metric("calls_refused_for_load") > before, "one is refused")
        for future in written:
            assert len(future.result(timeout=180)) == puts
    found = small.table.lookup({"k": list(range(100))}).column("a").to_pylist()
    assert found == [threads * puts] * 100
    assert small.metric("bytes_in_flight") == small.metric("puts_in_flight") == 0


def _refusal(hasty: Cluster, words: str) -> str:
    """Return what a client reads whose deadline is short; it may pass in the middle of a call."""
    for batch in range(1, 21):
        with pytest.raises(ServerUnavailable) as refused:
            hasty.table("t").put(rows(100), owner="hasty", token=Token(1, batch))
        if re.search(words, str(refused.value)):
            return str(refused.value)
    raise AssertionError(f"no refusal says {words!r}")


@pytest.mark.parametrize("small", [FEW_BYTES], indirect=True)
def test_look_ups_count_as_bytes_in_flight(small: Small) -> None:
    with client_of(small.address, deadline_s=0.3) as hasty, held_put(small.stranger, rows(1_200)):
        wait_until(lambda: small.metric("bytes_in_flight") > 0, "the put is held")
        with pytest.raises(Retryable, match="--max-bytes-in-flight"):
            hasty.table("t").lookup({"k": list(range(1_000))})
        assert hasty.table("t").lookup({"k": [1]}).num_rows == 1


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(TallybookError, match="max_puts is 0; a server needs at least 1"):
        Limits(max_puts=0)


# --- Memory -------------------------------------------------------------------------------------


def _memory_mebibytes(pid: int, field: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("local")
    options = ["--max-bytes-in-flight", str(40 * MEBIBYTE)]
    with LocalCluster(directory, session_timeout_s=5, options=options) as cluster:
        with cluster.connect() as client:
            table = client.create_table("t", SCHEMA, buckets=1, column_locks=False)
            table.put({"k": [1], "a": [1]})
        yield cluster


@pytest.fixture
def process(local: LocalCluster) -> Iterator[tuple[RemoteTable, Stranger, int]]:
    """Return a table, a stranger, and the process that serves both."""
    [server] = local.servers
    assert server.address is not None
    with local.connect() as client:
        table = client.table("t")
        with closing(Stranger(server.address, table)) as stranger:
            yield table, stranger, server.pid


def test_a_put_without_end_is_cut_at_the_limit(
    process: tuple[RemoteTable, Stranger, int],
) -> None:
    table, stranger, pid = process
    batch = pa.record_batch({"k": [1], "note": ["x" * MEBIBYTE]})
    sent = 0

    def endless() -> Iterator[tuple[pa.RecordBatch, bytes]]:
        nonlocal sent
        for sent in range(2_000):  # noqa: B007
            yield batch, b"0"

    ends, before = table.end_offsets(), _memory_mebibytes(pid, "VmRSS")
    with pytest.raises(BatchTooLarge, match="put_max_bytes"):
        stranger.put(wire.encode(stranger.put_fields()), endless(), batch.schema)
    # 64 MiB are the limit of a put; the rest is what was on its way.
    assert sent < 150
    assert _memory_mebibytes(pid, "VmHWM") - before < 160
    assert table.end_offsets() == ends


def test_open_puts_hold_no_more_than_the_bytes_in_flight_however_many_come(
    process: tuple[RemoteTable, Stranger, int],
) -> None:
    table, stranger, _ = process
    batch, count = pa.record_batch({"k": [1], "note": ["x" * (8 * MEBIBYTE)]}), 20
    with ExitStack() as stack:
        refused = _metric(stranger, "calls_refused_for_load")
        for _ in range(count):
            writer, _ = stranger.begin(wire.encode(stranger.put_fields()), batch.schema)
            stack.callback(_close, writer)
            writer.write_with_metadata(batch, b"0")
        wait_until(
            lambda: _metric(stranger, "calls_refused_for_load") == refused + count - 4,
            "all but four of them are refused",
        )
        assert _metric(stranger, "puts_in_flight") == 4
        assert 32 * MEBIBYTE < _metric(stranger, "bytes_in_flight") <= 40 * MEBIBYTE
        assert table.lookup({"k": [1]}).num_rows == 1


def test_an_announced_put_is_refused_before_anything_of_it_is_read(
    process: tuple[RemoteTable, Stranger, int],
) -> None:
    _, stranger, _ = process
    batch = pa.record_batch({"k": [1], "note": ["x" * (30 * MEBIBYTE)]})
    with held_put(stranger, batch):
        wait_until(lambda: _metric(stranger, "bytes_in_flight") > 0, "the put is held")
        command = wire.encode(stranger.put_fields(bytes=20 * MEBIBYTE))
        with pytest.raises(Overloaded, match="--max-bytes-in-flight"):
            stranger.put(command, [])
    with pytest.raises(BatchTooLarge, match="put_max_bytes"):
        stranger.put(wire.encode(stranger.put_fields(bytes=1 << 40)), [])


def _close(writer: Any) -> None:
    with suppress(pa.ArrowException):  # It was refused, or is cut short.
        writer.close()


def _metric(stranger: Stranger, name: str) -> float:
    answer = wire.decode(stranger.action("status", b"")).to_dict()
    return float(answer["metrics"][f"tallybook_{name}"])


# --- The end of clients and servers -------------------------------------------------------------

HALF_A_PUT = """
import sys
import pyarrow as pa
from server.client.cluster import connect
from tests.support.raw_flight import Stranger, wire

table = connect(sys.argv[1]).table("t")
stranger = Stranger(sys.argv[2], table)
writer, _ = stranger.begin(wire.encode(stranger.put_fields()))
writer.write_with_metadata(pa.record_batch({"k": [1], "a": [1_000_000]}), b"0")
print("sent", flush=True)
sys.stdin.read()
"""


def test_nothing_is_stored_of_a_client_that_is_killed_in_the_middle_of_a_put(
    local: LocalCluster, process: tuple[RemoteTable, Stranger, int]
) -> None:
    table, _, _ = process
    [server] = local.servers
    ends, row = table.end_offsets(), table.lookup({"k": [1]}).to_pylist()

    def in_flight() -> float:
        with local.connect() as client:
            [status] = client.status()
        return float(status["metrics"]["tallybook_puts_in_flight"])

    command = [sys.executable, "-c", HALF_A_PUT, local.address, str(server.address)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"sent\n"
        wait_until(lambda: in_flight() == 1, "the put has arrived")
        client.send_signal(signal.SIGKILL)
    wait_until(lambda: in_flight() == 0, "the put has ended")
    assert table.end_offsets() == ends
    assert table.lookup({"k": [1]}).to_pylist() == row
    assert "refused a put from ipv4:127.0.0.1" in server.log_path.read_text()


def test_a_put_during_a_graceful_stop_is_whole_or_refused(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path
) -> None:
    address, size = chroot(zookeeper), 100
    outcomes: dict[int, str] = {}
    enough, stopped = threading.Event(), threading.Event()

    def put(table: RemoteTable, first: int) -> None:
        for number in range(first, 1 << 20, 4):
            if stopped.is_set():
                return
            keys = list(range(number * size, (number + 1) * size))
            try:
                table.put({"k": keys, "a": [1] * size})
                outcomes[number] = "written"
            except Retryable:
                outcomes[number] = "refused"
            except UnknownOutcome:
                outcomes[number] = "unknown"
            if len(outcomes) > 20:
                enough.set()

    server = running(address, tmp_path).start()
    with client_of(address, deadline_s=0.5) as client, ThreadPoolExecutor(4) as pool:
        with client_of(address) as patient:
            table = patient.create_table("t", SCHEMA, buckets=4, column_locks=False)
            table.put({"k": [-1], "a": [1]})
        putting = [pool.submit(put, client.table("t"), first) for first in range(4)]
        try:
            assert enough.wait(180)
            server.stop()
            wait_until(lambda: "refused" in set(outcomes.values()), "puts are refused")
        finally:
            stopped.set()
            server.stop()
        for future in putting:
            future.result(timeout=180)
    with running(address, tmp_path), client_of(address) as client:
        table = client.table("t")
        for number, outcome in sorted(outcomes.items()):
            keys = list(range(number * size, (number + 1) * size))
            found = set(table.lookup({"k": keys}).column("a").to_pylist())
            allowed: dict[str, list[set[int | None]]] = {
                "written": [{1}],
                "refused": [{None}],
                "unknown": [{1}, {None}],
            }
            assert found in allowed[outcome], f"put {number} was {outcome}"


def test_a_client_that_never_ends_its_put_does_not_keep_a_server(
    zookeeper: EmbeddedZooKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.tablet.tablet_server._STOP_DEADLINE_S", 0.2)
    monkeypatch.setattr("server.tablet.tablet_server._CLOSE_DEADLINE_S", 0.2)
    address = chroot(zookeeper)
    with ExitStack() as stack:
        log = stack.enter_context(json_log())
        client = stack.enter_context(client_of(address, create=True))
        server = running(address, tmp_path).start()
        table = client.create_table("t", SCHEMA, buckets=1, column_locks=False)
        table.put({"k": [1], "a": [1]})
        stranger = stack.enter_context(closing(Stranger(server.address, table)))
        writer, _ = stranger.begin(wire.encode(stranger.put_fields()))
        writer.write_with_metadata(rows(1), b"0")
        wait_until(
            lambda: server.status()["metrics"]["tallybook_puts_in_flight"] == 1, "it is held"
        )
        server.stop()
        messages = [line["message"] for line in log.lines]
        assert "puts are still under way after 0.2 s" in messages
        assert "calls are still open after 0.2 s; leaving them" in messages
        with pytest.raises((pa.ArrowException, OSError)):
            writer.close()
    with running(address, tmp_path), client_of(address) as client:
        assert client.table("t").lookup({"k": [0, 1]}).column("a").to_pylist() == [None, 1]


# --- Metrics ------------------------------------------------------------------------------------

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\})? ([0-9.e+-]+|\+Inf|NaN)')
NOT_YET = {"call": "put", "error": "NotLeader"}
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def parse(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Parse Prometheus' text format; every sample belongs to the family announced before it."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    families: list[str] = []
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert kind in ("counter", "gauge", "histogram")
            assert family not in families
            families.append(family)
            continue
        found = SAMPLE.fullmatch(line)
        assert found is not None, line
        name, labels, value = found.groups()
        assert name.startswith(families[-1])
        key = name, frozenset(LABEL.findall(labels or ""))
        assert key not in samples
        samples[key] = float(value)
    return samples


@pytest.mark.parametrize("small", [Limits()], indirect=True)
def test_the_metrics_are_what_was_done(small: Small) -> None:
    small.table.put({"k": [1, 2, 3, 3], "a": [1, 1, 1, 1]})
    small.table.lookup({"k": list(range(50))})
    with pytest.raises(TallybookError):
        small.stranger.action("nonsense", b"")
    with urllib.request.urlopen(f"http://{small.server.metrics_address}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    samples = parse(text)

    def value(name: str, **labels: str) -> float:
        return samples[f"tallybook_{name}", frozenset(labels.items())]

    assert value("rows_total", table="t") == 104
    assert value("keys_changed_total", table="t") == 103
    assert value("keys_looked_up_total", table="t") == 50
    assert value("bytes_total", table="t") > 104 * 16
    # The first put may have come before the server had heard of the table.
    refused = samples.get(("tallybook_errors_total", frozenset(NOT_YET.items())), 0)
    assert value("call_seconds_count", call="put") == 2 + refused
    assert value("call_seconds_count", call="lookup") == 1
    assert value("call_seconds_bucket", call="put", le="+Inf") == 2 + refused
    assert 0 < value("call_seconds_sum", call="put") < 60
    assert value("errors_total", call="unknown", error="BadRequest") == 1
    assert value("buckets_led") == 2
    ends = small.table.end_offsets()
    for bucket, end in ends.items():
        name = str(bucket)
        assert value("log_end_offset", bucket=name, table="t") == end
    [status] = small.cluster.status()
    shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name, number in status["metrics"].items():
        if 'call="ends"' not in name:  # Asked for since.
            assert float(shown[name]) == number, name


@pytest.mark.parametrize("small", [Limits()], indirect=True)
def test_the_metrics_and_the_status_show_the_owners(small: Small) -> None:
    table = small.cluster.create_table("locked", SCHEMA, buckets=1)
    lock = small.cluster.coordinator.locks.acquire(table.definition.table, 'etl "1"', ["a"])
    access = RemoteAccess(small.cluster, table)
    access.fence(Writer(lock.owner, lock.epoch), lock.columns, table.bucket_ids())
    [name] = [name for name in small.server.status()["metrics"] if "owner_epoch" in name]
    assert name.startswith('tallybook_owner_epoch{bucket="')
    assert name.endswith('owner="etl \\"1\\"",table="locked"}')
    assert small.metric(name.removeprefix("tallybook_")) == lock.epoch
    [status] = small.cluster.status()
    owners = [bucket["owners"] for bucket in status["buckets"] if bucket["table"] == "locked"]
    assert owners == [{'etl "1"': lock.epoch}]


@pytest.mark.parametrize("small", [Limits()], indirect=True)
def test_other_paths_than_metrics_are_not_found(small: Small) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as missing:
        urllib.request.urlopen(f"http://{small.server.metrics_address}/../etc/passwd")
    missing.value.close()
