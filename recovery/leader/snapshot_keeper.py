"""A bucket's KV snapshots, as its leader keeps them: taken, listed, retired, freed.

The object store has the files, ZooKeeper the list, and the list decides: a snapshot is one from
when it is listed until it is retired. Steps, and what is left if the process dies after each:

1. claim the list with our term: a former leader can neither list, nor retire, nor delete any more;
2. checkpoint, and find the last stable offset for it: nothing is left but local files;
3. upload the files, then the manifest: objects that no list names, for the next sweep;
4. list it, and retire what is beyond the number to keep, in one write: then it is a snapshot;
5. of the retired, those that no lease pins: delete their files, then take them off the list.
   Whoever leases one meanwhile finds it retired, or was there before and is seen here.

The log is cleaned up to the oldest stable offset of all that are kept, listed or leased. What stays
of it before the latest one is rolled up, a little at a time.
"""

import logging
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from foundation.errors import CorruptSnapshot, MissingSnapshot, UnknownFormat
from foundation.failpoints import hit
from foundation.ids import LeadKey
from locks.snapshots.leases import Leases
from locks.snapshots.list_records import ListedSnapshot, SnapshotList
from locks.snapshots.lists import SnapshotLists
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log import wall_clock_ms
from merge_engine.bucket.segment import SegmentKind
from merge_engine.bucket.snapshot_manifest import Manifest
from merge_engine.bucket.snapshot_storage import SnapshotStorage
from merge_engine.bucket.view_meta import read_checkpoint
from recovery.reader.isolation import ReadRecords, last_stable_offset

logger = logging.getLogger(__name__)


class SnapshotKeeper:
    """The snapshots of one bucket, for as long as this process leads it. Safe for threads."""

    def __init__(
        self,
        bucket: Bucket,
        key: LeadKey,
        storage: SnapshotStorage,
        *,
        lists: Callable[[], SnapshotLists],
        leases: Callable[[], Leases],
        read_records: ReadRecords,
        directory: Path,
        retained: int,
        clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        """`directory`: for checkpoints, on the disk of the view, so that files are linked."""
        self._bucket = bucket
        self._key = key
        self._storage = storage
        self._lists = lists
        self._leases = leases
        self._read_records = read_records
        self._directory = directory
        self._retained = retained
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self._list: SnapshotList | None = None
        # Whether there may be objects that nobody needs: after a failure, and from former leaders.
        self._unswept = True

    def take(self) -> ListedSnapshot:
        """Take a snapshot, unless the latest has all there is; return the latest."""
        with self._lock:
            known = self._claim()
            latest = known.latest
            if latest is not None and self._is_current(latest):
                return latest
            self._unswept = True
            end = self._bucket.end_offset
            known = self._take(known)
            assert known.latest is not None
            if known.latest.applied < end:
                # An attempt that failed before had got as far as the manifest, and that one stands.
                known = self._take(known)
            self._free(known)
            assert known.latest is not None
            return known.latest

    def free(self) -> None:
        """Delete what no list and no lease needs any more."""
        with self._lock:
            if self._list is None:
                self._list = self._lists().read(self._key)
                if not self._list.kept and self._storage.is_empty():
                    self._unswept = False
            if self.has_surplus:
                self._free(self._claim())

    def clean_log(self, *, older_than_ms: int) -> int:
        """Drop the log as far as no snapshot needs it, and it is old enough; return its start."""
        with self._lock:
            before = self._claim().oldest_stable
        if before is None:
            return self._bucket.start_offset
        return self._bucket.clean(before, older_than_ms=older_than_ms)

    def roll_up_log(self) -> bool:
        """Roll up some of the log before the latest snapshot; True if there may be more.

        That is stable, so it is rarely read, and the view on disk has it.
        """
        latest = None if self._list is None else self._list.latest
        return latest is not None and self._bucket.roll_up(latest.stable)

    @property
    def has_surplus(self) -> bool:
        """Whether there may be something to free: kept for a lease, or left by a failure."""
        known = self._list
        return self._unswept or known is None or bool(known.retired)

    def _claim(self) -> SnapshotList:
        self._list = self._lists().claim(self._key, self._bucket.term)
        return self._list

    def _is_current(self, latest: ListedSnapshot) -> bool:
        """Whether a new one would be the same: nothing was changed since, nor committed.

        Deposed: another leader has come, and may have written.
        """
        stable = last_stable_offset(
            self._bucket, self._key.bucket, self._read_records, latest.applied
        )
        kinds = {header.kind for header in self._bucket.headers(latest.applied)}
        changed = not kinds.isdisjoint((SegmentKind.WRITE, SegmentKind.UNDO))
        return stable == latest.stable and not changed and bool(self._manifests([latest]))

    def _take(self, known: SnapshotList) -> SnapshotList:
        checkpoint = self._directory / uuid.uuid4().hex
        try:
            self._bucket.checkpoint(checkpoint)
            hit("snapshot.checkpointed")
            state = read_checkpoint(checkpoint)
            stable = last_stable_offset(
                self._bucket, self._key.bucket, self._read_records, state.applied
            )
            uploaded = self._storage.upload(
                checkpoint,
                snapshot_id=known.next_id,
                term=self._bucket.term,
                state=state,
                stable=stable,
                schema_version=self._bucket.history.current.version,
                created_ms=self._clock_ms(),
                reuse=self._manifests(known.listed),
            )
        finally:
            shutil.rmtree(checkpoint, ignore_errors=True)
        manifest = uploaded.manifest
        listed = self._lists().add(
            known,
            ListedSnapshot(
                snapshot_id=manifest.snapshot_id,
                term=manifest.term,
                applied=manifest.applied,
                stable=manifest.stable,
                created_ms=manifest.created_ms,
                bytes=sum(file.size for file in manifest.files),
            ),
            self._retained,
        )
        self._list = listed
        hit("snapshot.listed")
        logger.info(
            "snapshot %d of bucket %s: offset %d, stable %d, %d bytes sent, %d there before",
            manifest.snapshot_id,
            self._key,
            manifest.applied,
            manifest.stable,
            uploaded.uploaded_bytes,
            uploaded.reused_bytes,
        )
        return listed

    def _manifests(self, snapshots: Sequence[ListedSnapshot]) -> list[Manifest]:
        """Return the manifests of these; a damaged one, or a newer release's, shares no files.

        Nor does a retired one: a former leader, which has yet to notice, may be deleting it.
        """
        manifests = []
        for snapshot in snapshots:
            with suppress(CorruptSnapshot, MissingSnapshot, UnknownFormat):
                manifests.append(self._storage.manifest(snapshot.snapshot_id, snapshot.term))
        return manifests

    def _free(self, known: SnapshotList) -> None:
        """Ask for the leases after the retiring: who leases does it the other way round."""
        pinned = frozenset[int]()
        if known.retired:
            leased = self._leases().pinned(self._key.table_id)
            pinned = leased.get(self._key.bucket, pinned)
        gone = [one.snapshot_id for one in known.retired if one.snapshot_id not in pinned]
        if not gone and not self._unswept:
            return
        kept = [one for one in known.kept if one.snapshot_id not in gone]
        # Up to our term: another leader may have come since the claim, and be uploading by now.
        self._storage.sweep([(one.snapshot_id, one.term) for one in kept], term=known.term)
        hit("snapshot.swept")
        if gone:
            self._list = self._lists().remove(known, gone)
        self._unswept = False
