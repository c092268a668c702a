"""Late events: `order_by` decides which value is the last one, not when it arrives."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

import tallybook as tb
from examples.setting import Setting, alone

SCHEMA = (
    tb.SchemaBuilder()
    .column("parcel", "BIGINT")
    .agg_column("status", "STRING", "last_value", order_by="event_time")
    .agg_column("changes", "BIGINT", "count")
    .primary_key("parcel")
    .build()
)


def follow(setting: Setting) -> list[dict[str, Any]]:
    """Write events of parcels, one of them hours late, and return the rows."""
    with tb.connect(setting.address) as cluster:
        table = cluster.create_table("parcels", SCHEMA, buckets=2)
        events = [
            [(1, "sent", 8), (2, "sent", 9), (1, "arrived", 15)],
            [(1, "on its way", 12), (2, "on its way", 13)],  # Of parcel 1: late.
        ]
        source = ""
        for batch in events:
            source = setting.add_file("parcels", _rows(batch))
        names = "parcel LONG, status STRING, changes STRING, event_time TIMESTAMP"
        stream = setting.spark.readStream.schema(names).option("maxFilesPerTrigger", 1)
        sink = tb.AggregateSink(setting.address, "parcels", columns=["status", "changes"])
        setting.run(stream.parquet(source), sink, "checkpoint-parcels")
        rows: list[dict[str, Any]] = table.lookup({"parcel": [1, 2]}).to_pylist()
        for row in rows:
            print(row)
        return rows


def _rows(events: list[tuple[int, str, int]]) -> pa.Table:
    parcels, statuses, hours = zip(*events, strict=True)
    times = [datetime(2026, 11, 18, hour, tzinfo=UTC) for hour in hours]
    return pa.table(
        {
            "parcel": parcels,
            "status": statuses,
            "changes": statuses,
            "event_time": pa.array(times, pa.timestamp("us", tz="UTC")),
        }
    )


if __name__ == "__main__":
    alone(follow)
