"""Writing behind: when, and by whom, rows that have changed in memory are written to RocksDB.

Each time it is all that has changed, with the offset up to which it has: at once, or beside other
calls, from a copy. Rows that are being written stay in memory until they are, and are dirty again
if they could not be. For whoever has the bucket to himself.
"""

import logging
import time
from concurrent.futures import Executor, Future

from foundation.failpoints import hit
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.row_writer import KeyedRows, RowWriter
from merge_engine.bucket.view_meta import MetaChanges, ViewMeta
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.working_set.working_set import DirtyRows, WorkingSet

logger = logging.getLogger(__name__)

# How long whoever writes beside others stops, after every few rows.
_PAUSE_S = 0.0002


class WriteBehind:
    """Writes what has changed of one view. RocksDB has all up to the offset `written`."""

    def __init__(
        self,
        writer: RowWriter,
        rows: WorkingSet,
        meta: ViewMeta,
        background: Executor,
        options: BucketOptions,
    ) -> None:
        """`background`: runs what is written beside other calls."""
        self.writer = writer
        self._rows = rows
        self._meta = meta
        self._background = background
        self._options = options
        self.written = meta.applied
        # Why RocksDB did not take the rows the last time; None: it did.
        self.error: str | None = None
        # All up to here is at least being written.
        self._taken = meta.applied
        # What was begun to be written, and, where that is done beside other calls, its end.
        self._begun: _Job | None = None
        self._under_way: tuple[_Job, Future[None]] | None = None

    def share(self) -> float:
        """Return how much has changed, as a share of what may before it is written."""
        options = self._options
        return max(
            self._rows.dirty_bytes / options.behind_max_bytes,
            (self._meta.applied - self._taken) / options.behind_max_offsets,
        )

    def write(self) -> None:
        """Write all that has changed, now."""
        self.end()
        if not self._has_changed:
            return
        job = self._begin()
        job.in_a_hurry = True
        try:
            job.run(self.writer)
        except BaseException as exc:
            self._not_written(job)
            self.error = str(exc)
            raise
        self._is_written(job)

    def start(self, *, in_a_hurry: bool = False) -> "Future[None] | None":
        """Write all that has changed beside other calls; return what to wait for.

        None if there is so little that it was done at once. If something is being written already,
        that is returned, and what came since is left for the next time. `in_a_hurry`: somebody
        waits for it.
        """
        if self._under_way is not None:
            job, future = self._under_way
            job.in_a_hurry |= in_a_hurry
            if not future.done():
                return future
            self.end()
        if self._rows.dirty_rows <= self._options.behind_few_rows:
            self.write()
            return None
        job = self._begin()
        job.in_a_hurry = in_a_hurry
        try:
            future = self._background.submit(job.run, self.writer)
        except RuntimeError:  # Python is about to end, and starts nothing any more.
            self.write()
            return None
        self._under_way = job, future
        return future

    def try_to_start(self) -> bool:
        """Do the same; tell whether all that has changed is written, or is being written."""
        try:
            self.start()
        except Exception as exc:
            self._warn(exc)
        return not self._rows.dirty_rows

    def look(self) -> None:
        """Take note of what was written beside other calls, if it is by now."""
        if self._under_way is not None and self._under_way[1].done():
            self.end()

    def end(self) -> None:
        """Wait for what is being written. If it could not be, that is tried again later."""
        if self._under_way is None:
            return
        job, future = self._under_way
        job.in_a_hurry = True
        error = future.exception()
        self._under_way = None
        if error is None:
            self._is_written(job)
            return
        self._not_written(job)
        if not isinstance(error, Exception):
            raise error
        self._warn(error)

    @property
    def _has_changed(self) -> bool:
        changed = self._rows.dirty_rows or self._meta.changed or self._begun
        return bool(changed or self._meta.applied > self.written)

    def _begin(self) -> "_Job":
        """Return all that has changed, to be written; nothing is lost wherever this is stopped."""
        if self._begun is not None:  # Somebody was interrupted in the middle of this.
            self._not_written(self._begun)
        hit("view.before_write")
        job = _Job(self._rows.history, self._rows.copy_dirty(), self._meta.changes())
        self._begun = job
        self._rows.taken(job.slots)
        self._meta.taken(job.changes)
        self._taken = job.changes.applied
        return job

    def _is_written(self, job: "_Job") -> None:
        self._rows.written(job.slots)
        self.written = job.changes.applied
        self.error = None
        self._begun = None

    def _not_written(self, job: "_Job") -> None:
        self._rows.not_written(job.slots)
        self._meta.not_written(job.changes)
        self._taken = self.written
        self._begun = None

    def _warn(self, error: Exception) -> None:
        self.error = str(error)
        logger.warning("view %s lags its log: %s", self.writer.path, error)


class _Job:
    """Rows that are being written, with what goes with them."""

    def __init__(self, history: SchemaHistory, rows: DirtyRows, changes: MetaChanges) -> None:
        self.changes = changes
        self.slots = rows.slots
        self.in_a_hurry = False
        self._history = history
        self._copy: DirtyRows | None = rows

    def run(self, writer: RowWriter) -> None:
        """Write it all; give way to others, unless it is in a hurry."""
        rows = None if self._copy is None else self._copy.rows()
        keyed = None if rows is None else KeyedRows(self._history, *rows)
        writer.write(self.changes.entries, keyed, pause=self._pause)
        self._copy = None  # It may be a while until somebody looks whether this is done.
        hit("view.written")

    def _pause(self) -> None:
        if not self.in_a_hurry:
            time.sleep(_PAUSE_S)
