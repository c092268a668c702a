"""The rows of one bucket from a KV snapshot, read from the object store: no server is asked."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from foundation.errors import Corrupt, CutTooOld, MissingSnapshot, OffsetOutOfRange, UnknownSchema
from foundation.ids import BucketId
from locks.snapshots.list_records import ListedSnapshot
from merge_engine.bucket.snapshot_storage import SnapshotStorage
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.schema.schema import Column
from merge_engine.storage.objects import ObjectStorage
from recovery.reader.bucket_scan import BucketScan, open_snapshot_scan
from recovery.reader.cut import BucketCut
from server.protocol.definitions import SNAPSHOTS, ClusterTable


class SnapshotRows:
    """A scan of one bucket's snapshot, to iterate once; it is downloaded first, and then removed.

    At the cut, with what the log has that the snapshot has not; or, without one, as it is.
    """

    def __init__(
        self,
        storage: ObjectStorage,
        table: ClusterTable,
        key: BucketId,
        snapshot: ListedSnapshot,
        columns: Sequence[Column],
        *,
        knowing: Callable[[int], SchemaHistory],
        cut: BucketCut | None,
        limit: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`knowing`: returns the table's schemas, up to this version at least, or raises.

        `check`: raises if the snapshot is no longer held, so that its files may be going.
        """
        self._storage = storage.child(table.path(key))
        self._knowing = knowing
        self._snapshot = snapshot
        self._columns = columns
        self._cut = cut
        self._limit = limit
        self._check = check
        self._directory: Path | None = None
        self._scan: BucketScan | None = None
        self.closed = False

    @property
    def offset(self) -> int:
        """Where it was taken. As it is, the changelog from here on adds up to the table."""
        return self._snapshot.applied

    def open_early(self) -> None:
        """It is downloaded when it is read: what is leased stays as it is."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches in key order."""
        try:
            for batch in self._open().batches(self._columns, limit=self._limit):
                self._check()
                yield batch.data
        finally:
            self.close()

    def close(self) -> None:
        """Remove what was downloaded. Closing twice is fine."""
        self.closed = True
        if self._scan is not None:
            self._scan.close()
            self._scan = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _open(self) -> BucketScan:
        self._check()
        self._directory = Path(tempfile.mkdtemp(prefix="tallybook-snapshot-"))
        try:
            self._scan = self._download(self._directory / "view")
        except (Corrupt, CutTooOld, MissingSnapshot, OffsetOutOfRange):
            self._check()  # Rather than damaged, it is gone with its lease.
            raise
        return self._scan

    def _download(self, view: Path) -> BucketScan:
        snapshots = SnapshotStorage(self._storage.child(SNAPSHOTS))
        manifest = snapshots.manifest(self._snapshot.snapshot_id, self._snapshot.term)
        snapshots.restore(manifest, view)
        version = manifest.schema_version
        while True:
            try:
                return open_snapshot_scan(
                    view, self._cut, storage=self._storage, history=self._knowing(version)
                )
            except UnknownSchema as exc:  # The log has what was written since.
                if exc.version <= version:
                    raise
                version = exc.version
