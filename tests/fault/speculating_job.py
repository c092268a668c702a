"""A Spark driver whose tasks are held back at failpoints, so that Spark starts copies of them.

`python -m tests.fault.speculating_job '<settings as JSON>'` runs a query to its end, and a second
time on the same checkpoint, after more was written to its source. Tasks tell what they did by files
in a directory, and wait for files of each other: `put-B-P-A` is there when the put of batch B,
partition P, attempt A was answered, `outcome-B-P-A` has what came of it.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from foundation.failpoints import arm
from sink import executors
from sink.aggregate_sink import AggregateSink
from tests.support.sinks import write_file
from tests.support.spark_session import quiet_spark
from tests.support.zookeeper_server import wait_until

WAIT_S = 900.0


class Wait(NamedTuple):
    """Who waits where, for which file; None stands for all partitions, or all attempts."""

    batch: int
    partition: int | None
    attempt: int | None
    failpoint: str
    path: str

    def concerns(self, batch: int, partition: int, attempt: int) -> bool:
        """Whether this attempt at a task has to wait."""
        return self.batch == batch and all(
            wanted in (None, found)
            for wanted, found in ((self.partition, partition), (self.attempt, attempt))
        )


class HeldBack:
    """Stands in for the putting stage: puts as that does, with waits, and notes what came of it."""

    def __init__(self, original: Callable[[executors.Job], Any], settings: dict[str, Any]) -> None:
        self._original = original
        self._notes = settings["notes"]
        self._waits = [Wait(*wait) for wait in settings["waits"]]

    def __call__(self, job: executors.Job) -> Any:
        put_all, notes, batch = self._original(job), Path(self._notes), job.grant.token.batch
        waits = self._waits

        def put_with_waits(rows: Iterator[Any]) -> Iterator[str]:
            from pyspark import TaskContext  # noqa: PLC0415

            context = TaskContext.get()
            assert context is not None
            task = (batch, context.partitionId(), context.attemptNumber())
            name = "-".join(map(str, task))

            def wait_at(failpoint: str) -> None:
                for wait in waits:
                    if wait.concerns(*task) and wait.failpoint == failpoint:
                        wait_until(Path(wait.path).exists, f"{name}: {wait.path}", WAIT_S)

            def after_put() -> None:
                (notes / f"put-{name}").touch()
                wait_at("task.put")

            with (
                arm("task.before_put", lambda: wait_at("task.before_put")),
                arm("task.put", after_put),
            ):
                for outcome in put_all(rows):
                    # Before Spark gets it: it may listen no more.
                    note(notes / f"outcome-{name}", context.taskAttemptId(), outcome)
                    yield outcome

        return put_with_waits


def note(path: Path, task_id: int, outcome: str) -> None:
    """Note the outcome of a put; what else a task returns is about the rows it got."""
    found = json.loads(outcome)
    if "error" in found or "results" in found:
        found |= {"task_id": task_id, "pid": os.getpid()}
        writing = path.with_name(f".{path.name}")
        writing.write_text(json.dumps(found))
        writing.rename(path)


def main(settings: dict[str, Any]) -> None:
    """Run the query once for each list of files that its source gets."""
    executors._putting = HeldBack(executors._putting, settings)
    source = Path(settings["source"])
    with quiet_spark(settings["master"], **settings["spark"]) as spark:
        for run, files in enumerate(settings["runs"]):
            for file in files:
                write_file(source, int(Path(file).stem), pq.ParquetFile(file).read())
            status = _run(spark, source, settings)
            Path(settings["notes"], f"status-{run}").write_text(json.dumps(status))


def _run(spark: Any, source: Path, settings: dict[str, Any]) -> dict[str, Any]:
    sink = AggregateSink(
        settings["address"], settings["table"], columns=settings["columns"], route="executors"
    )
    stream = spark.readStream.schema("k BIGINT, a BIGINT, b BIGINT")
    query = (
        stream.option("maxFilesPerTrigger", 1)
        .parquet(str(source))
        .writeStream.foreachBatch(sink)
        .option("checkpointLocation", settings["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sink.status()


def command(settings: dict[str, Any]) -> Sequence[str]:
    """Return the command that runs it."""
    return [sys.executable, "-m", "tests.fault.speculating_job", json.dumps(settings)]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
