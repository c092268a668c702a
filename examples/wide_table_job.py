"""One Spark job of the wide table: reads a directory of events, fills its columns of the table.

This is what an application looks like; `examples/wide_table.py` starts two of them and kills one.
"""

import argparse
import json
import os
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import tallybook as tb
from examples.wide_table_data import STREAMS, TABLE

_ONLY_ERRORS = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


def main() -> None:
    """Process all files, one per batch, and say so on standard output: a line of JSON per batch."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("stream", choices=STREAMS)
    options.add_argument("--cluster", required=True, help="ZooKeeper's address")
    options.add_argument("--input", required=True, help="a directory of Parquet files")
    options.add_argument("--checkpoint", required=True)
    options.add_argument("--scratch", required=True, type=Path, help="for Spark's own files")
    options.add_argument("--every-ms", type=int, default=1000, help="how often a batch starts")
    arguments = options.parse_args()
    threading.Thread(target=_end_with_starter, daemon=True).start()

    stream = STREAMS[arguments.stream]
    spark = start_spark(stream.name, arguments.scratch)
    sink = tb.AggregateSink(
        arguments.cluster, TABLE, columns=stream.columns, renamed=stream.renamed
    )

    # The sink itself is the function to give to foreachBatch; this one reports what it did.
    def write(frame: Any, batch_id: int) -> None:
        before = sink.status()
        sink(frame, batch_id)
        report(before, sink.status())

    with closing(sink):
        events = spark.readStream.schema(stream.events).option("maxFilesPerTrigger", 1)
        query = (
            events.parquet(arguments.input)
            .writeStream.foreachBatch(write)
            .option("checkpointLocation", arguments.checkpoint)
            .trigger(processingTime=f"{arguments.every_ms} milliseconds")
            .start()
        )
        query.processAllAvailable()
        query.stop()
    spark.stop()


def report(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Print what a batch did."""
    last = after["last"]
    line = {
        "batch": last["batch"],
        "events": last["rows"],
        "customers": last["keys"],
        "milliseconds": last["milliseconds"]["total"],
        "undone": after["undone_keys"] - before.get("undone_keys", 0),
    }
    print(json.dumps(line), flush=True)


def start_spark(name: str, scratch: Path) -> SparkSession:
    """Return a small session: one core, on loopback, without a user interface, and silent."""
    scratch.mkdir(parents=True, exist_ok=True)
    logging = scratch / "log4j2.properties"
    logging.write_text(_ONLY_ERRORS)
    os.environ.update(SPARK_LOCAL_IP="127.0.0.1", PYSPARK_PYTHON=sys.executable)
    java = [
        f"-Dlog4j2.configurationFile={logging.as_uri()}",
        f"-Djava.io.tmpdir={scratch}",
        # For a short life on a small machine.
        *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
    ]
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": " ".join(java),
        "spark.driver.memory": "512m",
        "spark.local.dir": str(scratch),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    session = SparkSession.builder.master("local[1]").appName(name).config(map=settings)
    return session.getOrCreate()


def _end_with_starter() -> None:
    """End when the demo does, however it does: it holds the other end of our standard input."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
