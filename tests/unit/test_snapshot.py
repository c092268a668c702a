"""Snapshots as objects: what is uploaded, what is found again, what a sweep leaves."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from foundation.errors import (
    CorruptSnapshot,
    InvalidInput,
    MissingSnapshot,
    StorageFull,
    StorageUnavailable,
    UnknownOutcome,
)
from foundation.failpoints import arm
from merge_engine.bucket.snapshot_manifest import Manifest, content_of, data_name
from merge_engine.bucket.snapshot_storage import SnapshotStorage, UploadedSnapshot, restore_latest
from merge_engine.bucket.view_meta import CheckpointState
from merge_engine.storage.objects import LocalStorage, ObjectStorage, RemoteStorage
from tests.support.faulty_storage import (
    FaultyStorage,
    done_but_unknown,
    interrupt,
    no_room,
    not_done_and_unknown,
    still_on_its_way,
)

FIRST = {"000008.sst": b"many rows", "CURRENT": b"MANIFEST-5\n", "000004.log": b""}
SECOND = {**FIRST, "000009.sst": b"few rows", "MANIFEST-5": b"two files"}


@pytest.fixture(params=["local", "remote"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStorage:
    """Return where the snapshots of a bucket are."""
    if request.param == "local":
        return LocalStorage(tmp_path / "log").child("snapshots")
    return RemoteStorage(MemoryStore(), "log").child("snapshots")


def directory_of(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def upload(
    storage: ObjectStorage,
    path: Path,
    files: dict[str, bytes],
    *,
    snapshot_id: int = 1,
    term: int = 5,
    reuse: Sequence[Manifest] = (),
) -> UploadedSnapshot:
    """Upload these files from a new directory, or again from the same."""
    return SnapshotStorage(storage).upload(
        path if path.exists() else directory_of(path, files),
        snapshot_id=snapshot_id,
        term=term,
        state=CheckpointState(10, "test"),
        stable=8,
        schema_version=1,
        created_ms=1000,
        reuse=reuse,
    )


def damage(storage: ObjectStorage, name: str, change: Callable[[bytes], bytes]) -> None:
    data = storage.read(name)
    storage.delete([name])
    storage.create(name, change(data))


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_a_snapshot_is_restored_as_it_was_uploaded(storage: ObjectStorage, tmp_path: Path) -> None:
    done = upload(storage, tmp_path / "checkpoint", FIRST)
    snapshots = SnapshotStorage(storage)
    manifest = snapshots.manifest(1, 5)
    assert manifest == done.manifest
    assert (manifest.applied, manifest.stable, manifest.identity) == (10, 8, "test")
    assert (done.uploaded_bytes, done.reused_bytes) == (20, 0)
    snapshots.restore(manifest, tmp_path / "deep" / "view")
    assert files_in(tmp_path / "deep" / "view") == FIRST
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["view"]


def test_objects_are_named_by_content_and_term_and_no_file_is_sent_twice(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    first = upload(storage, tmp_path / "first", FIRST)
    second = upload(
        storage, tmp_path / "second", SECOND, snapshot_id=2, term=6, reuse=[first.manifest]
    )
    expected = [data_name(content_of(data), 5) for data in FIRST.values()]
    expected += [data_name(content_of(SECOND[name]), 6) for name in ("000009.sst", "MANIFEST-5")]
    assert storage.names() == sorted([*expected, "1-5.manifest", "2-6.manifest"])
    assert (second.uploaded_bytes, second.reused_bytes) == (17, 20)
    SnapshotStorage(storage).restore(second.manifest, tmp_path / "view")
    assert files_in(tmp_path / "view") == SECOND


def test_what_another_term_left_is_not_taken_to_be_there(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    upload(storage, tmp_path / "first", FIRST, term=5)
    later = upload(storage, tmp_path / "second", FIRST, term=6)
    assert later.uploaded_bytes == 20
    assert {term.object_name.partition("-")[2] for term in later.manifest.files} == {"6"}


@pytest.mark.parametrize(
    "point", ["snapshot.before_file", "snapshot.files_uploaded", "snapshot.manifest_created"]
)
def test_an_upload_that_was_interrupted_goes_on(
    storage: ObjectStorage, tmp_path: Path, point: str
) -> None:
    with arm(point, interrupt), pytest.raises(KeyboardInterrupt):
        upload(storage, tmp_path / "checkpoint", FIRST)
    if point != "snapshot.manifest_created":
        with pytest.raises(MissingSnapshot, match="there is no snapshot 1 of term 5"):
            SnapshotStorage(storage).manifest(1, 5)
    done = upload(storage, tmp_path / "checkpoint", FIRST)
    SnapshotStorage(storage).restore(done.manifest, tmp_path / "view")
    assert files_in(tmp_path / "view") == FIRST


def test_a_snapshot_that_this_term_has_finished_stands(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    first = upload(storage, tmp_path / "first", FIRST)
    again = upload(storage, tmp_path / "again", SECOND)
    assert again.manifest == first.manifest == SnapshotStorage(storage).manifest(1, 5)


def test_a_create_of_unknown_outcome_is_done_again(tmp_path: Path) -> None:
    storage = FaultyStorage(tmp_path / "snapshots")
    storage.faults = [done_but_unknown, not_done_and_unknown, still_on_its_way]
    done = upload(storage, tmp_path / "checkpoint", FIRST)
    storage.deliver_late()
    SnapshotStorage(storage).restore(done.manifest, tmp_path / "view")
    assert files_in(tmp_path / "view") == FIRST
    assert SnapshotStorage(storage).sweep([(1, 5)]) == []


def test_an_upload_gives_up_and_says_what_is_known(tmp_path: Path) -> None:
    storage = FaultyStorage(tmp_path / "snapshots")
    storage.faults = [not_done_and_unknown] * 4
    with pytest.raises(UnknownOutcome):
        upload(storage, tmp_path / "checkpoint", FIRST)
    storage.faults = [no_room]
    with pytest.raises(StorageFull):
        upload(storage, tmp_path / "checkpoint", FIRST)
    assert storage.names() == []
    with pytest.raises(StorageUnavailable, match="No such file or directory"):
        SnapshotStorage(storage).upload(
            tmp_path / "nowhere",
            snapshot_id=1,
            term=1,
            state=CheckpointState(1, "test"),
            stable=0,
            schema_version=1,
            created_ms=0,
            reuse=[],
        )


def test_a_snapshot_that_cannot_be_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "snapshots")
    with pytest.raises(InvalidInput, match="stable up to offset 2"):
        SnapshotStorage(storage).upload(
            directory_of(tmp_path / "checkpoint", FIRST),
            snapshot_id=1,
            term=1,
            state=CheckpointState(1, "test"),
            stable=2,
            schema_version=1,
            created_ms=0,
            reuse=[],
        )
    assert storage.names() == []


@pytest.mark.parametrize("change", [flipped, lambda data: data[:-1], lambda data: data + b"x"])
def test_a_damaged_file_is_named_and_nothing_is_left_behind(
    storage: ObjectStorage, tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    manifest = upload(storage, tmp_path / "checkpoint", FIRST).manifest
    name = next(file.object_name for file in manifest.files if file.name == "000008.sst")
    damage(storage, name, change)
    with pytest.raises(CorruptSnapshot, match=rf"snapshot 1: 000008\.sst, object {name}, is dam"):
        SnapshotStorage(storage).restore(manifest, tmp_path / "views" / "view")
    assert list((tmp_path / "views").iterdir()) == []


def test_a_missing_file_is_named_and_nothing_is_left_behind(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    manifest = upload(storage, tmp_path / "checkpoint", FIRST).manifest
    storage.delete([manifest.files[-1].object_name])
    with pytest.raises(CorruptSnapshot, match=rf"{manifest.files[-1].name}, .* is missing"):
        SnapshotStorage(storage).restore(manifest, tmp_path / "views" / "view")
    assert list((tmp_path / "views").iterdir()) == []


def test_a_directory_that_is_there_is_not_touched(storage: ObjectStorage, tmp_path: Path) -> None:
    manifest = upload(storage, tmp_path / "checkpoint", FIRST).manifest
    with pytest.raises(InvalidInput, match="checkpoint exists already; a restore needs a new"):
        SnapshotStorage(storage).restore(manifest, tmp_path / "checkpoint")
    assert files_in(tmp_path / "checkpoint") == FIRST


def test_what_a_killed_restore_left_does_not_get_into_the_next(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    manifest = upload(storage, tmp_path / "checkpoint", FIRST).manifest
    directory_of(tmp_path / "view.restoring", {"000001.sst": b"old", "CURRENT": b"torn"})
    SnapshotStorage(storage).restore(manifest, tmp_path / "view")
    assert files_in(tmp_path / "view") == FIRST
    assert not (tmp_path / "view.restoring").exists()


def test_the_latest_good_snapshot_is_restored(
    storage: ObjectStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for snapshot_id in (1, 2, 3):
        files = {"CURRENT": b"%d" % snapshot_id}
        upload(storage, tmp_path / f"{snapshot_id}", files, snapshot_id=snapshot_id)
    damage(storage, "3-5.manifest", flipped)
    storage.delete([data_name(content_of(b"2"), 5)])
    snapshots = SnapshotStorage(storage)
    found = restore_latest(snapshots, [(4, 5), (3, 5), (2, 5), (1, 5)], tmp_path / "view")
    assert found == snapshots.manifest(1, 5)
    assert files_in(tmp_path / "view") == {"CURRENT": b"1"}
    messages = [record.getMessage() for record in caplog.records]
    for message, part in zip(messages, ("no snapshot 4", "checksum", "missing"), strict=True):
        assert "is passed over" in message
        assert part in message
    assert restore_latest(snapshots, [(3, 5), (2, 5)], tmp_path / "another") is None
    assert not (tmp_path / "another").exists()


def test_a_sweep_leaves_what_is_kept_and_nothing_else(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    first = upload(storage, tmp_path / "first", FIRST)
    upload(storage, tmp_path / "second", SECOND, snapshot_id=2, reuse=[first.manifest])
    storage.create(data_name(content_of(b"left by a killed upload"), 4), b"left by a killed upload")
    storage.create("notes.txt", b"not ours")
    snapshots = SnapshotStorage(storage)
    deleted = snapshots.sweep([(2, 5)])
    assert deleted == ["1-5.manifest", data_name(content_of(b"left by a killed upload"), 4)]
    assert snapshots.sweep([(2, 5)]) == []
    snapshots.restore(snapshots.manifest(2, 5), tmp_path / "view")
    assert files_in(tmp_path / "view") == SECOND
    assert len(snapshots.sweep([])) == 6
    assert storage.names() == ["notes.txt"]


def test_manifests_go_before_their_files_and_the_next_sweep_finishes(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    first = upload(storage, tmp_path / "first", {"CURRENT": b"1"})
    upload(storage, tmp_path / "second", {"CURRENT": b"2"}, snapshot_id=2)
    with arm("snapshot.deleted", interrupt), pytest.raises(KeyboardInterrupt):
        SnapshotStorage(storage).sweep([(2, 5)])
    assert "1-5.manifest" not in storage.names()
    assert SnapshotStorage(storage).sweep([(2, 5)]) == [first.manifest.files[0].object_name]


@pytest.mark.parametrize("damaged", [True, False])
def test_no_file_is_deleted_while_one_to_keep_cannot_be_read(
    storage: ObjectStorage, tmp_path: Path, damaged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    upload(storage, tmp_path / "first", {"CURRENT": b"1"})
    upload(storage, tmp_path / "second", {"CURRENT": b"2"}, snapshot_id=2)
    if damaged:
        damage(storage, "2-5.manifest", flipped)
    else:
        storage.delete(["2-5.manifest"])
    with caplog.at_level(logging.WARNING):
        assert SnapshotStorage(storage).sweep([(2, 5)]) == ["1-5.manifest"]
    assert "no files of snapshots are deleted" in caplog.text
    assert sum(name.endswith("-5") for name in storage.names()) == 2


def test_a_deposed_leader_sweeps_nothing_of_those_after_it(
    storage: ObjectStorage, tmp_path: Path
) -> None:
    upload(storage, tmp_path / "first", FIRST, term=5)
    later = upload(storage, tmp_path / "second", SECOND, snapshot_id=2, term=6)
    deleted = SnapshotStorage(storage).sweep([], term=5)
    assert len(deleted) == 4
    SnapshotStorage(storage).restore(later.manifest, tmp_path / "view")
    assert files_in(tmp_path / "view") == SECOND
