"""Checkpoints of live buckets, and buckets that begin with a snapshot instead of the whole log."""

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from obstore.store import MemoryStore

from foundation.errors import Closed, CorruptView, InvalidInput, StorageUnavailable
from foundation.ids import Token
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.database import Database
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.owner_work import OwnerWork
from merge_engine.bucket.snapshot_manifest import Manifest
from merge_engine.bucket.snapshot_storage import SnapshotStorage, UploadedSnapshot, restore_latest
from merge_engine.bucket.view_meta import CheckpointState, read_checkpoint
from merge_engine.storage.objects import LocalStorage, ObjectStorage, RemoteStorage
from tests.conftest import BucketFactory, batch, rows_of
from tests.support.buckets import ADDED, add, delete, open_view

DEADLINE_S = 60
# RocksDB gets something every few puts, also in the middle of a checkpoint.
SMALL = BucketOptions(behind_max_bytes=20_000)


@pytest.fixture(params=["local", "remote"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStorage:
    """Return where the log of a bucket is, and its snapshots below."""
    if request.param == "local":
        return LocalStorage(tmp_path / "log")
    return RemoteStorage(MemoryStore(), "log")


def snapshot(
    bucket: Bucket,
    log: ObjectStorage,
    directory: Path,
    snapshot_id: int = 1,
    reuse: tuple[Manifest, ...] = (),
) -> UploadedSnapshot:
    """Take a snapshot of a bucket, as a leader does."""
    bucket.checkpoint(directory)
    state = read_checkpoint(directory)
    return SnapshotStorage(log.child("snapshots")).upload(
        directory,
        snapshot_id=snapshot_id,
        term=bucket.term,
        state=state,
        stable=state.applied,
        schema_version=bucket.history.current.version,
        created_ms=0,
        reuse=reuse,
    )


def restore(log: ObjectStorage, manifest: Manifest, path: Path) -> None:
    storage = SnapshotStorage(log.child("snapshots"))
    assert restore_latest(storage, [(manifest.snapshot_id, manifest.term)], path) == manifest


def hashes(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


def test_a_restored_view_and_the_rest_of_the_log_are_the_table(
    bucket_factory: BucketFactory, log: ObjectStorage, tmp_path: Path
) -> None:
    bucket = bucket_factory(storage=log)
    add(bucket, [1, 2, 3], [1, 2, 3], owner="me", token=Token(4, 7))
    delete(bucket, 3)
    manifest = snapshot(bucket, log, tmp_path / "checkpoint").manifest
    assert (manifest.applied, manifest.identity) == (bucket.end_offset, "test")
    bucket.evolve(bucket_factory(ADDED, name="other").history)
    bucket.put(batch(k=[1, 4], a=[10, 40], c=[5, 6]))
    delete(bucket, 2)
    # Without the log before it: nothing but the snapshot can have it.
    bucket.clean(manifest.applied)
    expected = rows_of(bucket)
    bucket.close()
    restore(log, manifest, bucket_factory.view_path(view="restored"))
    restored = bucket_factory(ADDED, storage=log, view="restored")
    assert rows_of(restored) == expected == {1: (11, None, 5), 4: (40, None, 6)}
    again = restored.put(batch(k=[1], a=[99]), owner="me", token=Token(4, 7))
    assert again.repeated
    assert add(restored, [1], [1]) == 1


def test_a_restored_view_has_all_that_a_view_has(
    bucket_factory: BucketFactory, log: ObjectStorage, tmp_path: Path
) -> None:
    bucket = bucket_factory(storage=log)
    add(bucket, [1], [1], owner="me", token=Token(4, 7))
    manifest = snapshot(bucket, log, tmp_path / "checkpoint").manifest
    restore(log, manifest, tmp_path / "restored")
    view = open_view(tmp_path / "restored", "test")
    assert view.applied == manifest.applied == 2
    token = view.meta.token("me")
    assert token is not None
    assert token.token == Token(4, 7)
    view.close()
    with pytest.raises(CorruptView, match="belongs to test, not to other"):
        open_view(tmp_path / "restored", "other")


def test_snapshots_below_a_log_are_not_seen_by_it(
    bucket_factory: BucketFactory, log: ObjectStorage, tmp_path: Path
) -> None:
    bucket = bucket_factory(storage=log)
    add(bucket, [1], [1])
    names = log.names()
    snapshot(bucket, log, tmp_path / "checkpoint")
    assert log.names() == names
    bucket.close()
    assert rows_of(bucket_factory(storage=log)) == {1: (1, None)}


def test_a_checkpoint_is_read_without_changing_it(bucket: Bucket, tmp_path: Path) -> None:
    add(bucket, [1], [1])
    bucket.checkpoint(tmp_path / "new" / "checkpoint")
    before = hashes(tmp_path / "new" / "checkpoint")
    state = read_checkpoint(tmp_path / "new" / "checkpoint")
    works = {"": OwnerWork(end_offset=2)}
    assert state == CheckpointState(applied=2, identity="test", works=works)
    assert hashes(tmp_path / "new" / "checkpoint") == before
    with pytest.raises(InvalidInput, match="checkpoint exists already"):
        bucket.checkpoint(tmp_path / "new" / "checkpoint")
    assert hashes(tmp_path / "new" / "checkpoint") == before


def test_a_checkpoint_of_an_empty_bucket_has_its_first_offset(
    bucket: Bucket, tmp_path: Path
) -> None:
    bucket.checkpoint(tmp_path / "checkpoint")
    assert read_checkpoint(tmp_path / "checkpoint") == CheckpointState(1, "test")


def test_what_is_no_checkpoint_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailable):
        read_checkpoint(tmp_path / "nowhere")
    bucket.checkpoint(tmp_path / "checkpoint")
    (table,) = (tmp_path / "checkpoint").glob("*.sst")
    size = table.stat().st_size
    table.unlink()  # A hard link: the bucket's own file must not be changed.
    table.write_bytes(bytes(size))
    with pytest.raises(CorruptView):
        read_checkpoint(tmp_path / "checkpoint")


def test_the_directory_is_free_after_a_checkpoint(
    bucket_factory: BucketFactory, tmp_path: Path
) -> None:
    bucket = bucket_factory()
    bucket.checkpoint(tmp_path / "checkpoint")
    bucket.close()
    assert rows_of(bucket_factory()) == {}


def test_checkpoints_while_a_thread_keeps_putting_are_whole(
    bucket_factory: BucketFactory, log: ObjectStorage, tmp_path: Path
) -> None:
    bucket = bucket_factory(storage=log, options=SMALL)
    stop = threading.Event()
    failed: list[BaseException] = []

    def keep_putting() -> None:
        generator = np.random.default_rng(0)
        try:
            while not stop.is_set():
                keys = pa.array(generator.integers(0, 5_000, 500))
                bucket.put(batch(k=keys, a=keys, b=keys))
        except BaseException as exc:  # Said by the test.
            failed.append(exc)

    writer = threading.Thread(target=keep_putting)
    writer.start()
    try:
        manifests: list[Manifest] = []
        for number in range(5):
            applied = bucket.end_offset
            done = snapshot(bucket, log, tmp_path / f"{number}", number, tuple(manifests))
            assert done.manifest.applied >= applied
            manifests.append(done.manifest)
    finally:
        stop.set()
        writer.join(DEADLINE_S)
    assert not failed
    expected = rows_of(bucket)
    bucket.close()
    for manifest in manifests:
        view = f"view-{manifest.snapshot_id}"
        restore(log, manifest, bucket_factory.view_path(view=view))
        restored = bucket_factory(storage=log, view=view)
        assert rows_of(restored) == expected
        restored.close()


def test_a_checkpoint_of_a_closed_bucket_says_so(bucket: Bucket, tmp_path: Path) -> None:
    bucket.close()
    with pytest.raises(Closed, match="the bucket is closed; open it again"):
        bucket.checkpoint(tmp_path / "checkpoint")


def test_a_bucket_that_is_closed_during_a_checkpoint_ends_it_and_is_free(
    bucket_factory: BucketFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = bucket_factory()
    add(bucket, [1], [1])
    count = Database.count

    def close_first(database: Database, *properties: str) -> int:
        bucket.close()
        return count(database, *properties)

    monkeypatch.setattr(Database, "count", close_first)
    with pytest.raises(Closed, match="closed meanwhile; open it again"):
        bucket.checkpoint(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
    assert rows_of(bucket_factory()) == {1: (1, None)}


def test_closing_at_any_time_gives_a_whole_checkpoint_or_says_closed(
    bucket_factory: BucketFactory, tmp_path: Path
) -> None:
    """The barrier lets both go at once; whoever is first, RocksDB is not closed below a step."""
    for number in range(20):
        bucket = bucket_factory(name=f"bucket-{number}")
        add(bucket, list(range(2_000)), list(range(2_000)))
        directory, together = tmp_path / f"checkpoint-{number}", threading.Barrier(2)
        closer = threading.Thread(target=_together(together, bucket.close))
        closer.start()
        try:
            together.wait(DEADLINE_S)
            bucket.checkpoint(directory)
        except Closed:
            assert not directory.exists()
        else:
            assert read_checkpoint(directory).applied == 2_001
        closer.join(DEADLINE_S)
        assert not closer.is_alive()
        bucket_factory(name=f"bucket-{number}").close()


def _together(barrier: threading.Barrier, call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        barrier.wait(DEADLINE_S)
        call()

    return run


def fill(bucket: Bucket, keys: "np.ndarray[tuple[int], np.dtype[np.int64]]", seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 1 << 40, len(keys))
    for start in range(0, len(keys), 50_000):
        part = slice(start, start + 50_000)
        bucket.put(batch(k=pa.array(keys[part]), a=pa.array(values[part])))


@pytest.mark.parametrize("flushes", [0, 2, 3])
def test_the_second_snapshot_sends_what_changed_however_the_table_was_loaded(
    bucket_factory: BucketFactory, tmp_path: Path, flushes: int
) -> None:
    """At the fourth flush RocksDB rewrites what is new: here by the first snapshot, or before."""
    log = LocalStorage(tmp_path / "log")
    bucket = bucket_factory(storage=log)
    for flush in range(flushes):
        fill(bucket, np.arange(20_000) * 10, seed=flush)
        bucket.flush()
    fill(bucket, np.arange(200_000), seed=10)
    first = snapshot(bucket, log, tmp_path / "first", 1)
    assert first.reused_bytes == 0
    assert len(list((tmp_path / "first").glob("*.sst"))) == 1
    changed = np.random.default_rng(1).choice(200_000, 2_000, replace=False)
    fill(bucket, changed, seed=11)
    second = snapshot(bucket, log, tmp_path / "second", 2, (first.manifest,))
    assert second.uploaded_bytes < 0.15 * first.uploaded_bytes
    assert second.uploaded_bytes + second.reused_bytes == sum(
        file.size for file in second.manifest.files
    )
    expected = rows_of(bucket)
    bucket.close()
    restore(log, second.manifest, bucket_factory.view_path(view="restored"))
    assert rows_of(bucket_factory(storage=log, view="restored")) == expected


def test_a_checkpoint_has_the_files_that_stay_if_its_flush_made_rocksdb_rewrite_them(
    bucket: Bucket, tmp_path: Path
) -> None:
    fill(bucket, np.arange(200_000), seed=0)
    bucket.checkpoint(tmp_path / "first")
    for seed in range(1, 4):
        fill(bucket, np.arange(24_000) * 8, seed)
        bucket.flush()
    fill(bucket, np.arange(24_000) * 8, seed=4)
    bucket.checkpoint(tmp_path / "second")
    assert len(list((tmp_path / "second").glob("*.sst"))) == 1


def test_a_checkpoint_takes_no_room_of_its_own(bucket: Bucket, tmp_path: Path) -> None:
    add(bucket, list(range(1_000)), list(range(1_000)))
    bucket.checkpoint(tmp_path / "checkpoint")
    tables = list((tmp_path / "checkpoint").glob("*.sst"))
    assert tables
    assert all(os.stat(table).st_nlink > 1 for table in tables)
