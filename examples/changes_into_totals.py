"""The changelog of one table as the input of another: totals by country, kept by a stream.

Each change has the row as it was and as it is. What it was is taken away, what it is is added: so a
customer who moves, or pays more, changes the totals by the difference. Both steps are exact, and so
is the whole.
"""

from typing import Any

from pyspark.sql import functions as F  # noqa: N812

import tallybook as tb
from examples.setting import Setting, alone

CUSTOMERS = (
    tb.SchemaBuilder()
    .column("customer_id", "BIGINT")
    .agg_column("country", "STRING", "last_value")
    .agg_column("cents", "BIGINT", "sum")
    .primary_key("customer_id")
    .build()
)
TOTALS = (
    tb.SchemaBuilder()
    .column("country", "STRING")
    .agg_column("cents", "BIGINT", "sum")
    .agg_column("customers", "BIGINT", "sum")
    .primary_key("country")
    .build()
)


def keep_totals(setting: Setting) -> list[dict[str, Any]]:
    """Write customers, follow their changes into totals, twice, and return the totals."""
    tb.spark.register(setting.spark)
    with tb.connect(setting.address) as cluster:
        customers = cluster.create_table("customers", CUSTOMERS, buckets=2)
        totals = cluster.create_table("totals", TOTALS, buckets=2)
        batches = [
            {"customer_id": [1, 2, 3], "country": ["fr", "de", "fr"], "cents": [100, 200, 300]},
            {"customer_id": [1, 4], "country": ["de", "fr"], "cents": [50, 400]},  # 1 has moved.
        ]
        shown: list[dict[str, Any]] = []
        with customers.writer(owner_id="shop", columns=["country", "cents"]) as writer:
            for number, batch in enumerate(batches):
                writer.write(number, tb.Rows(data=batch))
                _follow(setting)
                shown = totals.to_arrow().sort_by("country").to_pylist()
                print(shown)
        return shown


def _follow(setting: Setting) -> None:
    place = {"zookeeper": setting.address, "table": "customers"}
    changes = setting.spark.readStream.format("tallybook").options(**place, start="full").load()
    sign = F.when(F.col("_change_type").isin("insert", "update_postimage"), 1).otherwise(-1)
    stream = changes.select(
        "country", (sign * F.col("cents")).alias("cents"), sign.cast("long").alias("customers")
    )
    sink = tb.AggregateSink(setting.address, "totals", columns=["cents", "customers"])
    setting.run(stream, sink, "checkpoint-totals")


if __name__ == "__main__":
    alone(keep_totals)
