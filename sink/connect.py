"""Spark Connect: where a sink runs there, for which query, and how it ends.

Connect pickles the function of `foreachBatch` and calls it in a Python process of its own, beside
the Connect server: one for each run of a query, from its first batch to its end, which comes as
SIGTERM. The process is told the number of a batch, which is the checkpoint's, and not the query.
But it begins in the session that started the query, and that one lists its queries.
"""

import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from foundation.errors import InvalidInput, TallybookError

logger = logging.getLogger(__name__)

_WORKER = "pyspark.sql.connect.streaming.worker.foreach_batch_worker"
# How long locks may take to be released when Spark ends the process.
_MOST_TO_END_S = 20


class CannotTravel(InvalidInput, pickle.PickleError):
    """The sink cannot go where Connect would run it.

    A PickleError, since PySpark puts a message of its own in the place of any other.
    """


class Stopped(BaseException):
    """Spark ends the process while a batch is under way."""


def is_connect(frame: Any) -> bool:
    """Whether this frame is one of Spark Connect."""
    return type(frame).__module__.startswith("pyspark.sql.connect")


def in_worker() -> bool:
    """Whether this process is one in which Connect runs the function of a query."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(spec, "name", None) == _WORKER


def is_remote() -> bool:
    """Whether sessions that this process starts are those of Spark Connect."""
    return "SPARK_CONNECT_MODE_ENABLED" in os.environ or "SPARK_REMOTE" in os.environ


def starting_session() -> Any | None:
    """Return the session that started the query; None if this is no process of Connect's.

    It is the active one while the function is unpickled. Batches have a session of their own since
    Spark 4.3, which does not know of the query.
    """
    if not in_worker():
        return None
    from pyspark.sql.connect.session import SparkSession  # noqa: PLC0415

    return SparkSession.getActiveSession()


def query_among(queries: list[Any], owner: str, *, handover: bool) -> Any:
    """Return the query that this process runs for, of those that its session has running.

    It is the one that has the owner's name, or the only one. That it is the only one can be untrue
    for a moment, while ours is being stopped: then the lock is refused to a query that has not
    counted the owner's batches. With a handover it would not be, so there it takes the name.
    """
    named = [query for query in queries if query.name == owner]
    if not named and not handover and len(queries) == 1:
        named = queries
    if not queries:
        raise InvalidInput(
            f"the query that `{owner}` writes for is not found, or it is being stopped. A sink "
            "that is made inside of the function of foreachBatch cannot know: make it before"
        )
    if len(named) != 1:
        raise InvalidInput(
            f"which of the {len(queries)} queries of this session `{owner}` writes for is not known"
            f": Spark Connect does not say. Name the query after it: .queryName({owner!r})"
            + ("; handover=True needs that" if handover else "")
        )
    return named[0]


class _Ending:
    """The end of a process of Connect's: it is told by SIGTERM, and locks are released first.

    At once between batches. A batch that is under way is broken off, which leaves its work to be
    undone by whoever has the columns next; its lock is abandoned, so that this can be anybody.
    """

    def __init__(self) -> None:
        self._closes: list[Callable[[], None]] = []
        self._batches = 0

    def prepare(self, close: Callable[[], None]) -> None:
        """Have this called at the end. (Where another handles the signal, it is left to it.)"""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._told)
        if close not in self._closes:
            self._closes.append(close)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Note that a batch is under way."""
        self._batches += 1
        try:
            yield
        except Stopped:
            self._end()
            raise
        finally:
            self._batches -= 1

    def _told(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Spark tells twice.
        signal.alarm(_MOST_TO_END_S)  # Whatever happens: it ends the process.
        if self._batches:
            raise Stopped
        self._end()

    def _end(self) -> None:
        for close in self._closes:
            try:
                close()
            except TallybookError as exc:
                logger.warning("%s", exc)
        # And not by an exit: there Spark's client would ask a server that may be gone, for minutes.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


ending = _Ending()
