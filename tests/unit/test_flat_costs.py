"""What a change of the cluster costs a server does not depend on how many servers there are.

The servers are those of `benchmarks/scale`: real but for their data. What they ask the store for,
and what it tells them, is counted, never timed. `docs/scale.md` has the figures of large clusters.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.scale.counting import Counts
from benchmarks.scale.simulated import NoDataHosting, SimulatedServer
from foundation.ids import BucketId, LeadKey
from locks.cluster.placement import place
from locks.coordinator import Coordinator
from locks.store.memory import MemoryCoordination
from server.protocol.definitions import define, evolved
from server.tablet.config import HandOverConfig
from server.tablet.openings import OPEN_AT_ONCE
from tests.conftest import SUMS
from tests.support.buckets import ADDED
from tests.support.zookeeper_server import wait_until

FEW, MANY = 4, 16
BUCKETS = 64
DEADLINE_S = 30.0


class Crowd:
    """Servers in one process, which looks for them; a `Peers`."""

    def __init__(self) -> None:
        self.memory = MemoryCoordination()
        self.outside = Coordinator(self.memory.connect())
        self.servers: dict[str, SimulatedServer] = {}

    def join(self) -> SimulatedServer:
        """Let one more server join; it does not look yet."""
        address = f"127.0.0.1:{1000 + len(self.servers)}"
        server = SimulatedServer(
            self.memory.connect(), address, self, config=HandOverConfig(settle_s=3600.0)
        )
        self.servers[address] = server
        return server

    def ask(self, address: str, key: LeadKey, session: str, timeout_s: float) -> str | None:
        assert timeout_s > 0
        return self.servers[address].leadership.hand_over(key, session)

    def look(self) -> None:
        """Let all look once, and open what they have taken. Nothing moves: they do not settle."""
        for server in self:
            server.leadership.reconcile()
            assert server.leadership.wait(DEADLINE_S), "it does not end"

    def misplaced(self, server: SimulatedServer) -> int:
        """Return how many buckets a server should lead that another one does, and asks about."""
        addresses = [one.address for one in self.outside.servers.members().candidates]
        placed = place(1, 0, BUCKETS, addresses)
        led = {key.bucket.number for key in server.hosting.led() if key.table_id == 1}
        ours = {number for number, address in enumerate(placed) if address == server.address}
        return len(ours - led)

    def __iter__(self) -> Iterator[SimulatedServer]:
        return iter(list(self.servers.values()))


@contextmanager
def crowd_of(count: int) -> Iterator[Crowd]:
    crowd = Crowd()
    try:
        crowd.outside.tables.create("sums", define(SUMS, BUCKETS, column_locks=True, options={}))
        for _ in range(count):
            crowd.join()
        crowd.look()
        assert sum(len(server.hosting.led()) for server in crowd) == BUCKETS
        yield crowd
    finally:
        for server in crowd:
            server.close()


def nothing(_: Crowd) -> None:
    """All look again, as they do every second."""


def a_server_joins(crowd: Crowd) -> None:
    crowd.outside.servers.register("127.0.0.1:1")


def a_server_stands_aside(crowd: Crowd) -> None:
    server = crowd.outside.servers.register("127.0.0.1:1")
    crowd.outside.servers.stand_aside(server, "it is leaving")


def a_table_is_altered(crowd: Crowd) -> None:
    table = crowd.outside.tables.get("sums")
    crowd.outside.alter_table(table, evolved(table.definition, ADDED[-1]))


def a_partition_is_created(crowd: Crowd) -> None:
    crowd.outside.partitions.create(crowd.outside.tables.get("sums"), b"1")


def a_table_is_created(crowd: Crowd) -> None:
    crowd.outside.tables.create("more", define(SUMS, 1, column_locks=True, options={}))


def a_lead_is_given_up_and_taken(crowd: Crowd) -> None:
    server = next(server for server in crowd if server.hosting.led())
    [key, *_] = server.hosting.led()
    server.coordinator.leaders.give_up(server.server, [key])
    server.coordinator.leaders.take(server.server, [key])


def a_batch_is_committed(crowd: Crowd) -> None:
    lock = crowd.outside.locks.acquire(crowd.outside.tables.get("sums"), "etl", ["a"])
    ends = {BucketId(0, number): 1 for number in range(BUCKETS)}
    sessions = [server.server.name for server in crowd]
    lock.ready(ends, sessions)
    lock.commit(0, ends, sessions)


def cost_of(change: Callable[[Crowd], None], servers: int) -> Counts:
    """Return what a change costs the server that it costs most, when all have looked.

    But for a read of each lead that should be its and is another's: these are its own share.
    """
    with crowd_of(servers) as crowd:
        before = {server.address: server.store.counts for server in crowd}
        change(crowd)
        crowd.look()
        spent = [
            server.store.counts - before[server.address] - Counts(reads=crowd.misplaced(server))
            for server in crowd
        ]
        return max(spent, key=lambda one: (one.requests + one.events, one.bytes))


@pytest.mark.parametrize(
    ("change", "most"),
    [
        pytest.param(nothing, Counts(), id="nothing"),
        pytest.param(a_batch_is_committed, Counts(), id="a batch is committed"),
        pytest.param(a_server_joins, Counts(reads=1, listings=2, events=1), id="a server joins"),
        pytest.param(
            a_server_stands_aside, Counts(reads=2, listings=2, events=2), id="a server stands aside"
        ),
        pytest.param(a_table_is_altered, Counts(reads=2, events=1), id="a table is altered"),
        pytest.param(a_partition_is_created, Counts(reads=2, events=1), id="a partition"),
        # Three of the reads, and the transaction, are for the bucket, of who has to lead it.
        pytest.param(
            a_table_is_created,
            Counts(reads=5, listings=1, transactions=1, events=3),
            id="a table is created",
        ),
        pytest.param(
            a_lead_is_given_up_and_taken,
            Counts(reads=1, transactions=2),
            id="a lead is given up and taken",
        ),
    ],
)
def test_a_change_costs_a_server_the_same_among_few_and_many(
    change: Callable[[Crowd], None], most: Counts
) -> None:
    few, many = cost_of(change, FEW), cost_of(change, MANY)
    assert replace(few, bytes=0, syncs=0) == most
    assert replace(many, bytes=0, syncs=0) == most


def test_leads_that_wait_to_be_opened_are_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a server with much to open would ask for all of it, every second, until it is done."""
    go_on = threading.Event()
    begun: list[LeadKey] = []
    real = NoDataHosting.open

    def slow(hosting: NoDataHosting, key: LeadKey, *sources: Any) -> None:
        begun.append(key)
        assert go_on.wait(DEADLINE_S)
        real(hosting, key, *sources)

    monkeypatch.setattr(NoDataHosting, "open", slow)
    crowd = Crowd()
    crowd.outside.tables.create("sums", define(SUMS, BUCKETS, column_locks=True, options={}))
    server = crowd.join()
    server.leadership.reconcile()
    wait_until(lambda: len(begun) == OPEN_AT_ONCE, "as many to be opened as are at once")
    before = server.store.counts
    server.leadership.reconcile()
    assert server.store.counts == before
    go_on.set()
    assert server.leadership.wait(DEADLINE_S)
    assert len(server.hosting.led()) == BUCKETS
    server.close()
