"""Being told when a streaming query has ended.

Only a listener of the root session hears of it: one that is added through `df.sparkSession`, which
is a session of the query's own, does not.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def root_streams() -> Any:
    """Return the queries of the root session, which is told of all that end."""
    from pyspark.sql import SparkSession  # noqa: PLC0415

    return SparkSession.builder.getOrCreate().streams


def when_run_ends(streams: Any, run_id: str, call: Callable[[], None]) -> None:
    """Call once, from some thread, after this run of a query has ended.

    A run, not a query: the news of the last run may come when the next one is under way. `streams`:
    of the root session.
    """
    from pyspark.sql.streaming import StreamingQueryListener  # noqa: PLC0415

    class Listener(StreamingQueryListener):  # type: ignore[misc]
        def onQueryStarted(self, event: Any) -> None:  # noqa: N802
            """Not ours."""

        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            """Not ours."""

        def onQueryIdle(self, event: Any) -> None:  # noqa: N802
            """Not ours."""

        def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
            if str(event.runId) == run_id:
                # Spark tells all its news one after another, and waits for whoever it tells.
                threading.Thread(target=end, name="tallybook-run-ends", daemon=True).start()

    def end() -> None:
        try:
            streams.removeListener(listener)
        except Exception as exc:
            logger.info("a listener is left to Spark, which ends: %s", exc)
        try:
            call()
        except Exception:
            logger.exception("the sink of run %s did not close", run_id)

    listener = Listener()
    streams.addListener(listener)
