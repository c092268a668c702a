"""The examples that share a cluster and a Spark here: each ends, with the right totals."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tallybook as tb
from examples.backfill import fill
from examples.changes_into_totals import keep_totals
from examples.exact_counters import count
from examples.late_events import follow
from examples.setting import Setting
from examples.web_lookups import serve
from server.launch.local_cluster import LocalCluster
from tallybook import cli
from tests.support.documented import ROOT
from tests.support.notebooks import run_notebook
from tests.support.spark_session import quiet_spark

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    directory = tmp_path_factory.mktemp("examples")
    with quiet_spark("local[2]") as spark, LocalCluster(directory / "cluster", servers=2) as local:
        yield Setting(address=local.address, spark=spark, directory=directory)


@pytest.fixture
def setting(shared: Setting, tmp_path: Path) -> Iterator[Setting]:
    yield Setting(address=shared.address, spark=shared.spark, directory=tmp_path)
    with tb.connect(shared.address) as cluster:
        for name in cluster.list_tables():
            cluster.drop_table(name, force=True)


def test_a_batch_that_is_replayed_counts_once(
    setting: Setting, capsys: pytest.CaptureFixture[str]
) -> None:
    assert count(setting) == {"/": 6, "/buy": 3, "/help": 3}
    first, second = capsys.readouterr().out.splitlines()
    assert first.partition("{")[2] == second.partition("{")[2]


def test_a_late_event_replaces_nothing(setting: Setting) -> None:
    assert follow(setting) == [
        {"parcel": 1, "status": "arrived", "changes": 3},
        {"parcel": 2, "status": "on its way", "changes": 2},
    ]


def test_a_backfill_and_a_live_job_count_each_order_once(setting: Setting) -> None:
    assert fill(setting) == dict.fromkeys(range(5), 22)


def test_totals_follow_the_changes_of_another_table(setting: Setting) -> None:
    assert keep_totals(setting) == [
        {"country": "de", "cents": 350, "customers": 2},
        {"country": "fr", "cents": 700, "customers": 2},
    ]


def test_a_web_service_looks_keys_up_from_many_threads(setting: Setting) -> None:
    assert serve(setting) == sum(range(1000))


def test_the_notebook_of_the_quick_start_says_what_it_prints(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(setting.directory)
    run_notebook(ROOT / "docs" / "quick-start.ipynb", setting.address, setting.spark)


def test_a_dead_job_is_released_and_comes_back(
    setting: Setting, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TALLYBOOK_ZOOKEEPER", setting.address)
    for batch in (0, 1):
        job = subprocess.run(
            [sys.executable, "-m", "examples.dead_job"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        assert job.returncode == -signal.SIGKILL, job.stderr
        assert f"has committed batch {batch}" in job.stdout
        release = ["locks", "release", "visits", "etl-1"]
        assert cli.main(release) == 1, "the job may be running, as far as anybody knows"
        assert "or, if it is gone, say --force" in capsys.readouterr().err
        assert cli.main([*release, "--force"]) == 0
        assert f"2 keys were undone; its last committed batch is {batch}" in capsys.readouterr().out
    with tb.connect(setting.address) as cluster:
        assert cluster.table("visits").lookup({"customer_id": 7})["orders"].to_pylist() == [2]


def test_every_example_is_run_by_a_test() -> None:
    here: Any = (
        Path(__file__).read_text() + (Path(__file__).parent / "test_examples.py").read_text()
    )
    for path in (ROOT / "examples").glob("*.py"):
        # A job of the wide table is started by it.
        if "__main__" in path.read_text() and path.stem != "wide_table_job":
            assert path.stem in here, path
