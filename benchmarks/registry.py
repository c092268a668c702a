"""All benchmarks, in the order in which they run. A new one is a function, and a line here."""

from benchmarks.backfill import backfill, backfill_recovery, puts_beside_backfill
from benchmarks.cluster import failover, flight_lookups, flight_puts
from benchmarks.figure import Benchmark
from benchmarks.large import large_table
from benchmarks.locks import lock_commits
from benchmarks.lookup import lookup
from benchmarks.put import put_1m_keys, put_1m_keys_fixed, put_4_buckets, put_10k_keys
from benchmarks.readers import cuts, scan_beside_writer, spark_read, spark_stream
from benchmarks.recovery import replay, undo
from benchmarks.scans import scan_through_flight_vs_bare_iteration, scan_vs_bare_iteration
from benchmarks.sink import sink_overhead, sink_vs_delta, sink_vs_stateful
from benchmarks.snapshots import (
    put_while_snapshotting,
    snapshot_incremental,
    snapshot_restore,
)
from benchmarks.tiering import tiering

BENCHMARKS: dict[str, Benchmark] = {
    function.__name__: function
    for function in (
        put_1m_keys,
        put_1m_keys_fixed,
        put_10k_keys,
        put_4_buckets,
        lookup,
        scan_vs_bare_iteration,
        replay,
        undo,
        snapshot_incremental,
        put_while_snapshotting,
        snapshot_restore,
        large_table,
        lock_commits,
        flight_puts,
        flight_lookups,
        scan_through_flight_vs_bare_iteration,
        failover,
        cuts,
        scan_beside_writer,
        spark_read,
        spark_stream,
        tiering,
        sink_vs_stateful,
        sink_overhead,
        sink_vs_delta,
        backfill,
        backfill_recovery,
        puts_beside_backfill,
    )
}
