"""On Spark Connect: which query a sink writes for, and how the end of its process is told."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from foundation.errors import InvalidInput
from sink.connect import query_among


def query(name: str) -> Any:
    return SimpleNamespace(name=name)


def test_a_query_is_the_only_one_or_the_one_with_the_owners_name() -> None:
    alone, named = query(""), query("orders")
    assert query_among([alone], "orders", handover=False) is alone
    assert query_among([alone, named, query("")], "orders", handover=False) is named
    assert query_among([named], "orders", handover=True) is named


@pytest.mark.parametrize(
    ("names", "handover", "says"),
    [
        ([], False, "make it before"),
        (["", ""], False, r"which of the 2 queries.*`orders`.*\.queryName\('orders'\)$"),
        (["", "other"], False, r"\.queryName\('orders'\)$"),
        # That it is the only one may be a matter of the moment, and a handover does not check.
        ([""], True, "handover=True needs that"),
    ],
)
def test_a_query_that_is_not_known_for_certain_is_refused(
    names: list[str], handover: bool, says: str
) -> None:
    with pytest.raises(InvalidInput, match=says):
        query_among([query(name) for name in names], "orders", handover=handover)


PROGRAM = """
import atexit, os, sys, time
from foundation.errors import Unavailable
from sink.connect import Stopped, ending

def close():
    print("closed", flush=True)
    raise Unavailable("the next is closed nevertheless")

ending.prepare(close)
ending.prepare(lambda: print("closed, too", flush=True))
atexit.register(lambda: print("exit", flush=True))
def wait():
    print("there", flush=True)
    time.sleep(60)

if sys.argv[1] == "within":
    with ending.batch():
        try:
            wait()
        finally:
            print("broken off", flush=True)
else:
    with ending.batch():
        pass
    wait()
"""


@pytest.mark.parametrize(
    ("where", "says"), [("between", []), ("within", ["broken off"])], ids=["between", "within"]
)
def test_a_process_that_is_told_to_end_closes_its_sinks_and_ends_by_the_signal(
    where: str, says: list[str]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, where],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.read().splitlines() == [*says, "closed", "closed, too"]
        assert process.wait(180) == -signal.SIGTERM
