"""Being told when a streaming query has ended.

Only a listener of the root session hears of it: one that is added through `df.sparkSession`, which
is a session of the query's own, does not.
"""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def when_run_ends(run_id: str, call: Callable[[], None]) -> None:
    """Call once, from some thread, after this run of a query has ended.

    A run, not a query: the news of the last run may come when the next one is under way.
    """
    from pyspark.sql import SparkSession  # noqa: PLC0415
    from pyspark.sql.streaming import StreamingQueryListener  # noqa: PLC0415

    streams = SparkSession.builder.getOrCreate().streams

    class Listener(StreamingQueryListener):  # type: ignore[misc]
        def onQueryStarted(self, event: Any) -> None:  # noqa: N802
            """Not ours."""

        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            """Not ours."""

        def onQueryIdle(self, event: Any) -> None:  # noqa: N802
            """Not ours."""

        def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
            if str(event.runId) != run_id:
                return
            try:
                call()
            except Exception:
                logger.exception("the sink of run %s did not close", run_id)
            streams.removeListener(listener)

    listener = Listener()
    streams.addListener(listener)
