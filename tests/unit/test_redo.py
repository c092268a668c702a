"""The redo log: a promise is read again, and can be kept under whatever schema there is by then."""

import json
import pickle
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import CorruptSegment, InvalidInput, UnknownSchema
from foundation.ids import BucketId, Token
from merge_engine.bucket.segment import AggMode, Operation
from merge_engine.merging.local_aggregation import OPERATION
from merge_engine.merging.routing import partition_key
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Schema
from merge_engine.storage.objects import LocalStorage
from recovery.writer.parts import Part, PartCutter, PartSizes
from recovery.writer.promise_objects import Contents
from recovery.writer.redo import Promise, RedoLog, folded_rows
from recovery.writer.rows import Rows
from tests.support.memory_log import MemoryLog

SCHEMA = (
    SchemaBuilder()
    .column("k", pa.int64())
    .primary_key("k")
    .agg_column("total", pa.int64(), "sum")
    .agg_column("latest", pa.string(), "last_value", order_by="at")
    .build()
)
BY_DAY = (
    SchemaBuilder()
    .column("day", pa.int64())
    .column("k", pa.int64())
    .primary_key("day", "k")
    .partitioned_by("day")
    .agg_column("total", pa.int64(), "sum")
    .build()
)
NO_PARTITIONS = {b"": 0}
ROWS = Rows(
    data=[
        {"k": 1, "total": 2, "latest": "a", "at": datetime(2026, 5, 2, tzinfo=UTC)},
        {"k": 1, "total": 3, "latest": "b", "at": datetime(2026, 5, 1, tzinfo=UTC)},
    ]
)


@pytest.fixture
def storage() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def redo(storage: MemoryLog) -> RedoLog:
    return RedoLog(storage)


def write(
    redo: RedoLog,
    epoch: int = 3,
    *,
    table: str = "t1",
    owner: str = "me",
    rows: Rows = ROWS,
    schema: Schema = SCHEMA,
    part_rows: int = 100,
    partitions: Mapping[bytes, int] = NO_PARTITIONS,
) -> str:
    """Promise a batch; return where it is."""
    token = Token(epoch, 7)
    writer = redo.begin(table, owner, token)
    folded = folded_rows(rows, schema)
    if folded is not None:
        writer.begin(folded)
        cutter = PartCutter(
            schema,
            2,
            lambda target: BucketId(partitions[target.partition_key], target.bucket),
            PartSizes(rows=part_rows),
        )
        for piece in folded.pieces(schema):
            for part in cutter.add(piece):
                writer.add(part)
        for part in cutter.rest():
            writer.add(part)
    writer.finish()
    return redo.location_of(table, owner, token)


def left_of(
    promise: Promise, schema: Schema = SCHEMA, partitions: Iterable[int] = (0,)
) -> list[dict[str, Any]]:
    """Return the rows of a promise that are to be put."""
    return [
        row
        for part in promise.parts(schema, frozenset(partitions))
        for row in part.rows.to_pylist()
    ]


def read_again(
    redo: RedoLog, rows: Rows, later: Schema = SCHEMA
) -> tuple[Rows, list[dict[str, Any]]]:
    promise = redo.read(write(redo, rows=rows))
    found = promise.rows(later)
    assert found is not None
    assert found.schema is later
    return found, left_of(promise, later)


def test_a_promise_has_the_folded_rows(redo: RedoLog) -> None:
    found, data = read_again(redo, ROWS)
    [row] = data
    assert (row["k"], row["total"]) == (1, 5)
    assert found.columns == ["total", "latest"]
    assert (found.mode, found.operation_column) == (AggMode.MERGE_STATE, None)


def test_columns_and_deletes_go_along(redo: RedoLog) -> None:
    rows = Rows(
        data=[{"k": 1, "total": 2, "what": "upsert"}, {"k": 2, "total": 0, "what": "delete"}],
        columns=["total"],
        operation_column="what",
    )
    found, data = read_again(redo, rows)
    assert (found.columns, found.operation_column) == (["total"], OPERATION)
    assert sorted((row["k"], row[OPERATION]) for row in data) == [
        (1, Operation.UPSERT),
        (2, Operation.DELETE),
    ]


def test_what_replaces_goes_on_replacing(redo: RedoLog) -> None:
    rows = Rows(data=[{"k": 1, "total": 2}, {"k": 1, "total": 9}], mode=AggMode.REPLACE)
    found, data = read_again(redo, rows)
    assert (found.mode, data) == (AggMode.REPLACE, [{"k": 1, "total": 9}])


def test_columns_are_found_by_their_ids_and_orders_are_not_needed(redo: RedoLog) -> None:
    later = SCHEMA.rename_column("total", "sum").rename_column("k", "key").drop_column("latest")
    found, data = read_again(redo, ROWS, later.add_column("total", pa.int64(), "sum"))
    assert found.columns == ["sum"]
    assert data == [{"key": 1, "sum": 5}]


def test_nothing_is_left_of_a_promise_whose_columns_were_dropped(redo: RedoLog) -> None:
    only = redo.read(write(redo, rows=Rows(data=[{"k": 1, "total": 2}], columns=["total"])))
    assert only.rows(SCHEMA.drop_column("total")) is None


def test_a_schema_that_is_older_than_the_promise_is_refused(redo: RedoLog) -> None:
    later = SCHEMA.add_column("new", pa.int64(), "sum")
    found = redo.read(write(redo, rows=Rows(data=[{"k": 1, "new": 5}]), schema=later))
    with pytest.raises(UnknownSchema, match="schema version 2, and only 1 is known here"):
        found.rows(SCHEMA)


def test_a_partition_that_was_dropped_stays_so(redo: RedoLog) -> None:
    """Also if there is another one of its values: that has another id."""
    days = {day: partition_key(BY_DAY, {"day": day}) for day in (1, 2, 3)}
    data = [{"day": day, "k": 1, "total": day} for day in days]
    there = {key: number for number, key in enumerate(days.values(), start=1)}
    made = redo.read(write(redo, rows=Rows(data=data), schema=BY_DAY, partitions=there))
    assert left_of(made, BY_DAY, {1, 4}) == [{"day": 1, "k": 1, "total": 1}]
    assert left_of(made, BY_DAY, ()) == []


def test_an_empty_batch_can_be_promised(redo: RedoLog) -> None:
    for rows in (Rows(data=[]), Rows(data=pa.table({"k": pa.array([], pa.int64())}))):
        assert redo.read(write(redo, rows=rows)).rows(SCHEMA) is None


MANY = Rows(data=[{"k": k, "total": k} for k in range(100)], columns=["total"])


def test_a_large_promise_is_in_several_objects(storage: MemoryLog) -> None:
    redo = RedoLog(storage, object_bytes=200)
    location = write(redo, rows=MANY, part_rows=10)
    promise = redo.read(location)
    assert len(promise.contents.objects) > 2
    assert len(storage.names()) == len(promise.contents.objects) + 1
    parts = list(promise.parts(SCHEMA, frozenset({0})))
    assert sorted(row["k"] for part in parts for row in part.rows.to_pylist()) == list(range(100))
    for number in (0, 1):
        numbers = [part.number for part in parts if part.key == BucketId(0, number)]
        assert numbers == list(range(len(numbers)))
        assert promise.contents.parts[BucketId(0, number)] == len(numbers) > 2
    redo.delete(location, promise.contents.objects)
    assert storage.names() == []


def test_parts_of_several_writers_are_one_promise(redo: RedoLog) -> None:
    """Tasks write the parts of their buckets; the driver promises them all."""
    data = pa.table({"k": [1, 2], "total": [1, 2]})
    rows = Rows(data=data, columns=["total"], mode=AggMode.MERGE_STATE, schema=SCHEMA)
    written = []
    for number in (0, 1):
        task = redo.begin("t1", "me", Token(3, 7))
        task.begin(rows)
        [batch] = data.slice(number, 1).to_batches()
        task.add(Part(BucketId(0, number), 0, batch))
        written.append(json.loads(json.dumps(task.spill().to_json())))
    driver = redo.begin("t1", "me", Token(3, 7))
    driver.take(Contents.from_json(written[0]) + Contents.from_json(written[1]))
    driver.in_parts = True
    driver.finish()
    promise = redo.read(redo.location_of("t1", "me", Token(3, 7)))
    assert promise.in_parts
    assert left_of(promise) == data.to_pylist()


def test_what_lost_attempts_of_tasks_have_written_goes_with_the_promise(
    redo: RedoLog, storage: MemoryLog
) -> None:
    """Of this batch or of one before, whenever it came; not of a batch that is still to come."""

    def attempt(token: Token, owner: str = "me") -> Contents:
        task = redo.begin("t1", owner, token)
        task.begin(Rows(data=(), columns=["total"], schema=SCHEMA))
        task.add(Part(BucketId(0, 0), 0, pa.record_batch({"k": [1], "total": [1]})))
        return task.spill()

    def names() -> list[str]:
        return storage.child("t1").names()

    lost = [attempt(Token(3, batch)) for batch in (6, 7)]
    driver = redo.begin("t1", "me", Token(3, 7))
    driver.take(attempt(Token(3, 7)))
    driver.finish()
    lost.append(attempt(Token(3, 7)))
    others = [Token(3, 8), Token(2, 7), Token(4, 1), Token(30, 7)]
    kept = [attempt(token) for token in others] + [attempt(Token(3, 7), "she")]
    promise = redo.read(redo.location_of("t1", "me", Token(3, 7)))
    assert len(names()) == 1 + 1 + len(lost) + len(kept)
    redo.delete(redo.location_of("t1", "me", Token(3, 7)), promise.contents.objects)
    assert sorted(names()) == sorted(name for one in kept for name in one.objects)


def test_a_log_that_the_driver_does_not_share_with_its_tasks_is_told(tmp_path: Path) -> None:
    token = Token(3, 7)
    task = RedoLog.open(str(tmp_path / "there")).begin("t1", "me", token)
    task.begin(Rows(data=(), columns=["total"], schema=SCHEMA))
    task.add(Part(BucketId(0, 0), 0, pa.record_batch({"k": [1], "total": [1]})))
    driver = RedoLog.open(str(tmp_path / "here")).begin("t1", "me", token)
    driver.take(task.spill())
    with pytest.raises(InvalidInput, match="a place that the driver and all executors share"):
        driver.finish()


def test_a_promise_that_lacks_an_object_or_a_part_is_not_kept(tmp_path: Path) -> None:
    redo = RedoLog(LocalStorage(tmp_path), object_bytes=200)
    promise = redo.read(write(redo, rows=MANY, part_rows=10))
    first, second, *_ = (tmp_path / "t1" / name for name in promise.contents.objects)
    whole = first.read_bytes()
    for damaged in (b"", whole[:-1], bytes([*whole[:40], whole[40] ^ 1, *whole[41:]])):
        first.write_bytes(damaged)
        with pytest.raises(CorruptSegment, match=f"{first.name} in {tmp_path}/t1 is damaged"):
            left_of(promise)
    first.write_bytes(second.read_bytes())
    with pytest.raises(CorruptSegment, match="has not all of its parts"):
        left_of(promise)
    first.unlink()
    with pytest.raises(CorruptSegment, match=f"{first.name} is missing from {tmp_path}/t1"):
        left_of(promise)


def test_a_log_with_a_location_can_be_pickled(tmp_path: Path) -> None:
    redo = RedoLog.open(str(tmp_path / "redo"))
    location = write(redo)
    assert left_of(pickle.loads(pickle.dumps(redo)).read(location)) == left_of(redo.read(location))


def test_a_promise_that_is_sent_twice_is_there_once(redo: RedoLog, storage: MemoryLog) -> None:
    storage.faults.append("answer")
    with pytest.raises(Exception, match="no answer"):
        write(redo)
    location = write(redo)
    assert storage.names() == [location.removeprefix("/")]


def test_another_batch_under_the_same_name_is_not_taken_for_ours(redo: RedoLog) -> None:
    write(redo)
    other = Rows(data=[{"k": 1, "total": 700}])
    with pytest.raises(CorruptSegment, match="holds another batch than the one that is promised"):
        write(redo, rows=other)
    write(redo, rows=other, table="t2")


def test_only_what_earlier_epochs_of_an_owner_left_is_dropped(storage: MemoryLog) -> None:
    """Also parts of what never became a promise."""
    redo = RedoLog(storage, object_bytes=200)
    stay = [write(redo, 20), write(redo, 4, owner="her"), write(redo, 4, table="t2")]
    before = storage.names()
    assert [f"/{name}" for name in before] == sorted(stay)
    for epoch in (3, 12):
        location = write(redo, epoch, rows=MANY, part_rows=10)
        if epoch == 3:
            storage.delete([location.removeprefix("/")])
    assert len(storage.names()) > len(before) + 4
    redo.delete_of("t1", "me", before_epoch=20)
    assert storage.names() == before


def test_a_location_is_enough_to_find_a_promise(tmp_path: Path) -> None:
    redo = RedoLog.open(str(tmp_path / "redo"))
    location = write(redo)
    expected = left_of(redo.read(location))
    assert left_of(RedoLog.holding(location, None).read(location)) == expected
    own = RedoLog.open(f"{tmp_path}/redo/")
    assert RedoLog.holding(location, own) is own
    other = RedoLog.open(str(tmp_path / "other"))
    assert left_of(RedoLog.holding(location, other).read(location)) == expected


def test_a_log_elsewhere_is_opened_with_the_settings_of_one_s_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[tuple[str, dict[str, str]]] = []

    def open_storage(location: str, **settings: str) -> MemoryLog:
        opened.append((location, settings))
        return MemoryLog()

    monkeypatch.setattr("recovery.writer.redo.open_storage", open_storage)
    own = RedoLog.open("s3://mine/redo", region="eu")
    assert RedoLog.holding("s3://mine/redo/t1/x.redo", own) is own
    RedoLog.holding("s3://other/redo/t1/x.redo", own)
    RedoLog.holding("s3://other/redo/t1/x.redo", None)
    RedoLog.holding(f"{tmp_path}/t1/x.redo", own)
    assert opened[1:] == [
        ("s3://other/redo", {"region": "eu"}),
        ("s3://other/redo", {}),
        (str(tmp_path), {}),
    ]


def test_what_else_lies_in_the_place_is_nobody_s_promise(redo: RedoLog, storage: MemoryLog) -> None:
    location = write(redo)
    storage.create(f"{location.removeprefix('/')}.bak", b"")
    storage.create(location.removeprefix("/").replace("-3-7", "-3-7 (copy)"), b"")
    redo.delete_of("t1", "me", before_epoch=99)
    left = [name.removeprefix("t1/") for name in storage.names()]
    assert len(left) == 2
    assert location.rsplit("/", 1)[-1] not in left


def test_a_log_that_has_no_location_is_its_writers_alone(redo: RedoLog) -> None:
    location = write(redo)
    assert RedoLog.holding(location, redo) is redo
    with pytest.raises(InvalidInput, match="only its writer knows"):
        RedoLog.holding(location, None)


def test_what_is_damaged_or_gone_says_where(tmp_path: Path) -> None:
    redo = RedoLog(LocalStorage(tmp_path))
    location = write(redo)
    file = tmp_path / location.removeprefix("/")
    whole = file.read_bytes()
    flipped = [
        bytes([*whole[:at], whole[at] ^ (1 << at % 8), *whole[at + 1 :]])
        for at in range(len(whole))
    ]
    for damaged in (b"", b"nothing of the kind", whole[:-1], *flipped):
        file.write_bytes(damaged)
        with pytest.raises(CorruptSegment, match=f"{file.name} in {file.parent} is damaged"):
            redo.read(location)
    redo.delete(location)
    with pytest.raises(CorruptSegment, match=f"{file.name} is missing from {file.parent}"):
        redo.read(location)
