"""The examples. The demo: what it says, and that it leaves nothing running, however it ends."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import is_running
from tests.support.spark_session import needs_java

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0


@pytest.fixture
def marked(tmp_path: Path) -> dict[str, str]:
    """An environment that all processes of one demo inherit: so they can be found."""
    needs_java()
    (tmp_path / "tmp").mkdir()
    return {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "TALLYBOOK_TEST_MARK": str(tmp_path)}


def test_the_first_table_counts_right(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "first_table.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    row = "{'customer_id': 7, 'orders': 3, 'cents': 650, 'status': 'paid'}"
    assert done.stdout.count(row) == 2


@pytest.mark.spark
def test_the_demo_counts_every_event_once_and_leaves_nothing_behind(
    tmp_path: Path, marked: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.wide_table", "--quick"],
        cwd=ROOT,
        env=marked,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    lines = done.stdout.splitlines()
    compared = r"customers compared: 1,9\d\d, differences: 0, double-counted events: 0"
    assert re.fullmatch(compared, lines[-1])
    assert any("orders   was killed in batch 2" in line for line in lines)
    assert any("orders   undid what was not committed" in line for line in lines)
    assert list(_left_running(tmp_path)) == []
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.spark
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_a_demo_that_is_ended_early_leaves_nothing_running(
    ending: signal.Signals, tmp_path: Path, marked: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "examples.wide_table", "--quick"]
    with (
        (tmp_path / "output").open("w") as output,
        subprocess.Popen(
            command, cwd=ROOT, env=marked, stdout=output, stderr=output, start_new_session=True
        ) as demo,
    ):
        _wait_until(lambda: len([c for c in _left_running(tmp_path) if "SparkSubmit" in c]) == 2)
        os.killpg(demo.pid, ending)  # To the whole group, as a terminal does it.
        demo.wait(120)
    _wait_until(lambda: not list(_left_running(tmp_path)))
    if ending is signal.SIGINT:
        assert demo.returncode == 130
        assert (tmp_path / "output").read_text().endswith("all processes were ended\n")
        assert list((tmp_path / "tmp").iterdir()) == []


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _left_running(mark: Path) -> Iterator[str]:
    """Yield the command lines of the processes that have the mark in their environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found = f"TALLYBOOK_TEST_MARK={mark}".encode() in (process / "environ").read_bytes()
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # It has ended meanwhile.
        if found and is_running(int(process.name)):
            yield f"{process.name} {command}"
