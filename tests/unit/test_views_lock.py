"""A server's directory of views is its own, from start to stop or to the end of its process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foundation.errors import InUse, InvalidInput
from server.tablet.views_lock import ViewsLock

HOLDER = """
import sys, time
from pathlib import Path
from server.tablet.views_lock import ViewsLock

lock = ViewsLock(Path(sys.argv[1]))
lock.take()
print("taken", flush=True)
time.sleep(600)
"""


def test_a_directory_in_use_is_refused_by_its_name_and_its_holder(tmp_path: Path) -> None:
    first, second = ViewsLock(tmp_path), ViewsLock(tmp_path, wait_s=0.05)
    first.take()
    with pytest.raises(InUse) as refused:
        second.take()
    assert f"{tmp_path} is in use by another server (process {os.getpid()} on" in str(refused.value)
    assert "give each server a directory of its own" in str(refused.value)
    first.release()
    second.take()
    with pytest.raises(InUse):
        ViewsLock(tmp_path, wait_s=0.05).take()
    second.release()
    second.release()


def test_a_refused_server_leaves_the_name_of_the_holder(tmp_path: Path) -> None:
    first = ViewsLock(tmp_path)
    first.take()
    for _ in range(2):
        with pytest.raises(InUse, match=f"process {os.getpid()} on"):
            ViewsLock(tmp_path, wait_s=0.05).take()
    first.release()


def test_a_holder_that_was_killed_is_waited_for_and_succeeded_at_once(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"taken\n"
            with pytest.raises(InUse, match=f"process {holder.pid} on"):
                ViewsLock(tmp_path, wait_s=0.05).take()
            os.kill(holder.pid, signal.SIGKILL)
            successor = ViewsLock(tmp_path)  # Before anybody has waited for the killed one.
            successor.take()
        finally:
            holder.kill()
    with pytest.raises(InUse, match=f"process {os.getpid()} on"):
        ViewsLock(tmp_path, wait_s=0.05).take()
    successor.release()


def test_a_directory_that_cannot_be_locked_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(InvalidInput, match=f"{tmp_path} cannot be locked"):
        ViewsLock(tmp_path).take()
