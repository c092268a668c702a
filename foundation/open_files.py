"""How many files this process may have open: as many as it is allowed to say itself.

A shell, cron and systemd give 1,024 (`ulimit -n`), for the sake of programs that use select(2), and
let a process raise that up to another limit, the hard one, which is far higher. A bucket has six
files open besides those of its rows, so 1,024 are enough for 170 buckets.
"""

import sys
from contextlib import suppress
from functools import cache

if sys.platform != "win32":
    import resource

# The kernel allows no more unless it is told to; and a process has a table as large as that.
_MOST = 1 << 20
# The most that macOS takes, whatever it says of its hard limit.
_MOST_OF_MACOS = 10_240


@cache
def raise_limit() -> None:
    """Raise this process's limit to the hard one, once; it is never lowered.

    Children have the limit, too. kazoo, which uses select, takes epoll for files beyond 1,023.
    """
    if sys.platform == "win32":
        return
    soft, hard = limits()
    for wanted in (hard, min(hard, _MOST_OF_MACOS)):
        if wanted <= soft:
            return
        with suppress(ValueError, OSError):
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
            )
            return


def limits() -> tuple[int, int]:
    """Return how many files this process may have open, and how many it could have."""
    if sys.platform == "win32":
        return _MOST, _MOST
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _number(soft), _number(hard)


def _number(limit: int) -> int:
    return _MOST if limit in (resource.RLIM_INFINITY, -1) else min(limit, _MOST)
