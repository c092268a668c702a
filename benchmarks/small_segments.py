"""A log of many small segments, as a job with a batch a second leaves one: does its length matter?

For each length: how long a bucket takes to open, how long its changelog takes per batch from the
earliest offset on, and how much memory its leader holds for the log. The baseline is the same log
before it was rolled up. The log is in a store in memory, which answers at once: any other takes a
round trip more for each object that is read, and for each thousand that are listed.
"""

import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from itertools import islice
from statistics import median

from obstore.store import MemoryStore

from benchmarks.figure import Figure, Setting
from benchmarks.measure import timed
from benchmarks.workload import Workload, view_of
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log import Log
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.roll_up import RollUp
from merge_engine.storage.objects import RemoteStorage

_ROWS = 2
_OPENINGS = 5
# So many batches of the changelog are read of a log that is not rolled up, and of one that is.
_SOME, _MANY = 1000, 20_000
# How many batches come between two looks for what can be rolled up.
_ROLLED_EACH = 10_000


def small_segments(setting: Setting) -> Iterator[Figure]:
    """Opening, changelog and memory of logs of 1,000 to 600,000 batches: a week of one a second.

    The longest is rolled up as it grows, as servers do, and has no baseline.
    """
    for batches in (setting.batch_rows // 100, setting.batch_rows // 10, setting.batch_rows):
        yield from _measure(setting, batches)
    yield from _measure(setting, 6 * setting.batch_rows, rolled_as_it_grows=True)


def _measure(
    setting: Setting, batches: int, *, rolled_as_it_grows: bool = False
) -> Iterator[Figure]:
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
    roll_up = RollUp(log, storage, nullcontext, lambda: None, BucketOptions())
    for number in range(batches):
        log.append(segment)
        if rolled_as_it_grows and number % _ROLLED_EACH == 0:
            while roll_up.step(log.end):
                pass
    with closing(opened()) as bucket:
        bucket.flush()
    before = None if rolled_as_it_grows else _look(opened, _held(log) / batches, _SOME)
    with closing(opened()) as bucket:
        while bucket.roll_up(bucket.end_offset):
            pass
        held = _held(bucket._log) / batches
    after = _look(opened, held, _MANY)
    objects = len(storage.names())
    shutil.rmtree(directory)
    of = f"a log of {batches:,} batches of {_ROWS} rows, rolled up"
    beside = " as it grew" if before is None else "; baseline: before it was"
    what = {
        "open_ms": "opening, with an up-to-date view, of",
        "changelog_us": "per batch of the changelog from the earliest offset, of",
        "memory_bytes": "per batch, held by the leader, of",
    }
    for name, ours in after.items():
        unit = name.rpartition("_")[2]
        yield Figure(
            name=f"segments_{batches}_{name}",
            what=f"{what[name]} {of} ({objects:,} objects){beside}",
            ours=f"{ours:,.1f} {unit}",
            baseline="-" if before is None else f"{before[name]:,.1f} {unit}",
            value=ours,
        )


def _look(opened: Callable[[], Bucket], held: float, most: int) -> dict[str, float]:
    """Return the figures of a log as it is now; of its changelog, so many batches are read."""
    opening = _opening_ms(opened)
    with closing(opened()) as bucket:
        reading, count = timed(lambda: sum(1 for _ in islice(bucket.read_log(0), most)))
    return {
        "open_ms": opening,
        "changelog_us": reading / count * 1e6,
        "memory_bytes": held,
    }


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
