"""A tiering job, a program of a bed: after each round, the copy is the table at the copy's cut.

    python -m tests.multihost.tiering_job '<settings as JSON>'

A job that has failed is started again, as whoever looks after jobs does.
"""

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import tallybook as tb
from foundation.errors import Corrupt, LakeRefused, LakeTaken, TallybookError
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from sink.tiering.progress import Round
from tests.multihost.batches import COLUMNS, Prefixes, column_of, wrong_prefix
from tests.multihost.sharing import PATIENT_S, TABLE, Shared
from tests.support.spark_session import quiet_spark

LAKE = "s3://tallybook-1/lake"
KIND = "tiering"
_INTERVAL_S = 2.0
_LEASE_S = 30.0
_CHECK_ATTEMPTS = 5
# What no fault explains: nobody else has the lake, and nothing damages it.
_NEVER = (Corrupt, LakeRefused, LakeTaken)


def wrong_copy(table: RemoteTable, seed: int) -> list[str]:
    """Say in what the copy is not whole batches, or not the table at its cut."""
    copy = tb.tiering.find(LAKE)
    rows = copy.to_arrow().to_pylist()
    at_cut = table.scan(list(COLUMNS), at=copy.cut).to_arrow().to_pylist()
    wrong = []
    for column in COLUMNS:
        found = column_of(rows, column)
        problem = wrong_prefix(Prefixes(column, seed), found, 0, None)
        wrong += [] if problem is None else [f"version {copy.version}: {problem}"]
        if found != column_of(at_cut, column):
            wrong.append(f"version {copy.version}: {column} is not what the table has at its cut")
    return wrong


class _Job:
    """One tiering job after the other, until the process is to end."""

    def __init__(self, shared: Shared, spark: Any, cluster: Cluster) -> None:
        self._shared, self._spark, self._cluster = shared, spark, cluster
        self._job: tb.tiering.TieringJob | None = None
        self._began = time.monotonic()
        self._rounds = 0
        self._errors: list[dict[str, Any]] = []

    def run(self) -> None:
        """Run them."""
        options = tb.tiering.TieringOptions(
            table=TABLE, to=LAKE, interval_s=_INTERVAL_S, lease_s=_LEASE_S
        )
        while not self._shared.stopping.is_set():
            self._job = tb.tiering.TieringJob(self._spark, self._cluster, options, self._report)
            self._try(self._job.run)
            self._shared.stopping.wait(_INTERVAL_S)

    def stop(self) -> None:
        """End it after its round."""
        if self._job is not None:
            self._job.stop()

    def _report(self, done: object) -> None:
        if not isinstance(done, Round):
            return
        for _ in range(_CHECK_ATTEMPTS):
            if self._try(self._check):
                break
        ended = time.monotonic()
        self._shared.say(
            kind=KIND, number=self._rounds, began=self._began, ended=ended, errors=self._errors
        )
        self._rounds, self._began, self._errors = self._rounds + 1, ended, []

    def _check(self) -> None:
        table = self._cluster.table(TABLE)
        for wrong in wrong_copy(table, self._shared.settings["seed"]):
            self._shared.say_wrong(f"{KIND}: {wrong}")

    def _try(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except TallybookError as exc:
            after_s = round(time.monotonic() - self._began, 3)
            self._errors.append({"after_s": after_s, "error": f"{type(exc).__name__}: {exc}"})
            if isinstance(exc, _NEVER):
                self._shared.say_wrong(f"{KIND}: {type(exc).__name__}: {exc}")
            return False
        return True


def main(settings: dict[str, Any]) -> None:
    """Keep the copy up to date until SIGTERM."""
    logging.basicConfig(level=logging.WARNING)
    shared = Shared(settings)
    with quiet_spark("local[1]") as spark, shared.connected(PATIENT_S) as cluster:
        signal.signal(signal.SIGTERM, lambda *_: shared.stopping.set())
        job = _Job(shared, spark, cluster)
        thread = threading.Thread(target=job.run)
        thread.start()
        shared.stopping.wait()
        while thread.is_alive():
            job.stop()
            thread.join(0.5)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
