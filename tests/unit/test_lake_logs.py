"""One contract for both logs of a lake, on a disk and in an object store."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from foundation.errors import (
    CorruptLake,
    InvalidInput,
    LakeRefused,
    LakeTaken,
    StorageFull,
    StorageUnavailable,
    UnknownFormat,
    UnknownOutcome,
)
from merge_engine.storage.objects import LocalStorage, ObjectStorage, RemoteStorage
from sink.lake import delta_log, log, parquet_log
from sink.lake.delta_log import DeltaLog
from sink.lake.log import LakeLog, Nonces, create_version, version_name
from sink.lake.opening import Lake, Place, check_empty, find_lake, load_unaltered, open_lake
from sink.lake.parquet_log import ParquetLog
from sink.lake.state import Change, LakeState, file_name
from tests.support import faulty_storage
from tests.support.faulty_storage import Create, FaultyStorage
from tests.support.lakes import BUCKET, STARTED_MS, a_file, a_mark, commit

WHERE = "/lake"
DIRECTORIES = {"delta": delta_log.DIRECTORY, "parquet": parquet_log.DIRECTORY}


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStorage:
    if request.param == "local":
        return LocalStorage(tmp_path / "lake")
    return RemoteStorage(MemoryStore(), "some/lake")


@pytest.fixture(params=["delta", "parquet"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def log_of(kind: str, storage: ObjectStorage) -> LakeLog:
    return DeltaLog(storage, WHERE, {}) if kind == "delta" else ParquetLog(storage, WHERE)


@pytest.fixture
def lake_log(kind: str, storage: ObjectStorage) -> LakeLog:
    return log_of(kind, storage)


def shown(state: LakeState | None) -> Any:
    """Return what a state says, whatever the order of its files."""
    assert state is not None
    files = {
        name: (one.rows, one.size, set(one.dead), one.bounds) for name, one in state.files.items()
    }
    return state.version, state.mark, files, state.altered


def test_where_nothing_is_nothing_is_loaded(lake_log: LakeLog) -> None:
    assert lake_log.load() is None
    assert lake_log.load(3) is None


def test_what_was_committed_is_loaded_at_each_version(
    kind: str, storage: ObjectStorage, lake_log: LakeLog
) -> None:
    files = [a_file(10 + n, step=n, bounds=(n, 2 * n) if n % 2 else None) for n in range(6)]
    states = [commit(lake_log, None, added=files[:1])]
    for n in range(1, 6):
        gone = [files[n - 2]] if n >= 2 else []
        states.append(commit(lake_log, states[-1], added=[files[n]], removed=gone))
    assert [state.version for state in states] == [0, 1, 2, 3, 4, 5]
    other = log_of(kind, storage)
    for state in states:
        assert shown(other.load(state.version)) == shown(state)
    assert shown(other.load()) == shown(states[-1])
    assert states[-1].mark.version == 5
    assert set(states[-1].files) == {files[4].name, files[5].name}
    assert states[-1].rows == 14 + 15
    loaded = other.load()
    assert loaded is not None
    assert loaded.removed == {files[n].name: STARTED_MS + 1000 * (n + 2) for n in range(4)}
    assert loaded.removed == states[-1].removed


def test_a_copy_of_no_rows_has_versions_too(lake_log: LakeLog) -> None:
    state = commit(lake_log, None)
    assert shown(lake_log.load()) == shown(state)
    assert state.rows == 0


@pytest.mark.parametrize("version", [-1, 2, 10**12])
def test_a_version_that_is_not_there_is_told_with_the_one_that_is(
    lake_log: LakeLog, version: int
) -> None:
    commit(lake_log, commit(lake_log, None))
    with pytest.raises(
        InvalidInput, match=f"has no version {version}, or not any more; it is at 1"
    ):
        lake_log.load(version)


def test_of_two_that_commit_the_same_version_the_second_is_told_who_was_first(
    kind: str, storage: ObjectStorage, lake_log: LakeLog
) -> None:
    first = commit(lake_log, None, added=[a_file()])
    theirs = commit(log_of(kind, storage), first, added=[a_file(step=1)])
    with pytest.raises(LakeTaken, match="version 1 of /lake was committed by another"):
        commit(lake_log, first, added=[a_file(step=1)])
    assert shown(lake_log.load()) == shown(theirs)
    with pytest.raises(LakeTaken, match="was committed by another tiering job"):
        commit(log_of(kind, storage), None)
    assert shown(lake_log.load()) == shown(theirs)


def test_a_version_whose_name_is_free_again_is_not_committed(
    kind: str, storage: ObjectStorage, lake_log: LakeLog
) -> None:
    """By a job that was paused, while another one went on, and let go of what was old."""
    first = commit(lake_log, None, added=[a_file()])
    states, other = [first], log_of(kind, storage)
    for _ in range(6):
        states.append(commit(other, states[-1], added=[a_file()]))
    within = storage.child(DIRECTORIES[kind])
    within.delete([version_name(one) for one in range(4)])
    names = within.names()
    with pytest.raises(LakeTaken, match="version 1 of /lake was committed by another"):
        commit(lake_log, first, added=[a_file(step=1)])
    assert within.names() == names, "and nothing is left of it"
    with pytest.raises(LakeTaken):  # The next one is there: somebody may have gone on from it.
        commit(lake_log, states[2], added=[a_file(step=1)])
    with pytest.raises(LakeTaken):
        commit(lake_log, states[3], added=[a_file(step=1)])


def test_a_file_is_not_added_twice_in_one_change() -> None:
    file = a_file()
    with pytest.raises(AssertionError, match="added twice"):
        Change(mark=a_mark(), added=(file, replace(file, rows=1)), time_ms=0, operation="ROUND")


def test_other_objects_beside_the_log_do_not_matter(
    kind: str, storage: ObjectStorage, lake_log: LakeLog
) -> None:
    """Such as what file managers and backup tools leave."""
    state = commit(lake_log, None, added=[a_file()])
    within = storage.child(DIRECTORIES[kind])
    for name in (".DS_Store", "README", "notes.json", "zzz", f"{version_name(0)}.bak"):
        within.create(name, b"?")
    assert shown(lake_log.load()) == shown(state)
    later = commit(lake_log, state, added=[a_file(step=1)])
    lake_log.tidy(later, STARTED_MS)
    assert shown(lake_log.load()) == shown(later)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"7", b'"text"', b"\xff\xfe", b'{"format": 1}', b"null"]
)
def test_a_version_that_is_damaged_is_corrupt(
    kind: str, storage: ObjectStorage, lake_log: LakeLog, data: bytes
) -> None:
    state = commit(lake_log, None, added=[a_file()])
    within = storage.child(DIRECTORIES[kind])
    within.delete([version_name(0)])
    within.create(version_name(0), data)
    with pytest.raises((CorruptLake, LakeRefused)):
        lake_log.load()
    # Whoever commits on top of what was loaded before is none the wiser, and none the worse.
    assert commit(lake_log, state).version == 1


def test_whatever_is_wrong_with_a_version_it_is_an_error_of_ours(kind: str) -> None:
    storage = RemoteStorage(MemoryStore())
    lake_log = log_of(kind, storage)
    commit(lake_log, None, added=[a_file(dead=[] if kind == "parquet" else [1, 2], bounds=(0, 1))])
    within = storage.child(DIRECTORIES[kind])
    lines = [json.loads(line) for line in within.read(version_name(0)).splitlines()]
    tried = 0
    for number, line in enumerate(lines):
        for damaged in _damaged(line):
            there = [*lines[:number], damaged, *lines[number + 1 :]]
            within.delete([version_name(0)])
            within.create(version_name(0), "\n".join(map(json.dumps, there)).encode())
            tried += 1
            # Some of it does not matter, and is read.
            with suppress(CorruptLake, LakeRefused, UnknownFormat):
                lake_log.load()
    assert tried > 100


def _damaged(value: Any) -> list[Any]:
    """Return a value of JSON with any one part of it left out, or replaced by something else."""
    found: list[Any] = []
    if isinstance(value, dict):
        for name in value:
            found.append({one: there for one, there in value.items() if one != name})
            found += [{**value, name: other} for other in (None, 7, "x")]
            found += [{**value, name: inner} for inner in _damaged(value[name])]
    return found


@pytest.mark.parametrize("kind", ["delta"])
def test_a_version_that_is_missing_between_others_is_corrupt(
    kind: str, storage: ObjectStorage, lake_log: LakeLog
) -> None:
    state = None
    for _ in range(4):
        state = commit(lake_log, state, added=[a_file()])
    storage.child(DIRECTORIES[kind]).delete([version_name(2)])
    with pytest.raises(CorruptLake, match=r"version 2 .*is missing"):
        lake_log.load()
    with pytest.raises(InvalidInput, match="has no version 2"):
        lake_log.load(2)
    assert lake_log.load(1) is not None


# --- Lakes by their paths -------------------------------------------------------------------------


def test_a_lake_is_found_by_its_path_whatever_its_format(tmp_path: Path, kind: str) -> None:
    place = Place.of(str(tmp_path / "lake"))
    with pytest.raises(InvalidInput, match="has no copy of a table: make one by"):
        find_lake(place)
    made = open_lake(place, kind)
    state = commit(made.log, None)
    found = find_lake(place)
    assert type(found.log) is type(made.log)
    assert shown(load_unaltered(found)) == shown(state)
    assert shown(load_unaltered(found, 0)) == shown(state)


def test_a_format_that_there_is_not_is_refused(tmp_path: Path) -> None:
    place = Place.of(str(tmp_path))
    with pytest.raises(InvalidInput, match=r"a lake of the format 'delt'; did you mean 'delta'\?"):
        open_lake(place, "delt")
    with pytest.raises(InvalidInput, match="'iceberg'; there are delta and parquet"):
        open_lake(place, "iceberg")


def test_a_place_is_known_by_its_whole_path_and_keeps_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Place.of("lake").location == str(tmp_path / "lake")
    assert Place.of(f"file://{tmp_path}/lake/").location == str(tmp_path / "lake")
    remote = Place.of("s3://bucket/lake/", {"secret_access_key": "hush"})
    assert remote.location == "s3://bucket/lake"
    assert "hush" not in repr(remote)


def lake_at(storage: ObjectStorage, lake_log: LakeLog) -> Lake:
    return Lake(Place.of(WHERE), storage, lake_log)


def test_what_a_killed_first_round_has_left_is_no_obstacle_but_other_things_are(
    storage: ObjectStorage, lake_log: LakeLog
) -> None:
    storage.create(file_name(BUCKET, 0), b"")
    check_empty(lake_at(storage, lake_log))
    storage.create("README.md", b"")
    with pytest.raises(LakeRefused, match=r"/lake is not empty, .*it has README.md; choose"):
        check_empty(lake_at(storage, lake_log))
    storage.create("part-0.parquet", b"")
    with pytest.raises(LakeRefused, match=r"it has README.md and 1 more; choose another path"):
        check_empty(lake_at(storage, lake_log))


def test_a_copy_of_the_other_format_is_an_obstacle(storage: ObjectStorage, kind: str) -> None:
    commit(log_of(kind, storage), None)
    other = log_of("parquet" if kind == "delta" else "delta", storage)
    assert other.load() is None
    with pytest.raises(LakeRefused, match=f"has a lake of the format {kind}: say so, if it is"):
        check_empty(lake_at(storage, other))


# --- Creating a version whose outcome may not be known --------------------------------------------


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyStorage:
    monkeypatch.setattr(log, "_PAUSE_S", 0.0)
    return FaultyStorage(tmp_path / "log")


def create(storage: ObjectStorage, data: bytes = b"ours") -> bool:
    return create_version(storage, 3, data, data.decode(), Nonces())


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [faulty_storage.done_but_unknown],
        [faulty_storage.not_done_and_unknown],
        [faulty_storage.not_done_and_unknown] * 4,
        [faulty_storage.not_done_and_unknown, faulty_storage.done_but_unknown],
        [faulty_storage.sent_twice],
        [faulty_storage.still_on_its_way],
        [faulty_storage.not_done_and_unknown, faulty_storage.unreachable],
        [faulty_storage.not_done_and_unknown, faulty_storage.no_room],
    ],
)
def test_a_version_is_created_once_whatever_is_heard_of_it(
    faulty: FaultyStorage, faults: list[Create]
) -> None:
    faulty.faults = list(faults)
    assert create(faulty)
    faulty.deliver_late()
    assert faulty.read(version_name(3)) == b"ours"
    assert faulty.names() == [version_name(3)]


@pytest.mark.parametrize(
    "faults", [[], [faulty_storage.not_done_and_unknown], [faulty_storage.still_on_its_way]]
)
def test_a_version_that_somebody_else_has_created_stays_theirs(
    faulty: FaultyStorage, faults: list[Create]
) -> None:
    faulty.create(version_name(3), b"theirs")
    faulty.faults = list(faults)
    assert not create(faulty)
    faulty.deliver_late()
    assert faulty.read(version_name(3)) == b"theirs"


def test_who_is_overtaken_while_the_outcome_is_unknown_is_told(faulty: FaultyStorage) -> None:
    def overtaken(storage: LocalStorage, name: str, data: bytes) -> None:
        LocalStorage.create(storage, name, b"theirs")
        raise UnknownOutcome("timed out")

    faulty.faults = [faulty_storage.not_done_and_unknown, overtaken]
    assert not create(faulty)


def test_an_outcome_that_stays_unknown_is_said_to_be(faulty: FaultyStorage) -> None:
    faulty.faults = [faulty_storage.still_on_its_way] * 5
    with pytest.raises(UnknownOutcome, match=r"whether version 3 of .* was committed is not known"):
        create(faulty)
    faulty.deliver_late()
    assert faulty.read(version_name(3)) == b"ours"


@pytest.mark.parametrize(
    ("fault", "error"),
    [(faulty_storage.unreachable, StorageUnavailable), (faulty_storage.no_room, StorageFull)],
)
def test_what_is_certain_to_have_failed_is_said_to_have(
    faulty: FaultyStorage, fault: Create, error: type[Exception]
) -> None:
    faulty.faults = [fault]
    with pytest.raises(error):
        create(faulty)
    assert faulty.names() == []


@pytest.mark.parametrize("fault", [faulty_storage.done_but_unknown, faulty_storage.sent_twice])
def test_a_version_that_cannot_be_read_back_may_be_there(
    faulty: FaultyStorage, monkeypatch: pytest.MonkeyPatch, fault: Create
) -> None:
    """A store that has just gone away: nothing else than "unknown" would be true."""

    def read(name: str) -> bytes:
        raise StorageUnavailable(f"{name}: unreachable")

    monkeypatch.setattr(faulty, "read", read)
    faulty.faults = [fault, *[faulty_storage.unreachable] * 10]
    with pytest.raises(UnknownOutcome, match="whether version 3"):
        create(faulty)


@pytest.mark.parametrize("fault", [faulty_storage.done_but_unknown, faulty_storage.sent_twice])
def test_a_commit_of_a_log_whose_outcome_is_unknown_is_found_to_be_there(
    faulty: FaultyStorage, kind: str, fault: Create
) -> None:
    class Faulty(FaultyStorage):
        def child(self, path: str) -> LocalStorage:
            made = FaultyStorage(self._directory / path)
            made.faults = [fault]
            return made

    made = Faulty(faulty._directory)
    state = commit(log_of(kind, made), None, added=[a_file()])
    assert shown(log_of(kind, LocalStorage(faulty._directory)).load()) == shown(state)
