"""The wide table: its schema, the two streams that fill it, their events, and what it must say."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import tallybook as tb

TABLE = "customers"
CUSTOMERS = 2_000
SCHEMA = (
    tb.SchemaBuilder()
    .column("customer_id", "BIGINT")
    # Filled by the job `orders`:
    .agg_column("orders", "BIGINT", "count")
    .agg_column("cents", "BIGINT", "sum")
    .agg_column("last_status", "STRING", "last_value_ignore_nulls", order_by="ordered_at")
    # Filled by the job `clicks`:
    .agg_column("clicks", "BIGINT", "count")
    .agg_column("pages", "ARRAY<STRING>", "collect_set")
    .agg_column("last_page", "STRING", "last_value_ignore_nulls", order_by="clicked_at")
    .primary_key("customer_id")
    .build()
)

_STATUSES = ["new", "paid", "packed", "shipped", "returned", None]
_PAGES = ["/home", "/search", "/shoes", "/hats", "/bags", "/offers", "/cart", "/help", "/account"]
_FIRST_EVENT_US = 1_767_225_600_000_000  # 2026-01-01, in microseconds
_EVENT_EVERY_US = 250_000


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One of the two streams: what its events look like and which columns they fill.

    `renamed` maps columns of the table to those of the events, where the names differ.
    """

    name: str
    events: str
    renamed: Mapping[str, str]
    columns: tuple[str, ...]
    time: str


STREAMS = {
    "orders": Stream(
        name="orders",
        events="customer_id BIGINT, order_id BIGINT, cents BIGINT, status STRING, "
        "ordered_at TIMESTAMP",
        renamed={"orders": "order_id", "last_status": "status"},
        columns=("orders", "cents", "last_status"),
        time="ordered_at",
    ),
    "clicks": Stream(
        name="clicks",
        events="customer_id BIGINT, click_id BIGINT, page STRING, clicked_at TIMESTAMP",
        renamed={"clicks": "click_id", "pages": "page", "last_page": "page"},
        columns=("clicks", "pages", "last_page"),
        time="clicked_at",
    ),
}


def generate(stream: Stream, directory: Path, *, files: int, events_per_file: int) -> None:
    """Write the stream's events as Parquet files: always the same ones.

    Events arrive out of order, up to two files late. Spark takes the files in the order of their
    modification times.
    """
    directory.mkdir(parents=True)
    total = files * events_per_file
    random = np.random.default_rng(seed=[total, *stream.name.encode()])
    late = random.uniform(0, 2 * events_per_file, total)
    times = np.empty(total, np.int64)
    times[np.argsort(np.arange(total) + late)] = np.arange(total)
    columns: dict[str, Any] = {
        "customer_id": random.integers(1, CUSTOMERS + 1, total),
        stream.time: pa.array(_FIRST_EVENT_US + times * _EVENT_EVERY_US, pa.timestamp("us", "UTC")),
    }
    if stream.name == "orders":
        columns["order_id"] = np.arange(total)
        columns["cents"] = random.integers(100, 20_000, total)
        columns["status"] = pa.array(_STATUSES).take(random.integers(0, len(_STATUSES), total))
    else:
        columns["click_id"] = np.arange(total)
        columns["page"] = pa.array(_PAGES).take(random.integers(0, len(_PAGES), total))
    events = pa.table(columns)
    for number in range(files):
        path = directory / f"{stream.name}-{number:03}.parquet"
        pq.write_table(events.slice(number * events_per_file, events_per_file), path)
        modified = _FIRST_EVENT_US // 1_000_000 + number
        os.utime(path, (modified, modified))


def reference(inputs: Mapping[str, Path]) -> dict[int, dict[str, Any]]:
    """Return what the table has to say, by customer: computed from the files alone."""
    orders = _grouped(
        inputs["orders"],
        STREAMS["orders"],
        [("order_id", "count"), ("cents", "sum"), ("status", "last")],
    )
    clicks = _grouped(
        inputs["clicks"],
        STREAMS["clicks"],
        [("click_id", "count"), ("page", "distinct"), ("page", "last")],
    )
    nothing = dict.fromkeys(STREAMS["orders"].columns + STREAMS["clicks"].columns)
    return {
        customer: normal({**nothing, **orders.get(customer, {}), **clicks.get(customer, {})})
        for customer in sorted({*orders, *clicks})
    }


def normal(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for comparison: a set of pages has no order."""
    return {**row, "pages": None if row["pages"] is None else sorted(row["pages"])}


def _grouped(
    directory: Path, stream: Stream, functions: list[tuple[str, str]]
) -> dict[int, dict[str, Any]]:
    events = pq.read_table(directory).sort_by(stream.time)
    groups = events.group_by("customer_id", use_threads=False).aggregate(functions)
    groups = groups.select(["customer_id", *(f"{name}_{how}" for name, how in functions)])
    groups = groups.rename_columns(["customer_id", *stream.columns])
    return {row.pop("customer_id"): row for row in groups.to_pylist()}
