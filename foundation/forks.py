"""What must not be touched in a process that was forked from one that used it.

gRPC, RocksDB and kazoo run threads of their own, and a fork does not take threads along. In the
child a call waits for ever for one of them, and a destructor that joins them waits, too, or ends
the process; in the meantime it takes the parent's events from the sockets that both have. So a
library says when it is used, and whoever uses it in a child is told at once. What the child has
inherited is left as it is: it is neither closed nor destroyed there, and the parent goes on with
it.
"""

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

from foundation.errors import UsedAfterFork

_used_in: dict[str, int] = {}


class Holder(Protocol):
    """Has objects that must not be destroyed in a child."""

    def inherited(self) -> Iterable[object]:
        """Return those objects, as they are now."""


_holders: "WeakSet[Holder]" = WeakSet()


def use(library: str) -> None:
    """Say that a library is used here; UsedAfterFork if a parent of this process has used it."""
    if _used_in.setdefault(library, os.getpid()) != os.getpid():
        raise after_fork(library)


def check(library: str) -> None:
    """Raise UsedAfterFork if a parent of this process has used the library."""
    if library in _used_in:
        use(library)


def is_inherited(process: int) -> bool:
    """Whether what was made in this process (its pid) is a parent's, and none of ours."""
    return process != os.getpid()


def hold(holder: Holder) -> None:
    """Let nothing of this destroy itself in a child."""
    _holders.add(holder)


def after_fork(what: str) -> UsedAfterFork:
    """Return the error, with the way out."""
    return UsedAfterFork(
        f"this process was forked from one that had used {what}, whose threads do not come along: "
        "start children by spawn (multiprocessing.get_context('spawn'), subprocess; gunicorn "
        "without --preload), or make the first connection after the fork. Importing tallybook "
        "before it is fine"
    )


def _leave_alone() -> None:
    if not _used_in:
        return
    for holder in list(_holders):
        for inherited in holder.inherited():
            # One reference more than there are: it is never destroyed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
    # And when all is done, the libraries' own tidying up would wait for their threads or crash:
    # what is registered last is called first, and ends the process with the status that it has.
    with suppress(AttributeError):  # Where the C library is not GNU's.
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)


os.register_at_fork(after_in_child=_leave_alone)
