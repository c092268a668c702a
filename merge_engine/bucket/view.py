"""The materialised view of a bucket: RocksDB, and the newest rows in memory above it.

A cache of the log, and nothing more: RocksDB's own WAL is off. Rows change in memory, in the
working set, and go to RocksDB behind, many at a time, in one step with the applied offset and the
owners' last tokens (`write_behind`, `row_writer`). One column family, so that after a crash RocksDB
holds a prefix of these steps; the log has the rest.

Keys in RocksDB: `r` and the encoded key for a row, whose value `row_codec` lays out; `m` and
a name for all else, see `view_meta`. The format that is said there is the version of all of this,
also of the keys (`keys`) and of the rows, which have none of their own. Snapshots are
files of a view: with a new version of it, that of their manifests rises as well, so that an older
release passes them over.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from rocksdict import Cache, Options

from foundation.errors import InvalidInput, TallybookError
from merge_engine.bucket.database import Database
from merge_engine.bucket.fair_lock import FairLock
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.pinned_rows import PinnedRows
from merge_engine.bucket.rocksdb_errors import translated
from merge_engine.bucket.row_writer import RowWriter
from merge_engine.bucket.view_meta import ViewMeta, check_identity
from merge_engine.bucket.write_behind import WriteBehind
from merge_engine.encoding import ragged
from merge_engine.encoding.key_hashes import Hashes
from merge_engine.encoding.stored_rows import (
    ROW_PREFIX,
    SchemaHistory,
    StoredRows,
    concatenated,
)
from merge_engine.merging.grouping import key_order
from merge_engine.schema.schema import Column
from merge_engine.working_set.block import Keys, PreparedRows
from merge_engine.working_set.index import Slots
from merge_engine.working_set.memory import Memory
from merge_engine.working_set.working_set import Located, NewRows, WorkingSet

logger = logging.getLogger(__name__)

# Puts are refused when RocksDB has not taken the rows behind for so many times their limit.
_HARD_LIMIT = 4
# A checkpoint gets ready so many times, or so long, until RocksDB has this little in memory.
_READY_ATTEMPTS = 3
_READY_DEADLINE_S = 10.0
_READY_ENTRIES = 1_000
# So few rows, or versions of rows, are counted one by one: that takes two milliseconds.
_FEW_ROWS = 1_000
_COMPACTIONS = ("rocksdb.compaction-pending", "rocksdb.num-running-compactions")


class Read(NamedTuple):
    """Rows, and the schemas under whose newest they are."""

    history: SchemaHistory
    rows: StoredRows


class View:
    """The rows of a bucket as of `applied`.

    Not safe for concurrent use, except `read`, and `checkpoint`, `retire` and `drop_retired`
    beside all others.
    """

    def __init__(
        self,
        path: Path,
        history: SchemaHistory,
        *,
        identity: str,
        options: BucketOptions,
        cache: Cache,
        memory: Memory,
        lock: FairLock | None = None,
    ) -> None:
        """`lock`: whoever changes something has it; so has the caller now."""
        self.path = path
        self._options = options
        self._database = Database(path, options.to_options(cache))
        try:
            first = check_identity(self._database, identity)
            writer = RowWriter(self._database, options, cache)
            if first:
                writer.write(first)
            self.meta = ViewMeta(self._database)
            # Whether RocksDB has no rows that memory does not have.
            self._complete = not self._database.keys_below(ROW_PREFIX, 1)
        except BaseException:
            self._database.close()
            raise
        self._rows = WorkingSet(history, memory.block_bytes)
        self._behind = WriteBehind(writer, self._rows, self.meta, memory.background, options)
        self._memory = memory
        self._lock = lock or FairLock()
        self.last_used = 0
        # The keys that RocksDB has, where they are few, and the offset as of which.
        self._counted: Sequence[bytes] = ()
        self._counted_at = -1
        memory.join(self)

    @property
    def history(self) -> SchemaHistory:
        """The schemas that are known; rows are under the newest of them."""
        return self._rows.history

    def evolve(self, history: SchemaHistory) -> None:
        """Go on under a newer schema."""
        self._rows.evolve(history)

    def read(self, keys: Sequence[pa.Array], columns: Sequence[Column] | None = None) -> Read:
        """Return the rows of these keys, nothing touched where there is none; thread-safe.

        `keys`: the key columns. `columns`: of the rows, in this order; None: all. UnknownSchema, if
        the schema has changed meanwhile, and rows with it: read again.
        """
        wanted = self._rows.keys_of(keys)
        with self._rows.lock:
            history, complete = self._rows.history, self._complete
            chosen = history.positions(columns)
            located = self._rows.locate(wanted)
            parts = [located.read(chosen)] if located.places else []
        order = located.found
        if len(order) < len(wanted) or not parts:
            missing = located.missing()
            rows = self._stored(history, wanted.take(missing), complete=complete)
            parts.append(rows if columns is None else rows.only(chosen))
            order = np.concatenate([order, missing])
        return Read(history, _in_order(parts, order))

    def load(
        self, keys: pa.BinaryArray, hashes: Hashes | None = None, *, blindly: bool = False
    ) -> Located:
        """Bring the rows of these keys, all different, into memory; return where they are.

        `hashes`: of the keys, if they are known. `blindly`: all columns will be written, so what is
        not in memory is not read, and comes into memory by that.
        """
        wanted = self._rows.keys(keys, hashes)
        located = self._rows.unretired(wanted, self._rows.locate(wanted))
        missing = located.missing()
        if len(missing) == 0:
            return located
        new = wanted if len(missing) == len(keys) else wanted.take(missing)
        if blindly:
            return replace(located, new=NewRows(missing, new))
        rows = None if self._complete else self._stored(self.history, new)
        place = self._rows.insert(new, rows)
        return Located(len(keys), [*located.places, replace(place, rows=missing)])

    def rows(self, located: Located, columns: Sequence[int] | None = None) -> StoredRows:
        """Return the rows of a batch that was loaded, in its order."""
        chosen = range(len(self.history.position)) if columns is None else columns
        if not located.places:
            return self.history.decode([]).only(chosen)
        return _in_order([located.read(chosen)], located.found)

    def _stored(self, history: SchemaHistory, keys: Keys, *, complete: bool = False) -> StoredRows:
        """Return what RocksDB has of rows that are not in memory."""
        if complete:
            return history.decode([None] * len(keys))
        encoded = keys.encoded
        order = key_order(encoded)  # RocksDB reads sorted keys faster.
        back = np.empty(len(order), np.intp)
        back[order] = np.arange(len(order))
        values = self._database.get(history.row_keys(encoded.take(pa.array(order))))
        return history.decode(values).reordered(back)

    @property
    def applied(self) -> int:
        """The offset up to which the rows have all changes."""
        return self.meta.applied

    @property
    def written(self) -> int:
        """The offset up to which RocksDB has all changes; safe for threads."""
        return self._behind.written

    @property
    def error(self) -> str | None:
        """Why RocksDB did not take the rows the last time; None if it did. Safe for threads."""
        return self._behind.error

    def apply(
        self,
        located: Located,
        rows: PreparedRows,
        applied: int,
        schema_version: int = 0,
    ) -> None:
        """Change rows and the applied offset, in memory; then let them be written behind.

        `schema_version`: of the rows.

        The log has the change already, so nothing here can make it fail: if RocksDB does not take
        the rows now, memory keeps them and the next call tries again.
        """
        self._rows.write(located, rows)
        self.meta.applied = applied
        self.meta.schema_version = max(self.meta.schema_version, schema_version)
        if self._behind.share() >= 1:
            self._behind.try_to_start()
        self._memory.used(self)

    @property
    def nbytes(self) -> int:
        """How much memory the rows take."""
        return self._rows.nbytes

    @property
    def retiring_bytes(self) -> int:
        """How much of it goes as soon as RocksDB has it."""
        return self._rows.retiring_bytes

    def drop_retired(self, *, by_holder: bool) -> None:
        """Drop what RocksDB has by now, unless somebody else is busy with this bucket; thread-safe.

        `by_holder`: of the bucket's lock. Nobody else may, not even a thread that has it for
        something else: who has planned a change knows where its rows are.
        """
        with self._free(by_holder=by_holder) as free:
            if free:
                self._drop_retired()

    def _drop_retired(self) -> None:
        self._behind.look()
        self._rows.drop_retired()

    def retire(self, *, by_holder: bool) -> int:
        """Let the rows go that have been in memory for the longest time; return their size.

        0 if somebody else is busy with this bucket, or RocksDB is: then another time; thread-safe.
        """
        with self._free(by_holder=by_holder) as free:
            if not free or not self._behind.try_to_start():
                return 0
            self._complete = False  # Before anything is dropped: others read meanwhile.
            freed = self._rows.retire_oldest()
            self._drop_retired()
            return freed

    @contextmanager
    def _free(self, *, by_holder: bool) -> Iterator[bool]:
        with nullcontext(True) if by_holder else self._lock.if_free() as free:
            yield free and not self._database.is_closed

    def make_room(self) -> None:
        """Raise an error, mostly a Retryable one, if RocksDB has not taken rows for too long."""
        if self._behind.share() >= _HARD_LIMIT:
            self.write_behind()

    def write_behind(self) -> None:
        """Write all that has changed to RocksDB, with offset and tokens, in one step."""
        self._behind.write()

    def start_writing(self, *, in_a_hurry: bool = False) -> "Future[None] | None":
        """The same beside other calls; return what to wait for, see `WriteBehind.start`."""
        return self._behind.start(in_a_hurry=in_a_hurry)

    @property
    def dirty_rows(self) -> int:
        """How many rows RocksDB does not have, and nobody is writing."""
        return self._rows.dirty_rows

    def flush(self) -> int:
        """Make everything durable on disk; return the offset up to which it is."""
        self.write_behind()
        self._database.flush()
        return self._behind.written

    def checkpoint(self, directory: Path) -> None:
        """Copy what RocksDB holds into a new directory, mostly as hard links; writes go on.

        The copy has all that was written behind before the call, and is as of one write. Closed if
        the view is closed meanwhile; `close` waits for one step: a flush, a compaction, the copy.
        """
        if directory.exists():
            raise InvalidInput(f"{directory} exists already; a checkpoint needs a new directory")
        with translated(directory):
            directory.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + _READY_DEADLINE_S
        for _ in range(_READY_ATTEMPTS):
            # After a bulk load, a few flushes later RocksDB would rewrite nearly everything.
            # Whoever uploads checkpoints would send it twice, so let it happen before.
            self._database.flush_for_copy(_mostly_new)
            # RocksDB may replace files now. A copy of those that stay is uploaded only once.
            while self._database.count(*_COMPACTIONS) and time.monotonic() < deadline:
                time.sleep(0.01)
            if self._database.count("rocksdb.num-entries-active-mem-table") <= _READY_ENTRIES:
                break
        # This holds the interpreter lock, also while it flushes: hence the flushes before.
        self._database.checkpoint(directory)

    def estimated_rows(self) -> int:
        """Return about how many rows there are; nobody is waited for.

        Few are counted. Of many it is what RocksDB estimates or, where it has not got most of them
        yet, how many keys are in memory. RocksDB counts a key each time that it was written until
        it compacts, and our own entries: of few rows, its estimate says nothing.
        """
        stored = 0 if self._complete else self._database.count("rocksdb.estimate-num-keys")
        if max(stored, len(self._rows)) > _FEW_ROWS:
            return max(stored, len(self._rows))
        keys = self._stored_keys() if stored else ()
        if len(keys) > _FEW_ROWS:  # It estimates less than there are where much was deleted.
            return max(len(keys), len(self._rows))
        return self._rows.rows_there(keys)

    def _stored_keys(self) -> Sequence[bytes]:
        """Return the keys of few rows in RocksDB, or one more; read when it got others only."""
        written = self._behind.written
        if self._counted_at != written:
            stored = self._database.keys_below(ROW_PREFIX, _FEW_ROWS + 1)
            self._counted = [key.removeprefix(ROW_PREFIX) for key in stored]
            self._counted_at = written
        return self._counted

    def stored_bytes(self) -> int:
        """Return how large the files of the rows are."""
        return self._database.count("rocksdb.total-sst-files-size")

    def pin(self) -> PinnedRows:
        """Return all rows as of `applied`, whatever is written later; `close` closes them, too."""
        self.write_behind()
        return PinnedRows(self._database, ROW_PREFIX)

    def close(self) -> None:
        """Write what is in memory and release the directory, which is free on return.

        Who reads meanwhile is waited for; who comes later gets Closed. If something cannot be
        written now, it is replayed from the log by whoever opens the view next. Closing twice is
        fine.
        """
        if self._database.is_closed:
            return
        try:
            self.write_behind()
        except TallybookError as exc:
            logger.warning("view %s was closed before it had all of its log: %s", self.path, exc)
        finally:
            self._memory.leave(self)
            self._database.close()


def _in_order(parts: Sequence[StoredRows], order: Slots) -> StoredRows:
    """Return rows one after the other, each at the place in the batch that `order` says."""
    rows = parts[0] if len(parts) == 1 else concatenated(parts)
    if len(order) == 1 or ragged.all_set(order[1:] > order[:-1]):
        return rows
    back = np.empty(len(order), np.intp)
    back[order] = np.arange(len(order))
    return rows.reordered(back)


def _mostly_new(files: Sequence[dict[str, Any]]) -> bool:
    """Whether most bytes are in files that were flushed, and not compacted since."""
    new = sum(file["size"] for file in files if file["level"] == 0)
    return bool(2 * new > sum(file["size"] for file in files))


def pin_checkpoint(directory: Path) -> PinnedRows:
    """Return all rows of a checkpoint, once `read_checkpoint` has read it; its files stay."""
    database = Database(directory, Options(raw_mode=True), read_only=True)
    return PinnedRows(database, ROW_PREFIX, owned=True)
