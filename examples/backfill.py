"""Backfill beside a live job: each has its own column, and a reader adds the two.

The history counts into `orders_before`, under a name of its own, so it can be killed and run again;
the live job goes on meanwhile. A moment in time, the hour at which the live job began, parts the
events: each is counted by one of the two.
"""

from typing import Any

import tallybook as tb
from examples.setting import Setting, alone

SCHEMA = (
    tb.SchemaBuilder()
    .column("customer_id", "BIGINT")
    .agg_column("orders", "BIGINT", "count")
    .agg_column("orders_before", "BIGINT", "count")
    .primary_key("customer_id")
    .build()
)
BEGAN = 100
"""The live job counts events from this number on."""


def fill(setting: Setting) -> dict[int, int]:
    """Count live events and the history at the same time, and return orders by customer."""
    with tb.connect(setting.address) as cluster:
        table = cluster.create_table("orders", SCHEMA, buckets=4)
        history: dict[str, list[Any]] = {
            "customer_id": [number % 5 for number in range(BEGAN)],
            "orders_before": [f"order {number}" for number in range(BEGAN)],
        }
        with (
            table.writer(owner_id="live", columns=["orders"]) as live,
            table.writer(owner_id="backfill-2026-11", columns=["orders_before"]) as backfill,
        ):
            for batch in range(10):  # Neither waits for the other.
                live.write(batch, tb.Rows(data=_orders(BEGAN + batch)))
                part = {name: values[10 * batch :][:10] for name, values in history.items()}
                backfill.write(batch, tb.Rows(data=part))
        rows = table.to_arrow().sort_by("customer_id").to_pylist()
    totals = {
        row["customer_id"]: (row["orders"] or 0) + (row["orders_before"] or 0) for row in rows
    }
    print(totals)
    return totals


def _orders(number: int) -> dict[str, list[object]]:
    return {"customer_id": [number % 5], "orders": [f"order {number}"]}


if __name__ == "__main__":
    alone(fill)
