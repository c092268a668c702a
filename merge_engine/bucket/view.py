"""The materialised view of a bucket: RocksDB, and the newest rows in memory above it.

A cache of the log, and nothing more: RocksDB's own WAL is off. Rows go to memory first and to
RocksDB behind, many at a time, in one write batch with the applied offset and the owners' last
tokens. One column family, so that after a crash RocksDB holds a prefix of these write batches; the
log has the rest.

Keys in RocksDB: `r` and the encoded key for a row, whose value `row_codec` lays out; `m` and
a name for all else, see `view_meta`. The format that is said there is the version of all of this,
also of the keys (`keys`) and of the rows, which have none of their own. Snapshots are
files of a view: with a new version of it, that of their manifests rises as well, so that an older
release passes them over.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

from rocksdict import AccessType, Cache, Checkpoint, Options, Rdict, WriteBatch

from foundation import forks
from foundation.errors import (
    Closed,
    CorruptView,
    InvalidInput,
    Retryable,
)
from foundation.failpoints import hit
from merge_engine.bucket.options import BucketOptions, write_options
from merge_engine.bucket.pinned_rows import PinnedRows
from merge_engine.bucket.rocksdb_errors import translated
from merge_engine.bucket.view_meta import ViewMeta, check_identity

logger = logging.getLogger(__name__)

ROW_PREFIX = b"r"
LIBRARY = "RocksDB"
# Puts are refused when RocksDB has not taken the rows behind for so many times their limit.
_HARD_LIMIT = 4
# A checkpoint gets ready so many times, or so long, until RocksDB has this little in memory.
_READY_ATTEMPTS = 3
_READY_DEADLINE_S = 10.0
_READY_ENTRIES = 1_000
_COMPACTIONS = ("rocksdb.compaction-pending", "rocksdb.num-running-compactions")


class View:
    """The rows of a bucket as of `applied`.

    Not safe for concurrent use, except `get`, and `checkpoint` beside all others.
    """

    def __init__(self, path: Path, identity: str, options: BucketOptions, cache: Cache) -> None:
        self.path = path
        self._options = options
        self._write_options = write_options()
        self._needs_flush = False
        path.parent.mkdir(parents=True, exist_ok=True)
        forks.use(LIBRARY)
        with translated(path):
            self._database = Rdict(str(path), options.to_options(cache))
        try:
            first = check_identity(self._database, path, identity)
            if first:
                self._write(lambda: _batch_of(first))
            self.meta = ViewMeta(self._database, path)
        except BaseException:
            self._database.close()
            raise
        self._written = self.applied
        # The rows since the last write to RocksDB, and those before it: the older half is only
        # there to be read again soon.
        self._recent: dict[bytes, bytes] = {}
        self._previous: dict[bytes, bytes] = {}
        self._recent_bytes = 0
        self._recent_puts = 0
        # RocksDB keeps its directory until they are closed. Those that nobody has are closed.
        self._pinned: WeakSet[PinnedRows] = WeakSet()
        # LockSet for each step of a checkpoint: RocksDB must not be closed below it.
        self._closing = threading.Lock()
        self._closed = False
        forks.hold(self)

    def inherited(self) -> list[object]:
        """Return what must not be destroyed in a forked child: it would wait for ever."""
        return [self._database, *(handle for rows in self._pinned for handle in rows.inherited())]

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the rows of these keys (with their prefix); None where there is none."""
        # `_recent` first: rows move from there to `_previous`, and from there to RocksDB.
        generations = [rows for rows in (self._recent, self._previous) if rows]
        if not generations:
            return self._read(list(keys))
        values: list[bytes | None] = list(map(generations[0].get, keys))
        for rows in generations[1:]:
            found = map(rows.get, keys)
            values = [
                old if old is not None else new for old, new in zip(values, found, strict=True)
            ]
        unknown = [at for at, value in enumerate(values) if value is None]
        if unknown:
            for at, value in zip(unknown, self._read([keys[at] for at in unknown]), strict=True):
                values[at] = value
        return [value or None for value in values]

    @property
    def applied(self) -> int:
        """The offset up to which the rows have all changes."""
        return self.meta.applied

    def apply(
        self,
        keys: Sequence[bytes],
        values: Sequence[bytes],
        applied: int,
        schema_version: int = 0,
        *,
        bulk: bool = False,
    ) -> None:
        """Set rows (an empty value deletes) and the applied offset, in memory; then write behind.

        `schema_version`: of the rows. `bulk`: they are part of a large put, and unlikely to change
        again soon: written at once, a little each time, so that nobody waits for many of them.

        The log has the change already, so nothing here can make it fail: if RocksDB does not take
        the rows now, memory keeps them and the next call tries again.
        """
        self._recent.update(zip(keys, values, strict=True))
        self._recent_bytes += sum(map(len, keys)) + sum(map(len, values))
        self._recent_puts += 1
        self.meta.applied = applied
        self.meta.schema_version = max(self.meta.schema_version, schema_version)
        if bulk or self._behind() >= 1:
            try:
                self.write_behind()
            except (Retryable, CorruptView) as exc:
                logger.warning("view %s lags its log: %s", self.path, exc)

    def make_room(self) -> None:
        """Raise an error, mostly a Retryable one, if RocksDB has not taken rows for too long."""
        if self._behind() >= _HARD_LIMIT:
            self.write_behind()

    def _behind(self) -> float:
        options = self._options
        return max(
            self._recent_bytes / options.behind_max_bytes,
            (self.applied - self._written) / options.behind_max_offsets,
        )

    def write_behind(self) -> None:
        """Write the rows in memory to RocksDB: one write batch with offset and tokens."""
        if self.applied == self._written and not (self._recent or self.meta.changed):
            return
        hit("view.before_write")
        self._write(self._behind_batch)
        hit("view.written")
        # A put that filled the memory by itself is a bulk load: unlikely to be read again soon.
        self._previous = self._recent if self._recent_puts > 1 else {}
        self._recent, self._recent_bytes, self._recent_puts = {}, 0, 0
        self.meta.written()
        self._written = self.applied

    def _behind_batch(self) -> WriteBatch:
        batch = WriteBatch(raw_mode=True)
        put, delete = batch.put, batch.delete
        for key, value in self._recent.items():
            if value:
                put(key, value)
            else:
                delete(key)
        self.meta.add_to(batch)
        return batch

    def flush(self) -> int:
        """Make everything durable on disk; return the offset up to which it is."""
        self.write_behind()
        with translated(self.path):
            self._database.flush()
        return self._written

    def checkpoint(self, directory: Path) -> None:
        """Copy what RocksDB holds into a new directory, mostly as hard links; writes go on.

        The copy has all that was written behind before the call, and is as of one write. Closed if
        the view is closed meanwhile; `close` waits for one step: a flush, a compaction, the copy.
        """
        if directory.exists():
            raise InvalidInput(f"{directory} exists already; a checkpoint needs a new directory")
        directory.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _READY_DEADLINE_S
        for _ in range(_READY_ATTEMPTS):
            with self._while_open() as database:
                database.flush()
                # After a bulk load, a few flushes later RocksDB would rewrite nearly everything.
                # Whoever uploads checkpoints would send it twice, so let it happen before.
                if _mostly_new(database.live_files()):
                    database.compact_range(None, None)
            # RocksDB may replace files now. A copy of those that stay is uploaded only once.
            while self._counts(*_COMPACTIONS) and time.monotonic() < deadline:
                time.sleep(0.01)
            if self._counts("rocksdb.num-entries-active-mem-table") <= _READY_ENTRIES:
                break
        with self._while_open() as database:
            # This holds the interpreter lock, also while it flushes: hence the flushes before. The
            # object keeps RocksDB's lock file, so it must not outlive the call.
            Checkpoint(database).create_checkpoint(str(directory))

    def estimated_rows(self) -> int:
        """Return how many rows there are, as RocksDB estimates it; nobody is waited for."""
        with translated(self.path):
            return self._database.property_int_value("rocksdb.estimate-num-keys") or 0

    def _counts(self, *properties: str) -> int:
        with self._while_open() as database:
            return sum(database.property_int_value(name) or 0 for name in properties)

    @contextmanager
    def _while_open(self) -> Iterator[Rdict]:
        with self._closing:
            if self._closed:
                raise Closed("the bucket was closed meanwhile; open it again")
            with translated(self.path):
                yield self._database

    def pin(self) -> PinnedRows:
        """Return all rows as of `applied`, whatever is written later; `close` closes them, too."""
        self.write_behind()
        rows = PinnedRows(self._database, ROW_PREFIX, partial(translated, self.path))
        self._pinned.add(rows)
        return rows

    def close(self) -> None:
        """Write what is in memory and release the directory.

        If it cannot be written now, it is replayed from the log by whoever opens the view next.
        """
        try:
            self.write_behind()
        except Retryable as exc:
            logger.warning("view %s was closed before it had all of its log: %s", self.path, exc)
        finally:
            for rows in list(self._pinned):
                rows.close()
            with self._closing:
                self._closed = True
                self._database.close()

    def _read(self, keys: list[bytes]) -> list[bytes | None]:
        with translated(self.path):
            return cast(list[bytes | None], self._database.get(cast(list[Any], keys)))

    def _write(self, make_batch: Callable[[], WriteBatch]) -> None:
        """Write; while RocksDB stalls, back off outside the call: it holds the interpreter lock.

        rocksdict uses a batch up also when the write fails, so each attempt makes its own.
        """
        deadline = time.monotonic() + self._options.stall_deadline_s
        delay_s = 0.005
        with translated(self.path):
            # After a full disk, RocksDB refuses writes until a flush succeeds.
            if self._needs_flush:
                self._database.flush()
                self._needs_flush = False
            while True:
                try:
                    self._database.write(make_batch(), self._write_options)
                    return
                except Exception as exc:
                    if "Write stall" not in str(exc) or time.monotonic() > deadline:
                        self._needs_flush = "Write stall" not in str(exc)
                        raise
                time.sleep(delay_s)
                delay_s = min(delay_s * 2, 0.1)


def _batch_of(entries: Mapping[bytes, bytes]) -> WriteBatch:
    batch = WriteBatch(raw_mode=True)
    for key, value in entries.items():
        batch.put(key, value)
    return batch


def _mostly_new(files: Sequence[dict[str, Any]]) -> bool:
    """Whether most bytes are in files that were flushed, and not compacted since."""
    new = sum(file["size"] for file in files if file["level"] == 0)
    return bool(2 * new > sum(file["size"] for file in files))


def pin_checkpoint(directory: Path) -> PinnedRows:
    """Return all rows of a checkpoint, once `read_checkpoint` has read it; its files stay."""
    with translated(directory):
        database = Rdict(str(directory), Options(raw_mode=True), access_type=AccessType.read_only())
    return PinnedRows(database, ROW_PREFIX, partial(translated, directory), owned=True)
