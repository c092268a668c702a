"""Lock records as bytes: round trips, sizes, and what becomes of damaged ones."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from foundation.errors import CorruptRecord, InvalidInput
from foundation.ids import BucketId, Token
from locks.column_locks.record_codec import decode_record, encode_record
from locks.column_locks.records import Debt, DebtKind, LockRecord, Prepared
from locks.encoding import integers
from locks.encoding.offsets import Offsets

U64 = 2**64 - 1
NUMBERS = st.integers(0, 2**63 - 1)
TEXT = st.text(max_size=20)
COLUMNS = st.lists(st.integers(0, 2**31), max_size=8, unique=True).map(lambda c: tuple(sorted(c)))
BUCKETS = st.builds(BucketId, st.integers(0, 2**43 - 1), st.integers(0, 2**20 - 1))
OFFSETS = st.dictionaries(BUCKETS, NUMBERS, max_size=20).map(Offsets)
PREPARED = st.builds(Prepared, st.builds(Token, NUMBERS, st.integers(0, 2**62)), TEXT, TEXT)
FORMER = st.lists(st.binary(min_size=8, max_size=8), max_size=5).map(tuple)
DEBTS = st.one_of(
    st.builds(Debt, kind=st.just(DebtKind.UNDO), owner=TEXT, columns=COLUMNS, offsets=OFFSETS),
    st.builds(
        Debt,
        kind=st.just(DebtKind.REDO),
        owner=TEXT,
        columns=COLUMNS,
        offsets=OFFSETS,
        prepared=PREPARED,
    ),
)


@st.composite
def records(draw: st.DrawFn) -> LockRecord:
    """Draw a record in one of the states that a lock can be in."""
    state = draw(st.sampled_from(["given up", "acquired", "ready", "prepared"]))
    known: dict[str, Any] = {
        "stamp": draw(st.binary(min_size=16, max_size=16)),
        "epoch": draw(NUMBERS),
        "ttl_ms": draw(NUMBERS),
        "batch": draw(st.integers(-1, 2**62)),
        "query_id": draw(TEXT),
        "fingerprint": draw(TEXT),
        "former_queries": draw(FORMER),
        "columns": draw(COLUMNS),
        "committed": draw(st.dictionaries(st.integers(0, 2**31), NUMBERS, max_size=8)),
    }
    if state == "given up":
        return LockRecord(**known)
    known["columns"] = known["columns"] or (7,)
    held = LockRecord(held=True, abandoned=draw(st.booleans()), **known)
    if state == "acquired":
        return replace(held, debts=tuple(draw(st.lists(DEBTS, max_size=4))))
    ready = replace(held, ready=True, offsets=draw(OFFSETS))
    if state == "ready":
        return ready
    token = Token(ready.epoch, ready.batch + draw(st.integers(1, 9)))
    return replace(ready, prepared=Prepared(token, draw(TEXT), draw(TEXT)))


@given(records())
def test_a_record_is_read_as_it_was_written(record: LockRecord) -> None:
    assert decode_record(encode_record(record)) == record


@given(records(), st.data())
def test_a_record_with_a_flipped_bit_is_corrupt(record: LockRecord, data: st.DataObject) -> None:
    encoded = bytearray(encode_record(record))
    bit = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptRecord):
        decode_record(bytes(encoded))


@given(records())
def test_a_record_that_was_cut_short_is_corrupt(record: LockRecord) -> None:
    encoded = encode_record(record)
    for size in range(len(encoded)):
        with pytest.raises(CorruptRecord):
            decode_record(encoded[:size])
    with pytest.raises(CorruptRecord):
        decode_record(encoded + b"\0")


@given(st.binary(max_size=200))
def test_any_other_bytes_are_corrupt_and_raise_nothing_else(garbage: bytes) -> None:
    with pytest.raises(CorruptRecord):
        decode_record(garbage)


@given(records(), st.data())
def test_damage_that_the_checksum_covers_up_raises_nothing_else(
    record: LockRecord, data: st.DataObject
) -> None:
    """As if the writer itself had been wrong: whatever is read makes sense, or is corrupt."""
    encoded = encode_record(record)
    at = data.draw(st.integers(9, len(encoded)))
    body = encoded[9:at] + data.draw(st.binary(max_size=12)) + encoded[at + 1 :]
    checksum = xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    try:
        read = decode_record(encoded[:1] + checksum + body)
    except CorruptRecord:
        return
    assert decode_record(encode_record(read)) == read


def test_a_record_of_another_format_names_both_formats() -> None:
    encoded = encode_record(LockRecord())
    with pytest.raises(CorruptRecord, match="format 5, this release reads 2, 3 and 4; it was"):
        decode_record(b"\5" + encoded[1:])
    with pytest.raises(CorruptRecord, match="ends 1 bytes early"):
        decode_record(b"")


@pytest.mark.parametrize(
    "changes",
    [
        {"ready": True},
        {"abandoned": True},
        {"held": True},
        {"held": True, "columns": (1,), "offsets": Offsets({BucketId(0, 1): 5})},
        {"held": True, "columns": (1,), "prepared": Prepared(Token(1, 1), "there")},
        {
            "held": True,
            "ready": True,
            "columns": (1,),
            "batch": 1,
            "prepared": Prepared(Token(1, 1), "there"),
        },
        {"debts": (Debt(kind=DebtKind.UNDO, owner="a", columns=(1,)),)},
        {
            "held": True,
            "ready": True,
            "columns": (1,),
            "debts": (Debt(kind=DebtKind.UNDO, owner="a", columns=(1,)),),
        },
        {
            "held": True,
            "columns": (1,),
            "debts": (Debt(kind=DebtKind.REDO, owner="a", columns=(1,)),),
        },
    ],
)
def test_a_record_that_contradicts_itself_is_never_written(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptRecord, match="contradicts itself"):
        encode_record(LockRecord(**changes))


def test_ten_thousand_buckets_take_less_than_100_kb_and_fifty_owners_a_node_each(
    record_property: Any,
) -> None:
    random = np.random.default_rng(20_260)
    sizes = []
    for owner in range(50):
        ends = random.integers(0, 10**9, 10_000).tolist()
        offsets = Offsets({BucketId(0, bucket): end for bucket, end in enumerate(ends)})
        record = LockRecord(
            held=True,
            ready=True,
            epoch=10**6 + owner,
            ttl_ms=600_000,
            batch=10**6,
            query_id="6f1c2d7e-6a52-4d0b-9b1c-5d9f0c8c2f11",
            columns=tuple(range(4 * owner, 4 * owner + 4)),
            committed=dict.fromkeys(range(4 * owner, 4 * owner + 4), 10**6),
            offsets=offsets,
        )
        encoded = encode_record(record)
        assert decode_record(encoded).offsets == offsets
        sizes.append(len(encoded))
    print(f"10,000 buckets: {max(sizes):,} bytes an owner; 50 owners: {sum(sizes):,} bytes in all")
    record_property("bytes", max(sizes))
    assert max(sizes) < 100_000


@given(st.integers(0, U64))
@example(0)
@example(127)
@example(128)
@example(U64)
def test_integers_of_every_size_come_back(value: int) -> None:
    encoded = integers.encode_one(value)
    assert integers.decode_one(b"x" + encoded + b"\1", 1) == (value, 1 + len(encoded))


@pytest.mark.parametrize(
    "octets", [b"", b"\x80", b"\xff" * 9 + b"\x02", b"\xff" * 11, b"\x80" * 40]
)
def test_an_integer_that_does_not_end_or_has_more_than_64_bits_is_corrupt(octets: bytes) -> None:
    with pytest.raises(CorruptRecord):
        integers.decode_one(octets, 0)
    with pytest.raises(CorruptRecord):
        integers.decode_array(octets, 0)


@given(st.integers(0, 63).flatmap(lambda bits: st.lists(st.integers(0, 2**bits - 1), max_size=50)))
@example([0, 2**63 - 1])
@example([2**63 - 1])
@example([255, 256])
def test_arrays_of_every_width_come_back(values: list[int]) -> None:
    encoded = integers.encode_array(np.array(values, np.int64))
    decoded, end = integers.decode_array(b"x" + encoded + b"\1", 1)
    assert (decoded.tolist(), end) == (values, 1 + len(encoded))


@pytest.mark.parametrize(
    "octets",
    [
        b"\x01\x00",
        b"\x01\x00\x00",
        b"\x01\x00\x09" + bytes(9),
        b"\x02\x00\x01\x05",
        b"\x01\x00\x08" + b"\xff" * 8,
        b"\x01" + b"\xff" * 8 + b"\x7f\x01\x01",
        b"\xff" * 8 + b"\x01\x00\x01\x05",
    ],
)
def test_an_array_that_is_cut_or_has_more_than_63_bits_is_corrupt(octets: bytes) -> None:
    with pytest.raises(CorruptRecord):
        integers.decode_array(octets, 0)


@given(st.dictionaries(BUCKETS, NUMBERS, max_size=20), BUCKETS)
def test_offsets_are_a_mapping_sorted_by_bucket(
    offsets: dict[BucketId, int], other: BucketId
) -> None:
    made = Offsets(offsets)
    assert made == offsets
    assert dict(made) == offsets
    assert list(made) == sorted(offsets)
    assert len(made) == len(offsets)
    assert made.get(other) == offsets.get(other)
    assert (other in made) == (other in offsets)
    assert Offsets(made) == made
    assert hash(Offsets(made)) == hash(made)
    assert eval(repr(made)) == made
    decoded, end = Offsets.decode(made.encode(), 0)
    assert (decoded, end) == (made, len(made.encode()))


def test_a_bucket_that_cannot_be_is_in_no_offsets() -> None:
    made = Offsets({BucketId(3, 0): 5, BucketId(3, 1): 0, BucketId(3, 2): 9})
    assert made != Offsets({BucketId(3, 0): 5})
    assert BucketId(2, 2**20) not in made


@pytest.mark.parametrize(
    "offsets",
    [
        {BucketId(0, -1): 1},
        {BucketId(-1, 0): 1},
        {BucketId(0, 2**20): 1},
        {BucketId(2**43, 0): 1},
        {BucketId(2**70, 0): 1},
        {BucketId(0, 0): -1},
        {BucketId(0, 0): 2**63},
    ],
)
def test_offsets_out_of_range_are_refused(offsets: dict[BucketId, int]) -> None:
    with pytest.raises(InvalidInput):
        Offsets(offsets)
