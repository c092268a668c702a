"""`tallybook bench`: a small self-test of a cluster: does it count right, and how fast is it?

It writes to a table of its own and drops it again. The figures are of one client on this machine;
`make bench` has those to compare.
"""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer

from foundation.ids import Token
from merge_engine.schema.builder import SchemaBuilder
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from tallybook.commands.output import print_json, print_line, print_table, progress
from tallybook.commands.reaching import Json, cluster_command, connected
from tallybook.connecting import Reach

PREFIX = "tallybook_bench_"
_OWNER = "bench"
_KEYS_AT_ONCE = 100


def add_commands(app: typer.Typer) -> None:
    """Add `bench` to the application."""
    cluster_command(app, "bench", deadline_s=30.0)(bench)


def bench(
    reach: Reach,
    *,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="how long each of the three parts takes")
    ] = 3.0,
    keys: Annotated[int, typer.Option(min=1, max=1_000_000, help="how many there are")] = 10_000,
    rows: Annotated[int, typer.Option(min=1, max=100_000, help="of each put")] = 1_000,
    buckets: Annotated[int, typer.Option(min=1, max=64, help="of the table")] = 4,
    json: Json = False,
) -> None:
    """Try a cluster: puts and look-ups per second, into a table of its own that is dropped again.

    Exit code 1 if the totals are wrong. It puts load on a cluster that is in use.
    """
    with connected(reach) as cluster, _own_table(cluster, buckets) as table:
        with progress("bench", 3) as advance:
            batches, puts = _put(table, seconds, keys, rows)
            advance(1)
            one = _timed(lambda number: _look_up(table, [number % keys]), seconds)
            advance(1)
            some = [np.arange(i, i + _KEYS_AT_ONCE) % keys for i in range(0, keys, _KEYS_AT_ONCE)]
            many = _timed(lambda number: _look_up(table, some[number % len(some)]), seconds)
            advance(1)
        total = sum(filter(None, table.to_arrow(["count"])["count"].to_pylist()))
    right = total == batches * rows
    document = {
        "puts": _figures(puts, rows),
        "lookups": _figures(one, 1),
        "lookups_of_100": _figures(many, _KEYS_AT_ONCE),
        "total": total,
        "right": right,
    }
    if json:
        print_json(document)
    else:
        _print(document, rows)
    if not right:
        print_line(f"! {batches * rows:,} rows were put, and the table counts {total:,}", "red")
        raise typer.Exit(1)


@contextmanager
def _own_table(cluster: Cluster, buckets: int) -> Iterator[RemoteTable]:
    schema = (
        SchemaBuilder()
        .column("k", "BIGINT")
        .agg_column("count", "BIGINT", "sum")
        .primary_key("k")
        .build()
    )
    name = f"{PREFIX}{uuid.uuid4().hex[:8]}"
    table = cluster.create_table(name, schema, buckets=buckets, column_locks=False)
    try:
        yield table
    finally:
        cluster.drop_table(name, force=True)


def _put(table: RemoteTable, seconds: float, keys: int, rows: int) -> tuple[int, list[float]]:
    """Put for so long; return how many puts that were, and how long each of them took."""
    random = np.random.default_rng(1)
    ones = np.ones(rows, np.int64)

    def put(number: int) -> None:
        data = pa.table({"k": random.integers(0, keys, rows), "count": ones})
        # With a token, a put whose answer was lost counts once all the same.
        table.put(data, owner=_OWNER, token=Token(1, number))

    times = _timed(put, seconds)
    return len(times), times


def _look_up(table: RemoteTable, keys: Any) -> None:
    table.lookup(pa.table({"k": pa.array(keys, pa.int64())}))


def _timed(work: Callable[[int], None], seconds: float) -> list[float]:
    """Do something again and again for so long, at least once; return how long each took."""
    times: list[float] = []
    end = time.monotonic() + seconds
    while not times or time.monotonic() < end:
        began = time.perf_counter()
        work(len(times))
        times.append(time.perf_counter() - began)
    return times


def _figures(times: list[float], each: int) -> dict[str, float]:
    took = sum(times)
    return {
        "calls": len(times),
        "calls_per_s": round(len(times) / took, 1),
        "items_per_s": round(len(times) * each / took, 1),
        "mean_ms": round(1000 * took / len(times), 2),
        "p99_ms": round(1000 * float(np.percentile(times, 99)), 2),
    }


def _print(document: dict[str, Any], rows: int) -> None:
    names = {
        "puts": f"put of {rows:,} rows",
        "lookups": "look-up of 1 key",
        "lookups_of_100": f"look-up of {_KEYS_AT_ONCE} keys",
    }
    print_table(
        ("WHAT", "CALLS/S", "ROWS OR KEYS/S", "MEAN", "99 %"),
        [
            (
                what,
                f"{figures['calls_per_s']:,.1f}",
                f"{figures['items_per_s']:,.0f}",
                f"{figures['mean_ms']:.2f} ms",
                f"{figures['p99_ms']:.2f} ms",
            )
            for name, what in names.items()
            if (figures := document[name])
        ],
    )
    if document["right"]:
        print_line(f"the table counts all {document['total']:,} rows that were put; it is dropped")
