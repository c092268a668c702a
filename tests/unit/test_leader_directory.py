"""Where a client looks for the leaders of buckets."""

from foundation.ids import BucketId, LeadKey
from locks.cluster.placement import place
from locks.coordinator import Coordinator
from locks.store.memory import MemoryCoordination
from server.client.leader_directory import LeaderDirectory

BUCKETS = 8


def test_the_guess_is_the_placement_on_the_servers_that_were_last_seen() -> None:
    memory = MemoryCoordination()
    coordinator = Coordinator(memory.connect())
    directory = LeaderDirectory(lambda: coordinator)
    addresses: list[str] = []
    for number in range(1, 4):
        addresses.append(f"127.0.0.1:{number}")
        Coordinator(memory.connect()).servers.register(addresses[-1])
        directory.refresh()
        for partition in (0, 1):
            assert guesses(directory, partition) == place(1, partition, BUCKETS, addresses)


def guesses(directory: LeaderDirectory, partition: int) -> tuple[str, ...]:
    keys = [LeadKey(1, BucketId(partition, number)) for number in range(BUCKETS)]
    return tuple(directory.address_of(key, BUCKETS) for key in keys)
