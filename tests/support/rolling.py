"""Logs that are rolled up, and all that a reader can see of one."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from merge_engine.bucket.log import Log
from merge_engine.bucket.log_names import LogNames
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.roll_up import RollUp
from merge_engine.bucket.rolled import decode_rolled
from merge_engine.bucket.segment import encode_segment, segment_name
from merge_engine.storage.objects import ObjectStorage
from tests.support.logs import write_of


def roller(
    log: Log, storage: ObjectStorage, segments: int = 3, confirm: Callable[[], object] | None = None
) -> RollUp:
    """Return what rolls up a log that nobody else uses."""
    options = BucketOptions(roll_up_segments=segments)
    return RollUp(log, storage, nullcontext, confirm or log.confirm, options)


def roll_up(log: Log, storage: ObjectStorage, segments: int = 3, before: int | None = None) -> None:
    """Roll all of a log up, or what ends at or below `before`."""
    rolling = roller(log, storage, segments)
    while rolling.step(log.end if before is None else before):
        pass


def append_some(log: Log, first: int, count: int) -> None:
    """Append writes of one, two and three rows."""
    for number in range(first, first + count):
        log.append(write_of(*range(number, number + 1 + number % 3)))


def several_leaders(storage: ObjectStorage, writes: int = 5, leaders: int = 4) -> Log:
    """Return a log that several have led, each for so many writes; the last one leads it."""
    for number in range(leaders):
        log = Log(storage)
        log.lead()
        append_some(log, 10 * number, writes)
    return log


def all_bytes(log: Log) -> list[bytes]:
    """Return the segments of a log, as they are read, encoded again."""
    return [encode_segment(one) for one in log.segments(log.start)]


def seen(log: Log) -> dict[str, Any]:
    """Return all that can be read of a log, in all the ways there are, byte for byte."""
    headers = list(log.headers(log.start))
    bases = [header.base_offset for header in headers]
    offsets = [*range(log.start, log.end, 11), log.end]
    return {
        "start": log.start,
        "end": log.end,
        "headers": headers,
        "segments": all_bytes(log),
        "backwards": [encode_segment(one) for one in log.read(reversed(bases))][::-1],
        "from": {o: [s.header.base_offset for s in log.segments(o)] for o in offsets},
        "until": {o: [s.header.base_offset for s in log.segments(log.start, o)] for o in offsets},
        "headers from": {o: [h.base_offset for h in log.headers(o)] for o in offsets},
        "headers until": {o: [h.base_offset for h in log.headers(0, o)] for o in offsets},
    }


def bytes_of(storage: ObjectStorage) -> dict[int, bytes]:
    """Return the bytes of all segments by their bases, whichever objects they are in."""
    names = LogNames.of(storage.names())
    found = {base: storage.read(segment_name(base)) for base in names.bases}
    for one in names.rolled:
        rolled = decode_rolled(one.name, storage.read(one.name))
        for number, header in enumerate(rolled.index.headers):
            found[header.base_offset] = rolled.data(number)
    return found
