"""One table that grows: what an event costs at each size, its peers at ten million rows, and more.

All of it is measured on one table, because loading it is most of the work: the exactly-once writer
on two servers. Beside it on the same servers stands a table that stays as small as it was at first:
both take batches of the same size in turn, so that a machine that slows down does not look like a
table that does.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import numpy as np
import pyarrow as pa

from benchmarks.figure import NO_GOAL, Chart, Figure, Finding, Setting
from benchmarks.latency import latency, put_for
from benchmarks.measure import Pairs, interleave, peak_mib, timed
from benchmarks.peers.ours import Embedded, Writer
from benchmarks.peers.peer import Opening, Work
from benchmarks.peers.race import LOAD_ROWS, Entered, race
from benchmarks.peers.reference import Reference
from benchmarks.side_by_side import (
    CLICKHOUSE,
    DELTA,
    DUCKDB,
    DUCKDB_MERGE,
    FOUR_BUCKETS,
    ONE_BUCKET,
    PEERS,
    POSTGRESQL,
    TWO_SERVERS,
    throughput,
)
from benchmarks.workload import Workload
from server.launch.local_cluster import LocalCluster, LocalServer

_SERVERS = 2
_SOME_KEYS = pa.array(range(1_000))
# What the names of figures call `Setting.sizes`. At first both tables are of one size: how far that
# ratio is from 1 says how noisy the others are.
_LABELS = ("1m", "5m", "10m", "20m")
_OURS: dict[str, Opening] = {
    ONE_BUCKET: Embedded.with_buckets(1),
    FOUR_BUCKETS: Embedded.with_buckets(4),
}


def growing_table(setting: Setting) -> Iterator[Finding]:
    """Cost per event by size, peers at 10 M rows, start of servers, latency, and memory."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(setting.directory / "growing", servers=_SERVERS))
        client = stack.enter_context(cluster.connect(deadline_s=120))
        small, large = (Writer.on(client, name) for name in ("small", "large"))
        stack.callback(small.close)
        stack.callback(large.close)
        small.load(Workload(setting.sizes[0], batch_rows=LOAD_ROWS, string=False).fill())
        table = _Growing(setting, large, small, Reference(setting.sizes[-1]))
        for size in setting.sizes:
            table.grow(size)
            table.measure()
            if size == setting.large_keys:
                yield from _beside_peers(setting, table)
                yield from _starts(cluster, table)
        yield from table.figures()
        table.check()
        work = Workload(table.rows, batch_rows=setting.batch_rows // 10, string=False, seed=3)
        yield from latency(put_for(setting.latency_s, large, work))
        yield _memory(cluster, table)


@dataclass
class _Growing:
    """The table that grows, the one that does not, and what an event has cost them."""

    setting: Setting
    large: Writer
    small: Writer
    reference: Reference
    rows: int = 0
    costs: dict[int, Pairs] = field(default_factory=dict)

    def grow(self, rows: int) -> None:
        """Add rows, until there are so many."""
        for batch in Workload(rows, batch_rows=LOAD_ROWS, string=False).fill(self.rows):
            self.large.upsert(batch)
            self.reference.add(batch)
        self.rows = rows

    def measure(self) -> None:
        """Put batches of random keys into both tables in turn."""
        sizes = (self.rows, self.setting.sizes[0])
        ours, others = (
            Workload(keys, batch_rows=self.setting.batch_rows, string=False, seed=keys)
            for keys in sizes
        )

        def step() -> tuple[float, float]:
            one, other = ours.batch(), others.batch()
            seconds, _ = timed(lambda: self.large.upsert(one))
            small_seconds, _ = timed(lambda: self.small.upsert(other))
            self.reference.add(one)
            return seconds / len(one), small_seconds / len(other)

        step()
        self.costs[self.rows] = interleave(self.setting.runs, self.setting.steps, step)

    def check(self) -> None:
        """Compare some rows with the reference; raises WrongResult."""
        some = np.random.default_rng(4).choice(self.rows, self.setting.batch_rows, replace=False)
        keys = pa.array(some)
        self.reference.check("the table that grows", keys, self.large.read(keys))

    def figures(self) -> Iterator[Finding]:
        """Yield the cost of an event in the largest table over that in the small one, and all."""
        first = self.setting.sizes[0]
        for label, (rows, pairs) in zip(_LABELS, self.costs.items(), strict=True):
            yield pairs.duration(
                f"cost_{label}_vs_1m",
                what=f"time of {self.setting.batch_rows:,}-row batches by the writer on "
                f"{_SERVERS} servers into {rows:,} rows, against {first:,} rows beside them",
                goal="<=2" if label == _LABELS[-1] else NO_GOAL,
            )
        yield Chart(
            name="cost",
            title=f"What an event costs: {self.setting.batch_rows:,}-row batches, random keys",
            unit="µs per event",
            across="rows in the table",
            series={
                "the table that grows": [
                    (rows, median(pairs.ours) * 1e6) for rows, pairs in self.costs.items()
                ],
                f"a table of {first:,} rows beside it": [
                    (rows, median(pairs.baseline) * 1e6) for rows, pairs in self.costs.items()
                ],
            },
        )


def _beside_peers(setting: Setting, table: _Growing) -> Iterator[Finding]:
    """Small batches into the table as it is now, and into peers that have as many rows."""
    work = Work(
        name=f"{table.rows:,} rows",
        keys=table.rows,
        batch_rows=setting.batch_rows // 10,
        turn=setting.steps,
        rounds=setting.runs,
    )
    entered = {TWO_SERVERS: Entered(table.large, table.reference)}
    result = race(setting.directory / "beside", work, PEERS | _OURS, entered)
    yield from result.figure("writer_10m_rows_vs_duckdb", TWO_SERVERS, DUCKDB, goal=">=15")
    yield from result.figure("writer_10m_rows_vs_delta", TWO_SERVERS, DELTA, goal=">=60")
    yield from result.figure("writer_10m_rows_vs_clickhouse", TWO_SERVERS, CLICKHOUSE, goal=">=0.4")
    yield from result.figure("writer_10m_rows_vs_duckdb_merge", TWO_SERVERS, DUCKDB_MERGE)
    yield from result.figure("writer_10m_rows_vs_postgresql", TWO_SERVERS, POSTGRESQL)
    yield from throughput("throughput_10m_rows", [result])


def _starts(cluster: LocalCluster, table: _Growing) -> Iterator[Figure]:
    """Stop, and kill, all servers of a large table, and start them: when do they answer again?"""
    for name, how, end, goal in (
        ("server_start_10m_rows_s", "were stopped", LocalServer.stop, "<5"),
        ("server_start_after_kill_10m_rows_s", "were killed", LocalServer.kill, NO_GOAL),
    ):
        for server in cluster.servers:
            end(server)
        seconds, found = timed(partial(_start, cluster, table))
        table.reference.check("a server that has started", _SOME_KEYS, found)
        yield Figure(
            name=name,
            what=f"from the start of {_SERVERS} servers that {how}, with {table.rows:,} rows, to "
            f"the answer to a look-up of {len(_SOME_KEYS):,} keys (one run; a process takes about "
            "a second to import what it needs, and sessions of those that were killed end after "
            "four)",
            ours=f"{seconds:.1f} s",
            baseline="-",
            value=seconds,
            goal=goal,
        )


def _start(cluster: LocalCluster, table: _Growing) -> pa.Table:
    for server in cluster.servers:
        server.start()
    return table.large.read(_SOME_KEYS)


def _memory(cluster: LocalCluster, table: _Growing) -> Figure:
    """The largest resident size that the servers and ZooKeeper have had up to now."""
    servers = [peak_mib(server.pid) for server in cluster.servers]
    zookeeper = peak_mib(cluster.zookeeper.pid)
    return Figure(
        name="server_memory_20m_rows_mib",
        what=f"peak memory of a server, the larger of {_SERVERS}, for {table.rows:,} rows in all, "
        f"after all of the above (ZooKeeper: {zookeeper:,.0f} MiB)",
        ours=" + ".join(f"{mib:,.0f}" for mib in servers) + " MiB",
        baseline="-",
        value=max(servers),
        goal="<1024",
    )
