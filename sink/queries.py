"""The streaming query that a micro-batch belongs to, and what was planned as it.

Spark tells the thread that runs the function of foreachBatch which query it runs for. That is lost
in another thread, such as one of a pool. The frame keeps it: its session is one that Spark made for
this query alone. Spark's JVM has a list of all queries, and each of them knows the batch that it
runs: `batchTimestampMs`, the moment at which it was planned, is in the checkpoint's `offsets/N`. It
is written there once, before the batch runs first, and is the same in every replay.

These are Spark's own matters, and not promised: where they are not as in the versions that were
tried, the thread is all that tells, and nothing is known of the plan.
"""

import logging
from dataclasses import dataclass
from typing import Any

from foundation.errors import InvalidInput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Query:
    """A streaming query, and this run of it."""

    query_id: str
    run_id: str | None
    name: str = ""


def query_of(frame: Any) -> Query | None:
    """Return the query that a frame of classic Spark is a micro-batch of; None if it is of none.

    InvalidInput if that is not to be found out, while queries are active: a frame that is made
    anew, in a thread that is not the query's.
    """
    context = frame.sparkSession.sparkContext
    query_id = context.getLocalProperty("sql.streaming.queryId")
    active = _active(frame)
    of_frame = _same_session(active, frame) if query_id is None else _by_id(active, query_id)
    if of_frame is not None:
        run_id, name = str(of_frame.runId().toString()), of_frame.name()
        return Query(query_id=str(of_frame.id().toString()), run_id=run_id, name=name or "")
    if query_id is not None:
        return Query(query_id=query_id, run_id=context.getLocalProperty("spark.jobGroup.id"))
    if active:
        raise InvalidInput(
            "streaming queries are active, and which of them this frame belongs to is not known: "
            "it was made in a thread that Spark has not told. Call the sink in the thread of the "
            "function of foreachBatch, or with the frame that this was given; or start the thread "
            "with pyspark.inheritable_thread_target, and wait for it before the function returns. "
            "A frame of its own, of no stream, is written by tb.write(frame, table, name=...)"
        )
    return None


def fingerprint_of(frame: Any, query_id: str, batch: int) -> str:
    """Return when Spark planned this batch of the query; "" if it does not say, or counts others.

    The caller may number batches in another way than Spark, which knows its own only.
    """
    try:
        query = _by_id(_active(frame), query_id)
        execution = None if query is None else query.lastExecution()
        if execution is None or execution.currentBatchId() != batch:
            return ""
        return str(execution.offsetSeqMetadata().batchTimestampMs())
    except Exception as exc:
        logger.info("when Spark planned batch %d is not known: %s", batch, exc)
        return ""


def _active(frame: Any) -> list[Any]:
    """Return all queries of Spark's JVM, whichever session has started them."""
    try:
        shared = frame.sparkSession._jsparkSession.sharedState()
        return list(shared.activeStreamingQueries().values())
    except Exception as exc:
        logger.info("which queries are active is not known: %s", exc)
        return []


def _by_id(queries: list[Any], query_id: str) -> Any | None:
    return next((query for query in queries if query.id().toString() == query_id), None)


def _same_session(queries: list[Any], frame: Any) -> Any | None:
    """Return the query whose own session the frame has."""
    session = frame.sparkSession._jsparkSession
    for query in queries:
        try:
            if query.sparkSessionForStream().equals(session):
                return query
        except Exception as exc:
            logger.info("the session of a query is not known: %s", exc)
    return None
