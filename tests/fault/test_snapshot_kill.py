"""A snapshotter killed with SIGKILL at every step leaves no snapshot broken and nothing for ever.

The child opens a bucket, puts, takes a snapshot and sweeps all but the last two, round after round;
it lists its snapshots in a file, as leaders do in ZooKeeper: after the upload, and unlisted before
the sweep. After the kill every listed snapshot must be whole, and the next process must get to the
end and leave exactly the objects of what is listed then. A child repeats with

    python -m tests.fault.test_snapshot_kill <directory> <rounds>
"""

import signal
import sys
from pathlib import Path

import pytest

from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.snapshot_manifest import (
    Manifest,
    decode_manifest,
    is_manifest,
    manifest_name,
)
from merge_engine.bucket.snapshot_storage import SnapshotStorage, restore_latest
from merge_engine.bucket.view_meta import read_checkpoint
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.storage.objects import LocalStorage
from tests.conftest import SUMS, rows_of
from tests.fault.killed_writer import failpoint_names
from tests.support.buckets import add
from tests.support.forked import forked

DEADLINE_S = 60
KEPT = 2
ROUNDS = 3
KEYS = 300

# The visits at which the child is killed: in the first upload, in a later one, in a sweep that has
# a manifest to delete, and in the middle of its files. An upload has six files or more.
VISITS = {
    "snapshot.before_delete": (1, 2),
    "snapshot.before_file": (1, 4, 9, 16),
    "snapshot.deleted": (1, 2),
    "snapshot.files_uploaded": (1, 3),
    "snapshot.manifest_created": (1, 3),
}
# In them, the storage's own steps, of the log and of the snapshots.
STORAGE_VISITS = {"storage.written": (5, 12), "storage.linked": (5, 12)}

Listed = list[tuple[int, int]]


def open_bucket(directory: Path, view: str = "view") -> Bucket:
    storage = LocalStorage(directory / "log")
    return Bucket(storage, directory / view, SchemaHistory([SUMS]), identity="test")


def snapshots_of(directory: Path) -> LocalStorage:
    return LocalStorage(directory / "log").child("snapshots")


def listed(directory: Path) -> Listed:
    """Return the snapshots that the child has listed, oldest first."""
    path = directory / "listed"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(number), int(term)) for number, term in map(str.split, lines)]


def write_list(directory: Path, snapshots: Listed) -> None:
    """Replace the list, as one step."""
    new = directory / "listed.new"
    new.write_text("".join(f"{number} {term}\n" for number, term in snapshots))
    new.rename(directory / "listed")


def main(directory: Path, rounds: int) -> None:
    """Put, snapshot and sweep, so many times; begin with what a killed one may have left."""
    bucket = open_bucket(directory)
    storage = SnapshotStorage(snapshots_of(directory))
    storage.sweep(listed(directory), term=bucket.term)
    for number in range(rounds):
        add(bucket, list(range(number, KEYS)), [1] * (KEYS - number))
        checkpoint = directory / f"checkpoint-{bucket.term}-{number}"
        bucket.checkpoint(checkpoint)
        state = read_checkpoint(checkpoint)
        known = listed(directory)
        storage.upload(
            checkpoint,
            snapshot_id=known[-1][0] + 1 if known else 0,
            term=bucket.term,
            state=state,
            stable=state.applied,
            schema_version=1,
            created_ms=0,
            reuse=[storage.manifest(*snapshot) for snapshot in known],
        )
        known.append((known[-1][0] + 1 if known else 0, bucket.term))
        write_list(directory, known[-KEPT:])
        storage.sweep(known[-KEPT:], term=bucket.term)
    bucket.close()


def run(directory: Path, failpoint: str | None = None) -> int | None:
    """Run a child to its end; return how it ended."""
    with forked(main, directory, ROUNDS, failpoint=failpoint) as child:
        return child.end(DEADLINE_S)[0]


def needed(manifests: list[Manifest]) -> set[str]:
    files = {file.object_name for manifest in manifests for file in manifest.files}
    return files | {manifest_name(each.snapshot_id, each.term) for each in manifests}


def check_manifests(directory: Path) -> None:
    """Whatever has a manifest, listed or not, has its files: another leader may have listed it."""
    names = snapshots_of(directory).names()
    for name in filter(is_manifest, names):
        manifest = decode_manifest(name, snapshots_of(directory).read(name))
        assert needed([manifest]) <= set(names)


def check_whole(directory: Path) -> list[Manifest]:
    """Restore every listed snapshot, and compare it, with the rest of the log, to the table."""
    storage = SnapshotStorage(snapshots_of(directory))
    bucket = open_bucket(directory, "rebuilt")
    expected = rows_of(bucket)
    bucket.close()
    manifests = []
    for snapshot in listed(directory):
        view = f"restored-{bucket.term}-{snapshot[0]}"
        manifest = restore_latest(storage, [snapshot], directory / view)
        assert manifest is not None, f"snapshot {snapshot} is listed, but not whole"
        restored = open_bucket(directory, view)
        assert rows_of(restored) == expected
        restored.close()
        manifests.append(manifest)
    return manifests


def test_every_failpoint_of_snapshots_is_killed_at() -> None:
    names = [name for name in failpoint_names() if name.startswith("snapshot.")]
    assert sorted(VISITS) == names


@pytest.mark.parametrize(
    "failpoint",
    [
        f"{name}:{visit}"
        for name, visits in {**VISITS, **STORAGE_VISITS}.items()
        for visit in visits
    ],
)
def test_no_listed_snapshot_is_broken_and_what_was_left_is_swept(
    failpoint: str, tmp_path: Path
) -> None:
    assert run(tmp_path, failpoint) == -signal.SIGKILL, f"not killed at {failpoint}"
    check_manifests(tmp_path)
    check_whole(tmp_path)
    assert run(tmp_path) == 0
    manifests = check_whole(tmp_path)
    assert len(manifests) == KEPT
    assert set(snapshots_of(tmp_path).names()) == needed(manifests)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
