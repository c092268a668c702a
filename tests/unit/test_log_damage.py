"""Segments that are missing, swapped or damaged are named, and nothing is read instead."""

from pathlib import Path

import pytest

from foundation.errors import CorruptSegment, LogGap
from merge_engine.bucket.log import Log
from merge_engine.bucket.segment import SegmentKind, decode_segment, encode_segment, segment_name
from tests.support.faulty_storage import FaultyStorage
from tests.support.logs import contents, write_of


def test_a_missing_segment_in_the_middle_is_a_gap_that_is_named(
    log: Log, storage: FaultyStorage
) -> None:
    log.append(write_of(1, 2))
    log.append(write_of(3))
    storage.delete([segment_name(1)])
    for damaged in (log, Log(storage)):
        with pytest.raises(LogGap, match=rf"{segment_name(1)} is missing .*restore it from a copy"):
            contents(damaged)


def test_a_missing_first_segment_is_a_gap_and_the_next_ones_are_not_read_instead(
    log: Log, storage: FaultyStorage
) -> None:
    log.append(write_of(1, 2))
    log.append(write_of(3))
    storage.delete([segment_name(0)])
    with pytest.raises(LogGap, match=rf"{segment_name(0)} is missing"):
        contents(Log(storage))


def test_a_missing_segment_at_the_start_of_a_cleaned_log_is_a_gap_that_is_named(
    long_log: Log, storage: FaultyStorage
) -> None:
    long_log.clean(4)
    long_log = Log(storage)
    long_log.lead()
    storage.delete([segment_name(4)])
    with pytest.raises(LogGap, match=rf"{segment_name(4)} is missing"):
        contents(Log(storage))


def test_swapped_segments_are_noticed(log: Log, storage: FaultyStorage, tmp_path: Path) -> None:
    log.append(write_of(1))
    log.append(write_of(2))
    first, second = (tmp_path / "log" / segment_name(offset) for offset in (1, 2))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(CorruptSegment, match="renamed or swapped"):
        contents(log)
    with pytest.raises(CorruptSegment, match="renamed or swapped"):
        Log(storage)


def test_a_renamed_segment_is_noticed(log: Log, storage: FaultyStorage, tmp_path: Path) -> None:
    log.append(write_of(1))
    (tmp_path / "log" / segment_name(1)).rename(tmp_path / "log" / segment_name(5))
    with pytest.raises(CorruptSegment, match=rf"{segment_name(5)}.*renamed or swapped"):
        Log(storage)


def test_a_truncated_last_segment_is_an_error_and_not_the_end_of_the_log(
    log: Log, storage: FaultyStorage, tmp_path: Path
) -> None:
    log.append(write_of(1))
    path = tmp_path / "log" / segment_name(1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptSegment, match=r"log offset 1\): truncated, or not a segment"):
        Log(storage)
    path.write_bytes(b"")
    with pytest.raises(CorruptSegment, match=r"log offset 1\): only 0 bytes"):
        Log(storage)


def test_an_object_with_a_name_that_is_no_offset_is_named(storage: FaultyStorage) -> None:
    storage.create("copy-of-1.seg", b"")
    with pytest.raises(CorruptSegment, match=r"'copy-of-1\.seg' is not an object of a log; move"):
        Log(storage)


def test_other_objects_in_the_storage_do_no_harm(log: Log, storage: FaultyStorage) -> None:
    storage.create("README", b"")
    assert contents(Log(storage)) == [(0, "leader", [])]


def test_a_leader_segment_is_one_that_the_tests_can_read(log: Log, storage: FaultyStorage) -> None:
    leader = decode_segment(segment_name(0), storage.read(segment_name(0)))
    assert leader.header.kind is SegmentKind.LEADER
    assert encode_segment(leader) == storage.read(segment_name(0))
