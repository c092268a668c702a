"""A table that is written to, its copy in a lake, and jobs that keep it: to be killed, or here."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from foundation.failpoints import ENVIRONMENT_VARIABLE
from recovery.writer.rows import Rows
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.launch.local_cluster import LocalCluster
from sink.tiering.job import TieringJob
from sink.tiering.options import TieringOptions
from sink.tiering.progress import Round, Summary, Underway
from tests.conftest import schema_of
from tests.fault.cluster_load import REPOSITORY
from tests.fault.lake_checks import check_copy, check_steps, marks
from tests.fault.tiering_job import eager_compaction, tasks_in_this_process

SEED = int(os.environ.get("TALLYBOOK_SEED", random.randrange(1 << 32)))
JOB_S = 240.0
KEYS = 300
SCHEMA = schema_of(a=(pa.int64(), "sum"), b=(pa.int64(), "sum"))
_numbers = count()


class Way(NamedTuple):
    """How a copy is kept."""

    format: str
    layout: str


WAYS = [Way("delta", "vectors"), Way("delta", "rewrite"), Way("parquet", "rewrite")]


class Scene:
    """A table that is written to, and its copy."""

    def __init__(self, cluster: LocalCluster, client: Cluster, path: Path, way: Way) -> None:
        self.table: RemoteTable = client.create_table(f"tiered_{next(_numbers)}", SCHEMA, buckets=2)
        self.path = path / "lake"
        path.mkdir(exist_ok=True)
        self._log_path = path / "job.log"
        self._address, self.client = cluster.address, client
        self.chance = random.Random(f"{SEED} {way}")
        self._batch = 0
        self._columns = [["a", "b"], ["a"]][self.chance.randrange(2)]
        self.options: dict[str, Any] = {
            "table": self.table.name,
            "to": str(self.path),
            "once": True,
            **way._asdict(),
        }
        self.change(KEYS)

    def move(self, path: Path) -> None:
        """Keep the copy elsewhere from now on."""
        self.path = path
        self.options["to"] = str(path)

    def change(self, keys: int = 60, *, new: bool = False) -> None:
        """Write a batch: some rows are new, some change, some are deleted. `new`: all are new."""
        chosen = self.chance.sample(range(2 * KEYS), keys)
        if new:
            chosen = [1000 * (1 + self._batch) + key for key in chosen]
        rows: dict[str, list[Any]] = {
            "k": chosen,
            "op": [
                "delete" if not new and self.chance.random() < 0.2 else "upsert" for _ in chosen
            ],
        }
        for name in self._columns:
            rows[name] = [self.chance.randrange(1, 1 << 40) for _ in chosen]
        with self.table.writer(owner_id="w", columns=self._columns, deadline_s=60.0) as writer:
            writer.write(self._batch, Rows(data=rows, operation_column="op"))
        self._batch += 1

    @contextmanager
    def running(
        self, failpoint: str | None = None, **options: Any
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """Start a job as a process; it has ended at the end of the block."""
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        environment.pop(ENVIRONMENT_VARIABLE, None)
        if failpoint is not None:
            environment[ENVIRONMENT_VARIABLE] = failpoint
        settings = {"address": self._address, **self.options, **options}
        command = [sys.executable, "-m", "tests.fault.tiering_job", json.dumps(settings)]
        with self._log_path.open("ab") as log:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def kill(self, failpoint: str, **options: Any) -> None:
        """Run a job that is killed there; the copy is as it was, or has the round."""
        before = self.steps()
        with self.running(failpoint, **options) as process:
            assert process.wait(JOB_S) == -signal.SIGKILL, self.log()
        assert self.steps() - before in (0, 1, 2)
        self.check()

    def go_on(self, **options: Any) -> Summary:
        """Run a job to its end, here, and return its summary."""
        with tasks_in_this_process() as spark, eager_compaction():
            return self.job(spark, **options).run()

    def job(
        self, spark: Any, report: Callable[[Round | Underway], None] | None = None, **options: Any
    ) -> TieringJob:
        """Return a job."""
        wanted = TieringOptions(**{**self.options, **options})
        return TieringJob(spark, self.client, wanted, report)

    def steps(self) -> int:
        """Return how many steps are committed."""
        return len(marks(self.path)) if self.is_there else 0

    @property
    def is_there(self) -> bool:
        return any((self.path / name).exists() for name in ("_delta_log", "_tallybook"))

    def check(self) -> None:
        """The copy is right, if there is one, and each step was committed once."""
        if self.is_there:
            check_steps(self.path)
            check_copy(self.path, self.table)

    def leases(self) -> list[str]:
        """Return the leases on the table."""
        found = self.client.coordinator.leases.all(self.table.table_id)
        return sorted(one.lease_id for one in found if one.live)

    def log(self) -> str:
        """Return the end of what jobs printed."""
        return self._log_path.read_text(errors="replace")[-3000:]


class Running:
    """A job on a thread of its own, which has ended at the end of the block."""

    def __init__(self, job: TieringJob, name: str = "tiering") -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._job = job
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            self._job.run()
        except BaseException as exc:
            self.error = exc
        finally:
            self.ended.set()

    def summary(self) -> Summary:
        """Return what it has done; it must have ended well."""
        assert self.ended.wait(JOB_S), "it does not end"
        if self.error is not None:
            raise self.error
        return self._job.summary

    def __enter__(self) -> "Running":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._job.stop()
        assert self.ended.wait(JOB_S), "it does not end"
