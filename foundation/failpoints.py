"""Named places at which a test can stop, fail or kill the process.

A failpoint is one dictionary look-up when nothing is armed. `arm` hooks a callable into this
process; the environment variable TALLYBOOK_FAILPOINT (`name` or `name:n`, the n-th visit) kills
the process with SIGKILL, which is how the crash tests stop a child exactly there; `name:n:pause`
pauses it with SIGSTOP, as long as nobody wakes it.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ENVIRONMENT_VARIABLE = "TALLYBOOK_FAILPOINT"

_armed: dict[str, Callable[[], None]] = {}


def hit(name: str) -> None:
    """Run what is armed at this failpoint, if anything is."""
    action = _armed.get(name)
    if action is not None:
        action()


@contextmanager
def arm(name: str, action: Callable[[], None]) -> Iterator[None]:
    """Run `action` at every visit of the failpoint, for the duration of the block.

    In the place of what was armed there before.
    """
    before = _armed.get(name)
    _armed[name] = action
    try:
        yield
    finally:
        del _armed[name]
        if before is not None:
            _armed[name] = before


def kill_on_visit(visit: int = 1, how: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    """Return an action that ends this process with SIGKILL, or another signal, on this visit."""
    remaining = visit

    def action() -> None:
        nonlocal remaining
        remaining -= 1
        if remaining == 0:
            os.kill(os.getpid(), how)

    return action


def _arm_from_environment() -> None:
    setting = os.environ.get(ENVIRONMENT_VARIABLE)
    if setting:
        name, visit, how = (*setting.split(":"), "", "")[:3]
        signal_sent = signal.SIGSTOP if how == "pause" else signal.SIGKILL
        _armed[name] = kill_on_visit(int(visit or 1), signal_sent)


_arm_from_environment()
