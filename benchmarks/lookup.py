"""Look-ups, against a multi-get of RocksDB alone."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from benchmarks.bare import BareDatabase, stored_rows
from benchmarks.figure import Figure, Setting
from benchmarks.measure import interleave, timed
from benchmarks.workload import Workload, open_bucket

_LOOKUP_KEYS = 10_000


def lookup(setting: Setting) -> Iterator[Figure]:
    """Look-ups of random keys that exist."""
    directory = setting.directory / "lookup"
    work = Workload(setting.keys, batch_rows=setting.batch_rows)
    bucket = open_bucket(directory, work.history)
    bare = BareDatabase(directory / "bare")
    for batch in work.fill():
        bare.write(*stored_rows(bucket, bucket.put(batch)))
    bucket.flush()
    bare.flush()
    random = np.random.default_rng(1)

    def step() -> tuple[float, float]:
        keys = pa.record_batch({"key": random.integers(0, setting.keys, _LOOKUP_KEYS)})
        row_keys = work.history.row_keys(work.history.key_codec.encode(keys.columns))
        seconds, _ = timed(lambda: bucket.lookup(keys))
        bare_seconds, _ = timed(lambda: bare.read(row_keys))
        return seconds / _LOOKUP_KEYS, bare_seconds / _LOOKUP_KEYS

    step()
    yield interleave(2 * setting.runs, 2 * setting.steps, step).speed(
        "lookup_10k_keys_ratio",
        what=f"look-up of {_LOOKUP_KEYS:,} of {setting.keys:,} keys, against a multi-get of "
        "RocksDB alone",
        unit="keys",
    )
    bucket.close()
    bare.close()
