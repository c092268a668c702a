"""A large table: how much memory loading it takes, and whether puts slow down.

Run as a program, this module is the child process that loads the table, so that its peak memory is
that of the load and of nothing else: `python -m benchmarks.large <directory> <keys> <batch rows>`.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figure import Figure, Setting
from benchmarks.measure import interleave, timed
from benchmarks.workload import Workload, open_bucket
from merge_engine.bucket.bucket import Bucket

_LOAD_TIMEOUT_S = 900
_WARM_UP = 5


def large_table(setting: Setting) -> Iterator[Figure]:
    """Load a large table in a process of its own; then put into it, and into a smaller one."""
    directory = setting.directory / "large"
    before_mib, peak_mib = _load_in_child(directory, setting)
    yield Figure(
        name="memory_10m_rows_mib",
        what=f"peak memory of a process that loads {setting.large_keys:,} rows in batches of "
        f"{setting.batch_rows:,}, against its imports alone (one run)",
        ours=f"{peak_mib:,.0f} MiB",
        baseline=f"{before_mib:,.0f} MiB",
        value=peak_mib,
        goal="<1024",
    )
    works = [
        Workload(keys, batch_rows=setting.batch_rows) for keys in (setting.large_keys, setting.keys)
    ]
    large = open_bucket(directory, works[0].history)
    small = open_bucket(setting.directory / "small", works[1].history)
    for batch in works[1].fill():
        small.put(batch)
    buckets = (large, small)

    def step() -> tuple[float, float]:
        costs = [_cost_of_put(bucket, work) for bucket, work in zip(buckets, works, strict=True)]
        return costs[0], costs[1]

    for _ in range(_WARM_UP):
        step()
    yield interleave(setting.runs, setting.steps, step).speed(
        "put_10m_vs_1m_keys_ratio",
        what=f"put of {setting.batch_rows:,} rows into {setting.large_keys:,} keys, against "
        f"{setting.keys:,} keys",
        unit="keys",
        goal=">=0.5",
    )
    large.close()
    small.close()


def _cost_of_put(bucket: Bucket, work: Workload) -> float:
    batch = work.batch()
    seconds, result = timed(lambda: bucket.put(batch))
    return seconds / result.changed


def _load_in_child(directory: Path, setting: Setting) -> tuple[float, float]:
    """Return the child's memory before the load, and its peak, in MiB."""
    numbers = [str(setting.large_keys), str(setting.batch_rows)]
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.large", str(directory), *numbers],
        cwd=Path(__file__).parent.parent,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_LOAD_TIMEOUT_S,
    )
    before, peak = map(float, child.stdout.split())
    return before, peak


def _load(directory: Path, keys: int, batch_rows: int) -> None:
    work = Workload(keys, batch_rows=batch_rows)
    print(_peak_mib())
    bucket = open_bucket(directory, work.history)
    for batch in work.fill():
        bucket.put(batch)
    bucket.close()
    print(_peak_mib())


def _peak_mib() -> float:
    """Return the largest resident size that this process has had, as Linux counts it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError("/proc/self/status does not tell the peak memory")
    return int(found[1]) / 1024


if __name__ == "__main__":
    _load(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
