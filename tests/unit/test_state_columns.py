"""States of columns, read beside their values: what they are, and what they merge to elsewhere."""

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import SchemaError
from foundation.ids import BucketId
from locks.column_locks.records import LockRecord
from locks.encoding.offsets import Offsets
from merge_engine.aggregates.registry import AggFunction
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.segment import AggMode
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Column, Schema
from merge_engine.schema.state_columns import has_own_state, state_column
from recovery.reader.bucket_scan import BucketScan, open_scan, open_snapshot_scan
from recovery.reader.committed_lookup import Asked, committed_lookup
from tests.conftest import BucketFactory, batch
from tests.support.aggregates import MAP
from tests.support.cuts import cut_at

HERE = BucketId(0, 3)
POSITIONAL = [
    AggFunction.LAST_VALUE,
    AggFunction.FIRST_VALUE,
    AggFunction.LAST_VALUE_IGNORE_NULLS,
    AggFunction.FIRST_VALUE_IGNORE_NULLS,
]
SETS = [AggFunction.RBM32, AggFunction.RBM64, AggFunction.HLL_SKETCH, AggFunction.THETA_SKETCH]
BIGINT = pa.int64()
# By its order, the last to arrive is the first.
NUMBERS, ORDERS = [3, 5, 7, 5], [1, 2, 3, 0]
ORDERED = pa.struct([("value", BIGINT), ("order", BIGINT)])


def declared(function: AggFunction, kind: pa.DataType, **parameters: Any) -> Schema:
    """Return a table with the key `k`, the column `c`, and `t` that may order it."""
    builder = SchemaBuilder().column("k", BIGINT).primary_key("k")
    builder.agg_column("c", kind, function, **parameters)
    return builder.agg_column("t", BIGINT, "max").build()


# Schema, four inputs, the type of a state.
OWN: dict[str, tuple[Schema, Sequence[Any], pa.DataType]] = {
    "avg": (
        declared(AggFunction.AVG, pa.float64()),
        [1.5, 2.0, 4.25, 8.0],
        pa.struct([("sum", pa.float64()), ("count", BIGINT)]),
    ),
    "avg of decimals": (
        declared(AggFunction.AVG, pa.decimal128(9, 2)),
        [Decimal("0.01"), Decimal("0.02"), Decimal("7.35"), Decimal("-1.50")],
        pa.struct([("sum", pa.decimal128(38, 2)), ("count", BIGINT)]),
    ),
    "string_agg": (
        declared(AggFunction.STRING_AGG, pa.string(), delimiter=", "),
        ["a", "b, c", "", "d"],
        pa.list_(pa.string()),
    ),
    **{one.value: (declared(one, BIGINT), NUMBERS, pa.binary()) for one in SETS},
    **{one.value: (declared(one, BIGINT, order_by="t"), NUMBERS, ORDERED) for one in POSITIONAL},
}
SAME: dict[str, tuple[Schema, Sequence[Any], pa.DataType]] = {
    **{
        one.value: (declared(one, BIGINT), NUMBERS, BIGINT)
        for one in (AggFunction.SUM, AggFunction.PRODUCT, AggFunction.COUNT, *POSITIONAL)
    },
    **{one.value: (declared(one, pa.binary()), NUMBERS, pa.binary()) for one in SETS},
    **{
        one.value: (declared(one, pa.string()), ["b", "a", "c", "a"], pa.string())
        for one in (AggFunction.MIN, AggFunction.MAX)
    },
    **{
        one.value: (declared(one, pa.bool_()), [True, False, True, True], pa.bool_())
        for one in (AggFunction.BOOL_AND, AggFunction.BOOL_OR)
    },
    **{
        one.value: (declared(one, pa.list_(BIGINT)), NUMBERS, pa.list_(BIGINT))
        for one in (AggFunction.ARRAY_AGG, AggFunction.COLLECT_SET)
    },
    "merge_map": (
        declared(AggFunction.MERGE_MAP, MAP),
        [[("a", 1)], [("a", 2), ("b", 1)], [("c", 3)], []],
        MAP,
    ),
}
EVERY = {**{f"{name}, own": one for name, one in OWN.items()}, **SAME}
MEAN, INPUT, _ = OWN["avg"]


def value_of(schema: Schema) -> Column:
    return schema.column("c")


def both(schema: Schema) -> list[Column]:
    """Return the column and its states."""
    return [value_of(schema), state_column(value_of(schema))]


def fill(bucket: Bucket, values: Sequence[Any], first: int = 0) -> None:
    """Put these to key 1, with orders that are not those of arrival, and only `t` to key 2."""
    schema = bucket.history.current
    function = value_of(schema).function
    assert function is not None
    given = pa.array(values, function.input_type)
    orders = ORDERS[first : first + len(values)]
    bucket.put(batch(k=[1] * len(values), c=given, t=orders), owner="me")
    bucket.put(batch(k=[2], t=[9]), columns=["t"], owner="her")


def looked_up(bucket: Bucket, columns: Sequence[Column], *keys: int) -> list[tuple[Any, ...]]:
    return read(bucket.lookup_keys([pa.array(keys, BIGINT)], columns))


def read(found: pa.RecordBatch) -> list[tuple[Any, ...]]:
    """Return all but the key."""
    return [tuple(row.values())[1:] for row in found.to_pylist()]


def scanned(scan: BucketScan, columns: Sequence[Column]) -> list[tuple[Any, ...]]:
    return [row for part in scan.batches(columns) for row in read(part.data)]


def committed_at(offset: int) -> dict[str, LockRecord]:
    """Return the record of a lock on `c` and `t` that committed at this offset, and not since."""
    offsets = Offsets({HERE: offset})
    return {"me": LockRecord(held=True, ready=True, epoch=1, columns=(2, 3), offsets=offsets)}


# What is a state of its own


def test_every_function_is_looked_at_here() -> None:
    assert {one.value for one in AggFunction} == {name.split()[0] for name in [*OWN, *SAME]}


@pytest.mark.parametrize("name", OWN)
def test_a_state_that_is_no_value_is_told_by_its_type(name: str) -> None:
    schema, _, state_type = OWN[name]
    assert has_own_state(value_of(schema))
    states = state_column(value_of(schema))
    assert (states.id, states.name, states.type) == (value_of(schema).id, "c_state", state_type)
    assert not has_own_state(states)


@pytest.mark.parametrize("name", SAME)
def test_a_state_that_is_the_value_is_merged_as_it_is(
    bucket_factory: BucketFactory, name: str
) -> None:
    """So nobody who has the values needs the states."""
    schema, values, state_type = SAME[name]
    assert not has_own_state(value_of(schema))
    assert state_column(value_of(schema)).type == state_type
    bucket, other = (bucket_factory(schema, name=one) for one in ("bucket", "other"))
    fill(bucket, values)
    found = bucket.lookup_keys([pa.array([1], BIGINT)], both(schema))
    assert found.column("c").equals(found.column("c_state"))
    other.put(found.select(["k", "c"]), columns=["c"], mode=AggMode.MERGE_STATE)
    assert looked_up(other, both(schema), 1) == looked_up(bucket, both(schema), 1)


def test_a_key_has_no_state() -> None:
    key = MEAN.column("k")
    assert not has_own_state(key)
    with pytest.raises(SchemaError, match="column 'k' is part of the key and has no state"):
        state_column(key)


def test_columns_of_states_are_equal_if_those_of_values_are() -> None:
    wider = declared(AggFunction.AVG, pa.decimal128(11, 2))
    decimals, _, _ = OWN["avg of decimals"]
    assert state_column(value_of(MEAN)) == state_column(value_of(MEAN))
    assert state_column(value_of(wider)).type == state_column(value_of(decimals)).type
    assert state_column(value_of(wider)) != state_column(value_of(decimals))


# Look-ups


@pytest.mark.parametrize("name", OWN)
def test_states_merge_elsewhere_to_what_their_rows_would_have(
    bucket_factory: BucketFactory, name: str
) -> None:
    schema, values, state_type = OWN[name]
    whole, first, second, merged = (
        bucket_factory(schema, name=one) for one in ("whole", "first", "second", "merged")
    )
    for bucket, start, stop in ((whole, 0, 2), (whole, 2, 4), (first, 0, 2), (second, 2, 4)):
        fill(bucket, values[start:stop], start)
    for bucket in (first, second):
        found = bucket.lookup_keys([pa.array([1], BIGINT)], [state_column(value_of(schema))])
        assert found.schema.field("c_state").type == state_type
        merged.put(found.rename_columns(["k", "c"]), columns=["c"], mode=AggMode.MERGE_STATE)
    assert looked_up(merged, both(schema), 1) == looked_up(whole, both(schema), 1)
    [(value, state)] = looked_up(whole, both(schema), 1)
    assert None not in (value, state)
    assert value != state


@pytest.mark.parametrize("name", EVERY)
def test_what_was_never_written_has_no_state(bucket_factory: BucketFactory, name: str) -> None:
    schema, values, _ = EVERY[name]
    bucket = bucket_factory(schema)
    fill(bucket, values)
    nothing = (None, None)
    [written, *others] = looked_up(bucket, both(schema), 1, 2, 3)
    assert None not in written
    assert others == [nothing, nothing]
    assert scanned(open_scan(bucket, None), both(schema)) == [written, nothing]


def test_states_come_in_any_order_and_without_values(bucket_factory: BucketFactory) -> None:
    bucket = bucket_factory(MEAN)
    fill(bucket, INPUT)
    value, state = both(MEAN)
    assert looked_up(bucket, [state], 1) == [({"sum": 15.75, "count": 4},)]
    assert looked_up(bucket, [state, value], 2, 1) == [
        (None, None),
        ({"sum": 15.75, "count": 4}, 3.9375),
    ]


# At a cut


@pytest.mark.parametrize("name", OWN)
def test_states_are_masked_at_a_cut_as_values_are(
    bucket_factory: BucketFactory, tmp_path: Path, name: str
) -> None:
    schema, values, _ = OWN[name]
    bucket, columns, checkpoint = bucket_factory(schema), both(schema), tmp_path / "checkpoint"
    empty = bucket.end_offset
    fill(bucket, values[:2])
    middle, before = bucket.end_offset, looked_up(bucket, columns, 1)
    bucket.checkpoint(checkpoint)
    fill(bucket, values[2:], 2)
    now = looked_up(bucket, columns, 1)
    assert now != before
    nothing = [(None, None)]
    for offset, seen in ((empty, nothing), (middle, before), (bucket.end_offset, now)):
        cut = cut_at(HERE, committed_at(offset))
        asked = [Asked(bucket, cut, [pa.array([1, 2, 1], BIGINT)])]
        [found] = committed_lookup(asked, columns)
        assert read(found) == seen + nothing + seen
        [found] = committed_lookup(asked, columns[1:], found="_found")
        there = offset != empty
        assert read(found) == [(seen[0][1], there), (None, True), (seen[0][1], there)]
        for scan in (
            open_scan(bucket, cut),
            open_snapshot_scan(
                checkpoint, cut, storage=bucket_factory.storage(), history=bucket.history
            ),
        ):
            assert scanned(scan, columns) == (seen if there else []) + nothing
            scan.close()
