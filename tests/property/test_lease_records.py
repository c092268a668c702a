"""Leases and lists of snapshots as bytes: round trips, sizes, and what becomes of damaged ones."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import CorruptRecord
from foundation.ids import BucketId, LeadKey
from locks.encoding.offsets import Offsets
from locks.snapshots.lease_records import LeaseRecord, decode_lease, encode_lease
from locks.snapshots.list_records import (
    ListedSnapshot,
    SnapshotList,
    SnapshotState,
    decode_list,
    encode_list,
)

KEY = LeadKey(3, BucketId(7, 11))
NUMBERS = st.integers(0, 2**63 - 1)
BUCKETS = st.builds(BucketId, st.integers(0, 2**43 - 1), st.integers(0, 2**20 - 1))
IDS = st.dictionaries(BUCKETS, NUMBERS, max_size=20).map(Offsets)
LEASES = st.builds(
    LeaseRecord,
    stamp=st.binary(min_size=16, max_size=16),
    duration_ms=NUMBERS,
    started_ms=NUMBERS,
    snapshots=IDS,
    asked=IDS,
)


@st.composite
def lists(draw: st.DrawFn) -> SnapshotList:
    """Draw a list that a leader could have written."""
    ids = sorted(draw(st.sets(st.integers(1, 2**62), max_size=6)))
    term = draw(NUMBERS)
    return SnapshotList(
        key=KEY,
        term=term,
        next_id=(ids[-1] if ids else 0) + draw(st.integers(1, 9)),
        snapshots=tuple(
            ListedSnapshot(
                snapshot_id=one,
                term=draw(st.integers(0, term)),
                applied=draw(NUMBERS),
                stable=draw(NUMBERS),
                created_ms=draw(NUMBERS),
                bytes=draw(NUMBERS),
                state=draw(st.sampled_from(SnapshotState)),
            )
            for one in ids
        ),
    )


def decode_any_list(data: bytes) -> SnapshotList:
    return decode_list(KEY, data)


ENCODED = st.one_of(
    LEASES.map(lambda record: (encode_lease(record), decode_lease, encode_lease)),
    lists().map(lambda listed: (encode_list(listed), decode_any_list, encode_list)),
)
Encoded = tuple[bytes, Callable[[bytes], Any], Callable[[Any], bytes]]


@given(LEASES)
def test_a_lease_is_read_as_it_was_written(record: LeaseRecord) -> None:
    assert decode_lease(encode_lease(record)) == record


@given(lists())
def test_a_list_is_read_as_it_was_written(listed: SnapshotList) -> None:
    assert decode_list(KEY, encode_list(listed)) == listed


@given(ENCODED, st.data())
def test_a_flipped_bit_is_corrupt(encoded: Encoded, data: st.DataObject) -> None:
    octets, decode, _ = bytearray(encoded[0]), encoded[1], encoded[2]
    bit = data.draw(st.integers(0, 8 * len(octets) - 1))
    octets[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptRecord):
        decode(bytes(octets))


@given(ENCODED)
def test_what_was_cut_short_or_has_more_is_corrupt(encoded: Encoded) -> None:
    octets, decode, _ = encoded
    for size in range(len(octets)):
        with pytest.raises(CorruptRecord):
            decode(octets[:size])
    with pytest.raises(CorruptRecord):
        decode(octets + b"\0")


@given(ENCODED, st.data())
def test_damage_that_the_checksum_covers_up_raises_nothing_else(
    encoded: Encoded, data: st.DataObject
) -> None:
    octets, decode, encode = encoded
    at = data.draw(st.integers(9, len(octets)))
    body = octets[9:at] + data.draw(st.binary(max_size=12)) + octets[at + 1 :]
    checksum = xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    try:
        read = decode(octets[:1] + checksum + body)
    except CorruptRecord:
        return
    assert decode(encode(read)) == read


@given(st.binary(max_size=200))
def test_any_other_bytes_are_corrupt_and_raise_nothing_else(garbage: bytes) -> None:
    for decode in (decode_lease, decode_any_list):
        with pytest.raises(CorruptRecord):
            decode(garbage)


def test_another_format_is_named_with_this_one() -> None:
    with pytest.raises(CorruptRecord, match="a lease of format 9, this release reads 1"):
        decode_lease(b"\x09" + encode_lease(LeaseRecord())[1:])
    with pytest.raises(
        CorruptRecord, match=r"of bucket 7/11 of table 3, of format 9, this release reads 1"
    ):
        decode_any_list(b"\x09" + encode_list(SnapshotList(key=KEY))[1:])


def snapshot(snapshot_id: int = 1, **changes: Any) -> ListedSnapshot:
    known: dict[str, Any] = {
        "term": 4,
        "applied": 10**9,
        "stable": 10**9 - 50_000,
        "created_ms": 1_790_000_000_000,
        "bytes": 10**9,
    }
    return ListedSnapshot(snapshot_id=snapshot_id, **known | changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"snapshots": (snapshot(2), snapshot(1)), "next_id": 9}, "do not ascend"),
        ({"snapshots": (snapshot(1), snapshot(1)), "next_id": 9}, "do not ascend"),
        ({"snapshots": (snapshot(0),)}, "do not ascend from 1"),
        ({"snapshots": (snapshot(5),), "next_id": 5}, "it has id 5, and 5 is said to be the next"),
        ({"snapshots": (snapshot(1, term=10),), "next_id": 2}, "of a later leader"),
        ({"snapshots": (snapshot(1, stable=-1),), "next_id": 2}, "negative"),
        ({"term": 2**63}, "more than 63 bits"),
    ],
)
def test_a_list_that_contradicts_itself_is_never_written(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(CorruptRecord, match=f"contradict themselves: .*{why}"):
        encode_list(SnapshotList(**{"key": KEY, "term": 9, **changes}))


def test_a_lease_of_ten_thousand_buckets_takes_10_to_40_kb_and_a_list_some_60_bytes(
    record_property: Any,
) -> None:
    random = np.random.default_rng(20_260)
    sizes = {}
    for spread in (200, 60_000, 10**6):
        numbers = random.integers(10**6, 10**6 + spread, 10_000).tolist()
        ids = Offsets({BucketId(0, bucket): number for bucket, number in enumerate(numbers)})
        record = LeaseRecord(duration_ms=3_600_000, snapshots=ids)
        assert decode_lease(encode_lease(record)).snapshots == ids
        sizes[f"lease, ids that differ by up to {spread:,}"] = len(encode_lease(record))
    two = (snapshot(10**6), snapshot(10**6 + 1))
    listed = SnapshotList(key=KEY, term=900, next_id=10**6 + 2, snapshots=two)
    sizes["list of two snapshots"] = len(encode_list(listed))
    print(sizes)
    record_property("bytes", sizes)
    leases = list(sizes.values())[:3]
    assert leases == sorted(leases)
    assert leases[0] < 10_100
    assert leases[-1] < 40_100
    assert sizes["list of two snapshots"] < 80
