"""`tallybook lookup`, `scan` and `log`: rows of a table, and how they came to be."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any

import pyarrow as pa
import typer

from merge_engine.encoding.soundness import readable_rows
from tallybook.commands.keys import read_values
from tallybook.commands.output import print_json_line, print_line, print_table, shown
from tallybook.commands.reaching import (
    Isolation,
    Json,
    TableName,
    cluster_command,
    connected,
)
from tallybook.connecting import Reach

Columns = Annotated[
    str | None, typer.Option(metavar="NAME,...", help="these value columns only; else all")
]
# A table for people is printed as a whole: its columns are as wide as the widest of so many rows.
_AT_ONCE = 1_000


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the application."""
    cluster_command(app, "lookup")(lookup)
    cluster_command(app, "scan", deadline_s=30.0)(scan)
    cluster_command(app, "log", deadline_s=30.0)(log)


def lookup(
    reach: Reach,
    *,
    table: TableName,
    key: Annotated[
        list[str],
        typer.Argument(metavar="NAME=VALUE...", help="of all key columns", show_default=False),
    ],
    columns: Columns = None,
    isolation: Isolation = "committed",
    json: Json = False,
) -> None:
    """Look a key up. Exit code 1 if there is no such row."""
    with connected(reach) as cluster:
        found = cluster.table(table)
        values = read_values(found.schema.key_columns, key, table)
        asked = pa.table({name: pa.repeat(one, 1) for name, one in values.items()})
        rows = found.lookup(asked, names_of(columns), isolation=isolation, found=True)
    [row] = readable_rows(rows)
    there = row.pop("_found")
    if json:
        print_json_line({**row, "_found": there})
    elif there:
        print_rows(iter([row]), [*row])
    else:
        print_line(f"table {table} has no row {' '.join(key)}")
    if not there:
        raise typer.Exit(1)


def scan(
    reach: Reach,
    *,
    table: TableName,
    columns: Columns = None,
    limit: Annotated[int | None, typer.Option(min=0, help="so many rows; else all")] = None,
    isolation: Isolation = "committed",
    json: Json = False,
) -> None:
    """Print the rows of a table, bucket by bucket; with --json, an object on each line."""
    with connected(reach) as cluster:
        found = cluster.table(table)
        rows = found.scan(names_of(columns), isolation=isolation, limit=limit)
        _print(_rows(rows), rows.schema.names, json=json)


def log(
    reach: Reach,
    *,
    table: TableName,
    since: Annotated[
        str | None,
        typer.Option(metavar="CUT", help="from this cut on; else as far back as the logs go"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="so many changes; else all")] = None,
    json: Json = False,
) -> None:
    """Print the changelog of a table: its committed changes, bucket by bucket, in their order.

    The last line, on standard error, is the cut up to which it goes, for --since of the next call.
    With --limit, only if no change was left out: who went on from there would never see it.
    """
    with connected(reach) as cluster:
        found = cluster.table(table)
        changes = found.changes(since)
        rows = _rows(changes)
        _print(rows if limit is None else islice(rows, limit), changes.schema.names, json=json)
        if next(rows, None) is None:
            typer.echo(f"cut: {changes.until}", err=True)
        else:
            typer.echo("there are more changes; without --limit, their cut is told, too", err=True)


def names_of(columns: str | None) -> list[str] | None:
    """Return names between commas."""
    return None if columns is None else [name.strip() for name in columns.split(",")]


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield from readable_rows(batch)


def _print(rows: Iterator[dict[str, Any]], names: Sequence[str], *, json: bool) -> None:
    if json:
        for row in rows:
            print_json_line(row)
    else:
        print_rows(rows, names)


def print_rows(rows: Iterator[dict[str, Any]], names: Sequence[str]) -> None:
    """Print rows as tables of many rows each: they may be more than fit into memory."""
    head = list(names)
    some = list(islice(rows, _AT_ONCE))
    while True:
        print_table(head, [[shown(row[name]) for name in names] for row in some])
        some = list(islice(rows, _AT_ONCE))
        if not some:
            return
