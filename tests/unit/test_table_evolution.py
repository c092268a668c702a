"""An embedded table that is altered: by another handle, and beside calls that have begun."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from foundation.errors import (
    AlreadyExists,
    InvalidInput,
    MissingColumn,
    SchemaError,
    UnknownColumn,
    UnknownOutcome,
)
from merge_engine.bucket.bucket import Bucket
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.storage.objects import LocalStorage
from recovery.embedded.table import Table
from tests.conftest import SUMS


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    with Table.create(tmp_path / "table", SUMS, buckets=2) as made:
        yield made


def opened_again(tmp_path: Path, view: str) -> Table:
    """Return another handle, as of another machine: with views of its own."""
    return Table.open(tmp_path / "table", view_directory=tmp_path / view)


def rows(table: Table) -> list[dict[str, Any]]:
    return sorted(table.to_arrow().to_pylist(), key=lambda row: int(row["k"]))


def before(monkeypatch: pytest.MonkeyPatch, name: str, *happens: Callable[[], object]) -> None:
    """Let things happen before the next call of this method of a bucket."""
    waiting, real = iter(happens), getattr(Bucket, name)

    def call(self: Bucket, *arguments: Any, **named: Any) -> Any:
        for happening in waiting:
            happening()
        return real(self, *arguments, **named)

    monkeypatch.setattr(Bucket, name, call)


def test_a_handle_from_before_an_alteration_loses_nothing_of_what_came_after_it(
    table: Table, tmp_path: Path
) -> None:
    table.put({"k": [1, 2], "a": [1, 2]})
    with opened_again(tmp_path, "second") as second:
        table.add_column("c", pa.int64(), "sum")
        table.put({"k": [1, 2], "c": [10, 20]})
        second.put({"k": [1, 2], "a": [1, 1]})
        assert second.schema.names == ("k", "a", "b", "c")
        assert [row["c"] for row in rows(second)] == [10, 20]
    with opened_again(tmp_path, "third") as third:
        assert [(row["a"], row["c"]) for row in rows(third)] == [(2, 10), (3, 20)]


def test_a_scan_has_the_columns_that_it_began_with_whatever_has_their_names(
    table: Table,
) -> None:
    table.put({"k": list(range(20)), "a": [1] * 20, "b": [2] * 20})
    scan = iter(table.scan(["a"]))
    first = next(scan)
    for old, new in (("a", "c"), ("b", "a"), ("k", "key")):
        table.rename_column(old, new)
    table.put({"key": list(range(20)), "a": [100] * 20})
    found = pa.Table.from_batches([first, *scan])
    assert found.column_names == ["k", "a"]
    assert set(found["a"].to_pylist()) == {1}
    assert len(found) == 20


def test_a_scan_of_a_column_that_is_dropped_meanwhile_says_so(table: Table) -> None:
    table.put({"k": list(range(20)), "a": [1] * 20})
    scan, at_a_cut = iter(table.scan(["a"], isolation="latest")), iter(table.scan(["a"]))
    rows = next(at_a_cut).num_rows
    next(scan)
    table.drop_column("a")
    with pytest.raises(UnknownColumn, match="column 'a' was dropped meanwhile; read again"):
        list(scan)
    # Unless the rows of all buckets were pinned before.
    assert rows + sum(batch.num_rows for batch in at_a_cut) == 20


@pytest.mark.parametrize("to_offset", [None, 99])
def test_a_changelog_beside_an_alteration_and_a_put_has_both_or_neither(
    table: Table, monkeypatch: pytest.MonkeyPatch, to_offset: int | None
) -> None:
    table.put({"k": [1], "a": [1]})
    [bucket_id] = [one for one, end in table.end_offsets().items() if end > 1]

    def alter_and_put(column: str) -> None:
        table.add_column(column, pa.int64(), "sum")
        table.put({"k": [1], column: [5]})

    # Before the end is fixed, and between that and the reading.
    before(monkeypatch, "settled_end", lambda: alter_and_put("c"))
    before(monkeypatch, "read_log", lambda: alter_and_put("d"))
    latest = table.changelog(bucket_id, 0, to_offset, isolation="latest")
    found = [batch.to_pylist() for batch in latest]
    assert [[row["c"] for row in batch] for batch in found] == [[None], [5]]


def test_a_put_that_was_read_before_its_column_was_dropped_is_refused(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    before(monkeypatch, "exclusive", lambda: table.drop_column("a"))
    with pytest.raises(UnknownColumn, match="column 'a' was dropped meanwhile"):
        table.put({"k": list(range(20)), "a": [1] * 20})
    assert rows(table) == []


@pytest.mark.parametrize("error", [UnknownOutcome, AlreadyExists])
def test_an_alteration_that_happened_without_an_answer_is_found_to_be_ours(
    table: Table, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    real = LocalStorage.create

    def create(storage: LocalStorage, name: str, data: bytes) -> None:
        real(storage, name, data)
        monkeypatch.undo()
        raise error("done, and then sent again or not answered")

    monkeypatch.setattr(LocalStorage, "create", create)
    with suppress(UnknownOutcome):
        table.add_column("c", pa.int64(), "sum")
    if error is UnknownOutcome:  # It says: call again.
        table.add_column("c", pa.int64(), "sum")
    table.put({"k": [1], "c": [5]})
    assert [row["c"] for row in rows(table)] == [5]


def test_another_alteration_that_was_faster_is_not_taken_for_ours(
    table: Table, tmp_path: Path
) -> None:
    with opened_again(tmp_path, "second") as second:
        second.add_column("c", pa.int64(), "max")
        with pytest.raises(InvalidInput, match="the table was altered elsewhere; open it again"):
            table.add_column("c", pa.int64(), "sum")


def ordered(location: Path, order_by: str) -> Table:
    """Return a table whose column `v` is ordered by another one, or by the input alone."""
    schema = (
        SchemaBuilder()
        .column("k", "BIGINT")
        .agg_column("ts", "BIGINT", "max")
        .agg_column("v", "STRING", "last_value", order_by=order_by)
        .primary_key("k")
        .build()
    )
    return Table.create(location, schema)


def test_what_is_ordered_by_a_column_is_ordered_by_its_new_name_when_it_is_renamed(
    tmp_path: Path,
) -> None:
    with ordered(tmp_path / "table", "ts") as table:
        table.put({"k": [1, 1], "ts": [5, 3], "v": ["new", "old"]})
        table.rename_column("ts", "event_ts")
        table.put({"k": [1, 1], "event_ts": [4, 5], "v": ["late", "newest"]})
        assert rows(table) == [{"k": 1, "event_ts": 5, "v": "newest"}]
        # The former name is free, and nothing is ordered by what has it now.
        table.add_column("ts", "STRING", "last_value")
        table.put({"k": [1], "event_ts": [9], "v": ["last"], "ts": ["any text"]})
    with opened_again(tmp_path, "third") as table:
        assert rows(table) == [{"k": 1, "event_ts": 9, "v": "last", "ts": "any text"}]
        with pytest.raises(MissingColumn, match="'v' is ordered by 'event_ts'"):
            table.put({"k": [1], "v": ["x"]})


@pytest.mark.parametrize(
    "alter",
    [
        lambda table: table.add_column("at", "BIGINT", "max"),
        lambda table: table.rename_column("ts", "at"),
        lambda table: table.add_column(
            "w", "STRING", "last_value", order_by="k", order_type="DATE"
        ),
    ],
    ids=["added", "renamed", "ordered by it"],
)
def test_a_column_that_no_batch_could_have_beside_an_order_is_refused(
    alter: Callable[[Table], None], tmp_path: Path
) -> None:
    with ordered(tmp_path / "table", "at") as table:
        with pytest.raises(SchemaError, match=r"is ordered by '(at|k)' as .* takes BIGINT"):
            alter(table)
        table.add_column("when", "TIMESTAMP", "max")
        table.rename_column("when", "at")
        at = datetime(2026, 11, 19, tzinfo=UTC)
        table.put({"k": [1], "at": [at], "v": ["x"]})
        assert rows(table) == [{"k": 1, "ts": None, "v": "x", "at": at}]
