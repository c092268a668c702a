"""What tests of the log share: segments to append, and what a log holds."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from merge_engine.bucket.log import Log
from merge_engine.bucket.segment import Change, Segment, SegmentHeader, SegmentKind


def write_of(*keys: int) -> Segment:
    """Return a write of these keys, as a bucket would hand it to the log."""
    count = len(keys)
    header = SegmentHeader(
        kind=SegmentKind.WRITE,
        base_offset=0,
        term=0,
        nonce="",
        timestamp_ms=0,
        rows=count,
        column_ids=(2,),
    )
    before, after = pa.nulls(count, pa.int64()), pa.array(keys, pa.int64())
    change = Change(np.zeros(count, bool), before, np.ones(count, bool), after)
    return Segment(header, {1: pa.array(keys, pa.int64())}, {2: change})


def contents(log: Log, start: int | None = None) -> list[tuple[int, str, list[int]]]:
    """Return what the log holds: base offset, kind and keys of each segment."""
    return [
        (
            segment.header.base_offset,
            segment.header.kind.value,
            segment.keys[1].to_pylist() if segment.keys else [],
        )
        for segment in log.segments(log.start if start is None else start)
    ]


def ticking(times: Sequence[int]) -> Callable[[], int]:
    ticks: Iterator[int] = iter(times)
    return lambda: next(ticks)
