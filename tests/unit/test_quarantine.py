"""Bad rows are set aside once, whatever tasks come late, and whoever comes back."""

import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sink.quarantine import Quarantine


def rows(*reasons: str) -> pa.Table:
    return pa.table({"_reason": list(reasons)})


def place(path: Path, **other: Any) -> Quarantine:
    usual = {"path": str(path), "table": "t1", "owner": "etl", "batch": 3, "epoch": 7}
    return Quarantine(**{**usual, **other})


def set_aside(there: Quarantine, *reasons: str) -> None:
    there.publish([there.stage(rows(*reasons))])


def published(path: Path) -> dict[str, list[str]]:
    found = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    return {file.name: pq.read_table(file)["_reason"].to_pylist() for file in found}


def test_staged_rows_are_seen_when_they_are_published(tmp_path: Path) -> None:
    there = place(tmp_path)
    name = there.stage(rows("bad"))
    assert published(tmp_path) == {}
    [target] = there.publish([name])
    assert published(tmp_path) == {Path(target).name: ["bad"]}


def test_a_reader_can_tell_that_a_file_is_damaged(tmp_path: Path) -> None:
    there = place(tmp_path)
    [target] = there.publish([there.stage(pa.table({"_reason": ["bad" * 100], "v": [1.5]}))])
    assert pq.read_table(target, page_checksum_verification=True)["v"].to_pylist() == [1.5]
    whole = Path(target).read_bytes()
    at = whole.index(struct.pack("<d", 1.5))
    Path(target).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(OSError, match="checksum"):
        pq.read_table(target, page_checksum_verification=True)


def test_a_late_task_changes_nothing_and_its_file_goes_with_the_next_batch(tmp_path: Path) -> None:
    set_aside(place(tmp_path), "first", "second")
    place(tmp_path).stage(rows("first"))
    assert list(published(tmp_path).values()) == [["first", "second"]]
    place(tmp_path, batch=4).clear()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_batch_that_is_written_again_clears_its_own_files_only(tmp_path: Path) -> None:
    for other in ({}, {"batch": 31}, {"owner": "other"}, {"table": "t2"}):
        set_aside(place(tmp_path, **other), str(other))
    place(tmp_path, owner="other").stage(rows("under way"))
    place(tmp_path).clear()
    kept = [["{'batch': 31}"], ["{'owner': 'other'}"], ["{'table': 't2'}"]]
    assert sorted(published(tmp_path).values()) == kept
    assert len(list(tmp_path.iterdir())) == 4


def test_an_earlier_epoch_that_comes_back_clears_nothing_of_a_later_one(tmp_path: Path) -> None:
    set_aside(place(tmp_path, epoch=8), "of the successor")
    place(tmp_path, epoch=8).stage(rows("under way"))
    place(tmp_path, epoch=7).clear()
    assert list(published(tmp_path).values()) == [["of the successor"]]
    assert len(list(tmp_path.iterdir())) == 2
    place(tmp_path, epoch=10).clear()
    assert list(tmp_path.iterdir()) == []


def test_a_place_is_superseded_once_a_later_epoch_has_published_for_the_same_batch(
    tmp_path: Path,
) -> None:
    there = place(tmp_path, epoch=8)
    assert not there.is_superseded()
    for other in ({"epoch": 8}, {"epoch": 7}, {"batch": 31}, {"owner": "other"}, {"table": "t2"}):
        set_aside(place(tmp_path, **{"epoch": 9, **other}), "of somebody else")
    place(tmp_path, epoch=9).stage(rows("under way"))
    (tmp_path / "_SUCCESS").touch()
    assert not there.is_superseded()
    set_aside(place(tmp_path, epoch=10), "of the successor")
    assert there.is_superseded()
