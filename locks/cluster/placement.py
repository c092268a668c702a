"""Which server should lead which bucket: a function of the live servers, the same everywhere."""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import xxhash


def place(table_id: int, partition: int, buckets: int, servers: Iterable[str]) -> tuple[str, ...]:
    """Return the address of each bucket's server, by bucket number; none if there are no servers.

    Rendezvous hashing with a bound: each bucket goes to the server with the highest hash of both,
    among those that do not have their share of the partition's buckets yet. So four buckets on two
    servers are two on each, on three servers two, one and one; and few move when one comes or goes.
    """
    return _place(table_id, partition, buckets, tuple(sorted(set(servers))))


@lru_cache(maxsize=10_000)
def _place(
    table_id: int, partition: int, buckets: int, servers: tuple[str, ...]
) -> tuple[str, ...]:
    if not servers:
        return ()
    share, larger_shares = divmod(buckets, len(servers))
    load: Counter[str] = Counter()
    placed = []
    for number in range(buckets):
        bucket = f"{table_id}-{partition}-{number} ".encode()
        most = share + (larger_shares > 0)
        free = [server for server in servers if load[server] < most]
        best = max(free, key=lambda server: xxhash.xxh3_64_intdigest(bucket + server.encode()))
        load[best] += 1
        larger_shares -= load[best] > share
        placed.append(best)
    return tuple(placed)
