"""Leads that many servers want at the same time, as when a large cluster starts."""

from collections.abc import Sequence

import pytest

from foundation.ids import BucketId, LeadKey
from locks.coordinator import Coordinator
from locks.store.base import Create, Operation
from locks.store.memory import MemoryCoordination

KEYS = [LeadKey(1, BucketId(0, number)) for number in range(64)]
SMALL = 8


def test_a_server_gets_most_of_what_is_free_though_others_are_faster_at_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = MemoryCoordination()
    ours, theirs = Coordinator(memory.connect()), Coordinator(memory.connect())
    server = ours.servers.register("127.0.0.1:1")
    faster = theirs.servers.register("127.0.0.1:2")
    real = ours.store.transact
    transactions: list[int] = []

    def transact(operations: Sequence[Operation]) -> None:
        """Somebody takes the first of many that we are about to take; of few it comes too late."""
        wanted = [one.path for one in operations if isinstance(one, Create)]
        transactions.append(len(wanted))
        if len(wanted) > SMALL:
            [first] = [key for key in KEYS if wanted[0].endswith(f"/{key.node_name}")]
            theirs.leaders.take(faster, [first])
        real(operations)

    monkeypatch.setattr(ours.store, "transact", transact)
    taken = ours.leaders.take(server, KEYS)
    assert len(taken) > len(KEYS) / 2
    assert len(transactions) < len(KEYS) / 2
    leaders = theirs.leaders.all()
    assert sorted(leaders) == KEYS
    assert [key for key in KEYS if leaders[key] == server.name] == taken


def test_many_leads_are_found_by_one_listing_where_most_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = Coordinator(MemoryCoordination().connect())
    server = coordinator.servers.register("127.0.0.1:1")
    coordinator.leaders.take(server, KEYS)
    many = [LeadKey(1, BucketId(partition, 0)) for partition in range(1000)]
    read: list[str] = []
    real = coordinator.store.read_many

    def read_many(paths: Sequence[str]) -> object:
        read.extend(paths)
        return real(paths)

    monkeypatch.setattr(coordinator.store, "read_many", read_many)
    assert coordinator.leaders.holders([*many, *KEYS[1:]]) == dict.fromkeys(KEYS, server.name)
    assert len(read) == len(KEYS)
