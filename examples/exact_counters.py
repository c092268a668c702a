"""Exact counters: Spark runs a batch again after a crash, and nothing is counted twice."""

import tallybook as tb
from examples.setting import Setting, alone

SCHEMA = (
    tb.SchemaBuilder()
    .column("page", "STRING")
    .agg_column("views", "BIGINT", "count")
    .agg_column("milliseconds", "BIGINT", "sum")
    .primary_key("page")
    .build()
)


def count(setting: Setting) -> dict[str, int]:
    """Count page views, have the last batch run again, and return the counters."""
    with tb.connect(setting.address) as cluster:
        table = cluster.create_table("pages", SCHEMA, buckets=4)

        def run() -> None:
            # A sink finds its owner by the checkpoint: the same job goes on where it was.
            events = setting.spark.readStream.schema("page STRING, views STRING, milliseconds LONG")
            stream = events.option("maxFilesPerTrigger", 1).parquet(source)
            sink = tb.AggregateSink(setting.address, "pages", columns=["views", "milliseconds"])
            setting.run(stream, sink, "checkpoint")

        source = ""
        for number in range(3):
            visits = [f"visit {number}-{one}" for one in range(4)]
            pages = ["/", "/help", "/", "/buy"]
            rows = {"page": pages, "views": visits, "milliseconds": [10, 20, 30, 40]}
            source = setting.add_file("events", rows)
        run()
        print("after three batches", shown(table))

        # As if the driver had died right before Spark noted that the last batch is done.
        (setting.directory / "checkpoint" / "commits" / "2").unlink()
        for checksum in (setting.directory / "checkpoint" / "commits").glob(".2.crc"):
            checksum.unlink()
        run()
        print("after a replay     ", shown(table))
        return shown(table)


def shown(table: tb.RemoteTable) -> dict[str, int]:
    """Return the views by page, as committed readers see them."""
    rows = table.to_arrow(["page", "views"]).to_pylist()
    return {row["page"]: row["views"] for row in sorted(rows, key=lambda row: str(row["page"]))}


if __name__ == "__main__":
    alone(count)
