"""The directory of a server's views is its own: a second server there would ruin them.

A lock of the operating system, on a file in the directory. It goes with the process, however that
ends, so a server that was killed is in nobody's way.
"""

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

from foundation.errors import InUse, InvalidInput

# No view is called so: views are in directories that are named by table and uid.
_NAME = "lock"
# A process that was killed a moment ago still has its files open.
_WAIT_S = 5.0
_LOOK_S = 0.02


class ViewsLock:
    """LockSet from `take` to `release`, or to the end of the process. Not safe for threads."""

    def __init__(self, directory: Path, *, wait_s: float = _WAIT_S) -> None:
        self._directory = directory
        self._wait_s = wait_s
        self._file: IO[bytes] | None = None

    def take(self) -> None:
        """Take it; InUse, with the holder's name, if it is not to be had within the time."""
        deadline = time.monotonic() + self._wait_s
        try:
            file = (self._directory / _NAME).open("a+b")
        except OSError as exc:
            raise self._unusable(exc) from exc
        try:
            while not self._is_free(file):
                if time.monotonic() >= deadline:
                    raise self._in_use(file)
                time.sleep(_LOOK_S)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file = file

    def release(self) -> None:
        """Let others have it. Releasing twice is fine."""
        file, self._file = self._file, None
        if file is not None:
            # Not by closing alone: a process that is just being forked has the file open, too.
            fcntl.flock(file, fcntl.LOCK_UN)
            file.close()

    def _is_free(self, file: IO[bytes]) -> bool:
        """Lock the file unless somebody else has; whether it is locked now."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise self._unusable(exc) from exc
        return True

    def _in_use(self, file: IO[bytes]) -> InUse:
        file.seek(0)
        holder = file.read().decode(errors="replace") or "a process that has not said its name"
        return InUse(
            f"{self._directory} is in use by another server ({holder}): give each server a "
            "directory of its own, or stop that one first"
        )

    def _unusable(self, exc: OSError) -> InvalidInput:
        return InvalidInput(
            f"{self._directory} cannot be locked: {exc.strerror}; give a directory on a local disk"
        )
