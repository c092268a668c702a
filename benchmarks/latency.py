"""How long puts take one by one, while servers flush, compact, evict and take snapshots."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.figure import Chart, Figure, Finding, Setting
from benchmarks.measure import timed
from benchmarks.peers.ours import Writer
from benchmarks.peers.race import LOAD_ROWS
from benchmarks.workload import Workload
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster

_TEN_MINUTES_S = 600.0
_QUICK_S = 20.0
_SNAPSHOT_EVERY_S = 10.0
_POINTS = 60


@dataclass(frozen=True)
class Latencies:
    """When batches were begun, and how long each took, in seconds."""

    what: str
    began: NDArray[np.float64]
    took: NDArray[np.float64]


def put_latency(setting: Setting) -> Iterator[Finding]:
    """Ten minutes of puts into ten million rows: a benchmark that runs only where it is named."""
    quick = setting.large_keys < Setting(directory=setting.directory).large_keys
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(setting.directory / "latency", servers=2))
        client = stack.enter_context(cluster.connect(deadline_s=120))
        writer = Writer.on(client, "bench")
        stack.callback(writer.close)
        writer.load(Workload(setting.large_keys, batch_rows=LOAD_ROWS, string=False).fill())
        work = Workload(setting.large_keys, batch_rows=setting.batch_rows // 10, string=False)
        found = put_for(_QUICK_S if quick else _TEN_MINUTES_S, writer, work)
        yield from latency(found, suffix="_10_minutes")


def put_for(seconds: float, writer: Writer, work: Workload) -> Latencies:
    """Write and commit one batch after the other for so long, and take snapshots meanwhile."""
    began, took = [], []
    for _ in range(3):
        writer.upsert(work.batch())
    with _snapshots(writer.table) as taken:
        start = time.perf_counter()
        while time.perf_counter() < start + seconds:
            batch = work.batch()
            began.append(time.perf_counter() - start)
            took.append(timed(lambda batch=batch: writer.upsert(batch))[0])  # type: ignore[misc]
    what = (
        f"{len(took):,} batches of {len(batch):,} rows into {work.keys:,} rows, written and "
        f"committed one after the other for {seconds:.0f} s on two servers, which took "
        f"{len(taken)} snapshots of all buckets meanwhile"
    )
    return Latencies(what, np.array(began), np.array(took))


@contextmanager
def _snapshots(table: RemoteTable) -> Iterator[list[float]]:
    """Take snapshots of all buckets, again and again, until the block ends; yields their times."""
    ended, taken, failed = threading.Event(), list[float](), list[Exception]()

    def take() -> None:
        try:
            while not ended.is_set():
                taken.append(timed(table.snapshot)[0])
                ended.wait(_SNAPSHOT_EVERY_S)
        except Exception as exc:  # Raised below, in the thread that measures.
            failed.append(exc)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        yield taken
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]


def latency(found: Latencies, *, suffix: str = "") -> Iterator[Finding]:
    """Yield the longest put, p99 over p50, and all of it over time."""
    p50, p99 = (float(np.quantile(found.took, q)) for q in (0.5, 0.99))
    longest = float(found.took.max())
    yield Figure(
        name=f"longest_put_pause{suffix}_ms",
        what=f"the longest of {found.what}",
        ours=f"{longest * 1e3:,.0f} ms",
        baseline=f"p50 {p50 * 1e3:,.0f} ms",
        value=longest * 1e3,
        goal="<200",
    )
    yield Figure(
        name=f"put_p99_vs_p50{suffix}",
        what=f"p99 over p50 of {found.what}",
        ours=f"{p99 * 1e3:,.0f} ms",
        baseline=f"{p50 * 1e3:,.0f} ms",
        value=p99 / p50,
        goal="<=3",
    )
    edges = np.linspace(0, found.began[-1] + 1e-9, _POINTS + 1)
    places = np.digitize(found.began, edges) - 1
    series: dict[str, list[tuple[str | float, float]]] = {"longest": [], "p50": []}
    for place in np.unique(places):
        took = found.took[places == place] * 1e3
        series["longest"].append((float(edges[place]), float(took.max())))
        series["p50"].append((float(edges[place]), float(np.median(took))))
    yield Chart(
        name=f"latency{suffix}",
        title="Time of a batch, written and committed, under load",
        unit="ms",
        across="seconds",
        series=series,
        logarithmic=False,
    )
