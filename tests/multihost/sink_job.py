"""A Spark driver with two streaming queries, one sink by each route: a program of a bed.

    python -m tests.multihost.sink_job '<settings as JSON>'

A batch is a function of its number, as the plain writer's: what the source says is only when. A
query that fails is started again on its checkpoint; meanwhile its batch goes on waiting.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from server.protocol.environment import TOKEN_VARIABLE, credentials_from
from sink.aggregate_sink import AggregateSink
from tallybook.spark import LOST_HOSTS
from tests.multihost.batches import batch_of
from tests.multihost.hosts import REPOSITORY
from tests.multihost.sharing import ATTEMPT_S, DEADLINE_S, TABLE, Shared
from tests.support.spark_session import quiet_spark

ROUTES = ("driver", "executors")


class Query:
    """One streaming query, started again whenever it ends."""

    def __init__(self, shared: Shared, spark: Any, route: str) -> None:
        self._shared, self._spark, self._route = shared, spark, route
        self._began: dict[int, float] = {}
        self._errors: list[dict[str, Any]] = []
        self._done = -1

    def run(self) -> None:
        """Run it until the process is to end."""
        while not self._shared.stopping.is_set():
            query = self._start()
            while query.isActive and not self._shared.stopping.wait(0.2):
                pass
            error = query.exception()
            if error is not None:
                self._errors.append({"after_s": 0.0, "error": str(error)[-500:]})
            query.stop()

    def _start(self) -> Any:
        settings = self._shared.settings
        connection = {
            "token": os.environ[TOKEN_VARIABLE],
            "credentials": credentials_from(os.environ),
            "tls_root": settings["tls_root"],
            "attempt_s": ATTEMPT_S,
        }
        sink = AggregateSink(
            settings["zookeeper"],
            TABLE,
            columns=[self._route],
            route=self._route,
            connection=connection,
            owner_id=self._route,
            deadline_s=DEADLINE_S,
        )

        def write(_: Any, number: int) -> None:
            began = self._began.setdefault(number, time.monotonic())
            rows = pa.table(batch_of(self._route, settings["seed"], number))
            sink(self._spark.createDataFrame(rows), number)
            if number > self._done:  # Else Spark repeats its last one, which the sink skips.
                self._done = number
                ended, errors = time.monotonic(), self._errors
                self._errors = []
                self._shared.say(
                    kind=self._route, number=number, began=began, ended=ended, errors=errors
                )

        source = self._spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1)
        return (
            source.load()
            .writeStream.foreachBatch(write)
            .option("checkpointLocation", str(Path(settings["checkpoints"], self._route)))
            .trigger(processingTime="1 second")
            .start()
        )


def main(settings: dict[str, Any]) -> None:
    """Run both queries until SIGTERM."""
    shared = Shared(settings)
    with quiet_spark(
        settings["master"],
        spark_driver_host=settings["host"],
        spark_driver_bindAddress=settings["host"],
        spark_executor_memory="512m",
        spark_executor_cores="1",
        spark_executorEnv_PYTHONPATH=str(REPOSITORY),
        spark_scheduler_mode="FAIR",
        **LOST_HOSTS,
    ) as spark:
        signal.signal(signal.SIGTERM, lambda *_: shared.stopping.set())
        queries = [Query(shared, spark, route) for route in ROUTES]
        threads = [threading.Thread(target=query.run) for query in queries]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
