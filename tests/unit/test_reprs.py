"""What people see of our objects in a notebook or a log: what they are, and no rows or secrets."""

import pyarrow as pa

import tallybook as tb
from recovery.writer.redo import RedoLog
from tests.support.snapshot_world import MemoryStorage


def test_rows_say_how_many_they_are_and_not_what() -> None:
    rows = tb.Rows(data=pa.table({"k": [1, 2], "x": [4711, 4712]}), columns=["x"])
    assert repr(rows) == "Rows(2 rows of Table, columns=['x'], mode=accumulate)"
    assert repr(tb.Rows(data={"k": [1]})) == "Rows(dict, mode=accumulate)"
    assert repr(tb.Rows(data=lambda: iter([]))) == "Rows(pieces, mode=accumulate)"


def test_a_builder_says_what_was_declared_so_far() -> None:
    builder = tb.SchemaBuilder().column("k", pa.int64()).agg_column("n", pa.int64(), "sum")
    assert repr(builder) == "SchemaBuilder(k, n sum; key not given yet)"
    assert repr(builder.primary_key("k")) == "SchemaBuilder(k, n sum; key k)"


def test_a_redo_log_says_where_it_is() -> None:
    assert repr(RedoLog(MemoryStorage(), "s3://bucket/redo")) == "RedoLog(s3://bucket/redo)"
    assert repr(RedoLog(MemoryStorage())) == "RedoLog(of this process)"


def test_a_sink_says_what_it_writes_and_whose_it_is_and_no_token() -> None:
    sink = tb.AggregateSink(
        "127.0.0.1:1",
        "totals",
        columns=["n", "x"],
        owner_id="orders",
        connection={"token": "hush"},
        check=False,
    )
    assert repr(sink) == "AggregateSink(totals: n, x, owned by orders)"


def test_a_schema_in_a_notebook_is_a_table_whose_names_are_text() -> None:
    made = tb.SchemaBuilder().column("<k>", pa.int64()).agg_column("n", pa.int64(), "sum")
    shown = made.primary_key("<k>").build()._repr_html_()
    assert "<table" in shown
    assert "&lt;k&gt;" in shown
    assert "<k>" not in shown
