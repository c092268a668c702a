"""Memory that is freed is kept for what comes next.

Batches are worked on in arrays of about a megabyte, many for each of them. The C library of GNU
gives each back to the system as it is freed, and the next one costs a page fault per page: that was
two fifths of the time of a fold. As it runs, it adapts, and keeps up to 64 MiB at the end of its
heap, but never far enough for arrays of this size. So it is told to begin where it may end.
"""

import ctypes
import os
from contextlib import suppress
from functools import cache

# From <malloc.h>.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
# The most that the library itself adapts to, on 64 bits.
_LARGEST_BLOCK = 32 << 20
_KEPT = 2 * _LARGEST_BLOCK
# Each has a heap of its own, and keeps as much. Python's threads mostly take turns.
_ARENAS = 2
_SAYS_OTHERWISE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@cache
def keep_freed_memory() -> None:
    """Do so from now on, in all of this process; what the environment says goes first."""
    if any(name in os.environ for name in _SAYS_OTHERWISE):
        return
    with suppress(OSError, AttributeError):  # Where the C library is not GNU's.
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK)
        library.mallopt(_TRIM_THRESHOLD, _KEPT)
        if "MALLOC_ARENA_MAX" not in os.environ:
            library.mallopt(_ARENA_MAX, _ARENAS)
