"""SIGTERM and SIGINT as something to wait for, in whichever thread they arrive."""

import os
import select
import signal


class StopSignals:
    """Takes both signals from now on: none of them ends the process or raises any more.

    For the main thread. An event that a handler sets would not do. The kernel may give a signal to
    any thread, which does not wake a main thread that waits for a lock; and a handler that runs
    while that thread is inside the event's own lock waits for itself. Python writes the signal's
    number to a pipe at once, wherever it arrives: the pipe is what is waited for.
    """

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self._arrived = select.poll()
        self._arrived.register(reading, select.POLLIN)
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether one has arrived, as soon as it has; False when the time is over."""
        return bool(self._arrived.poll(None if timeout_s is None else 1000 * timeout_s))
