"""The materialised view of a bucket: RocksDB, and the newest rows in memory above it.

A cache of the log, and nothing more: RocksDB's own WAL is off. Rows go to memory first and to
RocksDB behind, many at a time, in one write batch with the applied offset and the owners' last
tokens. One column family, so that after a crash RocksDB holds a prefix of these write batches; the
log has the rest.

Keys in RocksDB:

    b"m" + name     meta: `format`, `identity`, `applied` (u64), `schema` (u64: the newest schema
                    version of all rows, or a later one), `token:<owner>` (4 x u64: epoch, batch,
                    base offset, end offset), `parts:<owner>` (4 x u64: epoch, batch, base offset,
                    how many parts): of a large put that is not complete
    b"r" + key      a row: the encoded key, and the value as `rows.py` lays it out
"""

import logging
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast
from weakref import WeakSet

from rocksdict import AccessType, Cache, Checkpoint, DbClosedError, Options, Rdict, WriteBatch

from foundation import forks
from merge_engine.errors import (
    Closed,
    CorruptView,
    InUse,
    InvalidInput,
    Retryable,
    StorageFull,
    StorageUnavailable,
    UnknownFormat,
)
from merge_engine.failpoints import hit
from merge_engine.options import BucketOptions, write_options
from merge_engine.pinned import PinnedRows
from merge_engine.segment import Token

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
ROW_PREFIX = b"r"
LIBRARY = "RocksDB"
_DELETED = b""
_APPLIED = b"mapplied"
_FORMAT = b"mformat"
_SCHEMA = b"mschema"
_IDENTITY = b"midentity"
_TOKEN_PREFIX = b"mtoken:"
_PARTS_PREFIX = b"mparts:"
_OFFSET = struct.Struct("<Q")
_TOKEN = struct.Struct("<4Q")
# Puts are refused when RocksDB has not taken the rows behind for so many times their limit.
_HARD_LIMIT = 4
# A checkpoint gets ready so many times, or so long, until RocksDB has this little in memory.
_READY_ATTEMPTS = 3
_READY_DEADLINE_S = 10.0
_READY_ENTRIES = 1_000
_COMPACTIONS = ("rocksdb.compaction-pending", "rocksdb.num-running-compactions")


class CheckpointState(NamedTuple):
    """Whose rows a checkpoint has, and the offset up to which it has them all."""

    applied: int
    identity: str


class AppliedToken(NamedTuple):
    """An owner's last token, and the offsets that its put was given."""

    token: Token
    base_offset: int
    end_offset: int


class AppliedParts(NamedTuple):
    """How many parts of an owner's last large put were applied, and where the first begins."""

    token: Token
    base_offset: int
    parts: int


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
            self._check_identity(identity)
            self.applied = self._number(_APPLIED)
            self.schema_version = self._number(_SCHEMA)
        except BaseException:
            self._database.close()
            raise
        self._written = self.applied
        self._tokens: dict[str, AppliedToken] = {}
        self._parts: dict[str, AppliedParts] = {}
        # The rows since the last write to RocksDB, and those before it: the older half is only
        # there to be read again soon.
        self._recent: dict[bytes, bytes] = {}
        self._previous: dict[bytes, bytes] = {}
        self._recent_bytes = 0
        self._recent_puts = 0
        # RocksDB keeps its directory until they are closed. Those that nobody has are closed.
        self._pinned: WeakSet[PinnedRows] = WeakSet()
        # Held for each step of a checkpoint: RocksDB must not be closed below it.
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

    def token(self, owner: str) -> AppliedToken | None:
        """Return the owner's last applied token."""
        if owner in self._tokens:
            return self._tokens[owner]
        stored = self._meta(_TOKEN_PREFIX + owner.encode())
        if stored is None:
            return None
        epoch, batch, base_offset, end_offset = _numbers(_TOKEN, stored, self.path)
        return AppliedToken(Token(epoch, batch), base_offset, end_offset)

    def remember(self, owner: str, applied: AppliedToken) -> None:
        """Set the owner's last token; it reaches RocksDB with the next write."""
        self._tokens[owner] = applied

    def parts(self, owner: str) -> AppliedParts | None:
        """Return how far the owner's last large put has got; also of one that is complete."""
        if owner in self._parts:
            return self._parts[owner]
        stored = self._meta(_PARTS_PREFIX + owner.encode())
        if stored is None:
            return None
        epoch, batch, base_offset, parts = _numbers(_TOKEN, stored, self.path)
        return AppliedParts(Token(epoch, batch), base_offset, parts)

    def remember_parts(self, owner: str, parts: AppliedParts) -> None:
        """Set how far the owner's large put has got; it reaches RocksDB with the next write."""
        self._parts[owner] = parts

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
        self.applied = applied
        self.schema_version = max(self.schema_version, schema_version)
        if bulk or self._behind() >= 1:
            try:
                self.write_behind()
            except (Retryable, CorruptView) as exc:
                logger.warning("view %s is behind its log: %s", self.path, exc)

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
        if self.applied == self._written and not (self._recent or self._tokens or self._parts):
            return
        hit("view.before_write")
        self._write(self._behind_batch)
        hit("view.written")
        # A put that filled the memory by itself is a bulk load: unlikely to be read again soon.
        self._previous = self._recent if self._recent_puts > 1 else {}
        self._recent, self._recent_bytes, self._recent_puts = {}, 0, 0
        self._tokens, self._parts = {}, {}
        self._written = self.applied

    def _behind_batch(self) -> WriteBatch:
        batch = WriteBatch(raw_mode=True)
        put, delete = batch.put, batch.delete
        for key, value in self._recent.items():
            if value:
                put(key, value)
            else:
                delete(key)
        for owner, last in self._tokens.items():
            stored = _TOKEN.pack(*last.token, last.base_offset, last.end_offset)
            put(_TOKEN_PREFIX + owner.encode(), stored)
        for owner, put_parts in self._parts.items():
            stored = _TOKEN.pack(*put_parts.token, put_parts.base_offset, put_parts.parts)
            put(_PARTS_PREFIX + owner.encode(), stored)
        put(_APPLIED, _OFFSET.pack(self.applied))
        put(_SCHEMA, _OFFSET.pack(self.schema_version))
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
            logger.warning("view %s was closed behind its log: %s", self.path, exc)
        finally:
            for rows in list(self._pinned):
                rows.close()
            with self._closing:
                self._closed = True
                self._database.close()

    def _check_identity(self, identity: str) -> None:
        version, known = self._meta(_FORMAT), self._meta(_IDENTITY)
        if version is None:
            self._write(lambda: _identity_batch(identity))
        elif version != str(FORMAT_VERSION).encode():
            raise UnknownFormat(
                f"view {self.path}: format {version.decode(errors='replace')}, this release reads "
                f"{FORMAT_VERSION}; upgrade, or remove the directory to rebuild it from the log"
            )
        elif known != identity.encode():
            found = (known or b"?").decode(errors="replace")
            raise CorruptView(
                f"view {self.path} belongs to {found}, not to {identity}; remove the directory to "
                "rebuild it from the log"
            )

    def _meta(self, key: bytes) -> bytes | None:
        return self._read([key])[0]

    def _number(self, key: bytes) -> int:
        stored = self._meta(key)
        return _numbers(_OFFSET, stored, self.path)[0] if stored else 0

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


def _mostly_new(files: Sequence[dict[str, Any]]) -> bool:
    """Whether most bytes are in files that were flushed, and not compacted since."""
    new = sum(file["size"] for file in files if file["level"] == 0)
    return bool(2 * new > sum(file["size"] for file in files))


def read_checkpoint(directory: Path) -> CheckpointState:
    """Return what a checkpoint is of, as it says itself; its files stay as they are."""
    with translated(directory):
        options = Options(raw_mode=True)
        database = Rdict(str(directory), options, access_type=AccessType.read_only())
        try:
            found = cast(list[bytes | None], database.get([_IDENTITY, _APPLIED]))
        finally:
            database.close()
    identity, applied = found
    if identity is None:
        raise CorruptView(f"{directory} is no copy of a view; make another one")
    offset = _numbers(_OFFSET, applied, directory)[0] if applied else 0
    return CheckpointState(offset, identity.decode(errors="replace"))


def pin_checkpoint(directory: Path) -> PinnedRows:
    """Return all rows of a checkpoint; its files stay as they are."""
    with translated(directory):
        database = Rdict(str(directory), Options(raw_mode=True), access_type=AccessType.read_only())
    return PinnedRows(database, ROW_PREFIX, partial(translated, directory), owned=True)


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Translate what rocksdict raises: bare exceptions with RocksDB's status as text."""
    try:
        yield
    except (CorruptView, Closed):
        raise
    except DbClosedError as exc:
        raise Closed(f"{path} was closed meanwhile; open it again") from exc
    except Exception as exc:
        text = str(exc)
        if "While lock file" in text or "lock hold by current process" in text:
            raise InUse(
                f"{path} is open in another process or handle; close that one first"
            ) from exc
        if "Corruption" in text:
            raise CorruptView(_rebuild(path, text)) from exc
        if "No space left" in text or "Disk quota" in text:
            raise StorageFull(f"{path}: no room; make room and try again") from exc
        if "IO error" in text or "Write stall" in text:
            raise StorageUnavailable(f"{path}: {text}") from exc
        raise


def _identity_batch(identity: str) -> WriteBatch:
    batch = WriteBatch(raw_mode=True)
    batch.put(_FORMAT, str(FORMAT_VERSION).encode())
    batch.put(_IDENTITY, identity.encode())
    return batch


def _numbers(form: struct.Struct, stored: bytes, path: Path) -> tuple[int, ...]:
    """Return what is stored in meta; RocksDB has checked the bytes, and this that they are ours."""
    try:
        return form.unpack(stored)
    except struct.error as exc:
        raise CorruptView(_rebuild(path, f"meta of {len(stored)} bytes: {exc}")) from exc


def _rebuild(path: Path, reason: str) -> str:
    return f"view {path}: {reason}; remove the directory to rebuild it from the log"
