"""A log of many small segments, as a job with a batch a second leaves one: does its length matter?

For each length: how long a bucket takes to open, how long its changelog takes per batch from the
earliest offset on, and how much memory its leader holds for the log. The baseline is the same log
before it was rolled up. The log is in a store in memory, which answers at once: any other takes a
round trip more for each object that is read, and for each thousand that are listed.
"""

import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from statistics import median

from obstore.store import MemoryStore

from benchmarks.figure import Figure, Setting
from benchmarks.measure import timed
from benchmarks.workload import Workload, view_of
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log import Log
from merge_engine.storage.objects import RemoteStorage

_ROWS = 2
_OPENINGS = 5
# So many batches of the changelog are read of a log that is not rolled up, and of one that is.
_SOME, _MANY = 1000, 20_000


def small_segments(setting: Setting) -> Iterator[Figure]:
    """Opening, changelog and memory of logs of a thousand, ten and a hundred thousand batches."""
    for batches in (setting.batch_rows // 100, setting.batch_rows // 10, setting.batch_rows):
        yield from _measure(setting, batches)


def _measure(setting: Setting, batches: int) -> Iterator[Figure]:
    directory = setting.directory / f"segments-{batches}"
    work = Workload(setting.small_keys, batch_rows=_ROWS)

    storage = RemoteStorage(MemoryStore())

    def opened() -> Bucket:
        return Bucket(storage, view_of(directory), work.history, identity="bench")

    with closing(opened()) as bucket:
        written = bucket.put(work.batch())
        [segment] = bucket.read_log(written.base_offset)
    # The same again and again, straight into the log: to put them would take most of the time.
    log = Log(storage)
    log.lead()
    for _ in range(batches):
        log.append(segment)
    small_bytes = _held(log) / batches
    with closing(opened()) as bucket:
        bucket.flush()
    opening = _opening_ms(opened)
    with closing(opened()) as bucket:
        reading, _ = timed(lambda: sum(1 for _ in islice(bucket.read_log(0), _SOME)))
        while bucket.roll_up(bucket.end_offset):
            pass
        rolled_bytes = _held(bucket._log) / batches
    rolled_opening = _opening_ms(opened)
    with closing(opened()) as bucket:
        rolled_reading, count = timed(lambda: sum(1 for _ in islice(bucket.read_log(0), _MANY)))
    objects = len(storage.names())
    shutil.rmtree(directory)
    of = f"a log of {batches:,} batches of {_ROWS} rows, rolled up"
    figures = {
        "open_ms": ("opening, with an up-to-date view, of", rolled_opening, opening),
        "changelog_us": (
            "per batch of the changelog from the earliest offset, of",
            rolled_reading / count * 1e6,
            reading / min(_SOME, count) * 1e6,
        ),
        "memory_bytes": ("per batch, held by the leader, of", rolled_bytes, small_bytes),
    }
    for name, (what, ours, baseline) in figures.items():
        unit = name.rpartition("_")[2]
        yield Figure(
            name=f"segments_{batches}_{name}",
            what=f"{what} {of} ({objects:,} objects); baseline: before it was",
            ours=f"{ours:,.1f} {unit}",
            baseline=f"{baseline:,.1f} {unit}",
            value=ours,
        )


def _opening_ms(opened: Callable[[], Bucket]) -> float:
    times = []
    for _ in range(_OPENINGS):
        seconds, bucket = timed(opened)
        bucket.close()
        times.append(seconds * 1000)
    return median(times)


def _held(log: Log) -> int:
    """Return how many bytes a leader holds for its log; what headers share counts once."""
    seen: set[int] = set()
    waiting: list[object] = [log._bases, log._headers, log._rolled._ranges, log._indexes]
    total = 0
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and not isinstance(one, type):
            seen.add(id(one))
            total += one.__sizeof__()
            waiting += gc.get_referents(one)
    return total
