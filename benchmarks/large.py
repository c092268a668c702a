"""A large table: how much memory loading it takes, and how soon it is open again.

Run as a program, this module is the child process that loads the table, so that its peak memory is
that of the load and of nothing else: `python -m benchmarks.large <directory> <keys> <batch rows>`.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.figure import Figure, Setting
from benchmarks.measure import peak_mib, timed
from benchmarks.workload import Workload, open_bucket

_LOAD_TIMEOUT_S = 900
_LOOKED_UP = 1_000


def large_table(setting: Setting) -> Iterator[Figure]:
    """Load a large table in a process of its own; then open it in this one."""
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
    history = Workload(setting.large_keys).history
    keys = pa.record_batch({"key": np.arange(_LOOKED_UP)})
    seconds, bucket = timed(lambda: open_bucket(directory, history))
    first, found = timed(lambda: bucket.lookup(keys))
    bucket.close()
    if found["events"].null_count:
        raise AssertionError("rows are missing from the bucket that was opened")
    yield Figure(
        name="bucket_start_10m_rows_s",
        what=f"opening a bucket of {setting.large_keys:,} rows, which was closed, until the first "
        f"{_LOOKED_UP:,} keys are looked up (one run)",
        ours=f"{seconds + first:.2f} s",
        baseline="-",
        value=seconds + first,
        goal="<5",
    )


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
    print(peak_mib())
    bucket = open_bucket(directory, work.history)
    for batch in work.fill():
        bucket.put(batch)
    bucket.close()
    print(peak_mib())


if __name__ == "__main__":
    _load(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
