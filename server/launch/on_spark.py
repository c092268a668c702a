"""Tablet servers as a long-running Spark application: Spark places them and starts them again.

with run(spark, servers=4, zookeeper="zk:2181/tallybook", logs="s3://bucket/logs") as servers:
    servers.wait()

Each server is a Spark job of one task. A server that ends, ends its task in good order, and a
thread of the driver submits the next one. So Spark's count of failed tasks, which is per job and
would end a job of many servers one day, only ever sees executors and Python workers that were lost.
"""

import io
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

from foundation.errors import InvalidInput, UnknownOutcome
from locks.store.zookeeper import CREDENTIALS_VARIABLE
from merge_engine.storage.environment import store_variables
from merge_engine.storage.objects import local_directory
from server.__main__ import parser, to_config
from server.launch.spark_task import Assignment, Ended
from server.protocol.environment import TOKEN_VARIABLE
from server.tablet.config import ServerConfig

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_HEALTHY_S = 10.0
_LOOK_S = 0.1
_STOP_DEADLINE_S = 60.0
_SPARKS_CHOICE = "python3"
_TRACEBACK = "Traceback (most recent call last):"


def run(
    spark: Any,
    *,
    servers: int,
    zookeeper: str,
    logs: str,
    views: str | Path | None = None,
    options: Sequence[str] = (),
) -> "ServersOnSpark":
    """Run this many servers on the executors of a Spark session, until stopped.

    Returns at once: servers start as Spark finds a free core for each. `views`: a directory on the
    executors' machines; unless given, Spark's own temporary one. `options`: as for
    `python -m server`; files that they name have to be on all machines. With `--host auto` each
    server listens on the address by which its machine reaches ZooKeeper; that needs a token. Token,
    credentials, and what the object store needs (AWS_*, GOOGLE_*, AZURE_*) are taken from this
    process's environment. Executors run the driver's Python, unless PYSPARK_PYTHON or
    spark.pyspark.python says otherwise.
    """
    assignments = plan(
        servers=servers, zookeeper=zookeeper, logs=logs, views=views, options=options
    )
    if not hasattr(spark, "sparkContext"):
        raise InvalidInput("Spark Connect cannot run servers: use a classic session, spark-submit")
    return ServersOnSpark(spark.sparkContext, assignments)


def plan(
    *,
    servers: int,
    zookeeper: str,
    logs: str,
    views: str | Path | None = None,
    options: Sequence[str] = (),
) -> list[Assignment]:
    """Return what each task will get; InvalidInput for what would not work. Needs no Spark."""
    if servers < 1:
        raise InvalidInput(f"there must be at least one server, not {servers}")
    directory = local_directory(logs)
    logs = logs if directory is None else str(directory.resolve())
    config = _checked(zookeeper, logs, options)
    if servers > 1 and (config.port or config.metrics_port):
        raise InvalidInput("servers may share a machine: leave --port out, and --metrics-port at 0")
    names = (TOKEN_VARIABLE, CREDENTIALS_VARIABLE)
    secrets = {name: os.environ[name] for name in names if name in os.environ}
    assignment = Assignment(
        number=0,
        zookeeper=zookeeper,
        logs=logs,
        views=None if views is None else Path(views),
        host=config.host,
        port=config.port,
        options=tuple(options),
        environment={**store_variables(), **secrets},
    )
    return [replace(assignment, number=number) for number in range(servers)]


def _checked(zookeeper: str, logs: str, options: Sequence[str]) -> ServerConfig:
    """Return the set-up as servers will see it: mistakes are for the caller, not for a log."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            arguments = parser().parse_args(
                [*options, "--zookeeper", zookeeper, "--logs", logs, "--views", "."]
            )
    except SystemExit:
        raise InvalidInput(said.getvalue().rpartition("error: ")[2].strip()) from None
    return to_config(arguments)


class ServersOnSpark:
    """Servers that run on Spark from now until `stop`, or until the Spark session ends."""

    def __init__(self, context: Any, assignments: Sequence[Assignment]) -> None:
        self._context = context
        self._python = executors_python(context)
        self._group = f"tallybook-{uuid.uuid4()}"
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._keep_running,
                args=(assignment,),
                name=f"tallybook-server-{assignment.number}",
                daemon=True,
            )
            for assignment in assignments
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when all has been stopped, or the Spark session has; False if not in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """End all servers, as a crash would; nothing that was acknowledged is lost by that.

        Returns when Spark has ended every task, which takes it some seconds. The processes go with
        them, the last one perhaps a moment later. Stopping twice is fine.
        """
        self._stopping.set()
        deadline = time.monotonic() + _STOP_DEADLINE_S
        while not self.wait(0) or self._unless_spark_ended(self._count_tasks):
            if time.monotonic() > deadline:
                raise UnknownOutcome(
                    f"Spark still runs servers {_STOP_DEADLINE_S:g} s after it was told to end "
                    "them; stop them again, or end the application"
                )
            if not self.wait(0):
                # Again and again: a thread may have been about to submit its next job.
                self._unless_spark_ended(lambda: self._context.cancelJobGroup(self._group))
            time.sleep(_LOOK_S)

    def __enter__(self) -> "ServersOnSpark":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _keep_running(self, assignment: Assignment) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stopping.is_set() and not self._spark_ended():
            began = time.monotonic()
            try:
                ended = self._run_once(assignment)
                logger.warning(
                    "%s (server %d on %s ended after %.1f s; its log there is %s)",
                    *(ended.reason, assignment.number, ended.host, ended.lasted_s),
                    ended.log_path,
                )
            except Exception as exc:
                if not self._stopping.is_set():
                    logger.warning("%s (server %d was lost)", why_lost(exc), assignment.number)
            healthy = time.monotonic() - began > _HEALTHY_S
            pause_s = _FIRST_PAUSE_S if healthy else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._stopping.wait(pause_s)

    def _run_once(self, assignment: Assignment) -> Ended:
        self._context.setJobGroup(self._group, f"tallybook server {assignment.number}")
        servers = self._context.parallelize([assignment.number], 1).map(_task(assignment))
        servers.ctx = _WithPython(self._context, self._python)
        [ended] = servers.collect()
        return Ended(**ended)

    def _count_tasks(self) -> int:
        """Return how many tasks still run; those of a cancelled job take Spark some seconds."""
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
        return sum(stage.numActiveTasks for stage in stages if stage)

    def _spark_ended(self) -> bool:
        # None once the session was stopped from Python.
        java = self._context._jsc
        if java is None:
            return True
        try:
            return bool(java.sc().isStopped())
        except Exception:  # The JVM itself is gone.
            return True

    def _unless_spark_ended(self, call: Callable[[], Any]) -> Any:
        """Call Spark, or return None when there is none any more; then its tasks are gone too."""
        try:
            return call()
        except Exception:
            if not self._spark_ended():
                raise
        return None


def _task(assignment: Assignment) -> Callable[[int], dict[str, Any]]:
    """Return the task. It takes our packages from where the driver has them, if that is there.

    So a shared file system is enough; on machines that do not share one, the packages have to be
    installed. A function in a function travels as code and plain values, so that Python can read
    it before the packages are found.
    """
    packages = str(Path(__file__).resolve().parents[2])
    fields = vars(assignment)

    def task(_: int) -> dict[str, Any]:
        if os.path.isdir(packages) and packages not in sys.path:
            sys.path.insert(0, packages)
        from server.launch import spark_task  # noqa: PLC0415

        return vars(spark_task.serve(spark_task.Assignment(**fields)))

    return task


def executors_python(context: Any) -> str:
    """Return the Python for the executors: what Spark was told, else the one that runs here.

    Told nothing, Spark takes any `python3` that it finds, which need not have our packages. It
    looks at spark.pyspark.python in spark-submit only.
    """
    told = (
        context.pythonExec if context.pythonExec != _SPARKS_CHOICE else None,
        os.environ.get("PYSPARK_PYTHON"),
        context.getConf().get("spark.pyspark.python"),
    )
    return next(filter(None, told), sys.executable)


class _WithPython:
    """A SparkContext, but for the Python of its executors; other jobs of the session keep theirs.

    The name is the one by which jobs ask for it.
    """

    def __init__(self, context: Any, python: str) -> None:
        self._context = context
        self.pythonExec = python

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def why_lost(error: Exception) -> str:
    """Return what Spark says, in a line: Py4J says another before it, and a stack trace follows.

    If it was Python that failed, on the executor, the line that its traceback ends with.
    """
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    # The last one: an error that was raised because of another comes after it.
    for number, line in reversed(list(enumerate(lines))):
        if line.endswith(_TRACEBACK):
            below = [one for one in lines[number + 1 :] if not one[0].isspace()]
            if below:
                return below[0]
    said = [line.strip(": ") for line in lines if "occurred while calling" not in line]
    return said[0] if said else repr(error)
