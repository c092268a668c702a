"""`tallybook partitions`: of a table with partition columns, list them and drop some."""

from typing import Annotated

import typer

from foundation.errors import InvalidInput
from merge_engine.encoding.soundness import readable_rows
from merge_engine.merging.dated_partitions import dated_column, moment_of
from server.client.remote_table import RemoteTable
from tallybook.commands.keys import read_values
from tallybook.commands.output import (
    confirm,
    counted,
    print_json,
    print_line,
    print_table,
    shown,
    utc,
)
from tallybook.commands.reaching import Json, TableName, Yes, cluster_command, connected
from tallybook.connecting import Reach

_VALUES = "[NAME=VALUE]..."


def add_commands(app: typer.Typer) -> None:
    """Add `partitions` and its commands to the application."""
    partitions = typer.Typer(
        no_args_is_help=True, help="List the partitions of a table, or drop some with their rows."
    )
    cluster_command(partitions, "list")(list_partitions)
    cluster_command(partitions, "drop", deadline_s=30.0)(drop)
    app.add_typer(partitions, name="partitions")


def list_partitions(reach: Reach, table: TableName, json: Json = False) -> None:
    """List the partitions of a table by the values of its partition columns."""
    with connected(reach) as cluster:
        found = cluster.table(table)
        _check_partitioned(found)
        rows = readable_rows(found.partitions())
    if json:
        print_json(rows)
    elif not rows:
        print_line(f"table {table} has no partition yet")
    else:
        print_table([*rows[0]], sorted(tuple(map(shown, row.values())) for row in rows))


def drop(
    reach: Reach,
    *,
    table: TableName,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar=_VALUES, help="of all partition columns", show_default=False),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN", help="all partitions before a day or time, or of an age: '30 days'"
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """Drop a partition and its rows, or all that are older."""
    if bool(values) == bool(older_than):
        raise typer.BadParameter("say which: NAME=VALUE for one, or --older-than for the old ones")
    with connected(reach) as cluster:
        found = cluster.table(table)
        _check_partitioned(found)
        if older_than is None:
            wanted = read_values(found.schema.partition_columns, values or (), table)
            confirm(f"Drop partition {' '.join(values or ())} of table {table}?", yes=yes)
            found.drop_partition(**wanted)
            print_line(f"partition {' '.join(values or ())} of table {table} is dropped")
            return
        dated_column(found.schema)  # What is wrong is said before anything is asked.
        before_ms = moment_of(older_than, cluster.coordinator.store.now_ms) // 1000
        confirm(f"Drop all partitions of table {table} before {utc(before_ms)}?", yes=yes)
        dropped = found.drop_partitions(older_than=older_than).num_rows
        count = counted(dropped, "partition")
        print_line(f"{count} of table {table} dropped, all before {utc(before_ms)}")


def _check_partitioned(table: RemoteTable) -> None:
    if not table.schema.partition_columns:
        raise InvalidInput(f"table {table.name} has no partition columns")
