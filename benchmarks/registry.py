"""All benchmarks, in the order in which they run. A new one is a function, and a line here.

Those in `ONLY_BY_NAME` take too long to run with the others, those in `ONLY_FULL` are left out of a
quick run.
"""

from benchmarks.backfill import backfill, backfill_recovery, puts_beside_backfill
from benchmarks.cluster import failover, flight_lookups, flight_puts
from benchmarks.figure import Benchmark
from benchmarks.growing import growing_table
from benchmarks.kinds import kinds
from benchmarks.large import large_table
from benchmarks.latency import put_latency
from benchmarks.locks import lock_commits
from benchmarks.lookup import lookup
from benchmarks.put import put_1m_keys, put_1m_keys_fixed, put_4_buckets, put_10k_keys
from benchmarks.readers import cuts, scan_beside_writer, spark_read, spark_stream
from benchmarks.recovery import replay, undo
from benchmarks.scans import scan_through_flight_vs_bare_iteration, scan_vs_bare_iteration
from benchmarks.side_by_side import side_by_side
from benchmarks.single_keys import single_key_lookups
from benchmarks.sink import sink_overhead, sink_vs_delta, sink_vs_stateful
from benchmarks.small_segments import small_segments
from benchmarks.snapshots import (
    put_while_snapshotting,
    snapshot_incremental,
    snapshot_restore,
)
from benchmarks.tiering import tiering

BENCHMARKS: dict[str, Benchmark] = {
    function.__name__: function
    for function in (
        side_by_side,
        growing_table,
        kinds,
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
        single_key_lookups,
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
        put_latency,
        small_segments,
    )
}
# `growing_table` takes snapshots beside puts, too.
ONLY_BY_NAME = frozenset(
    function.__name__ for function in (put_latency, put_while_snapshotting, small_segments)
)
# Small sizes say nothing here, or Spark takes longer to get to speed than there is time.
ONLY_FULL = frozenset(
    function.__name__
    for function in (
        large_table,
        failover,
        spark_read,
        spark_stream,
        tiering,
        sink_vs_stateful,
        sink_vs_delta,
        backfill,
        backfill_recovery,
        puts_beside_backfill,
    )
)
