"""Tasks of a tiering job, run on Spark's executors, and watched while they run."""

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from foundation.errors import SessionLost, TallybookError
from sink.task_python import packages_required, use_this_python
from sink.tiering.progress import Underway
from sink.tiering.tasks import FilesDone, LakeTask, total
from sink.worker_connections import disconnect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TELL_S = 10.0

Tell = Callable[[Underway], None]
"""Is told now and then how far the tasks of a step are."""


def run_tasks(
    spark: "SparkSession", tasks: Sequence[LakeTask], group: str, about: str, tell: Tell
) -> FilesDone:
    """Run them, and return what all have done; the first error of a task is raised here.

    `group`: by which Spark can be told to cancel them. `about`: what its page says of them.
    """
    if not tasks:
        return FilesDone()
    use_this_python(spark)
    context = spark.sparkContext
    context.setJobGroup(group, about, interruptOnCancel=True)
    counts = [context.accumulator(0) for _ in range(3)]

    def run(data: bytes) -> bytes:
        outcome = _run(data)
        if isinstance(outcome, FilesDone):
            done = 1, outcome.upserts, sum(file.size for file in outcome.added)
            for counter, count in zip(counts, done, strict=True):
                counter.add(count)
        return pickle.dumps(outcome)

    # A task is told of its own files only: they say which of their rows are dead.
    sent = context.parallelize(list(map(pickle.dumps, tasks)), len(tasks))
    with _telling(about, len(tasks), counts, tell), packages_required():
        outcomes = list(map(pickle.loads, sent.map(run).collect()))
    for outcome in outcomes:
        if isinstance(outcome, TallybookError):
            raise outcome
    return total(outcomes)


def _run(data: bytes) -> FilesDone | TallybookError:
    """Return what a task has done; an error as it is, for Spark would report it as text."""
    task: LakeTask = pickle.loads(data)
    try:
        return task.run()
    except TallybookError as exc:
        if isinstance(exc, SessionLost):
            disconnect(task.work.wanted.recipe)
        return exc


@contextmanager
def _telling(about: str, tasks: int, counts: Sequence[Any], tell: Tell) -> Iterator[None]:
    """Tell every few seconds what tasks have done that have ended."""
    ended, began = threading.Event(), time.monotonic()

    def run() -> None:
        while not ended.wait(_TELL_S):
            done, rows, size = (counter.value for counter in counts)
            seconds = time.monotonic() - began
            tell(Underway(about, tasks=tasks, done=done, rows=rows, bytes=size, seconds=seconds))

    thread = threading.Thread(target=run, name="tallybook-tiering", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
