"""Holds the namespaces of a bed for as long as whoever started it lives: `unshare -rnmu keeper.py`.

The starter holds the other end of our standard input. When it closes that, or ends for whatever
reason, SIGKILL included, we kill all that was ever started in our user namespace, also what sleeps
and what children of children have left behind; the namespaces go with the last process. Only the
standard library: it is started as a file, without the packages around it.
"""

import os
import signal
import sys
import time
from contextlib import suppress

_DEADLINE_S = 60.0


def main() -> None:
    """Wait for the end of our input, and end the others."""
    # A Ctrl-C, and what `timeout` sends, is for a whole group, and the starter's to handle.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print("ready", flush=True)
    while os.read(sys.stdin.fileno(), 1024):
        pass
    deadline = time.monotonic() + _DEADLINE_S
    while (pids := members(os.getpid(), "user")) and time.monotonic() < deadline:
        for pid in pids:  # One that forks meanwhile is met in the next round.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def members(holder: int, kind: str) -> list[int]:
    """Return all other processes that are in this namespace of a process."""
    wanted = _namespace(holder, kind)
    pids = map(int, filter(str.isdecimal, os.listdir("/proc")))
    return [pid for pid in pids if pid != holder and _namespace(pid, kind) == wanted]


def _namespace(pid: int, kind: str) -> str:
    with suppress(OSError):
        os.readlink(f"/proc/{pid}/exe")  # What has ended and was not waited for has none.
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    return ""  # It has ended, or is none of ours.


if __name__ == "__main__":
    main()
