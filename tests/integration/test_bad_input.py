"""Bad input: nothing changes, and the error names the culprit."""

from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import (
    BatchTooLarge,
    InvalidInput,
    InvalidKey,
    InvalidValue,
    MissingColumn,
    Overflow,
    TallybookError,
    UnknownColumn,
    WrongType,
)
from foundation.ids import Token
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.segment import AggMode
from merge_engine.schema.builder import SchemaBuilder
from recovery.embedded.table import Table
from tests.conftest import rows_of

SCHEMA = (
    SchemaBuilder()
    .column("customer_id", pa.int64())
    .agg_column("orders", pa.int64(), "count")
    .agg_column("revenue", pa.decimal128(5, 2), "sum")
    .agg_column("points", pa.int8(), "sum")
    .agg_column("status", pa.string(), "last_value", order_by="event_time", order_type="BIGINT")
    .agg_column("visitors", pa.int64(), "rbm32")
    .primary_key("customer_id")
    .build()
)
LIMITS = BucketOptions(put_max_rows=100, put_max_bytes=10_000)


@pytest.fixture
def customers(tmp_path: Path) -> Iterator[Table]:
    """Four buckets with something in each."""
    with Table.create(tmp_path / "customers", SCHEMA, buckets=4, options=LIMITS) as table:
        table.put({"customer_id": list(range(20)), "points": pa.array([100] * 20, pa.int8())})
        yield table


def state_of(table: Table) -> Any:
    """Return all that a call could change: rows, and where the log of each bucket ends."""
    return rows_of(table), table.end_offsets()


Case = tuple[dict[str, Any], dict[str, Any], type[TallybookError], str]
ONE = {"customer_id": [1]}
BAD: dict[str, Case] = {
    "missing key column": (
        {"orders": [1]},
        {},
        MissingColumn,
        "key column 'customer_id' is not in the batch; add it",
    ),
    "null key": (
        {"customer_id": [1, 2, None, None], "orders": [1, 1, 1, 1]},
        {},
        InvalidKey,
        "key column 'customer_id' is null in 2 of 4 rows, first in row 2; filter them out, "
        "or give them a key",
    ),
    "unknown column": (
        ONE | {"revenu": [1]},
        {},
        UnknownColumn,
        "the table has no column 'revenu'; did you mean 'revenue'?",
    ),
    "unknown column unlike any": (
        ONE | {"xyz": [1]},
        {},
        UnknownColumn,
        "the table has no column 'xyz'; it has customer_id, orders, revenue, points, status, "
        "visitors",
    ),
    "unknown column to write": (
        ONE | {"orders": [1]},
        {"columns": ["order"]},
        UnknownColumn,
        "the table has no column 'order'; did you mean 'orders'?",
    ),
    "a column to write that is not there": (
        ONE | {"orders": [1]},
        {"columns": ["orders", "points"]},
        MissingColumn,
        "column 'points' is to be written, but not in the batch",
    ),
    "a key column to write": (
        ONE | {"orders": [1]},
        {"columns": ["customer_id"]},
        InvalidInput,
        "column 'customer_id' is part of the key and cannot be written",
    ),
    "a text for columns": (
        ONE | {"orders": [1]},
        {"columns": "orders"},
        InvalidInput,
        "columns must be a list of column names, not 'orders'",
    ),
    "no value column": (
        ONE,
        {},
        MissingColumn,
        "the batch has no value column; the table has orders, revenue, points, status, visitors",
    ),
    "missing order column": (
        ONE | {"status": ["new"]},
        {},
        MissingColumn,
        "column 'status' is ordered by 'event_time', which is not in the batch",
    ),
    "wrong type": (
        ONE | {"points": ["many"]},
        {},
        WrongType,
        "column 'points' is TINYINT, but the batch has STRING; cast it first",
    ),
    "narrowing of a type that somebody chose, whatever the values": (
        ONE | {"points": pa.array([1])},
        {},
        WrongType,
        "column 'points' is TINYINT, but the batch has BIGINT; cast it first",
    ),
    "a number of Python that does not fit": (
        ONE | {"points": [128]},
        {},
        WrongType,
        "column 'points' is TINYINT, but the batch has BIGINT; cast it first",
    ),
    "wrong type of a key": (
        {"customer_id": ["1"], "orders": [1]},
        {},
        WrongType,
        "column 'customer_id' is BIGINT, but the batch has STRING; cast it first",
    ),
    "wrong type of an order": (
        ONE | {"status": ["new"], "event_time": ["now"]},
        {},
        WrongType,
        "column 'event_time' is BIGINT, but the batch has STRING; cast it first",
    ),
    "overflow of what is stored": (
        ONE | {"points": pa.array([100], pa.int8())},
        {},
        Overflow,
        "column 'points', key customer_id=1: ",
    ),
    "overflow within the batch": (
        {
            "customer_id": [50, 50],
            "revenue": pa.array([Decimal("999.99"), Decimal("0.01")], pa.decimal128(5, 2)),
        },
        {},
        Overflow,
        "column 'revenue', key customer_id=50: ",
    ),
    "a value that the function cannot take": (
        ONE | {"visitors": [-1]},
        {},
        InvalidValue,
        "column 'visitors', key customer_id=1: ",
    ),
    "too many rows": (
        {"customer_id": [1] * 101, "orders": [1] * 101},
        {},
        BatchTooLarge,
        "the batch has 101 rows, the limit is 100 (put_max_rows); split it",
    ),
    "too many bytes": (
        ONE | {"status": ["x" * 10_000], "event_time": [1]},
        {},
        BatchTooLarge,
        "bytes, the limit is 10,000 (put_max_bytes); split it",
    ),
    "unknown agg mode": (
        ONE | {"orders": [1]},
        {"mode": 7},
        InvalidInput,
        "unknown agg mode 7; use one of REPLACE = 0, ACCUMULATE = 1, MERGE_STATE = 2",
    ),
    "the name of an agg mode": (
        ONE | {"orders": [1]},
        {"mode": "replace"},
        InvalidInput,
        "unknown agg mode 'replace'; use one of REPLACE = 0, ACCUMULATE = 1, MERGE_STATE = 2",
    ),
    "bad operation": (
        {"customer_id": [1, 2], "orders": [1, 1], "op": ["upsert", "insert"]},
        {"operation_column": "op"},
        InvalidInput,
        "operation column 'op' has 'insert' in row 1; it takes 'upsert' and 'delete'",
    ),
    "null operation": (
        ONE | {"orders": [1], "op": pa.array([None], pa.string())},
        {"operation_column": "op"},
        InvalidInput,
        "operation column 'op' has None in row 0; it takes 'upsert' and 'delete'",
    ),
    "operation number": (
        ONE | {"orders": [1], "op": [2]},
        {"operation_column": "op"},
        InvalidInput,
        "operation column 'op' has 2 in row 0; it takes 'upsert' and 'delete'",
    ),
    "operations of another type": (
        ONE | {"orders": [1], "op": [["delete"]]},
        {"operation_column": "op"},
        WrongType,
        "operation column 'op' is list<item: string>; it takes the texts 'upsert' and 'delete'",
    ),
    "missing operations": (
        ONE | {"orders": [1]},
        {"operation_column": "op"},
        MissingColumn,
        "operation column 'op' is not in the batch; add it",
    ),
    "operations in a column of the table": (
        ONE | {"orders": [1]},
        {"operation_column": "orders"},
        InvalidInput,
        "operation column 'orders' is a column of the table; give the operations a column",
    ),
    "a state of another type": (
        ONE | {"orders": ["x"]},
        {"mode": AggMode.MERGE_STATE},
        WrongType,
        "column 'orders' is BIGINT, but the batch has STRING; cast it first",
    ),
    "a corrupt state": (
        ONE | {"visitors": [b"garbage"]},
        {"mode": AggMode.REPLACE},
        InvalidValue,
        "column 'visitors', key customer_id=1: ",
    ),
    "a token that no bucket could apply": (
        ONE | {"orders": [1]},
        {"owner": "me", "token": Token(-1, 0)},
        InvalidInput,
        "a token is Token(epoch, batch), two whole numbers from 0 on, not Token(epoch=-1, batch=0)",
    ),
    "a token that is none": (
        ONE | {"orders": [1]},
        {"owner": "me", "token": 5},
        InvalidInput,
        "a token is Token(epoch, batch), two whole numbers from 0 on, not 5",
    ),
    "an owner that is none": (
        ONE | {"orders": [1]},
        {"owner": None},
        InvalidInput,
        "an owner is a text, not None",
    ),
    "columns of different lengths": (
        {"customer_id": [1, 2], "orders": [1]},
        {},
        InvalidInput,
        "cannot read this as a table: Column 1 named orders expected length 2 but got length 1",
    ),
}


@pytest.mark.parametrize(("data", "arguments", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_changes_nothing_and_names_the_culprit(
    customers: Table,
    data: dict[str, Any],
    arguments: dict[str, Any],
    error: type[TallybookError],
    message: str,
) -> None:
    before = state_of(customers)
    with pytest.raises(error) as caught:
        customers.put(data, **arguments)
    assert type(caught.value) is error
    assert isinstance(caught.value, InvalidInput)
    assert message in str(caught.value)
    assert state_of(customers) == before
    customers.put(ONE | {"points": pa.array([1], pa.int8())})
    assert rows_of(customers)[1][2] == 101


def test_a_column_that_stands_twice_is_named(customers: Table) -> None:
    before = state_of(customers)
    one = pa.array([1])
    with pytest.raises(InvalidInput, match="the batch has column 'orders' more than once"):
        customers.put(pa.table([one, one, one], names=["customer_id", "orders", "orders"]))
    assert state_of(customers) == before


@pytest.mark.parametrize("data", [None, 5, "abc", ["abc"]])
def test_what_is_no_table_is_refused(customers: Table, data: Any) -> None:
    before = state_of(customers)
    with pytest.raises(InvalidInput, match="cannot read this as a table"):
        customers.put(data)
    assert state_of(customers) == before


def test_an_empty_list_is_an_empty_batch(customers: Table) -> None:
    before = state_of(customers)
    assert customers.put([]).rows == customers.delete([]).rows == 0
    assert customers.lookup([]).num_rows == 0
    assert state_of(customers) == before


def test_an_overflow_in_one_bucket_changes_no_bucket(customers: Table) -> None:
    before = state_of(customers)
    keys = list(range(20))
    for culprit in keys:
        points = pa.array([28 if key == culprit else 1 for key in keys], pa.int8())
        with pytest.raises(Overflow, match=f"'points', key customer_id={culprit}: .*nothing was"):
            customers.put({"customer_id": keys, "points": points}, owner="me", token=Token(1, 1))
    assert state_of(customers) == before
    result = customers.put(
        {"customer_id": keys, "points": pa.array([1] * 20, pa.int8())},
        owner="me",
        token=Token(1, 1),
    )
    assert (result.changed, len(result.buckets)) == (20, 4)
    assert not any(part.repeated for part in result.buckets.values())


@pytest.mark.parametrize("keys", [{"customer": [1]}, {}])
def test_lookups_and_deletes_without_the_key_name_it(customers: Table, keys: Any) -> None:
    calls: list[Callable[[Any], object]] = [customers.lookup, customers.delete]
    for call in calls:
        with pytest.raises(MissingColumn, match="key column 'customer_id' is not in the batch"):
            call(keys)


def test_reading_an_unknown_column_names_it(customers: Table) -> None:
    with pytest.raises(UnknownColumn, match=r"no column 'point'; did you mean 'points'\?"):
        customers.lookup(ONE, ["point"])
    with pytest.raises(UnknownColumn, match=r"no column 'point'; did you mean 'points'\?"):
        list(customers.scan(["point"]))
    with pytest.raises(InvalidInput, match="must be a list of column names, not 'points'"):
        customers.lookup(ONE, "points")


def test_a_table_is_created_once_and_opened_only_where_there_is_one(
    customers: Table, tmp_path: Path
) -> None:
    before = state_of(customers)
    with pytest.raises(InvalidInput, match=r"there is a table in .*customers.* already; open it"):
        Table.create(tmp_path / "customers", SCHEMA)
    with pytest.raises(InvalidInput, match=r"there is no table in .*nowhere.*; create one first"):
        Table.open(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match="a table needs at least one bucket, not 0"):
        Table.create(tmp_path / "none", SCHEMA, buckets=0)
    assert not (tmp_path / "nowhere").exists()
    assert state_of(customers) == before
