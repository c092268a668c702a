"""Segments as bytes: what was written comes back, and nothing else is ever taken for a segment."""

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from foundation.errors import CorruptSegment, UnknownFormat
from foundation.ids import Token
from merge_engine.bucket.segment import (
    FORMATS,
    MAGIC,
    AggMode,
    Change,
    Segment,
    SegmentHeader,
    SegmentKind,
    check_trailer,
    decode_segment,
    encode_segment,
    segment_name,
)

HEADER = SegmentHeader(
    kind=SegmentKind.WRITE,
    base_offset=42,
    term=7,
    nonce="0123456789abcdef",
    timestamp_ms=1_700_000_000_000,
    rows=3,
    schema_version=2,
    owner="orders-job",
    token=Token(epoch=5, batch=9),
    column_ids=(2, 5),
    agg_mode=AggMode.ACCUMULATE,
)


def flags(*values: int) -> np.typing.NDArray[np.bool_]:
    return np.array(values, bool)


SEGMENT = Segment(
    HEADER,
    {1: pa.array([1, 2, 3], pa.int64())},
    {
        2: Change(
            flags(0, 1, 1), pa.array([None, 5, 6]), flags(1, 1, 0), pa.array([1, None, None])
        ),
        5: Change(
            flags(0, 0, 1),
            pa.array([None, None, "x"]),
            flags(1, 0, 0),
            pa.array(["", None, None]),
        ),
    },
)
NAME = segment_name(42)


def resealed(body: bytes) -> bytes:
    """Return the bytes with a checksum that holds: what a writer with other ideas leaves."""
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def assert_same_columns(found: Mapping[int, pa.Array], expected: Mapping[int, pa.Array]) -> None:
    assert list(found) == list(expected)
    for column, array in expected.items():
        assert found[column].equals(array)


def assert_same(found: Segment, expected: Segment) -> None:
    assert found.header == expected.header
    assert_same_columns(found.keys, expected.keys)
    assert list(found.changes) == list(expected.changes)
    for column, change in expected.changes.items():
        other = found.changes[column]
        assert other.touched_before.tolist() == change.touched_before.tolist()
        assert other.touched_after.tolist() == change.touched_after.tolist()
        assert other.before.equals(change.before)
        assert other.after.equals(change.after)


def test_a_name_is_the_base_offset_in_20_digits_so_that_names_sort_like_offsets() -> None:
    assert segment_name(42) == "00000000000000000042.seg"
    offsets = [0, 9, 10, 99, 12345678901]
    assert sorted(segment_name(offset) for offset in offsets) == list(map(segment_name, offsets))


def test_a_segment_comes_back_as_it_was_written() -> None:
    assert_same(decode_segment(NAME, encode_segment(SEGMENT)), SEGMENT)


def test_an_undo_names_the_offset_it_goes_back_to() -> None:
    header = replace(HEADER, kind=SegmentKind.UNDO, undo_from=11, agg_mode=AggMode.REPLACE)
    undo = replace(SEGMENT, header=replace(header, token=None))
    found = decode_segment(NAME, encode_segment(undo))
    assert found.header == undo.header
    assert found.header.undo_from == 11
    assert found.header.token is None
    assert found.header.agg_mode is AggMode.REPLACE


@pytest.mark.parametrize("kind", [SegmentKind.LEADER, SegmentKind.EMPTY])
def test_a_segment_without_rows_takes_one_offset(kind: SegmentKind) -> None:
    header = SegmentHeader(kind=kind, base_offset=42, term=42, nonce="n", timestamp_ms=1)
    found = decode_segment(NAME, encode_segment(Segment(header, {}, {})))
    assert found.header == header
    assert found.header.kind is kind
    assert (found.keys, found.changes, found.header.end_offset) == ({}, {}, 43)


def test_a_segment_with_rows_takes_one_offset_per_row() -> None:
    assert HEADER.end_offset == 45


def test_any_arrow_reader_opens_a_segment() -> None:
    table = pa.ipc.open_stream(encode_segment(SEGMENT)).read_all()
    assert table.column_names[:2] == ["key.1", "operation"]
    # The third row is left without any column of its owner: for the owner it was deleted.
    assert table.column("operation").to_pylist() == [0, 0, 1]


def test_a_cut_segment_has_only_these_rows_and_the_whole_header() -> None:
    cut = SEGMENT.slice(1, 2)
    assert cut.header == HEADER
    assert cut.keys[1].to_pylist() == [2, 3]
    assert cut.changes[2].touched_before.tolist() == [True, True]
    assert cut.changes[2].before.to_pylist() == [5, 6]
    assert cut.changes[5].touched_after.tolist() == [False, False]
    assert cut.changes[5].before.to_pylist() == [None, "x"]


def test_whichever_byte_is_flipped_the_segment_is_refused() -> None:
    data = encode_segment(SEGMENT)
    for position in range(len(data)):
        for flipped in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= flipped
            with pytest.raises((CorruptSegment, UnknownFormat), match=NAME):
                decode_segment(NAME, bytes(damaged))


def test_wherever_a_segment_is_cut_off_it_is_refused() -> None:
    data = encode_segment(SEGMENT)
    for length in range(len(data)):
        with pytest.raises(CorruptSegment, match=NAME):
            decode_segment(NAME, data[:length])


def test_bytes_behind_a_segment_are_noticed() -> None:
    with pytest.raises(CorruptSegment, match="restore it from a copy"):
        decode_segment(NAME, encode_segment(SEGMENT) + b"\0")


def test_an_error_says_which_object_and_which_offset_it_is() -> None:
    data = bytearray(encode_segment(SEGMENT))
    data[20] ^= 1
    with pytest.raises(CorruptSegment) as caught:
        decode_segment(NAME, bytes(data))
    assert str(caught.value) == (
        "segment 00000000000000000042.seg (log offset 42): checksum mismatch; "
        "restore it from a copy of the log"
    )
    with pytest.raises(CorruptSegment, match=r"\(log offset 0\): only 3 bytes"):
        check_trailer(segment_name(0), b"abc")


def test_a_renamed_segment_is_refused() -> None:
    with pytest.raises(CorruptSegment, match=r"3 rows at offset 42.*renamed or swapped"):
        decode_segment(segment_name(45), encode_segment(SEGMENT))


def test_a_newer_format_is_not_guessed_at() -> None:
    data = encode_segment(SEGMENT)
    trailer = struct.pack("<H", FORMATS.current + 1) + MAGIC
    with pytest.raises(UnknownFormat, match=rf"{NAME}.* of format 5, .*reads 1, 2, 3 and 4; .*up"):
        decode_segment(NAME, resealed(data[: -len(trailer) - 8] + trailer))


@pytest.mark.parametrize(
    "header",
    [
        replace(HEADER, column_ids=(2, 5, 9)),
        replace(HEADER, column_ids=("x",)),  # type: ignore[arg-type]
        replace(HEADER, base_offset="42"),  # type: ignore[arg-type]
    ],
    ids=["a column that is not there", "a column that is none", "a text"],
)
def test_a_header_that_does_not_go_with_its_rows_is_refused(header: SegmentHeader) -> None:
    sealed = encode_segment(replace(SEGMENT, header=HEADER))
    with pa.ipc.open_stream(sealed) as reader:
        table = reader.read_all()
    metadata = {b"tallybook": json.dumps(asdict(header))}
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema.with_metadata(metadata)) as writer:
        writer.write_table(table)
    trailer = struct.pack("<H", FORMATS.current) + MAGIC
    with pytest.raises(CorruptSegment, match=rf"{NAME}: .*(the checksum holds, but|swapped)"):
        decode_segment(NAME, resealed(sink.getvalue().to_pybytes() + trailer))


def test_a_sealed_object_that_is_no_segment_is_refused() -> None:
    trailer = struct.pack("<H", FORMATS.current) + MAGIC
    with pytest.raises(CorruptSegment, match=rf"{NAME}.*the checksum holds, but"):
        decode_segment(NAME, resealed(b"no arrow stream" + trailer))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("x", pa.int64())])):
        pass
    with pytest.raises(CorruptSegment, match=NAME):
        decode_segment(NAME, resealed(sink.getvalue().to_pybytes() + trailer))


def test_only_segments_that_are_worth_it_are_compressed() -> None:
    """Either is read; small ones are compressed when they are rolled up."""
    for rows, is_smaller in ((1_000, False), (20_000, True)):
        flags_of_all, zeros = np.ones(rows, bool), pa.array(np.zeros(rows, np.int64))
        change = Change(flags_of_all, zeros, flags_of_all, zeros)
        header = replace(HEADER, rows=rows, column_ids=(2,))
        data = encode_segment(Segment(header, {1: zeros}, {2: change}))
        assert (len(data) < 3 * zeros.nbytes) is is_smaller
        found = decode_segment(segment_name(HEADER.base_offset), data)
        assert found.header == header
        assert found.keys[1].equals(zeros)
        assert found.changes[2].after.equals(zeros)
