"""Bad rows are set aside once, whatever tasks come late."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sink.quarantine import clear, publish, stage


def rows(*reasons: str) -> pa.Table:
    return pa.table({"_reason": list(reasons)})


def published(path: Path) -> dict[str, list[str]]:
    found = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    return {file.name: pq.read_table(file)["_reason"].to_pylist() for file in found}


def test_staged_rows_are_seen_when_they_are_published(tmp_path: Path) -> None:
    name = stage(rows("bad"), str(tmp_path), "etl", 3)
    assert published(tmp_path) == {}
    [target] = publish(str(tmp_path), [name])
    assert published(tmp_path) == {Path(target).name: ["bad"]}


def test_a_late_task_changes_nothing_and_its_file_goes_with_the_next_batch(tmp_path: Path) -> None:
    place = str(tmp_path)
    publish(place, [stage(rows("first", "second"), place, "etl", 3)])
    stage(rows("first"), place, "etl", 3)
    assert list(published(tmp_path).values()) == [["first", "second"]]
    clear(place, "etl", 4)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_batch_that_is_written_again_clears_its_own_files_only(tmp_path: Path) -> None:
    place = str(tmp_path)
    for owner, batch in (("etl", 3), ("etl", 31), ("other", 3)):
        publish(place, [stage(rows(f"{owner} {batch}"), place, owner, batch)])
    stage(rows("under way"), place, "other", 3)
    clear(place, "etl", 3)
    assert sorted(published(tmp_path).values()) == [["etl 31"], ["other 3"]]
    assert len(list(tmp_path.iterdir())) == 3
