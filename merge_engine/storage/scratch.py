"""Room on a local disk for what does not fit into memory: files without a name, soon gone.

A file is unlinked as soon as it is open: whatever becomes of the process, its room is free again.
How much all of them take together has a limit, and so has how far they fill the disk: the error
comes before others that use it meet a full one.
"""

import io
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from foundation.errors import StorageFull
from merge_engine.bucket.options import MEBIBYTE

# The free space is looked at after so many bytes, not with every write.
_LOOK_BYTES = 8 * MEBIBYTE


class Scratch:
    """The scratch files of a process, below one directory. Safe for threads."""

    def __init__(
        self,
        directory: Path | None = None,
        *,
        max_bytes: int = 1 << 62,
        min_free_bytes: int = 256 * MEBIBYTE,
    ) -> None:
        """`directory` None: that of the system. `min_free_bytes`: what is left free on its disk."""
        self.directory = Path(tempfile.gettempdir()) if directory is None else directory
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._lock = threading.Lock()
        self.used_bytes = 0

    def file(self) -> "ScratchFile":
        """Return a new file."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = cast(BinaryIO, tempfile.TemporaryFile(dir=self.directory))  # noqa: SIM115
        except OSError as exc:
            raise StorageFull(f"no scratch file in {self.directory}: {exc.strerror}") from exc
        return ScratchFile(self, file)

    def take(self, size: int, *, look: bool) -> None:
        """Count bytes that are about to be written; StorageFull if they are too many."""
        with self._lock:
            if self.used_bytes + size > self._max_bytes:
                raise StorageFull(
                    f"scratch files in {self.directory} would take more than "
                    f"{self._max_bytes:,} bytes; nothing was written, try again when others are "
                    "done, or allow more"
                )
            if look:
                self._check_free(size)
            self.used_bytes += size

    def give_back(self, size: int) -> None:
        """Say that bytes are free again."""
        with self._lock:
            self.used_bytes -= size

    def _check_free(self, size: int) -> None:
        try:
            found = os.statvfs(self.directory)
        except OSError as exc:
            raise StorageFull(f"{self.directory}: {exc.strerror}") from exc
        free = found.f_bavail * found.f_frsize
        if free - size < self._min_free_bytes:
            raise StorageFull(
                f"only {free:,} bytes are free on the disk of {self.directory}, and "
                f"{self._min_free_bytes:,} stay free; nothing was written, make room and try again"
            )


class ScratchFile(io.RawIOBase):
    """A file to append to, and to read by its path; `close` frees its room."""

    def __init__(self, scratch: Scratch, file: BinaryIO) -> None:
        super().__init__()
        self._scratch = scratch
        self._file = file
        self._looked_at = -1
        self.size = 0

    @property
    def path(self) -> str:
        """By which it can be opened for as long as it is open here, though it has no name."""
        return f"/proc/self/fd/{self._file.fileno()}"

    def writable(self) -> bool:
        """It can be written to."""
        return True

    def tell(self) -> int:
        """Return how much was written."""
        return self.size

    def write(self, data: Any) -> int:
        """Append bytes, or anything that is a buffer; StorageFull if there is no room."""
        view = memoryview(data).cast("B")
        self._scratch.take(len(view), look=self.size // _LOOK_BYTES != self._looked_at)
        self._looked_at = self.size // _LOOK_BYTES
        self.size += len(view)
        with self._no_room():
            self._file.write(view)
        return len(view)

    def flush(self) -> None:
        """Let readers of `path` see all that was written."""
        if not self._file.closed:
            with self._no_room():
                self._file.flush()

    def close(self) -> None:
        """Let go of it; what is mapped into memory stays so. Closing twice is fine."""
        if not self.closed:
            self._scratch.give_back(self.size)
            with suppress(OSError):  # What could not be written is not needed any more.
                self._file.close()
        super().close()

    @contextmanager
    def _no_room(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise StorageFull(f"{self._scratch.directory}: {exc.strerror}") from exc
