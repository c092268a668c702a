"""Objects that come to names of a log which were freed, whoever may have created them."""

import random
from dataclasses import replace

from merge_engine.bucket.segment import (
    SUFFIX,
    Segment,
    SegmentHeader,
    SegmentKind,
    decode_segment,
    encode_segment,
)
from tests.support.snapshot_world import MemoryStorage

KINDS = (SegmentKind.EMPTY, SegmentKind.LEADER, SegmentKind.WRITE)


def leave_stray(log: MemoryStorage, chance: random.Random) -> None:
    """Create a segment at a name of the log that was taken, and is free, if there is one.

    An empty segment, of the leader that was there or of another one; that of a leader; or a write
    that was somewhere else in the log.
    """
    ever = {path.removeprefix(log.prefix): data for path, data in log.objects.ever.items()}
    names = [name for name in ever if name.endswith(SUFFIX) and "/" not in name]
    free = sorted({*names} - {*log.names()})
    if not free:
        return
    name, kind = chance.choice(free), chance.choice(KINDS)
    there = decode_segment(name, ever[name]).header
    term = chance.choice([there.term, there.term, there.base_offset])
    header = SegmentHeader(
        kind=SegmentKind.EMPTY,
        base_offset=there.base_offset,
        term=term,
        nonce=f"stray-{chance.randrange(1 << 30)}",
        timestamp_ms=0,
    )
    stray = Segment(header, {}, {})
    if kind is SegmentKind.LEADER:
        stray = replace(stray, header=replace(header, kind=kind, term=header.base_offset))
    elif kind is SegmentKind.WRITE:
        other = chance.choice(names)
        moved = decode_segment(other, ever[other])
        base, nonce = header.base_offset, header.nonce
        moved_header = replace(moved.header, base_offset=base, term=term, nonce=nonce)
        stray = replace(moved, header=moved_header)
    log.create(name, encode_segment(stray))
