"""SIGTERM, by which Kubernetes, systemd and YARN stop a driver: locks are released before it ends.

Python would end at once, and leave its locks to expire. Here its queries are stopped first, which
lets a batch that is under way come to its end; locks are released, or abandoned where a batch was
broken off; and then the signal does what it would have done. All that by a thread of its own: the
main thread, which is told of the signal, may be in the middle of a call to Spark.

An application that handles the signal itself is left alone. It ends its queries, or exits, and
locks are released as at any other end.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sink.runs import end_all_now


class Terminated(BaseException):
    """The process is told to end while its main thread writes a batch: that is broken off."""


class _Termination:
    """What this process does about SIGTERM. Only its main thread can be told of a signal."""

    def __init__(self) -> None:
        self._process = 0
        self._batches = 0

    def prepare(self) -> None:
        """Handle the signal, if this is the main thread and nobody else handles it."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._told)
            self._process = os.getpid()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Write a batch; told to end meanwhile, break it off, if that is in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._batches += 1
        try:
            yield
        except Terminated:
            self._end()
            raise
        finally:
            self._batches -= 1

    def _told(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # A second one ends the process at once.
        if self._batches and self._process == os.getpid():
            raise Terminated
        self._end()

    def _end(self) -> None:
        if self._process == os.getpid():  # Else it was forked, and has nothing to release.
            end_all_now()
        os.kill(os.getpid(), signal.SIGTERM)


termination = _Termination()
