"""Processes that are killed, forked from one that has imported all that they need.

Each is there at once, where a new Python would first have to import for most of a second. It has
nothing of the process that asks for it, but for the function that it runs, and its arguments.
"""

import multiprocessing
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from foundation.failpoints import arm, kill_on_visit

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["tests.fault.embedded_writer", "tests.fault.killed_writer", "tests.fault.test_snapshot_kill"]
)


class Forked:
    """A process that runs, and whose standard output is read."""

    def __init__(self, process: ForkServerProcess, output: Connection) -> None:
        self._process = process
        self._output = output

    def read(self, deadline_s: float) -> bytes | None:
        """Return what it says next, empty if it has ended; None if it says nothing in time."""
        if select.select([self._output], [], [], max(deadline_s, 0.0))[0]:
            return os.read(self._output.fileno(), 1 << 16)
        return None

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()

    def end(self, deadline_s: float) -> tuple[int | None, bytes]:
        """Wait for its end; return its exit code, less than 0 for a signal, and what it said."""
        said, deadline = b"", time.monotonic() + deadline_s
        while part := self.read(deadline - time.monotonic()):
            said += part
        assert part is not None, f"it has not ended within {deadline_s:g} s, and said {said!r}"
        self._process.join(deadline_s)
        return self._process.exitcode, said


@contextmanager
def forked(
    main: Callable[..., None], *arguments: Any, failpoint: str | None = None
) -> Iterator[Forked]:
    """Run a function of a module in a process of its own; it has been killed on exit.

    `failpoint`: `name` or `name:n`, as in the environment of a process that is started.
    """
    reader, writer = _context.Pipe(duplex=False)
    process = _context.Process(target=_run, args=(writer, failpoint, main, arguments))
    with reader:
        with writer:
            process.start()
        try:
            yield Forked(process, reader)
        finally:
            process.kill()
            process.join()
            process.close()


def _run(
    output: Connection, failpoint: str | None, main: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    with output:
        os.dup2(output.fileno(), 1)
    if failpoint is None:
        main(*arguments)
        return
    name, _, visit = failpoint.partition(":")
    with arm(name, kill_on_visit(int(visit or 1))):
        main(*arguments)
