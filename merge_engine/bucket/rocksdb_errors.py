"""What rocksdict raises, as our errors: it has bare exceptions with RocksDB's status as text.

Complete: whatever comes from rocksdict leaves as one of ours. What does not come from it, a mistake
in a call or the failpoint of a test, passes as it is.
"""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rocksdict import DbClosedError

from foundation.errors import (
    Closed,
    CorruptView,
    InUse,
    StorageFull,
    StorageUnavailable,
    TallybookError,
)

_CLOSED = ("DB already closed",)
_CORRUPT = ("Corruption",)
_IN_USE = ("While lock file", "lock hold by current process")
_NO_ROOM = ("No space left", "Disk quota", "File too large")
_NO_ROOM_ERRNO = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FILES = ("Too many open files",)
# What may be over the next time: RocksDB's own words for its statuses, and two of rocksdict's.
_PASSING = (
    "IO error",
    "Write stall",
    "Result incomplete",
    "Resource busy",
    "Operation timed out",
    "Operation aborted",
    "Operation expired",
    "Operation failed",
    "Shutdown in progress",
    "Failed to create RocksDB directory",
    "os error",
)
# PyO3's, when an object is used while another call has it to itself.
_BORROWED = ("Already borrowed", "Already mutably borrowed")
# What Rust raises instead of ending the process. It is no `Exception`, and would end any thread.
_PANIC = "PanicException"


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Translate what rocksdict raises about the database at this path."""
    try:
        yield
    except BaseException as exc:
        error = translation(path, exc)
        if error is None:
            raise
        raise error from exc


def translation(path: Path, exc: BaseException) -> TallybookError | None:
    """Return an error about the database at this path as ours; None if rocksdict has none such."""
    if isinstance(exc, DbClosedError):
        return closed(path)
    if isinstance(exc, OSError):
        return _of_the_system(path, exc)
    text = str(exc)
    if type(exc).__name__ == _PANIC:
        return StorageUnavailable(f"{path}: RocksDB's library failed: {text}")
    if isinstance(exc, RuntimeError) and text in _BORROWED:
        return StorageUnavailable(f"{path} is being used by another call; try again")
    if type(exc) is not Exception:  # Rocksdict has no classes of its own for RocksDB's statuses.
        return None
    return _of_rocksdb(path, text)


def _of_rocksdb(path: Path, text: str) -> TallybookError:
    in_use = InUse(f"{path} is open in another process or handle; close that one first")
    corrupt = CorruptView(rebuild(path, text))
    known: Sequence[tuple[Sequence[str], TallybookError]] = (
        (_CLOSED, closed(path)),
        (_IN_USE, in_use),
        (_CORRUPT, corrupt),
        (_NO_ROOM, _full(path)),
        (_NO_FILES, _no_files(path)),
        (_PASSING, StorageUnavailable(f"{path}: {text}")),
    )
    for words, error in known:
        if any(one in text for one in words):
            return error
    # Anything else is about what is there: a file that is missing, a format of a later RocksDB.
    return corrupt


def _of_the_system(path: Path, exc: OSError) -> TallybookError:
    """Return an error of the operating system about a view's directory as ours."""
    if exc.errno in _NO_ROOM_ERRNO:
        return _full(path)
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        return _no_files(path)
    return StorageUnavailable(f"{path}: {exc}")


def closed(path: Path) -> Closed:
    """Say that a database was closed, and what to do."""
    return Closed(f"{path} was closed meanwhile; open it again")


def rebuild(path: Path, reason: str) -> str:
    """Say what is wrong with a view, and the way out."""
    return f"view {path}: {reason}; remove the directory to rebuild it from the log"


def _full(path: Path) -> StorageFull:
    return StorageFull(f"{path}: no room; make room and try again")


def _no_files(path: Path) -> StorageUnavailable:
    return StorageUnavailable(
        f"{path}: this process has as many files open as it may; raise the limit (ulimit -n, "
        "LimitNOFILE), or spread the buckets over more servers"
    )
