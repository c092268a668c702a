"""A directory of RocksDB, open: the one way to it, so that it is closed when nobody is inside.

rocksdict's `close` fails while another thread reads, and a read fails while it closes. An iterator
or a checkpoint that is left over keeps the directory locked for as long as it lives. So no other
module has rocksdict's objects: every use goes through `inside`, which counts who is there, and rows
that are pinned are known here. `close` lets nobody in any more, waits for those inside, lets go of
what is pinned, and closes. What comes later is told that it is closed, and nobody is told so before
it is.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast
from weakref import WeakSet

from rocksdict import (
    AccessType,
    Checkpoint,
    IngestExternalFileOptions,
    Options,
    Rdict,
    RdictIter,
    WriteBatch,
    WriteOptions,
)

from foundation import forks
from foundation.errors import TallybookError
from foundation.open_files import limits
from merge_engine.bucket.rocksdb_errors import closed, translated, translation

logger = logging.getLogger(__name__)

LIBRARY = "RocksDB"

Items = Iterator[tuple[bytes, bytes]]


# Lock, log, manifest, write-ahead log, directory, and a file of rows.
FILES_OF_A_BUCKET = 6
# RocksDB keeps all files of its rows open. The databases of a process together have this share of
# the files that it may have open: of equal size, they stay far below the limit, for each takes
# less the more there are. The rest is for what they need besides, logs, and connections.
_SHARE = 4
# RocksDB keeps them by 64 shards, and one in each, however few it may have.
_LEAST_FILES = 64
_opened: "WeakSet[Database]" = WeakSet()


def _files_for_another() -> int:
    """Return how many files of rows the next database may have open; it opens others in turn."""
    soft, _ = limits()
    return max(_LEAST_FILES, soft // _SHARE // (len(_opened) + 1))


class Pin(Protocol):
    """Has iterators of a database: without them let go of, it does not close."""

    def let_go(self) -> None:
        """Let go of them, after what is just being read. To do it twice is fine."""

    def inherited(self) -> Sequence[object]:
        """Return them, as they must not be destroyed in a forked child."""


class Database:
    """An open RocksDB. Safe for threads, from when it is made until it is closed."""

    def __init__(self, path: Path, options: Options, *, read_only: bool = False) -> None:
        """Open it; InUse if another process or handle has it. `read_only`: its files stay."""
        self.path = path
        access = AccessType.read_only() if read_only else AccessType.read_write()
        self._lock = threading.Lock()  # A plain one: each call takes it twice.
        self._left = threading.Condition(self._lock)
        self._users = 0
        self._closing = False
        # One at a time ends it; who comes meanwhile returns when it has ended.
        self._ending = threading.Lock()
        self._pins: WeakSet[Pin] = WeakSet()
        self._process = os.getpid()
        forks.use(LIBRARY)
        options.set_max_open_files(_files_for_another())
        with translated(path):
            if not read_only:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._rdict: Rdict | None = Rdict(str(path), options, access_type=access)
        forks.hold(self)
        _opened.add(self)

    @property
    def is_closed(self) -> bool:
        """Whether its directory is free: for whoever opens it next, or deletes it."""
        return self._rdict is None

    def inherited(self) -> list[object]:
        """Return what must not be destroyed in a forked child: it would wait for ever."""
        return [self._rdict, *(handle for pin in self._pins for handle in pin.inherited())]

    @contextmanager
    def inside(self) -> Iterator[Rdict]:
        """Give RocksDB for one call, or a few that go together; Closed if it is being closed.

        Nothing that it gives may outlive the block, but for a pin's iterators.
        """
        with self._lock:
            rdict = self._rdict
            if self._closing or rdict is None:
                raise closed(self.path)
            self._users += 1
        try:
            yield rdict
        except BaseException as exc:
            error = translation(self.path, exc)
            if error is None:
                raise
            raise error from exc
        finally:
            del rdict
            with self._lock:
                self._users -= 1
                if self._closing and not self._users:
                    self._left.notify_all()

    def close(self) -> None:
        """Close it when nobody is inside any more; on return it is closed. Closing twice is fine.

        What RocksDB could not write at the end is lost here, and is still in the log: no reason to
        fail, nor to keep the directory. In a forked child nothing is done: it is the parent's.
        """
        if forks.is_inherited(self._process):
            return
        with self._left:
            self._closing = True
            self._left.wait_for(lambda: not self._users)
        with self._ending:
            if self._rdict is None:
                return
            _opened.discard(self)
            for pin in list(self._pins):
                pin.let_go()
            rdict, self._rdict = self._rdict, None
            try:
                with translated(self.path):
                    rdict.close()  # Closed when it returns, and when it raises.
            except TallybookError as exc:
                logger.warning("view %s was closed without its last rows: %s", self.path, exc)

    # --- Reading ----------------------------------------------------------------------------------

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the values of these keys."""
        with self.inside() as rdict:
            return cast(list[bytes | None], rdict.get(cast(list[Any], keys)))

    def keys_below(self, prefix: bytes, at_most: int | None = None) -> list[bytes]:
        """Return the keys with a prefix, in order; not more than so many."""
        keys: list[bytes] = []
        with self.inside() as rdict:
            iterator = rdict.iter()
            iterator.seek(prefix)
            while iterator.valid() and len(keys) != at_most and iterator.key().startswith(prefix):
                keys.append(iterator.key())
                iterator.next()
            iterator.status()
        return keys

    def pin(self, pin: Pin, prefix: bytes) -> tuple[RdictIter, Items]:
        """Return two iterators over what there is now, for `pin` to keep until it is let go of."""
        with self.inside() as rdict:
            self._pins.add(pin)
            return rdict.iter(), cast(Items, rdict.items(from_key=prefix))

    def count(self, *properties: str) -> int:
        """Return the sum of numbers that RocksDB has of itself; 0 for those that it has not."""
        with self.inside() as rdict:
            return sum(rdict.property_int_value(name) or 0 for name in properties)

    # --- Writing ----------------------------------------------------------------------------------

    def write(self, batch: WriteBatch, options: WriteOptions) -> None:
        """Write a batch in one step, and use it up. This holds the interpreter lock to its end."""
        with self.inside() as rdict:
            rdict.write(batch, options)

    def take_in(self, file: Path) -> None:
        """Take in a file of RocksDB's own kind, which goes by that."""
        how = IngestExternalFileOptions()
        how.set_move_files(True)
        with self.inside() as rdict:
            rdict.ingest_external_file([str(file)], how)

    def flush(self) -> None:
        """Make everything durable that was written."""
        with self.inside() as rdict:
            rdict.flush()

    def flush_for_copy(self, is_new: Callable[[Sequence[dict[str, Any]]], bool]) -> None:
        """Flush; and rewrite all files now, if `is_new` says of them that RocksDB soon would."""
        with self.inside() as rdict:
            rdict.flush()
            if is_new(rdict.live_files()):
                rdict.compact_range(None, None)

    def checkpoint(self, directory: Path) -> None:
        """Copy it into a new directory, mostly as hard links."""
        with self.inside() as rdict:
            # This holds the interpreter lock, also while it flushes. The object keeps RocksDB's
            # lock file, so it does not outlive the call.
            Checkpoint(rdict).create_checkpoint(str(directory))
