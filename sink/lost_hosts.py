"""Hosts that are gone: how soon Spark notices, and what to tell it so that it does.

A task whose host is gone is run again elsewhere when Spark has noticed: when it has not heard of
the executor for a while, which it looks at from time to time. What was shuffled there is made again
when somebody has failed to fetch it. Unless told otherwise both take minutes, and a batch by the
executors waits for them, whatever the servers do. Spark reads this when an application starts: so
it is for whoever starts one, and a sink can only say that nobody did.
"""

import logging
from typing import Any

logger = logging.getLogger(__name__)

SETTINGS = {
    "spark.executor.heartbeatInterval": "2s",
    "spark.network.timeoutInterval": "1s",
    "spark.storage.blockManagerHeartbeatTimeoutMs": "8s",
    "spark.shuffle.io.connectionTimeout": "8s",
    "spark.shuffle.io.connectionCreationTimeout": "3s",
    "spark.shuffle.io.maxRetries": "1",
    "spark.shuffle.io.retryWait": "1s",
}
"""Spark notices within some 10 s: the session time-out of servers, unless they are told another."""
_LONG_S = 60.0


def notices_after_s(conf: Any) -> float:
    """Return how long a batch may wait for a host that is gone, by a SparkConf of the JVM."""
    network = f"{conf.getTimeAsSeconds('spark.network.timeout', '120s')}s"
    silent_ms = conf.getTimeAsMs("spark.storage.blockManagerHeartbeatTimeoutMs", network)
    looks_ms = conf.getTimeAsMs("spark.network.timeoutInterval", "60s")
    answer_s = conf.getTimeAsSeconds("spark.shuffle.io.connectionTimeout", network)
    connect_s = conf.getTimeAsSeconds("spark.shuffle.io.connectionCreationTimeout", f"{answer_s}s")
    pause_s = conf.getTimeAsSeconds("spark.shuffle.io.retryWait", "5s")
    retries = conf.getInt("spark.shuffle.io.maxRetries", 3)
    return float(max((silent_ms + looks_ms) / 1000, answer_s + retries * (pause_s + connect_s)))


def say_if_slow(context: Any) -> None:
    """Warn, unless this Spark notices soon when a host is gone, or has no other hosts."""
    if str(context.master).startswith("local"):
        return
    waits_s = notices_after_s(context._jsc.sc().conf())
    if waits_s > _LONG_S:
        logger.warning(
            "when the host of an executor is gone, a batch may wait for Spark for %.0f s: start "
            "the application with the settings tb.spark.LOST_HOSTS (docs/sink.md)",
            waits_s,
        )
