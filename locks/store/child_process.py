"""A child process that ends with the process that started it, however that ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from foundation import forks
from foundation.errors import ServerNotStarted
from locks.store import child_guardian

_STOP_DEADLINE_S = 15.0
_BY_SIGNAL = 128


class GuardedProcess:
    """A command under the eyes of a guardian process; its output goes to a log file."""

    def __init__(self, command: Sequence[str], log_path: Path) -> None:
        """Start it; ServerNotStarted if there is no such command."""
        self._process = os.getpid()
        self._guardian = subprocess.Popen(
            [sys.executable, "-S", "-E", child_guardian.__file__, str(log_path), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._guardian.stdout is not None
        pid = self._guardian.stdout.readline()
        if not pid:
            self.end(politely=False)
            raise ServerNotStarted(f"cannot run {command[0]}")
        self.pid = int(pid)

    @property
    def alive(self) -> bool:
        """Whether it is still running."""
        return self._guardian.poll() is None

    @property
    def killed_by(self) -> str | None:
        """The name of the signal that ended it; None if none did, or if it is still running."""
        code = self._guardian.poll()
        if code is None or code <= _BY_SIGNAL:
            return None
        try:
            return signal.Signals(code - _BY_SIGNAL).name
        except ValueError:  # It chose a large number by itself.
            return None

    @property
    def killed_in_words(self) -> str | None:
        """By which signal it was killed, for people; None as for `killed_by`."""
        name = self.killed_by
        return None if name is None else f"it was killed ({name})"

    def ask_to_end(self) -> None:
        """Send it SIGTERM, and do not wait for it."""
        if forks.is_inherited(self._process):
            return
        assert self._guardian.stdin is not None
        with suppress(BrokenPipeError):
            self._guardian.stdin.write(b"stop")
            self._guardian.stdin.flush()

    def end(self, *, politely: bool, deadline_s: float = _STOP_DEADLINE_S) -> None:
        """End it: by SIGTERM and, where that does not help in time or is not wanted, SIGKILL.

        In a process that was forked from the starter it does nothing: it is not its to end.
        """
        if forks.is_inherited(self._process):
            return
        assert self._guardian.stdin is not None
        assert self._guardian.stdout is not None
        if politely:
            self.ask_to_end()
            with suppress(subprocess.TimeoutExpired):
                self._guardian.wait(timeout=deadline_s)
        with suppress(BrokenPipeError):
            self._guardian.stdin.close()
        self._guardian.wait()
        self._guardian.stdout.close()


def last_lines(path: Path, count: int = 5) -> str:
    """Return the end of a log, for an error message."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(lines[-count:])
