"""Being told when a streaming query has ended.

Only a listener of the root session hears of it: one that is added through `df.sparkSession`, which
is a session of the query's own, does not.
"""

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


def when_query_ends(query_id: str, call: Callable[[], None]) -> None:
    """Call once, from some thread, after the query with this id has ended."""
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
            if str(event.id) != query_id:
                return
            try:
                call()
            except Exception:
                logger.exception("the sink of query %s did not close", query_id)

    streams.addListener(Listener())
