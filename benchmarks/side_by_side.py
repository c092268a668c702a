"""Tallybook and its peers with the same batches, on many keys and on few."""

import os
from collections.abc import Iterator, Sequence

from benchmarks.figure import NO_GOAL, Chart, Figure, Finding, Setting
from benchmarks.peers.clickhouse import ClickHouse
from benchmarks.peers.delta import Delta
from benchmarks.peers.duckdb import DuckDB
from benchmarks.peers.ours import Embedded, Writer
from benchmarks.peers.peer import Opening, Work
from benchmarks.peers.postgresql import PostgreSQL
from benchmarks.peers.race import Result, race

DUCKDB, DUCKDB_MERGE, DELTA = "DuckDB upsert", "DuckDB MERGE", "delta-rs MERGE"
CLICKHOUSE, POSTGRESQL = "ClickHouse, merged later", "PostgreSQL upsert"
ONE_BUCKET, FOUR_BUCKETS = "ours, embedded, 1 bucket", "ours, embedded, 4 buckets"
ONE_SERVER, TWO_SERVERS = "ours, writer, 1 server", "ours, writer, 2 servers"
PEERS: dict[str, Opening] = {
    DUCKDB: DuckDB.upsert_by_key,
    DUCKDB_MERGE: DuckDB.merge,
    DELTA: Delta,
    CLICKHOUSE: ClickHouse,
    POSTGRESQL: PostgreSQL,
}
_OURS: dict[str, Opening] = {
    ONE_BUCKET: Embedded.with_buckets(1),
    FOUR_BUCKETS: Embedded.with_buckets(4),
    ONE_SERVER: Writer.on_servers(1),
    TWO_SERVERS: Writer.on_servers(2),
}


def side_by_side(setting: Setting) -> Iterator[Finding]:
    """Batches into many keys, where rows are found and stored; and few, where they are folded."""
    many = Work(
        name=f"{setting.keys:,} keys",
        keys=setting.keys,
        batch_rows=setting.batch_rows,
        turn=3 * setting.steps,
        rounds=setting.runs,
    )
    few = Work(
        name=f"{setting.small_keys:,} keys",
        keys=setting.small_keys,
        batch_rows=setting.batch_rows,
        turn=4 * setting.steps,
        rounds=setting.runs,
    )
    on_many = race(setting.directory / "many", many, PEERS | _OURS)
    yield from on_many.figure("writer_1m_keys_vs_duckdb", TWO_SERVERS, DUCKDB, goal=">=1.5")
    yield from on_many.figure("writer_1m_keys_vs_clickhouse", TWO_SERVERS, CLICKHOUSE, goal=">=0.5")
    yield from _others(on_many, "1m_keys", (DUCKDB_MERGE, DELTA, POSTGRESQL))
    yield from _two_servers(on_many)
    on_few = race(setting.directory / "few", few, PEERS | _OURS)
    yield from on_few.figure("writer_10k_keys_vs_duckdb", TWO_SERVERS, DUCKDB, goal=">=0.8")
    yield from on_few.figure("embedded_10k_keys_vs_duckdb", ONE_BUCKET, DUCKDB, goal=">=1.2")
    yield from on_few.figure("four_buckets_vs_one_10k_keys", FOUR_BUCKETS, ONE_BUCKET, goal=">=1")
    yield from _others(on_few, "10k_keys", (DUCKDB_MERGE, DELTA, CLICKHOUSE, POSTGRESQL))
    yield from throughput("throughput", [on_many, on_few])


def _others(result: Result, label: str, peers: Sequence[str]) -> Iterator[Figure]:
    """Yield our writer beside those for whom there is no goal."""
    for who in peers:
        yield from result.figure(f"writer_{label}_vs_{_FIGURES[who]}", TWO_SERVERS, who)


_FIGURES = {
    DUCKDB_MERGE: "duckdb_merge",
    DELTA: "delta",
    CLICKHOUSE: "clickhouse",
    POSTGRESQL: "postgresql",
}


def _two_servers(result: Result) -> Iterator[Figure]:
    cores = os.cpu_count() or 1
    alone = cores > 2
    note = (
        f"; {cores} cores, of which the client has one to itself"
        if alone
        else f"; {cores} cores, which two servers and the client share: no goal here"
    )
    goal = ">=1.6" if alone else NO_GOAL
    yield from result.figure("two_servers_vs_one", TWO_SERVERS, ONE_SERVER, goal=goal, note=note)


def throughput(name: str, results: Sequence[Result]) -> Iterator[Finding]:
    """Yield who was left out, and the events per second of all others as bars."""
    for result in results:
        yield from result.skipped
    everybody = dict.fromkeys(who for result in results for who in result.seconds)
    yield Chart(
        name=name,
        title=f"Events folded into a table, in batches of {results[0].work.batch_rows:,}",
        unit="events/s",
        series={
            who: [(r.work.name, r.rate(who)) for r in results if who in r.seconds]
            for who in everybody
        },
    )
