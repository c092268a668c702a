"""A Spark session for a command; what keeps Spark from starting is an error of one line."""

from collections.abc import Mapping
from typing import Any

from foundation.errors import ServerNotStarted
from locks.store.embedded_zookeeper import java_words

_JVM_ENDED = "JAVA_GATEWAY_EXITED"


def start_spark(settings: Mapping[str, str], master: str | None) -> Any:
    """Return a session with these settings; `master`: unless spark-submit or its files say so.

    ServerNotStarted if Spark's Java does not start: which one that is, and why.
    """
    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    if master is not None:
        builder = builder.master(master)
    try:
        return builder.getOrCreate()
    except PySparkRuntimeError as exc:
        if _JVM_ENDED not in str(exc):
            raise
        raise ServerNotStarted(
            f"Spark needs Java 17 or newer, and its Java did not start ({java_words()}); what it "
            "said is above. Set JAVA_HOME to a working Java"
        ) from exc
