"""SIGTERM in a process that has sinks, without Spark: who handles it, and how the process ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

END_S = 60.0

_PROGRAM = """
import os, signal, sys, threading, time
from sink import runs
from sink.termination import termination

def say(word):
    print(word, flush=True)

def close():
    say("closes")
    if how == "hangs":
        time.sleep(3600)

how = sys.argv[1]
if how == "handled":
    signal.signal(signal.SIGTERM, lambda *_: (say("handled"), os._exit(7)))
prepare = threading.Thread(target=termination.prepare)
if how == "in a thread":
    prepare.start()
    prepare.join()
else:
    termination.prepare()
runs.close_at_end(close)
if how == "forked":
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        say("the child is gone")
        os._exit(0)
    say(str(os.getpid()))
if how == "in a batch":
    try:
        with termination.batch():
            say("ready")
            time.sleep(3600)
    finally:
        say("never: the signal has ended the process")
say("ready")
time.sleep(3600)
"""


@contextmanager
def program(how: str) -> Iterator[subprocess.Popen[str]]:
    """Run the program until the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, how], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("how", ["plain", "in a batch"])
def test_what_is_open_is_closed_and_then_the_signal_ends_the_process(how: str) -> None:
    with program(how) as process:
        assert line(process) == "ready"
        process.terminate()
        assert line(process) == "closes"
        assert process.wait(END_S) == -signal.SIGTERM
        assert line(process) == ""


def test_a_second_signal_ends_the_process_at_once() -> None:
    with program("hangs") as process:
        assert line(process) == "ready"
        process.terminate()
        assert line(process) == "closes"
        process.terminate()
        assert process.wait(END_S) == -signal.SIGTERM


def test_an_application_that_handles_the_signal_goes_on_doing_so() -> None:
    with program("handled") as process:
        assert line(process) == "ready"
        process.terminate()
        assert line(process) == "handled"
        assert process.wait(END_S) == 7


def test_a_sink_that_is_made_in_a_thread_changes_nothing() -> None:
    with program("in a thread") as process:
        assert line(process) == "ready"
        process.terminate()
        assert process.wait(END_S) == -signal.SIGTERM
        assert line(process) == ""


def test_a_forked_process_closes_nothing_of_its_parent() -> None:
    with program("forked") as process:
        child = int(line(process))
        assert line(process) == "ready"
        os.kill(child, signal.SIGTERM)
        assert line(process) == "the child is gone"
        assert process.wait(END_S) == 0
