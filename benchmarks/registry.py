"""All benchmarks, in the order in which they run. A new one is a function, and a line here."""

from benchmarks.cluster import failover, flight_lookups, flight_puts
from benchmarks.figure import Benchmark
from benchmarks.large import large_table
from benchmarks.locks import lock_commits
from benchmarks.lookup import lookup
from benchmarks.put import put_1m_keys, put_1m_keys_fixed, put_4_buckets, put_10k_keys
from benchmarks.recovery import replay, undo
from benchmarks.sink import sink_overhead, sink_vs_delta, sink_vs_stateful

BENCHMARKS: dict[str, Benchmark] = {
    function.__name__: function
    for function in (
        put_1m_keys,
        put_1m_keys_fixed,
        put_10k_keys,
        put_4_buckets,
        lookup,
        replay,
        undo,
        large_table,
        lock_commits,
        flight_puts,
        flight_lookups,
        failover,
        sink_vs_stateful,
        sink_overhead,
        sink_vs_delta,
    )
}
