"""What commands print, and how files describe tables: without a cluster."""

import json
import os
import re
import stat
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest
import typer
from pyarrow import parquet

from foundation.errors import InvalidInput, SchemaError
from tallybook.commands.definition_files import from_ddl, from_json
from tallybook.commands.export import Format, write_file, write_stream
from tallybook.commands.locks import listed
from tallybook.commands.output import (
    aligned,
    complain,
    confirm,
    counted,
    json_text,
    print_line,
    print_table,
    shown,
    size,
    span,
)
from tallybook.commands.reaching import told
from tallybook.commands.status import problems_of, status_rows


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.04, "0.0 s"), (9.94, "9.9 s"), (59, "59 s"), (3599, "59 min")),
        *((3660, "1 h 1 min"), (90_000, "1 d 1 h"), (86_400, "1 d"), (-5, "-5.0 s")),
    ],
)
def test_a_span_has_its_largest_units(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_sizes_and_counts_are_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)] == [
        *("0 B", "1023 B", "1.5 KiB", "3.0 GiB", "5.0 TiB"),
    ]
    assert [counted(n, "row") for n in (0, 1, 1000)] == ["0 rows", "1 row", "1,000 rows"]


def test_a_table_that_is_not_for_a_terminal_is_plain_and_never_cut(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wide = "x" * 300
    print_table(("A", "B"), [("1", wide), ("22", "[bold]y[/bold]")])
    assert capsys.readouterr().out == f"A   B\n1   {wide}\n22  [bold]y[/bold]\n"
    assert aligned([("A", "B")]) == ["A  B"]


def test_without_a_terminal_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    confirm("Drop it?", yes=True)
    with pytest.raises(typer.Exit) as ended:
        confirm("Drop it?", yes=False)
    assert ended.value.exit_code == 2
    assert "Drop it? There is no terminal to ask: say --yes" in capsys.readouterr().err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: False)
    with pytest.raises(typer.Exit) as ended:
        confirm("Drop it?", yes=False)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "nothing was changed\n"

    def interrupt(*_: object, **__: object) -> bool:
        raise typer.Abort

    monkeypatch.setattr(typer, "confirm", interrupt)
    with pytest.raises(typer.Exit) as ended, told("tallybook drop"):
        confirm("Drop it?", yes=False)
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "\ntallybook drop: interrupted\n"


def test_a_value_is_on_one_line_and_moves_no_cursor() -> None:
    assert shown("a\nb\x1b[2J \u00e4") == "a\\nb\\x1b[2J \u00e4"
    assert [shown(one) for one in (None, b"\x00q", 1.5, ["x\n"])] == [
        "-",
        "0071",
        "1.5",
        "['x\\n']",
    ]


ORDERS = 'drop "me"\x1b[31m\x9b2J\u202e'


def test_no_name_and_no_value_gives_orders_to_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_line(f"table {ORDERS} is dropped")
    print_table((ORDERS, "B"), [(ORDERS, "1")])
    complain(f"tallybook drop: {ORDERS}")
    with pytest.raises(typer.Exit):
        confirm(f"Drop {ORDERS}?", yes=False)
    printed = capsys.readouterr()
    for text in (printed.out, printed.err, json_text({ORDERS: [ORDERS]})):
        assert not [one for one in text if one != "\n" and not one.isprintable()]
    assert json.loads(json_text({ORDERS: [ORDERS]})) == {ORDERS: [ORDERS]}


def test_json_has_no_nan_and_no_infinity() -> None:
    nan, endless = float("nan"), float("inf")
    document = {"a": nan, "b": [endless, {"c": (-endless, 1.5, None, True)}], "d": b"\x01"}
    assert json.loads(json_text(document), parse_constant=pytest.fail) == {
        "a": "NaN",
        "b": ["Infinity", {"c": ["-Infinity", 1.5, None, True]}],
        "d": "01",
    }


def test_on_a_narrow_terminal_each_row_is_a_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    head = [f"COLUMN {number}" for number in range(9)]
    print_table(head, [[f"value {number}" for number in range(9)], [*"abcdefgh[]"][:9]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["COLUMN 0  value 0", "COLUMN 1  value 1"]
    assert lines[9:11] == ["", "COLUMN 0  a"]
    assert lines[-1] == "COLUMN 8  ["
    monkeypatch.setenv("COLUMNS", "200")
    print_table(head, [["x"] * 9])
    heading = capsys.readouterr().out.splitlines()[1]
    assert all(name in heading for name in head)


def test_of_many_columns_the_first_are_listed() -> None:
    names = [f"c{number}" for number in range(40)]
    assert listed(names, 5) == "c0, c1, c2, c3, c4 and 35 more"
    assert listed(names[:5], 5) == "c0, c1, c2, c3, c4"
    assert listed(names, None).endswith("c38, c39")


ROWS = pa.table({"k": [1, 2], "at": pa.array([0, 3_000_000], pa.date32()), "n": [[None], [2.0]]})


def test_a_file_that_is_replaced_keeps_its_permissions_and_a_link_stays_one(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    file.write_text("what was there")
    file.chmod(0o640)
    assert write_file(file, Format.PARQUET, ROWS.schema, ROWS.to_batches())[0] == 2
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert parquet.read_table(file).equals(ROWS)
    assert [one.name for one in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("kind", Format)
def test_every_format_goes_through_a_pipe(kind: Format, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    rows, written = write_stream(pipe, kind, ROWS.schema, ROWS.to_batches())
    reader.join()
    [data] = received
    assert (rows, written) == (2, len(data))
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    if kind is Format.PARQUET:
        assert parquet.read_table(pa.BufferReader(data)).equals(ROWS)
    elif kind is Format.ARROW:
        assert pa.ipc.open_file(data).read_all().equals(ROWS)
    else:
        assert data.decode().splitlines()[1:] == ['1,1970-01-01,"[null]"', '2,10183-09-21,"[2.0]"']


def table(**fields: Any) -> dict[str, Any]:
    return {
        "name": "clicks",
        "buckets": [],
        "snapshots": {"oldest_s": None, "buckets": 0},
        "locks": [],
        **fields,
    }


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        ({"servers": [], "tables": []}, "no server runs: start one"),
        (
            {"servers": [{"address": "h:1", "error": "gone"}], "tables": []},
            "server h:1 does not answer: gone",
        ),
        (
            {"servers": [{"address": "h:1", "problems": {"disk full": "no room"}}], "tables": []},
            "server h:1: disk full: no room",
        ),
        (
            {
                "servers": [{"address": "h:1"}],
                "tables": [
                    table(buckets=[{"bucket": f"0/{n}", "server": None, "why": "damaged"}])
                    for n in (3,)
                ],
            },
            "table clicks: bucket 0/3 without a leader: damaged",
        ),
        (
            {
                "servers": [{"address": "h:1"}],
                "tables": [
                    table(
                        buckets=[
                            {
                                "bucket": "0/3",
                                "server": "h:1",
                                "view_lag": 7,
                                "view_error": "no room",
                            }
                        ]
                    )
                ],
            },
            "table clicks: the view of bucket 0/3 at server h:1 is 7 changes behind its log: no",
        ),
        (
            {
                "servers": [{"address": "h:1"}],
                "tables": [table(snapshots={"oldest_s": 7200.0, "buckets": 1})],
            },
            "table clicks: the latest snapshot of a bucket is 2 h old",
        ),
        (
            {
                "servers": [{"address": "h:1"}],
                "tables": [table(locks=[{"owner": "e", "columns": "a", "state": "expired"}])],
            },
            "table clicks: the lock of `e` on a is expired; its job comes back, or "
            "`tallybook locks release clicks e`",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_reason(seen: dict[str, Any], problem: str) -> None:
    [found] = problems_of(seen, snapshot_age_s=3600.0)
    assert found.startswith(problem)


def test_a_thousand_buckets_without_a_leader_are_one_line() -> None:
    buckets = [{"bucket": f"0/{n}", "server": None, "why": "no server"} for n in range(1000)]
    seen = {"servers": [{"address": "h:1"}], "tables": [table(buckets=buckets)]}
    [line] = problems_of(seen, snapshot_age_s=60.0)
    assert line.endswith("and 980 more without a leader: no server")
    assert len(line) < 300


def test_a_server_that_does_not_answer_is_shown_with_its_error() -> None:
    assert status_rows([{"address": "h:1", "error": "gone"}]) == [("h:1", *"------", "(gone)")]


DDL = """
CREATE TABLE `t` (
    k BIGINT, -- the key
    `a, b` ARRAY<STRING> COMMENT 'with (brackets), and commas',
    n DECIMAL(20, 2),
    PRIMARY KEY (k)
) WITH ('fields.n.agg' = 'sum', 'fields.a, b.agg' = 'last_value', 'buckets' = '8')
"""


def test_a_statement_describes_a_table() -> None:
    found = from_ddl(DDL)
    assert from_ddl(f"{DDL.rstrip()[:-1]}, 'team' = 'a')").options == {"team": "a"}
    assert (found.name, found.buckets, found.column_locks) == ("t", 8, None)
    assert found.schema.names == ("k", "a, b", "n")
    assert [column.name for column in found.schema.key_columns] == ["k"]
    assert [column.function.name for column in found.schema.value_columns if column.function] == [
        "last_value",
        "sum",
    ]


@pytest.mark.parametrize("delimiter", ["--", " -- ", "a--b", "/*", "''--", "/* x */"])
def test_what_is_in_quotes_is_no_comment(delimiter: str) -> None:
    statement = f"""
        CREATE TABLE t (k BIGINT, -- it's the key
            `a--b` STRING COMMENT 'it''s -- here', /* and 'here', -- too */ PRIMARY KEY (k)
        ) WITH ('fields.a--b.agg' = 'string_agg', -- joined by
            'fields.a--b.string_agg.delimiter' = '{delimiter}', 'buckets' = '2') -- end"""
    for text in (statement, f"{' '.join(_without_line_comments(statement))};"):
        found = from_ddl(text)
        [column] = found.schema.value_columns
        assert column.name == "a--b"
        assert column.function is not None
        assert column.function.parameters == {"delimiter": delimiter.replace("''", "'")}
        assert found.buckets == 2


def _without_line_comments(text: str) -> list[str]:
    return [re.sub(r" -- (it's the key|joined by|end)$", "", line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("SELECT 1", "neither JSON nor DDL"),
        ("CREATE TABLE t (k BIGINT", r"a '\)' is missing"),
        ("CREATE TABLE t (k BIGINT, PRIMARY KEY (k)) SORTED", "PARTITIONED BY or WITH may follow"),
        ("CREATE TABLE t (k BIGINT, PRIMARY KEY (k)) WITH (a = b)", "write 'name' = 'value'"),
        ("CREATE TABLE t (k BIGNT, PRIMARY KEY (k))", "unknown type 'BIGNT'"),
        (f"{DDL.rstrip()[:-1]}, 'bucketz' = '8')", "no table has the option 'bucketz'; did you"),
        (f"{DDL.rstrip()[:-1]}, 'Retention' = '8')", "did you mean 'retention'"),
    ],
)
def test_a_statement_that_is_wrong_is_refused(text: str, why: str) -> None:
    with pytest.raises((InvalidInput, SchemaError), match=why):
        from_ddl(text)


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ({"colums": []}, "did you mean 'columns'"),
        ({"columns": 1}, "a table has a list of columns"),
        ({"columns": ["k"]}, "a column is an object"),
        ({"columns": [{"name": "k"}]}, "a column has a type"),
        (
            {"columns": [{"name": "k", "type": "INT"}], "primary_key": ["k"], "buckets": "many"},
            "buckets is a number",
        ),
    ],
)
def test_a_document_that_is_wrong_is_refused(document: Any, why: str) -> None:
    with pytest.raises((InvalidInput, SchemaError), match=why):
        from_json(json.dumps(document))
