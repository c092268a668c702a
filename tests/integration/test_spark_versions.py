"""The sink on the oldest Spark that it is for; all other tests run on the newest."""

import subprocess

import pytest

from tests.support.documented import ROOT
from tests.support.spark_session import needs_java

OLDEST = "3.5.9"
# Longer than other tests may take: the first run installs that Spark.
pytestmark = pytest.mark.timeout(1500)


def test_the_sink_writes_on_the_oldest_spark() -> None:
    needs_java()
    made = _make(f"build/spark-{OLDEST}/.installed", timeout_s=900)
    if made.returncode:
        pytest.skip(f"pip cannot install Spark {OLDEST}: {made.stderr.strip()[-200:]}")
    ran = _make("test-spark", f"VERSION={OLDEST}", "QUICK=1", timeout_s=540)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-1000:]
    assert " passed" in ran.stdout


def _make(*arguments: str, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
