"""Other keys and functions than integers and sums, each against columns of fixed width."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.figure import Chart, Finding, Setting
from benchmarks.measure import Pairs, timed, until_idle
from benchmarks.workload import Workload, open_bucket
from merge_engine.aggregates.registry import AggFunction
from merge_engine.bucket.bucket import Bucket
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema

_FIXED = "fixed width"
_KEPT_ITEMS = 5
_REGIONS = [f"region-{number:02d}" for number in range(16)]

Columns: TypeAlias = dict[str, pa.Array]


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A table whose keys or whose first value column are of another kind.

    `change` makes the columns of a batch from those of fixed width.
    """

    name: str
    label: str
    schema: Schema
    change: Callable[[Columns], Columns]

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch of fixed width as one of this kind."""
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        return pa.record_batch(self.change(columns))


def kinds(setting: Setting) -> Iterator[Finding]:
    """Puts into one bucket per kind, in turn, each against the one of fixed width."""
    work = Workload(setting.keys, batch_rows=setting.batch_rows, string=False)
    with ExitStack() as stack:
        buckets = {}
        for kind in _kinds():
            history = SchemaHistory([kind.schema])
            bucket = open_bucket(setting.directory / kind.name, history)
            stack.callback(bucket.close)
            buckets[kind.label] = (kind, bucket)
        seconds: dict[str, list[float]] = {label: [] for label in buckets}

        def run(batches: Sequence[pa.RecordBatch]) -> None:
            """Put the batches into one bucket after the other; each has the machine to itself."""
            for label, (kind, bucket) in buckets.items():
                changed = [kind.of(batch) for batch in batches]
                took, _ = timed(partial(_put_all, bucket, changed))
                seconds[label].append(took / sum(map(len, batches)))
                until_idle()

        for batch in work.fill():
            for kind, bucket in buckets.values():
                bucket.put(kind.of(batch))
        run([work.batch()])
        for times in seconds.values():
            times.clear()
        for _ in range(setting.runs):
            run([work.batch() for _ in range(setting.steps)])
    fixed = seconds[_FIXED]
    for label, (kind, _) in buckets.items():
        if label != _FIXED:
            yield Pairs(seconds[label], fixed).speed(
                f"put_{kind.name}_vs_fixed_width",
                what=f"put of {setting.batch_rows:,} rows into {setting.keys:,} keys of one "
                f"bucket: {label}, against an integer key, a sum, a maximum and a count",
                unit="rows",
                goal=">=0.5",
            )
    yield Chart(
        name="kinds",
        title=f"Puts of {setting.batch_rows:,} rows into {setting.keys:,} keys of one bucket",
        unit="rows/s",
        series={
            label: [("one bucket", 1 / float(np.median(times)))] for label, times in seconds.items()
        },
    )


def _put_all(bucket: Bucket, batches: Sequence[pa.RecordBatch]) -> None:
    for batch in batches:
        bucket.put(batch)


def _kinds() -> list[_Kind]:
    return [
        _Kind(name="fixed", label=_FIXED, schema=_schema(), change=dict),
        _Kind(
            name="string_keys",
            label="a string key",
            schema=_schema(keys={"key": "STRING"}),
            change=lambda columns: {**columns, "key": _text("customer-", columns["key"])},
        ),
        _Kind(
            name="composite_keys",
            label="a key of a string and an integer",
            schema=_schema(keys={"region": "STRING", "key": "BIGINT"}),
            change=lambda columns: {**columns, "region": _regions(columns["key"])},
        ),
        _Kind(
            name="decimal_sum",
            label="a sum of decimals",
            schema=_schema("DECIMAL(18,2)", AggFunction.SUM),
            change=lambda columns: {**columns, "total": _decimals(columns["total"])},
        ),
        _Kind(
            name="string_agg",
            label=f"string_agg, {_KEPT_ITEMS} items at most",
            schema=_schema("STRING", AggFunction.STRING_AGG, limit=_KEPT_ITEMS),
            change=lambda columns: {**columns, "total": _text("item-", columns["total"])},
        ),
        _Kind(
            name="array_agg",
            label=f"array_agg, {_KEPT_ITEMS} items at most",
            schema=_schema("ARRAY<STRING>", AggFunction.ARRAY_AGG, limit=_KEPT_ITEMS),
            change=lambda columns: {**columns, "total": _text("item-", columns["total"])},
        ),
        _Kind(
            name="sketch",
            label="hll_sketch",
            schema=_schema("BIGINT", AggFunction.HLL_SKETCH),
            change=dict,
        ),
    ]


def _schema(
    total: str = "BIGINT",
    function: AggFunction = AggFunction.SUM,
    *,
    keys: Mapping[str, str] = MappingProxyType({"key": "BIGINT"}),
    **parameters: Any,
) -> Schema:
    """Return a schema like that of the workload, whose keys or whose `total` may be another."""
    builder = SchemaBuilder()
    for name, data_type in keys.items():
        builder.column(name, data_type)
    return (
        builder.agg_column("total", total, function, **parameters)
        .agg_column("highest", "DOUBLE", AggFunction.MAX)
        .agg_column("events", "BIGINT", AggFunction.COUNT)
        .primary_key(*keys)
        .build()
    )


def _text(prefix: str, numbers: pa.Array) -> pa.Array:
    """Return `customer-123` and so on."""
    return pc.binary_join_element_wise(prefix, numbers.cast(pa.string()), "")


def _regions(keys: pa.Array) -> pa.Array:
    """Return one of a few words, always the same for a key."""
    return pa.array(_REGIONS).take(pa.array(keys.to_numpy() % len(_REGIONS)))


def _decimals(numbers: pa.Array) -> pa.Array:
    """Return small numbers with two digits after the point."""
    return numbers.cast(pa.int32()).cast(pa.decimal128(18, 2))
