"""Processes that are not our children: whether they run, and who started them."""

from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether the process is there, and more than a zombie that nobody has waited for."""
    return _fields(pid)[:1] not in ([], ["Z"])


def parent_of(pid: int) -> int:
    """Return the process that started this one."""
    return int(_fields(pid)[1])


def _fields(pid: int) -> list[str]:
    """Return what /proc says after the name, which may have blanks: state, parent, and so on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
