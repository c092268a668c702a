"""A Spark driver to be killed: writes a directory of Parquet files to a table, until it has all.

`python -m tests.fault.sink_job '<settings as JSON>'`. TALLYBOOK_FAILPOINT says where it dies. It
prints "started" when Spark runs, and "done" when the source is exhausted.
"""

import json
import sys
from typing import Any

from sink.aggregate_sink import AggregateSink
from tests.support.spark_session import quiet_spark


def main(settings: dict[str, Any]) -> None:
    """Run the query on its checkpoint until the source has nothing more."""
    with quiet_spark("local[2,3]") as spark:
        print("started", flush=True)
        sink = AggregateSink(
            settings["address"], settings["table"], columns=settings["columns"], **settings["sink"]
        )
        schema = spark.read.parquet(settings["source"]).schema
        source = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        query = (
            source.parquet(settings["source"])
            .writeStream.foreachBatch(sink)
            .option("checkpointLocation", settings["checkpoint"])
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        print("done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
