"""Bad input, damage and full disks: nothing changes, and the error names the culprit."""

import json
import random
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash

from merge_engine.bucket import Bucket
from merge_engine.errors import (
    BatchTooLarge,
    CorruptSegment,
    CorruptView,
    InUse,
    InvalidInput,
    InvalidKey,
    InvalidValue,
    LogGap,
    MissingColumn,
    Overflow,
    Retryable,
    StorageFull,
    TallybookError,
    UnknownColumn,
    UnknownFormat,
    WrongType,
)
from merge_engine.options import BucketOptions
from merge_engine.schema_builder import SchemaBuilder
from merge_engine.segment import AggMode, Token, segment_name
from merge_engine.storage import LocalStorage
from merge_engine.stored import SchemaHistory
from merge_engine.table import Table
from tests.conftest import batch, rows_of, schema_of

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


def cents(text: str) -> pa.Array:
    return pa.array([Decimal(text)], pa.decimal128(5, 2))


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
    "narrowing, whatever the values": (
        ONE | {"points": [1]},
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


# Damage in the log


@pytest.fixture
def closed_table(tmp_path: Path) -> Path:
    """A closed table of one bucket with segments at 0 (leader), 1 and 3, and no view."""
    schema = schema_of(a=(pa.int64(), "sum"))
    with Table.create(tmp_path / "table", schema, buckets=1) as table:
        table.put({"k": [1, 2], "a": [1, 2]})
        table.put({"k": [1], "a": [10]})
    shutil.rmtree(tmp_path / "table" / "view")
    return tmp_path / "table"


def log_of(table: Path) -> Path:
    return table / "log" / "table" / "0"


def open_and_read(table: Path) -> Any:
    with Table.open(table) as opened:
        return rows_of(opened)


def test_a_flipped_bit_in_a_segment_is_reported_with_file_and_offset(closed_table: Path) -> None:
    path = log_of(closed_table) / segment_name(1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    names = sorted(path.name for path in log_of(closed_table).iterdir())
    with pytest.raises(CorruptSegment) as caught:
        open_and_read(closed_table)
    assert f"segment {segment_name(1)} (log offset 1): checksum mismatch" in str(caught.value)
    assert str(log_of(closed_table)) in str(caught.value)
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert open_and_read(closed_table) == {1: (11,), 2: (2,)}
    assert set(names) < {path.name for path in log_of(closed_table).iterdir()}


def test_a_segment_of_a_newer_format_is_reported_with_both_versions(closed_table: Path) -> None:
    path = log_of(closed_table) / segment_name(3)
    body = bytearray(path.read_bytes()[:-8])
    body[-10:-8] = struct.pack("<H", 9)
    path.write_bytes(body + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(body))))
    with pytest.raises(UnknownFormat) as caught:
        open_and_read(closed_table)
    assert "(log offset 3): format version 9, this release reads 1; upgrade" in str(caught.value)
    assert str(log_of(closed_table)) in str(caught.value)


def test_a_missing_segment_is_reported_with_file_and_place(closed_table: Path) -> None:
    (log_of(closed_table) / segment_name(1)).unlink()
    with pytest.raises(LogGap) as caught:
        open_and_read(closed_table)
    assert f"segment {segment_name(1)} is missing from" in str(caught.value)
    assert str(log_of(closed_table)) in str(caught.value)


@pytest.mark.parametrize("name", ["table.json", "schema/00000001.json"])
def test_a_description_of_a_newer_format_is_refused(closed_table: Path, name: str) -> None:
    path = closed_table / name
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"format": 9}))
    with pytest.raises(UnknownFormat, match=r"has format 9, .* reads (format )?1.*; upgrade"):
        Table.open(closed_table)


def test_a_damaged_description_is_reported_by_name(closed_table: Path) -> None:
    (closed_table / "table.json").write_text("{")
    with pytest.raises(CorruptSegment, match=r"table\.json in .* is damaged"):
        Table.open(closed_table)


# Two processes

HOLDER = """
    import sys
    from merge_engine.table import Table

    with Table.open(sys.argv[1]) as table:
        table.put({"k": [1], "a": [100]})
        print("open", flush=True)
        sys.stdin.readline()
        table.put({"k": [1], "a": [1000]})
"""


def test_a_second_process_is_told_that_the_bucket_is_in_use_and_harms_nobody(
    closed_table: Path,
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(closed_table)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with Table.open(closed_table) as table:
            with pytest.raises(InUse) as caught:
                table.put({"k": [1], "a": [5]})
            view = closed_table / "view" / "table" / "0"
            assert str(caught.value) == (
                f"{view} is open in another process or handle; close that one first"
            )
            with pytest.raises(InUse):
                table.lookup({"k": [1]})
            process.communicate("go on\n", timeout=30)
            assert process.returncode == 0
            assert rows_of(table) == {1: (1111,), 2: (2,)}, "it can be opened when it is free"
    finally:
        process.kill()
        process.wait()


# Full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB; skips where this process may not mount one."""
    directory = tmp_path / "small"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(directory)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


TEXTS = schema_of(text=(pa.string(), "last_value"))


def random_texts(seed: int, count: int) -> list[str]:
    """Texts that no compression makes small."""
    source = random.Random(seed)
    return [source.randbytes(1000).hex() for _ in range(count)]


def put_until_refused(bucket: Bucket, model: dict[int, str]) -> TallybookError:
    """Put new rows, ten at a time, until one is refused; the model has those that were not."""
    for turn in range(1000):
        keys = list(range(turn * 10, turn * 10 + 10))
        texts = random_texts(turn, 10)
        try:
            bucket.put(batch(k=keys, text=texts), owner="me", token=Token(1, turn))
        except TallybookError as exc:
            return exc
        model.update(zip(keys, texts, strict=True))
    raise AssertionError("the disk was never full")


def texts_of(bucket: Bucket) -> dict[int, str]:
    return {key: text for key, (text,) in rows_of(bucket).items()}


def test_with_a_full_log_disk_a_put_changes_nothing_and_goes_on_when_there_is_room(
    small_disk: Path, tmp_path: Path
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(2 << 20))
    storage = LocalStorage(small_disk / "log")
    bucket = Bucket(storage, tmp_path / "view", SchemaHistory([TEXTS]), identity="full")
    model: dict[int, str] = {}
    refused = put_until_refused(bucket, model)
    assert type(refused) is StorageFull
    assert str(refused).startswith(f"no room to create {small_disk / 'log'}")
    assert str(refused).endswith("; nothing was written; make room and try again")
    assert model
    names, end = storage.names(), bucket.end_offset
    assert texts_of(bucket) == model
    with pytest.raises(StorageFull):
        bucket.put(batch(k=[1], text=["".join(random_texts(-1, 20))]))
    assert (storage.names(), bucket.end_offset) == (names, end)
    assert [path.name for path in sorted((small_disk / "log").iterdir())] == names
    filler.unlink()
    token = Token(1, len(model) // 10)
    assert not bucket.put(batch(k=[1], text=["after"]), owner="me", token=token).repeated
    model[1] = "after"
    assert texts_of(bucket) == model
    bucket.close()
    rebuilt = Bucket(storage, tmp_path / "new-view", SchemaHistory([TEXTS]), identity="full")
    assert texts_of(rebuilt) == model
    rebuilt.close()


def test_with_a_full_view_disk_puts_stay_committed_until_the_limit_and_it_goes_on_with_room(
    small_disk: Path, tmp_path: Path
) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(2 << 20))
    storage = LocalStorage(tmp_path / "log")
    options = BucketOptions(
        behind_max_bytes=64 << 10, write_buffer_bytes=128 << 10, stall_deadline_s=0.1
    )
    bucket = Bucket(
        storage, small_disk / "view", SchemaHistory([TEXTS]), identity="full", options=options
    )
    model: dict[int, str] = {}
    refused = put_until_refused(bucket, model)
    assert isinstance(refused, Retryable)
    assert str(small_disk / "view") in str(refused)
    assert bucket.end_offset == 1 + len(model), "what was refused must not be in the log"
    keys = list(model)
    assert bucket.lookup(batch(k=keys)).column("text").to_pylist() == list(model.values())
    last = bucket.last_token("me")
    assert last is not None
    assert last.token == Token(1, len(model) // 10 - 1)
    elsewhere = Bucket(
        _copied(storage, tmp_path / "copy"),
        tmp_path / "copied-view",
        SchemaHistory([TEXTS]),
        identity="full",
    )
    assert texts_of(elsewhere) == model, "the log alone must have every put"
    elsewhere.close()

    filler.unlink()
    # RocksDB looks by itself every five seconds whether there is room again.
    _until_it_works(lambda: bucket.put(batch(k=[1], text=["after"])), deadline_s=40)
    model[1] = "after"
    assert texts_of(bucket) == model
    bucket.close()
    reopened = Bucket(
        storage, small_disk / "view", SchemaHistory([TEXTS]), identity="full", options=options
    )
    assert texts_of(reopened) == model
    reopened.close()


def _copied(storage: LocalStorage, directory: Path) -> LocalStorage:
    copy = LocalStorage(directory)
    for name in storage.names():
        copy.create(name, storage.read(name))
    return copy


def _until_it_works(call: Callable[[], object], *, deadline_s: float) -> None:
    """Call again while the answer is a Retryable error, as a caller should."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            call()
            return
        except Retryable:
            if time.monotonic() > deadline:
                raise
            threading.Event().wait(0.05)


# Damage in the view

ROWS = 3000


def _flipped(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    for at in range(position, position + 8):
        data[at] ^= 0x55
    path.write_bytes(data)


@pytest.fixture(scope="module")
def large_bucket(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """A closed bucket of many blocks, all of them in SST files."""
    directory = tmp_path_factory.mktemp("large")
    model = dict(enumerate(text[:400] for text in random_texts(0, ROWS)))
    bucket = _open_large(directory)
    bucket.put(batch(k=list(model), text=list(model.values())))
    bucket.flush()
    bucket.close()
    return directory, model


def _open_large(directory: Path) -> Bucket:
    storage, history = LocalStorage(directory / "log"), SchemaHistory([TEXTS])
    return Bucket(storage, directory / "view", history, identity="large")


@pytest.mark.parametrize("part", [0.1, 0.35, 0.5, 0.77, 0.9])
def test_flipped_bytes_in_the_view_are_noticed_by_every_read_path(
    large_bucket: tuple[Path, dict[int, str]], tmp_path: Path, part: float
) -> None:
    original, model = large_bucket
    directory = tmp_path / "bucket"
    shutil.copytree(original, directory)
    largest = max((directory / "view").glob("*.sst"), key=lambda path: path.stat().st_size)
    assert largest.stat().st_size > 500_000
    _flipped(largest, int(largest.stat().st_size * part))
    bucket = _open_large(directory)
    try:
        end = bucket.end_offset
        damaged: list[list[int]] = []
        messages: list[str] = []
        for start in range(0, ROWS, 10):
            keys = list(range(start, start + 10))
            try:
                found = bucket.lookup(batch(k=keys)).column("text").to_pylist()
            except CorruptView as exc:
                damaged.append(keys)
                messages.append(str(exc))
            else:
                assert found == [model[key] for key in keys], "a damaged row was read as another"
        assert 1 <= len(damaged) <= 5, "one block was damaged"
        for message in messages:
            assert str(directory / "view") in message
            assert "remove the directory to rebuild it from the log" in message
        with pytest.raises(CorruptView, match="remove the directory to rebuild it"):
            list(bucket.scan())
        with pytest.raises(CorruptView, match="remove the directory to rebuild it"):
            list(bucket.scan(batch_size=7))
        with pytest.raises(CorruptView, match="remove the directory to rebuild it"):
            bucket.put(batch(k=damaged[0], text=["new"] * 10))
        assert bucket.end_offset == end
        bucket.put(batch(k=[-1], text=["new"]))
    finally:
        bucket.close()
    shutil.rmtree(directory / "view")
    rebuilt = _open_large(directory)
    assert texts_of(rebuilt) == model | {-1: "new"}
    rebuilt.close()
