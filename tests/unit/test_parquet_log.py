"""The log of a copy as plain Parquet: any tool that reads JSON knows what to read."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from obstore.store import MemoryStore

from foundation.errors import InvalidInput, UnknownFormat
from merge_engine.storage.objects import LocalStorage, RemoteStorage
from sink.lake.log import version_name
from sink.lake.parquet_log import DIRECTORY, ParquetLog
from sink.lake.state import LakeState, Layout
from tests.support.lakes import STARTED_MS, a_file, commit, sums, write_rows


def test_any_tool_that_reads_json_knows_what_to_read(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    log = ParquetLog(storage, str(tmp_path))
    [old] = write_rows(storage, sums([1, 2]))
    state = commit(log, None, added=[old])
    files = write_rows(storage, sums([2, 3]), step=1)
    commit(log, state, added=files, removed=[old])
    last = max((tmp_path / DIRECTORY).iterdir())
    names = [one["name"] for one in json.loads(last.read_bytes())["files"]]
    rows = pq.read_table([tmp_path / name for name in names])
    assert rows.column("k").to_pylist() == [2, 3]


def test_there_are_no_deletion_vectors() -> None:
    assert ParquetLog.layouts == (Layout.REWRITE,)


def versions(count: int) -> tuple[ParquetLog, list[LakeState]]:
    """Return a log of so many versions, one each second."""
    log = ParquetLog(RemoteStorage(MemoryStore()), "/lake")
    states = [commit(log, None, added=[a_file()])]
    for _ in range(1, count):
        before = states[-1]
        states.append(commit(log, before, added=[a_file()], removed=[*before.files.values()]))
    return log, states


def there(log: ParquetLog, states: list[LakeState]) -> list[int]:
    found = []
    for state in states:
        try:
            assert log.load(state.version) == state
        except InvalidInput:
            continue
        found.append(state.version)
    return found


@pytest.mark.parametrize(
    ("since_ms", "kept"),
    [
        (0, [0, 1, 2, 3, 4, 5]),
        (1_000, [0, 1, 2, 3, 4, 5]),  # Version 0 was there until just then.
        (1_001, [1, 2, 3, 4, 5]),
        (3_500, [3, 4, 5]),
        (5_000, [4, 5]),
        (5_001, [5]),
        (10**9, [5]),
    ],
)
def test_versions_that_were_replaced_before_the_retention_are_removed(
    since_ms: int, kept: list[int]
) -> None:
    log, states = versions(6)
    log.tidy(states[-1], STARTED_MS + since_ms)
    assert there(log, states) == kept
    log.tidy(states[-1], STARTED_MS + since_ms)
    assert there(log, states) == kept
    assert log.load() == states[-1]


def test_what_came_late_to_the_name_of_a_version_that_was_removed_is_removed() -> None:
    log, states = versions(6)
    log.tidy(states[-1], STARTED_MS + 3_500)
    log._storage.create(version_name(1), b"of a job that was paused")
    log.tidy(states[-1], STARTED_MS + 3_500)
    assert there(log, states) == [3, 4, 5]
    assert log._storage.names() == [version_name(one) for one in (3, 4, 5)]


def test_a_job_that_is_behind_removes_nothing_of_what_came_after() -> None:
    log, states = versions(6)
    log.tidy(states[2], STARTED_MS + 10**9)
    assert there(log, states) == [2, 3, 4, 5]


def test_what_was_removed_long_ago_is_not_written_for_ever() -> None:
    log, states = versions(30)
    storage = log._storage
    sizes = [len(storage.read(version_name(one.version))) for one in states]
    assert sizes[29] > sizes[10]
    state = states[-1].forget(STARTED_MS + 28_000)
    assert sorted(state.removed.values()) == [STARTED_MS + 28_000, STARTED_MS + 29_000]
    after = commit(log, state, added=[a_file()])
    assert len(storage.read(version_name(after.version))) < sizes[10]


def test_a_version_under_another_number_was_put_there_by_somebody_else() -> None:
    """Who wants an earlier one back, say: its files may be gone."""
    log, states = versions(3)
    storage = log._storage
    storage.create(version_name(3), storage.read(version_name(0)))
    loaded = log.load()
    assert loaded is not None
    assert loaded.altered == "version 3: a copy of version 0"
    assert log.load(2) == states[2]
    again = commit(log, loaded, added=[a_file()], removed=[*loaded.files.values()])
    assert (again.version, again.mark.step) == (4, 4)
    assert log.load() == again


def test_a_version_of_a_later_release_is_told_as_such() -> None:
    log, _ = versions(1)
    storage = log._storage
    found = json.loads(storage.read(version_name(0)))
    storage.create(version_name(1), json.dumps({**found, "format": 2}).encode())
    with pytest.raises(UnknownFormat, match=r"0001\.json of /lake is of format 2, this release"):
        log.load()


def test_the_same_state_is_loaded_whatever_the_order_of_its_files() -> None:
    log, states = versions(1)
    files = [a_file(step=1, bounds=(1, 2)), a_file(step=1)]
    state = commit(log, states[0], added=files)
    loaded = log.load()
    assert loaded is not None
    assert replace(loaded, files=dict(sorted(loaded.files.items()))) == state
