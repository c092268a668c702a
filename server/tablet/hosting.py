"""The buckets that a server leads, open and recovered."""

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from foundation.allocator import keep_freed_memory
from foundation.errors import LogGap, NotLeader, TallybookError
from foundation.ids import LeadKey
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log import wall_clock_ms
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.snapshot_storage import SnapshotStorage, restore_latest
from merge_engine.bucket.view_meta import read_checkpoint
from merge_engine.storage.objects import ObjectStorage
from recovery.leader.led_bucket import LedBucket
from server.protocol.definitions import SNAPSHOTS, ClusterTable

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
ReadSnapshots = Callable[[], Sequence[tuple[int, int]]]
"""Reads the ids and terms of a bucket's snapshots, the latest first."""


class Hosting:
    """Opens, serves and closes buckets. Safe for threads; whoever leads them is decided elsewhere.

    Logs are in the cluster's storage; views are in this server's own directory: a zombie must not
    hold what its successor needs.
    """

    def __init__(
        self,
        logs: ObjectStorage,
        views: Path,
        options: BucketOptions,
        *,
        before_close: Callable[[LeadKey], None] = lambda _: None,
        clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        """`before_close`: ends what reads a bucket, which is no longer served by then.

        `clock_ms`: dates the segments; it is to be the same for all servers of a cluster.
        """
        self._before_close = before_close
        self._clock_ms = clock_ms
        self._logs = logs
        self._views = views
        self._options = options
        keep_freed_memory()
        self._cache = options.to_cache()
        self.memory = options.to_memory()
        self._lock = threading.Lock()
        self._tables: dict[int, ClusterTable] = {}
        self._buckets: dict[LeadKey, LedBucket] = {}
        self._unopened: dict[LeadKey, str] = {}

    @property
    def options(self) -> BucketOptions:
        """How buckets use memory and disk."""
        return self._options

    def set_table(self, table: ClusterTable) -> None:
        """Take a definition that was read; an older one than we have is late and ignored.

        The buckets get it first: whoever finds it here may ask them for all of its columns.
        """
        told: set[LedBucket] = set()
        while True:
            with self._lock:
                known = self._tables.get(table.table_id)
                if known is not None and known.table.version >= table.table.version:
                    return
                waiting = [
                    led
                    for key, led in self._buckets.items()
                    if key.table_id == table.table_id and led not in told
                ]
                if not waiting:
                    self._tables[table.table_id] = table
                    return
            for led in waiting:
                with suppress(TallybookError):  # It is being closed.
                    led.bucket.evolve(table.history)
            told.update(waiting)

    def forget_tables(self, existing: Iterable[int]) -> None:
        """Drop the definitions of tables that are no more."""
        with self._lock:
            for table_id in set(self._tables) - set(existing):
                del self._tables[table_id]

    def table(self, table_id: int) -> ClusterTable:
        """Return a table; NotLeader if this server has not heard of it."""
        with self._lock:
            table = self._tables.get(table_id)
        if table is None:
            raise NotLeader(f"this server knows no table with id {table_id}: dropped, or very new")
        return table

    def get(self, key: LeadKey) -> LedBucket:
        """Return a bucket that this server leads; NotLeader if it does not."""
        led = self._buckets.get(key)
        why = self._unopened.get(key)
        if led is None and why is not None:
            raise NotLeader(f"bucket {key} should be served here and cannot be opened: {why}")
        if led is None:
            raise NotLeader(
                f"this server does not lead bucket {key.bucket} of table "
                f"{key.table_id}: ask who does"
            )
        return led

    def set_unopened(self, reasons: Mapping[LeadKey, str]) -> None:
        """Say which buckets should be served here and cannot be, and why."""
        self._unopened = dict(reasons)

    def unopened(self) -> Mapping[LeadKey, str]:
        """Return which buckets should be served here and cannot be, and why."""
        return self._unopened

    def led(self) -> Mapping[LeadKey, LedBucket]:
        """Return all buckets that are being served."""
        with self._lock:
            return dict(self._buckets)

    def open(
        self,
        key: LeadKey,
        read_snapshots: ReadSnapshots = list,
        read_table: Callable[[], ClusterTable] | None = None,
    ) -> None:
        """Take the lead in the log, bring the view up to date, and serve.

        Where there is no view, or one that is older than the log, it is restored from a snapshot.
        `read_table`: reads the definition again, for what was written under a later schema.
        """
        table = self.table(key.table_id)
        path = table.path(key.bucket)
        if not (self._views / path).exists():
            self._restore(key, read_snapshots)
        try:
            bucket = self._open(table, path, read_table)
        except LogGap:
            if not self._restore(key, read_snapshots):
                raise
            bucket = self._open(table, path, read_table)
        while True:
            with self._lock:
                newest = self._tables.get(key.table_id, table)
                if bucket.history.current.version >= newest.schema.version:
                    self._buckets[key] = LedBucket(bucket, key.bucket, locked=table.locked)
                    self._unopened.pop(key, None)
                    return
            bucket.evolve(newest.history)

    def _open(
        self, table: ClusterTable, path: str, read_table: Callable[[], ClusterTable] | None
    ) -> Bucket:
        return Bucket(
            self._logs.child(path),
            self._views / path,
            table.history,
            identity=path,
            options=self._options,
            cache=self._cache,
            memory=self.memory,
            clock_ms=self._clock_ms,
            read_schemas=None if read_table is None else lambda: read_table().history,
        )

    def _restore(self, key: LeadKey, read_snapshots: ReadSnapshots) -> bool:
        """Put the latest good snapshot in the view's place; False if there is none that is newer.

        The view stays until its successor is here: where a segment is missing, not cleaned, a view
        may be all that is left of it.
        """
        view = self._views / self.table(key.table_id).path(key.bucket)
        restored = view.with_name(f"{view.name}.restored")
        shutil.rmtree(restored, ignore_errors=True)  # Of a server that was killed right here.
        began = time.monotonic()
        manifest = restore_latest(self.snapshots(key), read_snapshots(), restored)
        if manifest is None:
            return False
        if view.exists() and read_checkpoint(view).applied >= manifest.applied:
            shutil.rmtree(restored, ignore_errors=True)
            return False
        shutil.rmtree(view, ignore_errors=True)
        restored.rename(view)
        logger.info(
            "restored bucket %s from snapshot %d at offset %d after %.3f s",
            key,
            manifest.snapshot_id,
            manifest.applied,
            time.monotonic() - began,
        )
        return True

    def snapshots(self, key: LeadKey) -> SnapshotStorage:
        """Return where the snapshots of a bucket are."""
        path = self.table(key.table_id).path(key.bucket)
        return SnapshotStorage(self._logs.child(path).child(SNAPSHOTS))

    @property
    def checkpoints(self) -> Path:
        """Where to make checkpoints: on the disk of the views, so that files are linked."""
        return self._views / CHECKPOINTS

    def close(self, key: LeadKey) -> None:
        """Stop serving a bucket; calls that are under way end first."""
        with self._lock:
            led = self._buckets.pop(key, None)
        if led is not None:
            self._before_close(key)
            led.bucket.close()

    def drop(self, key: LeadKey) -> None:
        """Close a bucket whose table or partition was dropped, and delete its view.

        Log and snapshots are not ours alone: whoever leases them may still read them.
        """
        path = self.table(key.table_id).path(key.bucket)
        self.close(key)
        shutil.rmtree(self._views / path, ignore_errors=True)

    def close_all(self) -> None:
        """Stop serving; one that fails to close keeps none of the others open."""
        for key in self.led():
            try:
                self.close(key)
            except Exception:
                logger.exception("bucket %s did not close", key)
