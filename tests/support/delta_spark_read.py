"""Read a Delta table with Delta's own Spark: `<python> delta_spark_read.py PATH VERSION ...`.

For a Python that has delta-spark, and a Spark for which there is one; nothing of ours is needed. A
line of JSON per version: its rows.
"""

import json
import os
import sys


def main(path: str, versions: list[str]) -> None:
    from delta import configure_spark_with_delta_pip  # type: ignore[import-not-found]  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    catalog = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
    settings = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": catalog,
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = configure_spark_with_delta_pip(builder).getOrCreate()
    for version in versions:
        frame = spark.read.format("delta").option("versionAsOf", version).load(path)
        rows = [row.asDict(recursive=True) for row in frame.collect()]
        print("rows", json.dumps(rows, default=str), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
