"""A process that is asked to stop notices, whichever of its threads is told."""

import subprocess
import sys

import pytest

_WAITS = """
import signal, sys, threading
from foundation.stop_signals import StopSignals

stop = StopSignals()
assert not stop.wait(0)

def tell():
    signal.pthread_kill(threading.get_ident(), getattr(signal, sys.argv[1]))

threading.Timer(0.1, tell).start()
assert stop.wait(180)
assert stop.wait(), "it is not forgotten"
print("stops")
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_that_another_thread_gets_is_noticed(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WAITS, name],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "stops\n", "")
