"""The buckets that a server leads, open and recovered, and those that it warms up for."""

import logging
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from foundation.allocator import keep_freed_memory
from foundation.background import surviving
from foundation.errors import LogGap, NotLeader, TallybookError
from foundation.ids import BucketId, LeadKey
from foundation.open_files import raise_limit
from locks.snapshots.list_records import ListedSnapshot
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.follower import Follower
from merge_engine.bucket.log import wall_clock_ms
from merge_engine.bucket.log_and_view import GoOn
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.snapshot_storage import SnapshotStorage, restore_latest
from merge_engine.bucket.view_meta import read_checkpoint
from merge_engine.storage.objects import ObjectStorage, is_remote
from recovery.leader.led_bucket import LedBucket
from server.protocol.definitions import SNAPSHOTS, ClusterTable

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
# With the uid: whatever else somebody keeps beside the views is not ours to delete.
_OF_A_TABLE = re.compile(".+-[0-9a-f]{32}")
# A change that is replayed costs about as much as this many bytes of a snapshot that is restored.
_BYTES_PER_CHANGE = 256
ReadSnapshots = Callable[[], Sequence[ListedSnapshot]]
"""Reads what is listed of a bucket's snapshots, the latest first."""
ReadTable = Callable[[], ClusterTable]
"""Reads a table's definition again, for what was written under a later schema."""


class Hosting:
    """Opens, serves and closes buckets; whoever leads them is decided elsewhere.

    Safe for threads, of which one at a time warms up for, opens or closes the same bucket. Logs are
    in the cluster's storage; views are in this server's own directory: a zombie must not hold what
    its successor needs.
    """

    def __init__(
        self,
        logs: ObjectStorage,
        views: Path,
        options: BucketOptions,
        *,
        before_close: Callable[[LeadKey], None] = lambda _: None,
        clock_ms: Callable[[], int] = wall_clock_ms,
        forgotten: Callable[[Collection[str]], None] = lambda _: None,
    ) -> None:
        """`before_close`: ends what reads a bucket, which is no longer served by then.

        `forgotten`: told after tables were forgotten, or renamed, of the names that there are.
        `clock_ms`: dates the segments; it is to be the same for all servers of a cluster.
        """
        self._before_close = before_close
        self._clock_ms = clock_ms
        self._forgotten = forgotten
        self._logs = logs
        self._views = views
        self._options = options
        keep_freed_memory()
        raise_limit()
        self._cache = options.to_cache()
        self.memory = options.to_memory()
        self._lock = threading.Lock()
        self._tables: dict[int, ClusterTable] = {}
        self._buckets: dict[LeadKey, LedBucket] = {}
        self._followers: dict[LeadKey, Follower] = {}
        # No longer served, and not closed yet.
        self._ended: dict[LeadKey, LedBucket] = {}
        self._unopened: dict[LeadKey, str] = {}
        self._awaited: Collection[LeadKey] = frozenset()
        self._asked: set[LeadKey] = set()

    @property
    def asks_afar(self) -> bool:
        """Whether a question to a bucket's log costs a round trip."""
        return is_remote(self._logs)

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
                    break
            for led in waiting:
                with suppress(TallybookError):  # It is being closed.
                    led.bucket.evolve(table.history)
            told.update(waiting)
        if known is not None and known.name != table.name:
            self._tell_names()

    def forget_tables(self, existing: Iterable[int]) -> None:
        """Drop the definitions of tables that are no more."""
        with self._lock:
            gone = set(self._tables) - set(existing)
            for table_id in gone:
                del self._tables[table_id]
        if gone:
            self._tell_names()

    def _tell_names(self) -> None:
        with self._lock:
            names = {table.name for table in self._tables.values()}
        self._forgotten(names)

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
        if led is None and key in self._awaited:
            self._asked.add(key)
            raise NotLeader(f"bucket {key} is being opened here; ask again")
        if led is None:
            raise NotLeader(
                f"this server does not lead bucket {key.bucket} of table "
                f"{key.table_id}: ask who does"
            )
        return led

    def get_all(self, keys: Sequence[LeadKey]) -> list[LedBucket]:
        """Return buckets that this server leads; NotLeader if one of them is not led here.

        All that are still to be opened here are opened soon, as `get` has it for one.
        """
        try:
            return [self.get(key) for key in keys]
        except NotLeader:
            self._asked.update(key for key in keys if key in self._awaited)
            raise

    def set_unopened(self, reasons: Mapping[LeadKey, str]) -> None:
        """Say which buckets should be served here and cannot be, and why."""
        self._unopened = dict(reasons)

    def unopened(self) -> Mapping[LeadKey, str]:
        """Return which buckets should be served here and cannot be, and why."""
        return self._unopened

    def set_awaited(self, keys: Collection[LeadKey]) -> None:
        """Say which buckets are to be served here soon."""
        self._awaited = frozenset(keys)
        self._asked &= self._awaited

    def asked(self) -> Collection[LeadKey]:
        """Return those of the awaited buckets that somebody has asked for."""
        return frozenset(self._asked)

    def led(self) -> Mapping[LeadKey, LedBucket]:
        """Return all buckets that are being served."""
        with self._lock:
            return dict(self._buckets)

    def warm(
        self,
        key: LeadKey,
        read_snapshots: ReadSnapshots = list,
        read_table: ReadTable | None = None,
        go_on: GoOn = lambda: True,
    ) -> None:
        """Bring the view of a bucket that another server leads near the end of its log.

        As `open` does, but nobody is told, and nothing is written. Closed if `go_on` says no.
        """
        self._close_ended(key)  # If that failed: until it is closed, its view cannot be opened.
        follower = self._begin(key, read_snapshots, read_table, go_on, gently=True)
        with self._lock:
            self._followers[key] = follower

    def follow(self, key: LeadKey) -> int:
        """Apply what its leader has appended since; return how many segments that were."""
        return self._followers[key].follow()

    def cool(self, key: LeadKey) -> None:
        """Let go of a bucket that was warm. Its view stays: the next time there is less to do."""
        with self._lock:
            follower = self._followers.pop(key, None)
        if follower is not None:
            follower.close()

    def open(
        self,
        key: LeadKey,
        read_snapshots: ReadSnapshots = list,
        read_table: ReadTable | None = None,
        go_on: GoOn = lambda: True,
    ) -> None:
        """Take the lead in the log, bring the view up to date, and serve.

        One that is warm has little left to replay. Else, where there is no view, or one that is
        older than the log, or so old that it takes less, it is restored from a snapshot. Closed if
        `go_on` says no before it leads.
        """
        self._close_ended(key)
        with self._lock:
            follower = self._followers.pop(key, None)
        if follower is None:
            follower = self._begin(key, read_snapshots, read_table, go_on)
        try:
            bucket = Bucket.led_from(follower)
        except LogGap:  # It was cleaned while we followed.
            if not self._restore(key, read_snapshots()):
                raise
            bucket = Bucket.led_from(self._begin(key, read_snapshots, read_table, go_on))
        table = self.table(key.table_id)
        while True:
            with self._lock:
                newest = self._tables.get(key.table_id, table)
                if bucket.history.current.version >= newest.schema.version:
                    self._buckets[key] = LedBucket(bucket, key.bucket, locked=table.locked)
                    self._unopened.pop(key, None)
                    self._asked.discard(key)
                    return
            bucket.evolve(newest.history)

    def _begin(
        self,
        key: LeadKey,
        read_snapshots: ReadSnapshots,
        read_table: ReadTable | None,
        go_on: GoOn,
        *,
        gently: bool = False,
    ) -> Follower:
        snapshots = read_snapshots()
        if self._is_restored_sooner(key, snapshots):
            self._restore(key, snapshots)
        try:
            return self._follower(key, read_table, go_on, gently=gently)
        except LogGap:
            if not self._restore(key, snapshots):
                raise
            return self._follower(key, read_table, go_on, gently=gently)

    def _follower(
        self, key: LeadKey, read_table: ReadTable | None, go_on: GoOn, *, gently: bool
    ) -> Follower:
        table = self.table(key.table_id)
        path = table.path(key.bucket)
        return Follower(
            self._logs.child(path),
            self._views / path,
            table.history,
            identity=path,
            options=self._options,
            cache=self._cache,
            memory=self.memory,
            clock_ms=self._clock_ms,
            read_schemas=None if read_table is None else lambda: read_table().history,
            go_on=go_on,
            gently=gently,
        )

    def _is_restored_sooner(self, key: LeadKey, snapshots: Sequence[ListedSnapshot]) -> bool:
        """Whether it takes less to restore the latest snapshot than to replay what it has."""
        view = self._views / self.table(key.table_id).path(key.bucket)
        if not snapshots or not view.exists():
            return bool(snapshots)
        try:
            applied = read_checkpoint(view).applied
        except TallybookError:  # To open it says what is wrong with it.
            return False
        latest = snapshots[0]
        return latest.bytes < (latest.applied - applied) * _BYTES_PER_CHANGE

    def _restore(self, key: LeadKey, snapshots: Sequence[ListedSnapshot]) -> bool:
        """Put the latest good snapshot in the view's place; False if there is none that is newer.

        The view stays until its successor is here: where a segment is missing, not cleaned, a view
        may be all that is left of it.
        """
        view = self._views / self.table(key.table_id).path(key.bucket)
        restored = view.with_name(f"{view.name}.restored")
        shutil.rmtree(restored, ignore_errors=True)  # Of a server that was killed right here.
        began = time.monotonic()
        named = [(one.snapshot_id, one.term) for one in snapshots]
        manifest = restore_latest(self.snapshots(key), named, restored)
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

    def end(self, key: LeadKey, *, at_once: bool = False) -> None:
        """Stop serving a bucket; calls that are under way end first, unless `at_once`.

        Nothing of it is written here any more. To close it can wait until somebody else leads it.
        """
        with self._lock:
            led = self._buckets.pop(key, None)
            if led is not None:
                self._ended[key] = led
            led = self._ended.get(key)
        if led is not None:
            led.bucket.end(at_once=at_once)

    def close(self, key: LeadKey) -> None:
        """Stop serving a bucket, and close it; calls that are under way end first."""
        self.end(key)
        self._close_ended(key)

    def _close_ended(self, key: LeadKey) -> None:
        """Close what is no longer served; what fails is still there for the next to close it."""
        led = self._ended.get(key)
        if led is None:
            return
        try:
            self._before_close(key)
        finally:
            led.bucket.close()
        with self._lock:
            self._ended.pop(key, None)

    def drop(self, key: LeadKey) -> None:
        """Close a bucket whose table or partition was dropped, and delete its view.

        Log and snapshots are not ours alone: whoever leases them may still read them.
        """
        path = self.table(key.table_id).path(key.bucket)
        self.cool(key)
        self.close(key)
        shutil.rmtree(self._views / path, ignore_errors=True)

    def sweep(self, exists: Callable[[LeadKey], bool]) -> None:
        """Delete all views of tables and partitions that there are not any more.

        Nobody may be opening one of them, or closing one.
        """
        with self._lock:
            known = {table.directory: table.table_id for table in self._tables.values()}
        for directory in self._views.glob("*-*"):
            if not _OF_A_TABLE.fullmatch(directory.name):
                continue
            table_id = known.get(directory.name)
            partitions = list(directory.iterdir())
            gone = [
                partition
                for partition in partitions
                if table_id is None
                or not exists(LeadKey(table_id, BucketId(int(partition.name), 0)))
            ]
            for path in [directory] if gone == partitions else gone:
                logger.info("%s was a view of what was dropped, and is deleted", path)
                shutil.rmtree(path, ignore_errors=True)

    def close_all(self) -> None:
        """Stop serving; one that fails to close keeps none of the others open."""
        with self._lock:
            keys = [*self._buckets, *self._ended, *self._followers]
        for key in keys:
            for close in (self.cool, self.close):
                with surviving("closing a bucket"):
                    close(key)
