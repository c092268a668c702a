"""The redo log: a promise is read again, and can be kept under whatever schema there is by then."""

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from merge_engine import (
    AggMode,
    CorruptSegment,
    InvalidInput,
    LocalStorage,
    Schema,
    SchemaBuilder,
    Token,
    UnknownSchema,
)
from merge_engine.routing import partition_key
from merge_engine.segment import Operation
from merge_engine.table import as_arrow
from recovery.access import Rows
from recovery.redo import Promise, RedoLog
from tests.memory_log import MemoryLog

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


def promise(rows: Rows = ROWS) -> Promise:
    return Promise.of(rows, SCHEMA, NO_PARTITIONS)


def write(redo: RedoLog, epoch: int = 3, *, table: str = "t1", owner: str = "me") -> str:
    return redo.write(table, owner, Token(epoch, 7), promise())


def read_again(redo: RedoLog, rows: Rows, later: Schema = SCHEMA) -> tuple[Rows, list[object]]:
    location = redo.write("t1", "me", Token(3, 7), promise(rows))
    found = redo.read(location).rows(later, NO_PARTITIONS)
    assert found is not None
    assert found.schema is later
    return found, as_arrow(found.data, later).to_pylist()


def test_a_promise_has_the_folded_rows(redo: RedoLog) -> None:
    found, data = read_again(redo, ROWS)
    [row] = data
    assert isinstance(row, dict)
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
    assert (found.columns, found.operation_column) == (["total"], "_operation")
    assert sorted((row["k"], row["_operation"]) for row in data) == [  # type: ignore[index]
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
    only = promise(Rows(data=[{"k": 1, "total": 2}], columns=["total"]))
    assert only.rows(SCHEMA.drop_column("total"), NO_PARTITIONS) is None


def test_a_schema_that_is_older_than_the_promise_is_refused(redo: RedoLog) -> None:
    later = SCHEMA.add_column("new", pa.int64(), "sum")
    found = Promise.of(Rows(data=[{"k": 1, "new": 5}]), later, NO_PARTITIONS)
    with pytest.raises(UnknownSchema, match="schema version 2, and only 1 is known here"):
        found.rows(SCHEMA, NO_PARTITIONS)


def test_a_partition_that_was_dropped_stays_so_also_if_there_is_another_of_its_values() -> None:
    days = {day: partition_key(BY_DAY, {"day": day}) for day in (1, 2, 3)}
    data = [{"day": day, "k": 1, "total": day} for day in days]
    there = {key: number for number, key in enumerate(days.values(), start=1)}
    made = Promise.of(Rows(data=data), BY_DAY, there)
    made_anew = {days[1]: 1, days[3]: 4}
    found = made.rows(BY_DAY, made_anew)
    assert found is not None
    assert as_arrow(found.data, BY_DAY).to_pylist() == [{"day": 1, "k": 1, "total": 1}]
    assert made.rows(BY_DAY, {}) is None


def test_an_empty_batch_can_be_promised(redo: RedoLog) -> None:
    for rows in (Rows(data=[]), Rows(data=pa.table({"k": pa.array([], pa.int64())}))):
        location = redo.write("t1", "me", Token(3, 7), promise(rows))
        assert redo.read(location).rows(SCHEMA, NO_PARTITIONS) is None


def test_a_promise_that_is_sent_twice_is_there_once(redo: RedoLog, storage: MemoryLog) -> None:
    storage.faults.append("answer")
    with pytest.raises(Exception, match="no answer"):
        write(redo)
    location = write(redo)
    assert storage.names() == [location.removeprefix("/")]


def test_another_batch_under_the_same_name_is_not_taken_for_ours(redo: RedoLog) -> None:
    write(redo)
    other = promise(Rows(data=[{"k": 1, "total": 700}]))
    with pytest.raises(CorruptSegment, match="holds another batch than the one that is promised"):
        redo.write("t1", "me", Token(3, 7), other)
    redo.write("t2", "me", Token(3, 7), other)


def test_only_what_earlier_epochs_of_an_owner_left_is_to_be_dropped(redo: RedoLog) -> None:
    mine = [write(redo, epoch) for epoch in (3, 12, 20)]
    write(redo, 4, owner="her")
    write(redo, 4, table="t2")
    assert sorted(redo.of_owner("t1", "me", before_epoch=20)) == sorted(mine[:2])
    redo.delete(mine)
    assert redo.of_owner("t1", "me", before_epoch=99) == []


def test_a_location_is_enough_to_find_a_promise(tmp_path: Path) -> None:
    location = write(RedoLog.open(str(tmp_path / "redo")))
    found = RedoLog.holding(location, None).read(location)
    assert found.data.equals(promise().data)
    own = RedoLog.open(f"{tmp_path}/redo/")
    assert RedoLog.holding(location, own) is own
    other = RedoLog.open(str(tmp_path / "other"))
    assert RedoLog.holding(location, other).read(location).data.equals(promise().data)


def test_a_log_elsewhere_is_opened_with_the_settings_of_one_s_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[tuple[str, dict[str, str]]] = []

    def open_storage(location: str, **settings: str) -> MemoryLog:
        opened.append((location, settings))
        return MemoryLog()

    monkeypatch.setattr("recovery.redo.open_storage", open_storage)
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
    assert redo.of_owner("t1", "me", before_epoch=99) == [location]


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
    redo.delete([location])
    with pytest.raises(CorruptSegment, match=f"{file.name} is missing from {file.parent}"):
        redo.read(location)
