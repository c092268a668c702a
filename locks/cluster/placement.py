"""Which server should lead which bucket: a function of the live servers, the same everywhere."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

# Per server and partition, 8 bytes per bucket: 40 MB if all are of tables with 10,000 buckets.
_KEPT_HASHES = 512

Hashes = npt.NDArray[np.uint64]


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
    # A row for each bucket. What a server that is full would have had is set to nothing in the
    # rows of the buckets to come, so that the highest that is left is always the answer.
    hashes = np.stack([_hashes(table_id, partition, buckets, one) for one in servers], axis=1)
    best = hashes.argmax(axis=1)
    share, larger_shares = divmod(buckets, len(servers))
    load = np.zeros(len(servers), np.int64)
    placed = []
    for number in range(buckets):
        chosen = int(best[number])
        placed.append(servers[chosen])
        load[chosen] += 1
        larger_shares -= int(load[chosen]) > share
        if load[chosen] < share:
            continue
        full = load >= share + (larger_shares > 0)
        # Once the last of the larger shares is given, all that have a smaller one are full.
        if full[chosen]:
            _leave_out(hashes[number + 1 :], best[number + 1 :], full)
    return tuple(placed)


def _leave_out(hashes: Hashes, best: npt.NDArray[np.intp], full: npt.NDArray[np.bool_]) -> None:
    """Choose again for those buckets whose best server is full."""
    rows = np.flatnonzero(full[best])
    best[rows] = np.where(full, np.uint64(0), hashes[rows]).argmax(axis=1)


@lru_cache(maxsize=_KEPT_HASHES)
def _hashes(table_id: int, partition: int, buckets: int, server: str) -> Hashes:
    """Return the hashes of each bucket with a server: kept, since others come and go."""
    name = server.encode()
    keys = [bucket + name for bucket in _names(table_id, partition, buckets)]
    hashes = np.array(list(map(xxhash.xxh3_64_intdigest, keys)), np.uint64)
    hashes.flags.writeable = False
    return hashes


@lru_cache(maxsize=1)
def _names(table_id: int, partition: int, buckets: int) -> list[bytes]:
    return [b"%d-%d-%d " % (table_id, partition, number) for number in range(buckets)]
