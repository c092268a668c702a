"""Connections to servers over a network that is not a loopback device: long ways, lost answers."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from merge_engine import UnknownOutcome
from server.client import Cluster
from server.connections import Access, Broken, Connections
from server.errors import ServerUnavailable
from server.local_cluster import LocalCluster
from tests.conftest import SUMS
from tests.flight_proxy import FlightProxy, lead_through


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


class Silent(flight.FlightServerBase):  # type: ignore[misc]
    """Takes a put to its end and says nothing, as one that was ended right there."""

    def do_put(self, *arguments: Any) -> None:
        _, _, reader, _ = arguments
        reader.read_all()


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
    connections = Connections(Access())
    batch = pa.record_batch({"k": [1]})
    with pytest.raises(Broken, match="without an answer") as raised:
        connections.put(silent, b"{}", batch.schema, [(0, batch)], 10.0)
    assert raised.value.sent
    connections.close()


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
