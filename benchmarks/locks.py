"""Commits of a column lock, against ZooKeeper alone writing the same bytes."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np
from kazoo.client import KazooClient

from benchmarks.figure import Figure, Setting
from benchmarks.measure import interleave, timed
from foundation.ids import BucketId
from locks.catalog.definitions import TableDefinition
from locks.column_locks.record_codec import encode_record
from locks.coordinator import Coordinator
from locks.encoding.offsets import Offsets
from locks.store.embedded_zookeeper import EmbeddedZooKeeper
from locks.store.zookeeper import ZooKeeperStore

_OWNERS = 50
_COMMITS = 50


def lock_commits(setting: Setting) -> Iterator[Figure]:
    """Commit batches over 16 and over 10,000 buckets, beside bare `set` of the same records."""
    with EmbeddedZooKeeper(setting.directory / "zookeeper") as zookeeper:
        for label, buckets in (("16", 16), ("10k", 10_000)):
            yield from _commits(setting, zookeeper.address, label, buckets)


def _commits(setting: Setting, address: str, label: str, buckets: int) -> Iterator[Figure]:
    random = np.random.default_rng(buckets)
    ends = random.integers(1_000_000, 2_000_000, buckets)
    bare = KazooClient(address)
    bare.start()
    with closing(ZooKeeperStore(f"{address}/commits-{label}")) as store:
        coordinator = Coordinator(store)
        server = coordinator.servers.register("127.0.0.1:1")
        table = coordinator.tables.create(
            "customers",
            TableDefinition(
                schema="{}", columns={"orders": 2}, key_columns=("id",), buckets=buckets
            ),
        )
        lock = coordinator.locks.acquire(table, "etl-1", ["orders"])
        ids = [BucketId(0, number) for number in range(buckets)]
        lock.ready(dict(zip(ids, ends.tolist(), strict=True)), [server.name])
        path = f"/bare-{label}"
        bare.create(path, encode_record(lock.record))

        def step() -> tuple[float, float]:
            ours = theirs = 0.0
            for _ in range(_COMMITS):
                ends[:] += random.integers(0, 1_000, buckets)
                offsets = Offsets(dict(zip(ids, ends.tolist(), strict=True)))
                batch = lock.batch + 1
                ours += timed(partial(lock.commit, batch, offsets, [server.name]))[0]
                theirs += timed(partial(bare.set, path, encode_record(lock.record)))[0]
            return ours / _COMMITS, theirs / _COMMITS

        step()
        pairs = interleave(setting.runs, setting.steps, step)
        size = len(encode_record(lock.record))
    bare.stop()
    bare.close()
    yield pairs.speed(
        f"commit_{label}_buckets_ratio",
        what=f"commits of a lock over {buckets:,} buckets, a server's session checked in the same "
        "transaction, against bare kazoo `set` of the same bytes",
        unit="commits",
        goal=">=0.8",
    )
    yield Figure(
        name=f"lock_record_{label}_buckets_bytes",
        what=f"size of a lock record of {buckets:,} buckets; {_OWNERS} owners of a table take "
        f"{_OWNERS * size:,} bytes, each in a node of its own",
        ours=f"{size:,} bytes",
        baseline="1 MB at most",
        value=size,
    )
