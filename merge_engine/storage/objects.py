"""Where a log lives: named, immutable objects that are created once.

`ObjectStorage` is the boundary. Two implementations: `LocalStorage`, a directory whose objects
survive a power cut once `create` returns, and `RemoteStorage`, anything that obstore speaks (S3,
GCS, Azure; its in-memory store in tests). One contract suite runs against all of them.
"""

import errno
import io
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast
from urllib.parse import unquote

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import ObjectStore, from_url

from foundation.errors import (
    AlreadyExists,
    InvalidInput,
    MissingObject,
    StorageFull,
    StorageUnavailable,
    UnknownOutcome,
)
from foundation.failpoints import hit
from merge_engine.storage.environment import looked_at

TEMPORARY_PREFIX = ".creating-"
STALE_TEMPORARY_SECONDS = 3600
# A large object is synced piece by piece: whoever syncs a small one meanwhile waits for no more.
_SYNC_BYTES = 4 << 20
# obstore has Python's own error for what is not found, and its own in other places.
_REFUSED = (NotFoundError, FileNotFoundError, PermissionDeniedError, UnauthenticatedError)
_DURATION = re.compile(r" in [\d.]+(ns|µs|ms|s)\b")
# What obstore's HTTP client is told, and not the store.
_OF_CLIENT = frozenset(
    {
        *("allow_http", "allow_invalid_certificates", "root_certificate", "user_agent"),
        *("timeout", "connect_timeout", "read_timeout", "pool_idle_timeout"),
        *("pool_max_idle_per_host", "randomize_addresses", "http1_only", "http2_only"),
        *("proxy_url", "proxy_ca_certificate", "proxy_excludes"),
    }
)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class ObjectStorage(Protocol):
    """Named, immutable objects. A name is created at most once, by whoever comes first."""

    def create(self, name: str, data: bytes) -> None:
        """Create the object, durable on return.

        Raises AlreadyExists if the name is taken, StorageFull or StorageUnavailable if it was
        certainly not created, UnknownOutcome if it may have been, or may still be.
        """

    def read(self, name: str) -> bytes:
        """Return the object's bytes; MissingObject if there is none."""

    def open(self, name: str) -> BinaryIO:
        """Return the object as a file: what is not read of it is not fetched. MissingObject."""

    def names(self) -> list[str]:
        """Return all names, sorted."""

    def sizes(self) -> dict[str, int]:
        """Return how many bytes each object has, by name; in the order of the names."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete the objects; names that do not exist are passed over."""

    def child(self, path: str) -> "ObjectStorage":
        """Return the storage below this one, under `path`."""

    def remove_empty(self, path: str) -> None:
        """Remove what is left of a place below this one that has no objects: empty directories."""


class LocalStorage:
    """A directory. An object appears under its name whole, or not at all.

    Written to a temporary file, synced, linked to its name (`rename` would overwrite, `O_EXCL`
    would show a torn file after a crash), and the directory synced.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)

    def create(self, name: str, data: bytes) -> None:
        temporary = self._directory / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        try:
            with _certain_failure(self._directory / name):
                _make_directory(self._directory)
                _write_synced(temporary, data)
            hit("storage.written")
            self._link(temporary, name)
            hit("storage.linked")
            self._sync(name)
        finally:
            with suppress(OSError):  # What it leaves is hidden, and removed when it is old.
                temporary.unlink()

    def _link(self, temporary: Path, name: str) -> None:
        try:
            os.link(temporary, self._directory / name)
        except FileExistsError as exc:
            # Whoever linked it may not have synced the directory yet, and the caller builds on it.
            self._sync(name)
            raise AlreadyExists(f"{self._directory / name} exists already") from exc
        except OSError as exc:
            if exc.errno in _NO_ROOM:
                raise StorageFull(_no_room(self._directory / name)) from exc
            raise UnknownOutcome(f"{self._directory / name}: {exc.strerror}") from exc

    def _sync(self, name: str) -> None:
        """Make a name that was linked durable; whether it is if that fails, nobody knows."""
        try:
            _sync_directory(self._directory)
        except OSError as exc:
            raise UnknownOutcome(f"{self._directory / name}: {exc.strerror}") from exc

    def read(self, name: str) -> bytes:
        path = f"{self._directory}{os.sep}{name}"  # Paths are slow to make.
        try:
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError as exc:
            raise MissingObject(f"{path} does not exist") from exc
        except OSError as exc:
            raise StorageUnavailable(f"{path}: {exc.strerror}") from exc

    def open(self, name: str) -> BinaryIO:
        try:
            return (self._directory / name).open("rb")
        except FileNotFoundError as exc:
            raise MissingObject(f"{self._directory / name} does not exist") from exc
        except OSError as exc:
            raise StorageUnavailable(f"{self._directory / name}: {exc.strerror}") from exc

    def names(self) -> list[str]:
        try:
            found = [entry.name for entry in os.scandir(self._directory) if entry.is_file()]
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise StorageUnavailable(f"{self._directory}: {exc.strerror}") from exc
        self._remove_stale([name for name in found if name.startswith(TEMPORARY_PREFIX)])
        return sorted(name for name in found if not name.startswith(TEMPORARY_PREFIX))

    def sizes(self) -> dict[str, int]:
        found = {}
        for name in self.names():
            with suppress(FileNotFoundError):  # Deleted since.
                found[name] = (self._directory / name).stat().st_size
        return found

    def _remove_stale(self, temporaries: Sequence[str]) -> None:
        """Remove what killed processes left, but nothing that a live one may be writing.

        Its age is by the clock that dates the files, which is another machine's on a network disk:
        ours, which may be ahead, only says when to ask.
        """
        for name in temporaries:
            path = self._directory / name
            with suppress(OSError):
                stale_at = path.stat().st_mtime + STALE_TEMPORARY_SECONDS
                if time.time() > stale_at and self._time_there() > stale_at:
                    path.unlink()

    def _time_there(self) -> float:
        """Return the time by the clock of the disk, from a file that is written for that."""
        probe = self._directory / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def delete(self, names: Sequence[str]) -> None:
        try:
            for name in names:
                (self._directory / name).unlink(missing_ok=True)
            if names and self._directory.is_dir():
                _sync_directory(self._directory)
        except OSError as exc:
            raise StorageUnavailable(f"{self._directory}: {exc.strerror}") from exc

    def remove_empty(self, path: str) -> None:
        place = self._directory / path
        for directory, *_ in os.walk(place, topdown=False):
            with suppress(OSError):  # Somebody has something there.
                os.rmdir(directory)
        # And those above it, each if this was the last in it.
        with suppress(OSError):
            while (place := place.parent) != self._directory:
                place.rmdir()

    def child(self, path: str) -> "LocalStorage":
        return LocalStorage(self._directory / path)

    def __str__(self) -> str:
        return str(self._directory)

    def __repr__(self) -> str:
        return f"LocalStorage({str(self._directory)!r})"


class RemoteStorage:
    """A prefix of an object store, through obstore. `create` is the store's own put-if-absent."""

    def __init__(self, store: ObjectStore, prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""

    def create(self, name: str, data: bytes) -> None:
        path = self._prefix + name
        try:
            obstore.put(self._store, path, data, mode="create")
        except AlreadyExistsError as exc:
            raise AlreadyExists(f"{path} exists already") from exc
        except _REFUSED as exc:
            raise StorageUnavailable(f"{path}: {_first_line(exc)}") from exc
        except Exception as exc:
            raise UnknownOutcome(f"{path}: {_first_line(exc)}") from exc
        hit("storage.linked")

    def read(self, name: str) -> bytes:
        path = self._prefix + name
        try:
            return bytes(obstore.get(self._store, path).bytes())
        except (NotFoundError, FileNotFoundError) as exc:
            raise MissingObject(f"{path} does not exist") from exc
        except Exception as exc:
            raise StorageUnavailable(f"{path}: {_first_line(exc)}") from exc

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, _RemoteFile(self._store, self._prefix + name))

    def names(self) -> list[str]:
        return list(self.sizes())

    def sizes(self) -> dict[str, int]:
        try:
            listing = obstore.list_with_delimiter(self._store, self._prefix or None)
        except Exception as exc:
            raise StorageUnavailable(f"{self._prefix}: {_first_line(exc)}") from exc
        found = {entry["path"][len(self._prefix) :]: entry["size"] for entry in listing["objects"]}
        return dict(sorted(found.items()))

    def delete(self, names: Sequence[str]) -> None:
        paths = [self._prefix + name for name in names]
        try:
            obstore.delete(self._store, paths)
        except (NotFoundError, FileNotFoundError):
            # Some stores end with the first that does not exist: one by one, then.
            for path in paths if len(paths) > 1 else ():
                self.delete([path.removeprefix(self._prefix)])
        except Exception as exc:
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            raise StorageUnavailable(f"{paths[0]}{more}: {_first_line(exc)}") from exc

    def remove_empty(self, path: str) -> None:
        """Nothing: names are all there is."""

    def child(self, path: str) -> "RemoteStorage":
        return RemoteStorage(self._store, self._prefix + path)

    def __repr__(self) -> str:
        return f"RemoteStorage({self._store!r}, {self._prefix!r})"


class _RemoteFile(io.RawIOBase):
    """An object of which ranges are fetched, as they are read."""

    def __init__(self, store: ObjectStore, path: str) -> None:
        self._store = store
        self._path = path
        self._at = 0
        with self._translated():
            self._size: int = obstore.head(store, path)["size"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"{start + offset} is before the start of {self._path}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._checkClosed()
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        with self._translated():
            found = obstore.get_range(self._store, self._path, start=self._at, end=end)
        count = len(found)
        buffer[:count] = memoryview(found)
        self._at += count
        return count

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (NotFoundError, FileNotFoundError) as exc:
            raise MissingObject(f"{self._path} does not exist") from exc
        except Exception as exc:
            raise StorageUnavailable(f"{self._path}: {_first_line(exc)}") from exc


def open_storage(location: str | Path, **settings: Any) -> ObjectStorage:
    """Return the storage at a directory, or at a URL such as `s3://bucket/prefix`.

    `settings` go to obstore as they are (`region=`, `endpoint=`, `access_key_id=`, ...); those of
    its HTTP client (`allow_http=`, `timeout=`, ...) may stand beside them, for who has text only.
    """
    directory = local_directory(location)
    if directory is not None:
        if settings:  # Their names only: a value may be a secret.
            raise InvalidInput(f"{location} is a directory and takes no settings: {[*settings]}")
        return LocalStorage(directory)
    try:
        return RemoteStorage(from_url(str(location), **_with_client_options(settings)))
    except BaseException as exc:
        # obstore panics over some settings, and a panic is no Exception.
        if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
            raise
        variables = looked_at(str(location))
        raise InvalidInput(
            f"cannot use {location!r}: {_first_line(exc)}" + (f"; {variables}" if variables else "")
        ) from exc


def is_remote(storage: ObjectStorage) -> bool:
    """Whether an object costs a round trip. A storage around another one has it as `wrapped`."""
    wrapped = getattr(storage, "wrapped", None)
    return isinstance(storage, RemoteStorage) if wrapped is None else is_remote(wrapped)


def _with_client_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as obstore wants them: those of its HTTP client in a dictionary within."""
    own = {name: value for name, value in settings.items() if name not in _OF_CLIENT}
    of_client = {name: value for name, value in settings.items() if name in _OF_CLIENT}
    if of_client:
        own["client_options"] = {**own.get("client_options", {}), **of_client}
    return own


def local_directory(location: str | Path) -> Path | None:
    """Return the directory that a path or a `file://` URL means; None for any other URL."""
    if not isinstance(location, str | Path):
        raise InvalidInput(f"a location is a path or a URL, not {location!r}")
    if isinstance(location, Path) or "://" not in location:
        return Path(location)
    if location.startswith("file://"):
        return Path(unquote(location.removeprefix("file://")))
    return None


@contextmanager
def _certain_failure(path: Path) -> Iterator[None]:
    """Translate errors of steps before the object can be seen under its name."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _NO_ROOM:
            raise StorageFull(_no_room(path)) from exc
        raise StorageUnavailable(f"{path}: {exc.strerror}") from exc


def _make_directory(directory: Path) -> None:
    """Create the directory so that it survives a power cut: each new entry is synced too."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    _sync_directory(directory.parent)


def _write_synced(path: Path, data: bytes) -> None:
    with open(path, "xb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view[:_SYNC_BYTES]) :]
            if view:
                os.fdatasync(file.fileno())
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_room(path: Path) -> str:
    return f"no room to create {path}; nothing was written; make room and try again"


def _first_line(exc: BaseException) -> str:
    """obstore appends whole debug dumps; the first line says what happened.

    And how long it took, which is left out: an error that comes again is to read the same.
    """
    lines = str(exc).strip().splitlines()
    return _DURATION.sub("", lines[0]) if lines else type(exc).__name__
