"""The rows of one bucket from a KV snapshot, read from the object store: no server is asked."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from locks import BucketKey, ListedSnapshot
from merge_engine import (
    Column,
    MissingSnapshot,
    ObjectStorage,
    OffsetOutOfRange,
    SchemaHistory,
    SnapshotStorage,
)
from merge_engine.errors import Corrupt
from merge_engine.log import Log
from recovery.scan import BucketScan, open_snapshot_scan
from server.definitions import ClusterTable
from server.hosting import SNAPSHOTS


class SnapshotRows:
    """A scan of one bucket's snapshot, to iterate once; it is downloaded first, and then removed.

    Committed rows stand at the snapshot's stable offset, others at its applied offset.
    """

    def __init__(
        self,
        storage: ObjectStorage,
        table: ClusterTable,
        key: BucketKey,
        snapshot: ListedSnapshot,
        columns: Sequence[Column],
        *,
        knowing: Callable[[int], SchemaHistory],
        committed: bool,
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
        self._committed = committed
        self._limit = limit
        self._check = check
        self._directory: Path | None = None
        self._scan: BucketScan | None = None

    @property
    def offset(self) -> int:
        """Where the rows stand in the log: the changelog from here on adds up to the table."""
        snapshot = self._snapshot
        return snapshot.stable if self._committed else snapshot.applied

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
        except (Corrupt, MissingSnapshot, OffsetOutOfRange):
            self._check()  # Rather than damaged, it is gone with its lease.
            raise
        return self._scan

    def _download(self, view: Path) -> BucketScan:
        snapshots = SnapshotStorage(self._storage.child(SNAPSHOTS))
        manifest = snapshots.manifest(self._snapshot.snapshot_id, self._snapshot.term)
        snapshots.restore(manifest, view)
        return open_snapshot_scan(
            view,
            log=Log(self._storage),
            stable=manifest.stable,
            history=self._knowing(manifest.schema_version),
            committed=self._committed,
        )
