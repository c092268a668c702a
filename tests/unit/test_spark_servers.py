"""Servers on Spark without Spark: what travels to the executors, and what is said of their end."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from foundation.errors import UnknownOutcome
from server.launch import on_spark
from server.launch.logs import JsonFormatter, last_words
from server.launch.on_spark import executors_python, plan, why_lost
from tallybook.spark import register

VARIABLES = {
    "TALLYBOOK_TOKEN": "secret-1",
    "TALLYBOOK_ZOOKEEPER_CREDENTIALS": "user:secret-2",
    "AWS_SECRET_ACCESS_KEY": "secret-3",
    "AWS_ENDPOINT_URL": "http://secret-4",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "secret-5",
    "AZURE_STORAGE_ACCOUNT_KEY": "secret-6",
    "SERVICE_ACCOUNT": "/secret-7",
}


def test_what_servers_need_of_the_drivers_environment_travels_unseen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SOMETHING_ELSE", "stays")
    for assignment in plan(servers=2, zookeeper="127.0.0.1:1/x", logs="s3://bucket/logs"):
        assert VARIABLES.items() <= assignment.environment.items()
        assert "SOMETHING_ELSE" not in assignment.environment
        assert "secret" not in repr(assignment)
        assert "secret" not in " ".join(assignment.options)


# --- Which Python -------------------------------------------------------------------------------


def context(python: str = "python3", **settings: str) -> Any:
    """Return what is looked at of a SparkContext; "python3" is what Spark takes if told nothing."""
    named = {name.replace("_", "."): value for name, value in settings.items()}
    return SimpleNamespace(pythonExec=python, getConf=lambda: SimpleNamespace(get=named.get))


def test_executors_run_the_drivers_python_unless_spark_was_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    assert executors_python(context()) == sys.executable
    assert executors_python(context(spark_pyspark_python="/conf/python")) == "/conf/python"
    # The session was made when the variable was there.
    assert executors_python(context("/before/python")) == "/before/python"
    monkeypatch.setenv("PYSPARK_PYTHON", "python3")
    assert executors_python(context()) == "python3"


def test_tasks_of_a_spark_of_this_machine_run_this_python_once_the_format_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)

    def registered(master: str) -> str:
        made = context()
        made.master = master
        session = SimpleNamespace(
            _sc=made,
            dataSource=SimpleNamespace(register=lambda _: None),
            conf=SimpleNamespace(set=lambda *_: None),
        )
        register(cast(Any, session))
        return str(made.pythonExec)

    assert registered("local[2]") == sys.executable
    assert registered("spark://master:7077") == "python3", "others may not have it at this path"


def test_a_python_without_our_packages_has_no_data_source_and_says_nothing() -> None:
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "import pyspark_tallybook; assert not hasattr(pyspark_tallybook, 'DefaultSource')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=180
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- Stopping -----------------------------------------------------------------------------------


def test_servers_that_spark_does_not_end_are_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(on_spark, "_STOP_DEADLINE_S", 0.0)
    tracker = SimpleNamespace(
        getJobIdsForGroup=lambda _: [1],
        getJobInfo=lambda _: SimpleNamespace(stageIds=[1]),
        getStageInfo=lambda _: SimpleNamespace(numActiveTasks=1),
    )
    spark = context()
    spark.statusTracker = lambda: tracker
    with pytest.raises(UnknownOutcome, match="still runs servers 0 s after"):
        on_spark.ServersOnSpark(spark, []).stop()


# --- Why a server ended -------------------------------------------------------------------------


def json_line(level: int, message: str, error: BaseException | None = None) -> str:
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("server", level, "x.py", 1, message, None, info)
    return JsonFormatter().format(record)


JOINED = json_line(logging.INFO, "joined as 4711 on 127.0.0.1:1")
DIED = json_line(logging.CRITICAL, "died of an error", ValueError("what it was"))
TRACEBACK = "Traceback (most recent call last):\n  File \"x.py\", line 1\nKeyError: 'a'"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "it said nothing"),
        (JOINED, "joined as 4711 on 127.0.0.1:1"),
        (f"{JOINED}\nthe server did not start: no room", "the server did not start: no room"),
        (
            f"the server did not start: no room\nat all\n{JOINED}",
            "the server did not start: no room at all",
        ),
        (f"{JOINED}\n{DIED}\n{JOINED}", "died of an error: ValueError: what it was"),
        (f"{JOINED}\n{TRACEBACK}\n", "KeyError: 'a'"),
        (f"{JOINED}\npython -m server: error: no such thing", "python -m server: error: no such"),
        ("[1, 2]", "[1, 2]"),
    ],
)
def test_the_last_words_of_a_server_are_for_people(tmp_path: Path, log: str, words: str) -> None:
    path = tmp_path / "server.log"
    path.write_text(log)
    said = last_words(path)
    assert said.startswith(words)
    assert "{" not in said


def test_the_last_words_are_those_of_this_run(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    assert last_words(path) == "it said nothing"
    path.write_text("the server did not start: of the run before\n")
    before = path.stat().st_size
    assert last_words(path, before) == "it said nothing"
    with path.open("a") as log:
        log.write(f"{JOINED}\n")
    assert last_words(path, before) == "joined as 4711 on 127.0.0.1:1"
    path.write_text("x" * 10_000_000)
    assert len(last_words(path)) <= 2000


PYTHON_ERROR = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent failure: Lost task 0.3 in stage 0.0 (TID 3) (127.0.0.1 executor 0): org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/x/pyspark/worker.py", line 1, in main
    process()
    ~~~~~~~^^
KeyError: 'what came first'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/server/on_spark.py", line 1, in task
ModuleNotFoundError: No module named 'kazoo'

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:1)
Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:1)
Caused by: org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/x/server/on_spark.py", line 1, in task
ModuleNotFoundError: No module named 'kazoo'
"""  # noqa: E501
JAVA_ERROR = """An error occurred while calling o1.
: java.io.IOException: Cannot run program "/no/python": error=2, No such file or directory
\tat java.base/java.lang.ProcessBuilder.start(Unknown Source)
"""


def test_what_spark_says_of_a_lost_server_is_told_in_a_line() -> None:
    assert why_lost(Exception(PYTHON_ERROR)) == "ModuleNotFoundError: No module named 'kazoo'"
    assert why_lost(Exception(JAVA_ERROR)).startswith(
        'java.io.IOException: Cannot run program "/no'
    )
    assert why_lost(ValueError()) == "ValueError()"
