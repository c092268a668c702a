"""Snapshots of a bucket in its object storage: upload, restore, sweep.

A snapshot is a checkpoint's files, each an object named by its content, and a manifest, created
last: a manifest implies its files. Files that an earlier snapshot has already are not sent again.
Deletes go the other way, manifests first, so that this holds after every step, and after a crash
the next sweep removes what belongs to no snapshot.

Which snapshots there are, the caller knows: it lists one after its upload, and unlists it before
the sweep. It runs one upload or sweep of a bucket at a time, and keeps the snapshots whose files
are used again until the new one is listed.
"""

import logging
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from foundation.errors import (
    AlreadyExists,
    Corrupt,
    CorruptSnapshot,
    InvalidInput,
    MissingObject,
    MissingSnapshot,
    StorageUnavailable,
    UnknownOutcome,
)
from foundation.failpoints import hit
from foundation.parallel import map_all
from merge_engine.bucket.snapshot_manifest import (
    Manifest,
    SnapshotFile,
    content_of,
    data_name,
    decode_manifest,
    encode_manifest,
    is_manifest,
    manifest_name,
    term_of,
)
from merge_engine.bucket.view_meta import CheckpointState
from merge_engine.storage.objects import LocalStorage, ObjectStorage

logger = logging.getLogger(__name__)

_CREATE_ATTEMPTS = 4
# So many files are in memory at once during a restore.
_RESTORE_THREADS = 3


@dataclass(frozen=True, kw_only=True)
class UploadedSnapshot:
    """A snapshot that is complete, and how much of it was sent, or was there from earlier ones."""

    manifest: Manifest
    uploaded_bytes: int
    reused_bytes: int


class SnapshotStorage:
    """The snapshots of one bucket, in a storage of their own."""

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage

    def upload(
        self,
        directory: Path,
        *,
        snapshot_id: int,
        term: int,
        state: CheckpointState,
        stable: int,
        schema_version: int,
        created_ms: int,
        reuse: Sequence[Manifest] = (),
    ) -> UploadedSnapshot:
        """Upload a checkpoint; it is a snapshot when this returns.

        Only files of `reuse`, and what this term made before, are taken to be there. Calling again
        after an error goes on where it stopped. If this term has finished a snapshot of this id
        before, that one stands and is returned.
        """
        manifest = Manifest(
            snapshot_id=snapshot_id,
            term=term,
            identity=state.identity,
            applied=state.applied,
            stable=stable,
            created_ms=created_ms,
            schema_version=schema_version,
            files=(),
        )
        reused = {file.content: file.object_name for each in reuse for file in each.files}
        files = [self._upload_file(path, term, reused) for path in _files_of(directory)]
        hit("snapshot.files_uploaded")
        manifest = replace(manifest, files=tuple(files))
        if not self._create(manifest.object_name, encode_manifest(manifest)):
            manifest = self.manifest(snapshot_id, term)
        hit("snapshot.manifest_created")
        reused_bytes = sum(file.size for file in files if file.content in reused)
        uploaded_bytes = sum(file.size for file in files) - reused_bytes
        return UploadedSnapshot(
            manifest=manifest, uploaded_bytes=uploaded_bytes, reused_bytes=reused_bytes
        )

    def _upload_file(self, path: Path, term: int, reused: Mapping[str, str]) -> SnapshotFile:
        hit("snapshot.before_file")
        try:
            data = path.read_bytes()
        except OSError as exc:
            raise StorageUnavailable(f"{path}: {exc.strerror}") from exc
        content = content_of(data)
        if content in reused:
            return SnapshotFile(path.name, reused[content], len(data))
        name = data_name(content, term)
        self._create(name, data)
        return SnapshotFile(path.name, name, len(data))

    def _create(self, name: str, data: bytes) -> bool:
        """Create an object that nobody but this term makes; return False if it was there."""
        for attempt in range(1, _CREATE_ATTEMPTS + 1):
            try:
                self._storage.create(name, data)
            except AlreadyExists:
                return False
            except UnknownOutcome:
                if attempt == _CREATE_ATTEMPTS:
                    raise
            else:
                break
        return True

    def is_empty(self) -> bool:
        """Whether there is nothing at all, not even what a failed upload left."""
        return not self._storage.names()

    def manifest(self, snapshot_id: int, term: int) -> Manifest:
        """Return a snapshot's manifest; MissingSnapshot, or CorruptSnapshot, if it has none."""
        name = manifest_name(snapshot_id, term)
        try:
            return decode_manifest(name, self._storage.read(name))
        except MissingObject as exc:
            raise MissingSnapshot(
                f"there is no snapshot {snapshot_id} of term {term} in {self._storage}"
            ) from exc

    def restore(self, manifest: Manifest, directory: Path) -> None:
        """Download a snapshot into a new directory, which is there whole, and durable, or not.

        CorruptSnapshot if a file is not what was uploaded. What a killed restore into the same
        directory has left is removed; so there is one at a time.
        """
        if directory.exists():
            raise InvalidInput(f"{directory} exists already; a restore needs a new directory")
        temporary = directory.with_name(f"{directory.name}.restoring")
        shutil.rmtree(temporary, ignore_errors=True)
        target = LocalStorage(temporary)

        def download(file: SnapshotFile) -> None:
            target.create(file.name, self.read_file(manifest, file))

        try:
            with ThreadPoolExecutor(_RESTORE_THREADS, "restore") as pool:
                map_all(pool, download, manifest.files)
            _rename_synced(temporary, directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def read_file(self, manifest: Manifest, file: SnapshotFile) -> bytes:
        """Return a file of a snapshot; CorruptSnapshot if it is not what was uploaded."""
        where = f"snapshot {manifest.snapshot_id}: {file.name}, object {file.object_name},"
        try:
            data = self._storage.read(file.object_name)
        except MissingObject as exc:
            raise CorruptSnapshot(f"{where} is missing; take another snapshot") from exc
        if len(data) != file.size or content_of(data) != file.content:
            raise CorruptSnapshot(f"{where} is damaged; take another snapshot")
        return data

    def sweep(self, keep: Collection[tuple[int, int]], *, term: int | None = None) -> list[str]:
        """Delete what the snapshots to keep, (id, term) each, do not need; return the names.

        With `term`, what later leaders made is left alone, so that a sweep by one that was deposed
        harms none of their uploads. If one to keep cannot be read, files stay, for some may be its.
        """
        names = [name for name in self._storage.names() if _is_up_to(term, name)]
        kept = {manifest_name(*snapshot) for snapshot in keep}
        needed = self._needed(keep)
        spent = [name for name in names if is_manifest(name) and name not in kept]
        if needed is not None:
            spent += [name for name in names if not is_manifest(name) and name not in needed]
        for name in spent:
            hit("snapshot.before_delete")
            self._storage.delete([name])
            hit("snapshot.deleted")
        return spent

    def _needed(self, keep: Collection[tuple[int, int]]) -> set[str] | None:
        """Return the objects of these snapshots' files; None if they cannot be known."""
        needed: set[str] = set()
        for snapshot_id, term in keep:
            try:
                files = self.manifest(snapshot_id, term).files
            except (Corrupt, MissingSnapshot) as exc:
                logger.warning("no files of snapshots are deleted in %s: %s", self._storage, exc)
                return None
            needed.update(file.object_name for file in files)
        return needed


def restore_latest(
    storage: SnapshotStorage, snapshots: Sequence[tuple[int, int]], directory: Path
) -> Manifest | None:
    """Restore the first good one of these snapshots, (id, term) each, newest first; return it."""
    for snapshot_id, term in snapshots:
        try:
            manifest = storage.manifest(snapshot_id, term)
            storage.restore(manifest, directory)
        except (Corrupt, MissingSnapshot) as exc:
            logger.warning("snapshot %d of term %d is passed over: %s", snapshot_id, term, exc)
            continue
        return manifest
    return None


def _is_up_to(term: int | None, name: str) -> bool:
    """Whether an object was made by this leader or one before; False for what is not ours."""
    made_by = term_of(name)
    return made_by is not None and (term is None or made_by <= term)


def _files_of(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.is_file())
    except OSError as exc:
        raise StorageUnavailable(f"{directory}: {exc.strerror}") from exc


def _rename_synced(source: Path, target: Path) -> None:
    try:
        source.rename(target)
        descriptor = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as exc:
        raise StorageUnavailable(f"{target}: {exc.strerror}") from exc
