"""Processes that are not our children: whether they run, and who started them."""

import os
import signal
from pathlib import Path

from tests.support.zookeeper_server import wait_until


def is_running(pid: int) -> bool:
    """Whether the process is there, and more than a zombie that nobody has waited for."""
    return _fields(pid)[:1] not in ([], ["Z"])


def parent_of(pid: int) -> int:
    """Return the process that started this one."""
    return int(_fields(pid)[1])


def pause(pid: int) -> None:
    """Stop a process with SIGSTOP; returns when none of its threads runs any more.

    A signal is there a while before it has its effect, and what a thread does meanwhile counts.
    """
    os.kill(pid, signal.SIGSTOP)

    def has_stopped() -> bool:
        states = [task.read_text().rpartition(") ")[2][0] for task in _tasks(pid)]
        return {*states} <= {"T", "t", "Z"}

    wait_until(has_stopped, f"process {pid} has stopped")


def _tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*/stat"))


def _fields(pid: int) -> list[str]:
    """Return what /proc says after the name, which may have blanks: state, parent, and so on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
