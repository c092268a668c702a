"""The redo log: what is written is read again, under whatever schema there is by then."""

from pathlib import Path

import pyarrow as pa
import pytest

from merge_engine import AggMode, CorruptSegment, LocalStorage, Schema, SchemaBuilder, Token
from merge_engine.table import as_arrow
from recovery.access import Rows
from recovery.redo import RedoLog
from tests.memory_log import MemoryLog

SCHEMA = (
    SchemaBuilder()
    .column("k", pa.int64())
    .primary_key("k")
    .agg_column("total", pa.int64(), "sum")
    .agg_column("latest", pa.string(), "last_value", order_by="at")
    .build()
)
ROWS = Rows(data=[{"k": 1, "total": 2, "latest": "a", "at": 5}])


@pytest.fixture
def storage() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def redo(storage: MemoryLog) -> RedoLog:
    return RedoLog(storage)


def read_again(redo: RedoLog, rows: Rows, later: Schema = SCHEMA) -> tuple[Rows, list[object]]:
    found = redo.read(redo.write("me", Token(3, 7), rows, SCHEMA), later)
    return found, as_arrow(found.data, later).to_pylist()


def test_rows_are_read_as_they_were_written(redo: RedoLog) -> None:
    found, data = read_again(redo, ROWS)
    assert data == ROWS.data
    assert found.columns == ["total", "latest"]
    assert (found.mode, found.operation_column) == (AggMode.ACCUMULATE, None)


def test_columns_mode_and_operations_go_along(redo: RedoLog) -> None:
    rows = Rows(
        data=[{"k": 1, "total": 2, "what": "upsert"}, {"k": 2, "total": 0, "what": "delete"}],
        columns=["total"],
        mode=AggMode.MERGE_STATE,
        operation_column="what",
    )
    found, data = read_again(redo, rows)
    assert (found.columns, found.mode) == (["total"], AggMode.MERGE_STATE)
    assert found.operation_column == "_operation"
    assert [row["_operation"] for row in data] == ["upsert", "delete"]  # type: ignore[index]


def test_columns_are_found_by_their_ids(redo: RedoLog) -> None:
    later = SCHEMA.rename_column("total", "sum").drop_column("latest")
    found, data = read_again(redo, ROWS, later.add_column("total", pa.int64(), "sum"))
    assert found.columns == ["sum"]
    assert [sorted(row) for row in data] == [["at", "k", "sum"]]  # type: ignore[call-overload]


def test_a_batch_that_is_sent_twice_is_there_once(redo: RedoLog, storage: MemoryLog) -> None:
    storage.faults.append("answer")
    with pytest.raises(Exception, match="no answer"):
        redo.write("me", Token(3, 7), ROWS, SCHEMA)
    location = redo.write("me", Token(3, 7), ROWS, SCHEMA)
    assert storage.names() == [location]


def test_only_what_earlier_epochs_of_an_owner_left_is_to_be_dropped(redo: RedoLog) -> None:
    mine = [redo.write("me", Token(epoch, 7), ROWS, SCHEMA) for epoch in (3, 12, 20)]
    redo.write("her", Token(4, 7), ROWS, SCHEMA)
    assert sorted(redo.of_owner("me", before_epoch=20)) == sorted(mine[:2])
    redo.delete(mine)
    assert redo.of_owner("me", before_epoch=99) == []


def test_what_is_damaged_or_gone_says_where(tmp_path: Path) -> None:
    redo = RedoLog(LocalStorage(tmp_path))
    location = redo.write("me", Token(3, 7), ROWS, SCHEMA)
    whole = (tmp_path / location).read_bytes()
    flipped = bytes([*whole[:-100], whole[-100] ^ 1, *whole[-99:]])
    for damaged in (b"", b"nothing of the kind", whole[:-1], flipped):
        (tmp_path / location).write_bytes(damaged)
        with pytest.raises(CorruptSegment, match=f"{location} in {tmp_path} is damaged"):
            redo.read(location, SCHEMA)
    redo.delete([location])
    with pytest.raises(CorruptSegment, match=f"{location} is missing from {tmp_path}"):
        redo.read(location, SCHEMA)
