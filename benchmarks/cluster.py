"""Servers: puts and look-ups through Flight, and a leader that dies."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.bare import BareDatabase, stored_rows
from benchmarks.figure import Figure, Setting
from benchmarks.measure import Pairs, interleave, timed
from benchmarks.workload import Workload, open_bucket
from foundation.ids import BucketId, LeadKey
from merge_engine.bucket.bucket import Bucket
from merge_engine.storage.objects import LocalStorage
from recovery.embedded.table import Table
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster

_BUCKETS = 4
_LOOKUP_KEYS = 10_000
_SESSION_S = 2.0


def flight_puts(setting: Setting) -> Iterator[Figure]:
    """Puts through one server, over the embedded table."""
    directory = setting.directory / "flight_puts"
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    with ExitStack() as stack:
        one = _table(stack, directory / "one", work, servers=1)
        embedded = stack.enter_context(
            Table.create(directory / "embedded", work.schema, buckets=_BUCKETS)
        )
        for batch in work.fill():
            for table in (one, embedded):
                table.put(batch)

        def over_embedded() -> tuple[float, float]:
            batch = work.batch()
            seconds, _ = timed(lambda: one.put(batch))
            embedded_seconds, _ = timed(lambda: embedded.put(batch))
            return seconds / len(batch), embedded_seconds / len(batch)

        yield interleave(setting.runs, setting.steps, over_embedded).speed(
            "put_through_flight_ratio",
            what=f"put of {setting.batch_rows:,} rows into {setting.keys:,} keys of a table with "
            f"{_BUCKETS} buckets on one server, against the same table embedded",
            unit="rows",
            goal=">=0.8",
        )


def flight_lookups(setting: Setting) -> Iterator[Figure]:
    """Look-ups of many keys over RocksDB's multi-get."""
    directory = setting.directory / "flight_lookups"
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    bucket = open_bucket(directory / "bucket", work.history)
    bare = BareDatabase(directory / "bare")
    random = np.random.default_rng(1)
    with ExitStack() as stack:
        table = _table(stack, directory / "cluster", work, servers=1)
        for batch in work.fill():
            bare.write(*stored_rows(bucket, bucket.put(batch)))
            table.put(batch)
        bare.flush()
        bucket.close()

        def many() -> tuple[float, float]:
            keys = pa.record_batch({"key": random.integers(0, setting.keys, _LOOKUP_KEYS)})
            row_keys = work.history.row_keys(work.history.key_codec.encode(keys.columns))
            seconds, _ = timed(lambda: table.lookup(keys))
            bare_seconds, _ = timed(lambda: bare.read(row_keys))
            return seconds / _LOOKUP_KEYS, bare_seconds / _LOOKUP_KEYS

        many()
        yield interleave(2 * setting.runs, 2 * setting.steps, many).speed(
            "flight_lookup_10k_keys_ratio",
            what=f"look-up of {_LOOKUP_KEYS:,} of {setting.keys:,} keys through Flight, against a "
            "multi-get of RocksDB alone",
            unit="keys",
            goal=">=0.6",
        )
        bare.close()


def failover(setting: Setting) -> Iterator[Figure]:
    """A leader of half the table is killed: how long until the other serves all of it."""
    directory = setting.directory / "failover"
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    with ExitStack() as stack:
        cluster = stack.enter_context(
            LocalCluster(directory / "cluster", servers=2, session_timeout_s=_SESSION_S)
        )
        client = stack.enter_context(cluster.connect(deadline_s=300))
        table = client.create_table("bench", work.schema, buckets=_BUCKETS, column_locks=False)
        for batch in work.fill():
            table.put(batch)
        victim = cluster.servers[0]
        lost = [key for key in table.bucket_ids() if _address(client, table, key) == victim.address]
        keys = {"key": list(range(1000))}
        before = table.lookup(keys)
        os.kill(victim.pid, signal.SIGKILL)
        while victim.address in {server.address for server in client.coordinator.servers.all()}:
            time.sleep(0.01)
        seconds, after = timed(lambda: table.lookup(keys))
        if not after.equals(before):
            raise AssertionError("what was acknowledged was lost")
        replay_seconds = _replay(directory, work, table, lost)
    yield Pairs([seconds], [replay_seconds]).duration(
        "failover_vs_replay",
        what=f"from the end of a killed leader's session to the first look-up in all its buckets "
        f"({len(lost)} of {_BUCKETS}, {setting.keys:,} rows in all), over the time that replaying "
        "their logs takes in one process",
    )


def _replay(directory: Path, work: Workload, table: RemoteTable, keys: list[BucketId]) -> float:
    """Return how long it takes to open copies of these buckets without their views."""

    def open_copy(key: BucketId) -> Bucket:
        copy = directory / "replay" / str(key.number)
        return Bucket(
            LocalStorage(copy), copy.with_suffix(".view"), work.history, identity="replay"
        )

    for key in keys:
        logs = directory / "cluster" / "logs" / table.definition.path(key)
        shutil.copytree(logs, directory / "replay" / str(key.number))
    with ThreadPoolExecutor(len(keys) or 1) as pool:
        seconds, buckets = timed(lambda: list(pool.map(open_copy, keys)))
    for bucket in buckets:
        bucket.close()
    return seconds


def _address(client: Cluster, table: RemoteTable, key: BucketId) -> str | None:
    leader = client.coordinator.leaders.leader_of(LeadKey(table.table_id, key))
    servers = {server.name: server.address for server in client.coordinator.servers.all()}
    return servers.get(leader or "")


def _table(stack: ExitStack, directory: Path, work: Workload, *, servers: int) -> RemoteTable:
    cluster = stack.enter_context(LocalCluster(directory, servers=servers))
    client = stack.enter_context(cluster.connect())
    return client.create_table("bench", work.schema, buckets=_BUCKETS, column_locks=False)
