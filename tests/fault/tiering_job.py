"""A tiering job to be killed: one round, or rounds until it is ended.

`python -m tests.fault.tiering_job '<settings as JSON>'`. TALLYBOOK_FAILPOINT says where it dies. Of
a job's steps, most are the driver's: unless the settings say `spark`, its tasks run in the driver,
which is the job as it is but for that, and starts in a second. It prints each round.
"""

import json
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pytest

from server.client.cluster import connect
from sink.tiering import compaction, copying
from sink.tiering.job import TieringJob
from sink.tiering.options import TieringOptions
from sink.tiering.running import _run
from sink.tiering.tasks import FilesDone, LakeTask, total
from tests.support.spark_session import quiet_spark


class NoSpark:
    """As much of a Spark session as a job needs whose tasks run elsewhere."""

    defaultParallelism = 2  # noqa: N815

    @property
    def sparkContext(self) -> "NoSpark":  # noqa: N802
        """The same: one has the other."""
        return self

    def cancelJobGroup(self, group: str) -> None:  # noqa: N802
        """Cancel nothing: a task ends when it is done."""


def run_here(
    spark: object,
    tasks: Sequence[LakeTask],
    group: str,
    about: str,
    tell: object,
) -> FilesDone:
    """Run tasks one after the other in this process, as those of Spark would."""
    done = []
    for data in map(pickle.dumps, tasks):
        outcome = pickle.loads(pickle.dumps(_run(data)))
        if isinstance(outcome, Exception):
            raise outcome
        done.append(outcome)
    return total(done)


@contextmanager
def tasks_in_this_process() -> Iterator[Any]:
    """Have jobs run their tasks here; yield what stands for Spark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "run_tasks", run_here)
        yield cast(Any, NoSpark())


@contextmanager
def eager_compaction() -> Iterator[None]:
    """Have any two files of a bucket merged, so that rounds are followed by a compaction."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "_FAN", 2)
        patch.setattr(compaction, "_class", lambda _: 0)
        yield


def main(settings: dict[str, Any]) -> None:
    """Run the job."""
    if settings.pop("spark", False):
        starting: Any = quiet_spark("local[2]")
    else:
        starting = tasks_in_this_process()
    address = settings.pop("address")
    with starting as spark, eager_compaction(), connect(address, deadline_s=60.0) as cluster:
        options = TieringOptions(**settings)
        job = TieringJob(spark, cluster, options, lambda done: print(done, flush=True))
        print(job.run(), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
