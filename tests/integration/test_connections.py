"""Connections to servers over a network that is not a loopback device: long ways, lost answers."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from foundation.errors import ServerUnavailable, UnknownOutcome
from foundation.ids import BucketId
from merge_engine.bucket.segment import AggMode
from server.client import connections
from server.client.cluster import Cluster
from server.client.connections import Broken, Connections, ServerCredentials
from server.launch.local_cluster import LocalCluster
from server.protocol import wire
from server.protocol.calls import Status
from server.protocol.puts import GO_ON, Put, read_put
from tests.conftest import SUMS
from tests.support.flight_proxy import FlightProxy, lead_through
from tests.support.zookeeper_server import wait_until


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


class Silent(flight.FlightServerBase):  # type: ignore[misc]
    """Takes a put to its end and says nothing, as one that was ended right there."""

    def do_put(self, *arguments: Any) -> None:
        _, descriptor, reader, writer = arguments
        call = read_put(wire.decode(descriptor.command))
        if isinstance(call, Put) and call.holds_end:
            writer.write(GO_ON)
        reader.read_all()


class Leaving(flight.FlightServerBase):  # type: ignore[misc]
    """Ends every put before it has taken it on, as a server that is being stopped may."""

    def do_put(self, *_: Any) -> None:
        """Return without a word."""


@pytest.fixture
def silent() -> Iterator[str]:
    with Silent("grpc://127.0.0.1:0") as server:
        yield f"127.0.0.1:{server.port}"


def test_a_server_a_fifth_of_a_second_away_can_be_reached(
    local: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = local.servers[0].address
    assert address is not None
    with FlightProxy(address, delay_s=0.2) as proxy:
        lead_through(monkeypatch, address, proxy)
        with local.connect(deadline_s=20.0) as cluster:
            table = cluster.create_table("far", SUMS, column_locks=False)
            table.put({"k": [1, 2], "a": [5, 6]})
            assert table.lookup({"k": [2]}, ["a"]).column("a").to_pylist() == [6]


def test_a_put_that_ends_without_an_answer_may_have_been_carried_out(silent: str) -> None:
    connections = Connections(ServerCredentials())
    batch = pa.record_batch({"k": [1]})
    call = Put(
        table_id=1,
        schema_version=1,
        buckets={BucketId(0, 0): None},
        mode=AggMode.ACCUMULATE,
        owner="",
    )
    for held in (replace(call, holds_end=True), call):
        sent = held.holds_end
        with pytest.raises(Broken, match="without an answer") as raised:
            connections.put(
                silent, held, batch.schema, [(Put.place(0), batch)], 10.0, holds_end=sent
            )
        assert raised.value.sent
    connections.close()


def test_a_put_that_breaks_before_the_server_took_it_on_is_sent_again(
    local: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one without a token: it is certain that nothing was written."""
    with Leaving("grpc://127.0.0.1:0") as server, local.connect() as cluster:
        table = cluster.create_table("left", SUMS, column_locks=False)
        directory = cluster.calls.directory
        addresses = iter([f"127.0.0.1:{server.port}"])
        address_of = directory.address_of
        monkeypatch.setattr(
            directory, "address_of", lambda *key: next(addresses, None) or address_of(*key)
        )
        table.put({"k": [1], "a": [1]})
        assert next(addresses, None) is None, "the other one was asked first"
        assert table.lookup({"k": [1]}, ["a"]).column("a").to_pylist() == [1]


def test_who_put_without_a_token_is_told_that_the_outcome_is_unknown(
    local: LocalCluster, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local.connect() as cluster:
        table = cluster.create_table("silent", SUMS, column_locks=False)
        _send_to(silent, cluster, monkeypatch)
        with pytest.raises(UnknownOutcome, match="whether the rows were written is not known"):
            table.put({"k": [1], "a": [1]})


def _send_to(address: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.calls.directory, "address_of", lambda *_: address)


def test_a_server_that_hangs_is_not_waited_for_beyond_the_deadline(
    local: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf, local.connect(deadline_s=1.0) as cluster:
        table = cluster.create_table("deaf", SUMS, column_locks=False)
        _send_to(f"127.0.0.1:{deaf.getsockname()[1]}", cluster, monkeypatch)
        began = time.monotonic()
        with pytest.raises(ServerUnavailable):
            table.lookup({"k": [1]})
        assert time.monotonic() - began < 5  # One attempt alone may take 10 s.


def test_a_server_that_said_nothing_is_asked_again_with_less_patience_and_then_with_more(
    local: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_FIRST_PATIENCE_S", 0.05)
    waits: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        calls = Connections(ServerCredentials())
        waiting = calls._waiting

        def noted(timeout_s: float) -> flight.FlightCallOptions:
            waits.append(timeout_s)
            return waiting(timeout_s)

        monkeypatch.setattr(calls, "_waiting", noted)
        for _ in range(5):
            with pytest.raises(Broken):
                calls.call(f"127.0.0.1:{deaf.getsockname()[1]}", Status(), 0.3)
        assert waits == [0.3, 0.05, 0.1, 0.2, 0.3]
        address = local.servers[0].address
        assert address is not None
        calls._patience_s[address] = 20.0
        calls.call(address, Status(), 30.0)
        calls.call(address, Status(), 30.0)
        assert waits[-2:] == [20.0, 30.0], "it has answered"
        calls.close()


def test_a_wait_counts_though_another_had_dropped_the_connection_meanwhile() -> None:
    """As an exchange does that ends: it says little, and what waits on says more."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        calls = Connections(ServerCredentials())
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(calls.call, address, Status(), 1.0)
            wait_until(lambda: address in calls._clients, "it is being called")
            calls._drop(address, calls._clients[address], waited=False)
            assert isinstance(asked.exception(), Broken)
        assert calls._patience_s == {address: 1.0}
        calls.close()
