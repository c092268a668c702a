"""The bytes of a rolled object: what was written is read back, or what is wrong with it is said."""

import io
import os
from dataclasses import replace

import pytest

from foundation.errors import CorruptSegment, LogGap
from merge_engine.bucket import rolled as rolled_format
from merge_engine.bucket.log import Log
from merge_engine.bucket.log_names import LogNames
from merge_engine.bucket.rolled import (
    RolledRange,
    SegmentBytes,
    decode_rolled,
    encode_rolled,
    read_index,
)
from merge_engine.bucket.segment import encode_segment
from tests.support.faulty_storage import FaultyStorage
from tests.support.logs import contents
from tests.support.rolling import roll_up, several_leaders

NAME = RolledRange(0, 10).name


@pytest.fixture
def segments(storage: FaultyStorage) -> list[SegmentBytes]:
    """Return segments with the offsets [0, 10)."""
    log = several_leaders(storage, leaders=2, writes=2)
    return [SegmentBytes(one.header, encode_segment(one)) for one in log.segments(0)]


@pytest.fixture
def data(segments: list[SegmentBytes]) -> bytes:
    return encode_rolled(segments)


class Counting(io.BytesIO):
    """A file that knows how much of it was read."""

    count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        self.count += len(found)
        return found


def test_names_say_first_and_end_and_sort_by_offset() -> None:
    assert NAME == "00000000000000000000-00000000000000000010.rolled"
    assert RolledRange.of(NAME) == RolledRange(0, 10)
    ranges = [RolledRange(0, 9), RolledRange(9, 10), RolledRange(10, 1000), RolledRange(1000, 1001)]
    assert sorted(one.name for one in ranges) == [one.name for one in ranges]
    for name in ("1.rolled", "a-b.rolled", "-.rolled"):
        with pytest.raises(CorruptSegment, match="is not an object of a log; move it away"):
            RolledRange.of(name)


def test_every_segment_is_read_back_byte_for_byte(
    segments: list[SegmentBytes], data: bytes
) -> None:
    rolled = decode_rolled(NAME, data)
    assert [rolled.data(number) for number in range(len(segments))] == [s.data for s in segments]
    assert list(rolled.index.headers) == [one.header for one in segments]
    for number, one in enumerate(segments):
        for offset in range(one.header.base_offset, one.header.end_offset):
            assert rolled.index.at(offset) == number
            assert rolled.segment_at(offset).header == one.header


def test_of_the_index_alone_no_more_is_fetched_than_it_takes(
    segments: list[SegmentBytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode_rolled([one._replace(data=os.urandom(1000)) for one in segments])
    monkeypatch.setattr(rolled_format, "_END_BYTES", 100)
    file = Counting(data)
    assert list(read_index(NAME, file).headers) == [one.header for one in segments]
    assert file.count < 1500 < len(data)


def test_any_byte_that_is_damaged_is_noticed(data: bytes) -> None:
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x40
        with pytest.raises(CorruptSegment, match=NAME):
            decode_rolled(NAME, bytes(damaged))


def test_any_byte_that_is_missing_is_noticed(data: bytes) -> None:
    for length in range(len(data)):
        with pytest.raises(CorruptSegment, match=f"rolled segments {NAME}"):
            decode_rolled(NAME, data[:length])


def test_an_object_under_another_name_is_noticed(data: bytes) -> None:
    for other in (RolledRange(0, 9), RolledRange(1, 10), RolledRange(10, 20)):
        with pytest.raises(CorruptSegment, match="it was renamed or swapped"):
            decode_rolled(other.name, data)


def test_segments_that_do_not_follow_each_other_are_noticed(segments: list[SegmentBytes]) -> None:
    with pytest.raises(CorruptSegment, match="renamed or swapped"):
        decode_rolled(NAME, encode_rolled([*segments[:1], *segments[2:]]))


def test_an_index_that_contradicts_its_segments_is_noticed(segments: list[SegmentBytes]) -> None:
    header = segments[1].header
    wrong = SegmentBytes(replace(header, owner="x"), segments[1].data)
    rolled = decode_rolled(NAME, encode_rolled([segments[0], wrong, *segments[2:]]))
    with pytest.raises(CorruptSegment, match="the index does not say what the segments do"):
        rolled.segment_at(header.base_offset)


# In a log


def test_a_damaged_rolled_object_is_named_with_the_log_that_it_is_in(
    storage: FaultyStorage,
) -> None:
    log = several_leaders(storage)
    roll_up(log, storage)
    [first, *_] = LogNames.of(storage.names()).rolled
    path = storage._directory / first.name
    good = path.read_bytes()
    for damaged in (good[:-1], b"", good[:50] + b"!" + good[51:]):
        path.write_bytes(damaged)
        for reader in (log, Log(storage)):
            with pytest.raises(CorruptSegment, match=rf"{first.name}.*\(in {storage}\)"):
                contents(reader)
    path.write_bytes(good)
    assert len(contents(log)) == 24


def test_a_missing_rolled_object_is_a_gap_that_is_named(storage: FaultyStorage) -> None:
    log = several_leaders(storage)
    roll_up(log, storage)
    [_, second, *_] = LogNames.of(storage.names()).rolled
    storage.delete([second.name])
    with pytest.raises(LogGap, match=rf"{second.name} is missing from .*restore it from a copy"):
        contents(log)
    with pytest.raises(LogGap, match=r"is missing from .*restore it from a copy"):
        contents(Log(storage))
