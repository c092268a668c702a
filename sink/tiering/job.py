"""The tiering job: rounds, one after another, until it is stopped; leases, retries, reports."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from foundation.errors import (
    CorruptLake,
    Fenced,
    LakeTaken,
    Refused,
    SchemaError,
    TallybookError,
    UnknownTable,
)
from server.client.cluster import Cluster
from server.tablet.metrics import Labels, Metrics
from sink.rolling_lease import RollingLease
from sink.tiering.copying import TableCopy
from sink.tiering.options import TieringOptions
from sink.tiering.progress import Lag, Round, RoundKind, Summary, Underway

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

# What another attempt does not mend.
_FINAL = (UnknownTable, SchemaError, Refused, Fenced, CorruptLake)
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class TieringJob:
    """Keeps a copy of a table in a lake. `run` once; `stop`, from any thread, ends it.

    `report`: is told of each round, and every few seconds how far a long one is. `metrics`: for
    Prometheus.
    """

    def __init__(
        self,
        spark: "SparkSession",
        cluster: Cluster,
        options: TieringOptions,
        report: Callable[[Round | Underway], None] | None = None,
    ) -> None:
        self._spark = spark
        self._cluster = cluster
        self._options = options
        self._report = report
        self._stopped = threading.Event()
        self._copy: TableCopy | None = None
        self._had_all_s: float | None = None
        self._in_doubt = False  # Whether the lake may be elsewhere than we know: it is asked again.
        self.summary = Summary()
        self.metrics = Metrics()
        self.metrics.gauge("lake_lag_seconds", lambda: self._gauge(lambda _: self._lag().seconds))
        self.metrics.gauge("lake_lag_batches", lambda: self._gauge(lambda _: self._lag().batches))
        self.metrics.gauge("lake_files", lambda: self._gauge(lambda one: one.files))
        self.metrics.gauge("lake_rows", lambda: self._gauge(lambda one: one.table_rows))

    def stop(self, *, at_once: bool = False) -> None:
        """End it after the round that is under way; or at once, and that round changes nothing."""
        self._stopped.set()
        copy = self._copy
        if at_once and copy is not None:
            self._spark.sparkContext.cancelJobGroup(copy.name)

    def run(self) -> Summary:
        """Keep the copy up to date until `stop`, or for one round; return what was done.

        The log that is not in the copy yet is held while it runs. If it fails, or is done, that is
        given up, or held for a while if the options say so; if it is killed, the next run of the
        job takes it up.
        """
        began = time.monotonic()
        table = self._cluster.table(self._options.table)
        copy = TableCopy(self._spark, table, self._cluster.recipe, self._options, self._tell)
        copy.load()
        self._copy = copy
        lease = RollingLease(table, copy.name, int(1000 * self._options.lease_s))
        try:
            self._run(copy, lease)
        except LakeTaken:
            lease.stop()  # The other job may hold on to the same leases.
            raise
        except BaseException:
            with suppress(TallybookError):  # It expires, and the error that there is says more.
                lease.drop()
            raise
        if not self._options.hold_s:  # Else somebody will come back for it, and is waited for.
            with suppress(TallybookError):
                copy.forget()
        if self._options.hold_s:
            lease.hold(int(1000 * self._options.hold_s))
        else:
            lease.drop()
        self.summary = replace(self.summary, seconds=time.monotonic() - began)
        return self.summary

    def _run(self, copy: TableCopy, lease: RollingLease) -> None:
        while True:
            began = time.monotonic()
            done = self._round(copy, lease)
            if done is None:
                return
            late = self._is_late(done)
            self._note(done if late else self._look_after(copy, done))
            pause_s = 0.0 if late else self._options.interval_s - (time.monotonic() - began)
            if self._options.once or self._stopped.wait(max(0.0, pause_s)):
                return

    def _is_late(self, done: Round) -> bool:
        """Whether the copy is further behind than it should be: then there is no time to lose."""
        target_s = self._options.lag_target_s
        return target_s is not None and done.lag.seconds > target_s

    def _round(self, copy: TableCopy, lease: RollingLease) -> Round | None:
        """Do a round, again if it fails; None if the job is stopped before it succeeds."""
        pause_s = _FIRST_PAUSE_S
        for left in reversed(range(self._options.attempts)):
            began = time.monotonic()
            try:
                if self._in_doubt:
                    copy.load()
                self._in_doubt = False
                return self._with_lag(copy.round(lease), began)
            except Exception as exc:  # Spark's have no root of ours.
                cause = copy.explained(exc) if isinstance(exc, TallybookError) else exc
                self._in_doubt = True
                if self._stopped.is_set():
                    return None
                if cause is not exc:
                    raise cause from exc
                if not left or isinstance(exc, _FINAL):
                    raise
                self._note_failure("a round", exc)
            if self._stopped.wait(pause_s):
                return None
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise AssertionError("the last attempt returns, or raises")

    def _with_lag(self, done: Round, began_s: float) -> Round:
        """Return a round with how far the copy is behind by now, if that can be found out."""
        assert self._copy is not None
        if done.kind is not RoundKind.COPY:  # Its cut was taken after it began.
            self._had_all_s = began_s
        with suppress(TallybookError):
            self._copy.tell(time.monotonic() - began_s)
            return replace(done, lag=self._lag())
        return done

    def _lag(self) -> Lag:
        """Return how far the copy is behind now; rounds that fail let it grow."""
        assert self._copy is not None
        lag = self._copy.lag()
        return lag if self._had_all_s is None else lag.at_most(time.monotonic() - self._had_all_s)

    def _look_after(self, copy: TableCopy, done: Round) -> Round:
        """Keep the copy small and clean. What fails has its turn after the next round."""
        try:
            compacted = copy.compact(done.rows) if done.kind is not RoundKind.NOTHING else 0
            return replace(copy.shown(done), compacted=compacted, cleaned=copy.clean())
        except Exception as exc:
            cause = copy.explained(exc) if isinstance(exc, TallybookError) else exc
            if cause is not exc:
                raise cause from exc
            if isinstance(exc, _FINAL):
                raise
            if not self._stopped.is_set():
                self._note_failure("the compaction of files", exc)
            self._in_doubt = True
            return copy.shown(done)

    # --- What others are told -------------------------------------------------------------------

    def _note(self, done: Round) -> None:
        self.summary = self.summary.plus(done)
        if done.kind is not RoundKind.NOTHING:
            self.metrics.count("lake_rounds", 1, **self._labels)
            self.metrics.count("lake_rows_written", done.rows, **self._labels)
            self.metrics.count("lake_rows_deleted", done.deleted, **self._labels)
            self.metrics.count("lake_bytes_written", done.bytes, **self._labels)
            self.metrics.observe("lake_round", done.seconds, **self._labels)
        logger.log(_level(done), "table %s: %s", self._options.table, done)
        if self._report is not None:
            self._report(done)

    def _tell(self, underway: Underway) -> None:
        logger.info("%s", underway)
        if self._report is not None:
            self._report(underway)

    def _note_failure(self, what: str, exc: Exception) -> None:
        lines = str(exc).strip().splitlines() or [type(exc).__name__]
        # Spark begins with a heading, and has the traceback of a task below it.
        told = lines[-1] if lines[0].endswith(":") else lines[0]
        logger.warning("%s of table %s failed: %s", what, self._options.table, told)
        self.summary = replace(self.summary, failed=self.summary.failed + 1)
        self.metrics.count("lake_failures", 1, **self._labels)

    @property
    def _labels(self) -> dict[str, str]:
        return {"table": self._options.table}

    def _gauge(self, read: Callable[[Round], float]) -> Mapping[Labels, float]:
        last = self.summary.last
        return {} if last is None else {tuple(self._labels.items()): read(last)}


def _level(done: Round) -> int:
    return logging.DEBUG if done.kind is RoundKind.NOTHING else logging.INFO
