"""The runs of streaming queries that this process writes for, from their first batch to their end.

A query that has ended lets go of its columns when Spark tells so, which is a moment later. Whoever
wants the columns sooner, a query that is started next, need not wait for that: it ends what is
known to be over. And what still runs when the process ends is ended before Spark is gone, which
would complain of listeners and functions that no longer answer.
"""

import atexit
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foundation import forks

logger = logging.getLogger(__name__)

# How long a run that is over may take to let go, and Spark to tell that it is over.
_MAKE_WAY_S = 10.0
# At exit: how long queries may take to stop in all, and Spark to tell all that it has to tell.
_AT_EXIT_S = 20.0
_LAST_NEWS_MS = 5_000


@dataclass(frozen=True, kw_only=True)
class Columns:
    """What a run holds: columns of a table, as an owner."""

    table: str
    owner: str
    ids: frozenset[int]

    def is_in_the_way_of(self, other: "Columns") -> bool:
        """Whether the other cannot have its columns, or not quietly, while this one has its own."""
        if self.table != other.table:
            return False
        return self.owner == other.owner or bool(self.ids & other.ids)


class Run:
    """A run of a query, for which a sink writes; `end` lets go of its lock, and may come twice."""

    def __init__(
        self, *, query_id: str, run_id: str, columns: Columns, end: Callable[[], None], streams: Any
    ) -> None:
        self.query_id = query_id
        self.run_id = run_id
        self.columns = columns
        self._end = end
        self._query = _query(streams, run_id)
        self._process = os.getpid()
        self.ended = threading.Event()

    def end(self) -> None:
        """Let go of the lock; from then on nobody is in the way."""
        try:
            self._end()
        finally:
            self.ended.set()
            with _lock:
                _runs.pop(self.run_id, None)

    def is_over(self, next_query_id: str | None) -> bool | None:
        """Whether the query has ended; None if only Spark can tell, and will.

        Of one query there is one run at a time: the next is there when the last is over.
        """
        if self.query_id == next_query_id:
            return True
        return None if self._query is None else not self._query.isActive

    def stop(self) -> None:
        """Stop the query, if it runs and is known."""
        if self._query is not None and self._query.isActive:
            self._query.stop()

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it, and was not forked from the one that has."""
        return not forks.is_inherited(self._process)


_lock = threading.Lock()
_runs: dict[str, Run] = {}
# What closes the sinks that have a lock, in a query or not.
_closes: list[Callable[[], None]] = []


def begin(run: Run) -> None:
    """Note that this run holds its columns."""
    with _lock:
        _runs[run.run_id] = run
    _exit.prepare()


def close_at_end(close: Callable[[], None]) -> None:
    """Have this called when the process is told to end, unless `closed` comes first."""
    with _lock:
        if close not in _closes:
            _closes.append(close)
    _exit.prepare()


def closed(close: Callable[[], None]) -> None:
    """Note that a sink is closed."""
    with _lock:
        if close in _closes:
            _closes.remove(close)


def end_all_now() -> None:
    """Stop all queries and close all sinks; returns when that is done, or takes too long.

    Of a process that ends without its exit functions.
    """
    _exit.end()


def forget(run_id: str | None) -> None:
    """Note that a run is over, and its lock released."""
    with _lock:
        run = _runs.pop(run_id or "", None)
    if run is not None:
        run.ended.set()


def make_way(columns: Columns, query_id: str | None, run_id: str | None) -> None:
    """End other runs that hold these columns and are over. One that goes on is left alone.

    Whoever lets go too slowly is not waited for: then the lock says who holds it.
    """
    with _lock:
        others = [run for run in _runs.values() if run.run_id != run_id and run.is_ours]
    for run in others:
        if not run.columns.is_in_the_way_of(columns):
            continue
        over = run.is_over(query_id)
        if over:
            # Its last batch may still be under way, and want what we hold.
            threading.Thread(
                target=_end, args=[run], name="tallybook-run-ends", daemon=True
            ).start()
        if over is not False:
            run.ended.wait(_MAKE_WAY_S)


class _Exit:
    """The end of the process: queries are stopped, whose functions end with it, and locks released.

    By a thread that waits for it: at exit none can be started, and one that Spark lets wait for a
    function which never returns would never exit.
    """

    def __init__(self) -> None:
        self._process = 0
        self._now = threading.Event()
        self._done = threading.Event()

    def prepare(self) -> None:
        """Be there when this process ends, before what the sinks rest on is gone."""
        with _lock:
            if self._process != os.getpid():
                self._process = os.getpid()
                self._now, self._done = threading.Event(), threading.Event()
                waiting = (self._now, self._done)
                threading.Thread(
                    target=self._wait, args=waiting, name="tallybook-exit", daemon=True
                ).start()
        atexit.unregister(self.end)  # Last registered, first called.
        atexit.register(self.end)

    def end(self) -> None:
        """Have queries stopped and locks released, and wait for that."""
        if self._process == os.getpid():
            self._now.set()
            if not self._done.wait(_AT_EXIT_S):
                logger.warning("a query did not stop in %g s: the process exits", _AT_EXIT_S)

    @staticmethod
    def _wait(now: threading.Event, done: threading.Event) -> None:
        now.wait()
        try:
            _end_all()
        finally:
            done.set()


_exit = _Exit()


def _end_all() -> None:
    from pyspark import SparkContext  # noqa: PLC0415

    with _lock:
        runs = [run for run in _runs.values() if run.is_ours]
    context = SparkContext._active_spark_context
    if context is not None and runs:
        try:
            for run in runs:
                run.stop()
            # So that Spark tells nothing to a process that is gone.
            context._jsc.sc().listenerBus().waitUntilEmpty(_LAST_NEWS_MS)
        except Exception as exc:
            # Spark is gone, or says that it is late: all that is left is ours.
            logger.info("queries were not stopped at exit: %s", exc)
    for run in runs:
        _end(run)
    with _lock:
        left = [*_closes]
    for close in left:
        try:
            close()
        except Exception as exc:
            logger.warning("a lock was not released: %s", exc)


def _end(run: Run) -> None:
    try:
        run.end()
    except Exception as exc:
        logger.warning("the lock of run %s was not released: %s", run.run_id, exc)


def _query(streams: Any, run_id: str) -> Any | None:
    """Return the query of this run; None if it was started through another session."""
    return next((query for query in streams.active if str(query.runId) == run_id), None)
