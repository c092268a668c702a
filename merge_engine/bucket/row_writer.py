"""Writes rows of a view to RocksDB, with all that goes with them, in one step.

Few rows are a write batch. Many become a file of RocksDB's own kind, sorted by key, that is then
taken in as a whole: that is less than half the work, for nothing goes through RocksDB's memory, and
other threads run meanwhile, where a large write batch would hold the interpreter lock to its end.
Before it takes a file in, RocksDB makes durable what it has in memory of the same range; and the
offset is in both. So what it holds after a crash is always a prefix of all that was written.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from rocksdict import Cache, SstFileWriter, WriteBatch

from foundation.errors import StorageUnavailable
from foundation.failpoints import hit
from merge_engine.bucket.database import Database
from merge_engine.bucket.options import BucketOptions, write_options
from merge_engine.bucket.rocksdb_errors import translated
from merge_engine.encoding.stored_rows import SchemaHistory, StoredRows
from merge_engine.merging.grouping import key_order

# Not a name that RocksDB would take for one of its files.
_FILE = "behind.sst"
# So many rows are encoded at a time, and so many written.
_CHUNK = 4096
_AT_A_TIME = 256
# RocksDB itself begins to slow writes down at twenty.
_MANY_FILES = 20
_FILES = "rocksdb.num-files-at-level0"
# In the text of what RocksDB raises where it would keep a write waiting.
_STALL = "Write stall"

Chunk = tuple[Sequence[bytes], Sequence[bytes]]
"""Keys, in order, and their values; an empty value deletes."""


class KeyedRows(NamedTuple):
    """Rows with their encoded keys, in any order, under the newest schema."""

    history: SchemaHistory
    keys: pa.BinaryArray
    rows: StoredRows

    def encoded(self) -> Iterator[Chunk]:
        """Yield the rows as RocksDB has them, in the order of their keys."""
        order = key_order(self.keys)
        for start in range(0, len(order), _CHUNK):
            some = order[start : start + _CHUNK]
            keys = self.history.row_keys(self.keys.take(pa.array(some)))
            values = self.history.encode(self.rows.reordered(some))
            for at in range(0, len(keys), _AT_A_TIME):
                yield keys[at : at + _AT_A_TIME], values[at : at + _AT_A_TIME]


class RowWriter:
    """Writes to one database; one call at a time."""

    def __init__(self, database: Database, options: BucketOptions, cache: Cache) -> None:
        self._database = database
        self.path = database.path
        self._options = options
        self._cache = cache
        self._write_options = write_options()
        self._needs_flush = False
        with translated(self.path):
            (self.path / _FILE).unlink(missing_ok=True)

    def write(
        self,
        others: Mapping[bytes, bytes],
        rows: KeyedRows | None = None,
        *,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        """Write rows, and other entries, whose keys are all before them.

        `pause`: called again and again, to give way to other threads. Each of their calls that lets
        go of the interpreter lock would wait 5 ms for it otherwise, and a put has a hundred.
        """

        def chunks() -> Iterator[Chunk]:
            entries = sorted(others.items())
            yield [key for key, _ in entries], [value for _, value in entries]
            if rows is not None:
                yield from rows.encoded()

        if rows is None or len(rows.keys) <= self._options.behind_few_rows:
            self._write_batch(chunks)
            return
        path = self.path / _FILE
        with translated(self.path):
            self._make_file(path, chunks(), pause)
        hit("view.file_made")
        self._retry(self._check_files)
        self._database.take_in(path)

    def _make_file(self, path: Path, chunks: Iterator[Chunk], pause: Callable[[], None]) -> None:
        path.unlink(missing_ok=True)
        # Taken in and opened like all others, so it is made like them.
        file = SstFileWriter(self._options.to_options(self._cache))
        file.open(str(path))
        for keys, values in chunks:
            if all(values):
                deque(map(file.__setitem__, keys, values), maxlen=0)  # A loop, but not in Python.
            else:
                for key, value in zip(keys, values, strict=True):
                    if value:
                        file[key] = value
                    else:
                        del file[key]
            pause()
        file.finish()

    def _check_files(self) -> None:
        if self._database.count(_FILES) >= _MANY_FILES:
            raise StorageUnavailable(f"{self.path}: {_STALL}: RocksDB does not keep up")

    def _write_batch(self, chunks: Callable[[], Iterator[Chunk]]) -> None:
        # After a full disk, RocksDB refuses writes until a flush succeeds.
        if self._needs_flush:
            self._database.flush()
            self._needs_flush = False

        def write() -> None:  # rocksdict uses a batch up also when the write fails.
            batch = WriteBatch(raw_mode=True)
            for keys, values in chunks():
                for key, value in zip(keys, values, strict=True):
                    if value:
                        batch.put(key, value)
                    else:
                        batch.delete(key)
            self._database.write(batch, self._write_options)

        try:
            self._retry(write)
        except Exception as exc:
            self._needs_flush = _STALL not in str(exc)
            raise

    def _retry(self, call: Callable[[], None]) -> None:
        """Call; while RocksDB stalls, back off outside of it: it holds the interpreter lock."""
        deadline = time.monotonic() + self._options.stall_deadline_s
        delay_s = 0.005
        while True:
            try:
                return call()
            except StorageUnavailable as exc:
                if _STALL not in str(exc) or time.monotonic() > deadline:
                    raise
            time.sleep(delay_s)
            delay_s = min(delay_s * 2, 0.1)
