"""`tallybook tables`, `describe`, `create`, `alter`, `rename`, `truncate` and `drop`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from foundation.errors import InvalidInput
from recovery.description import TableDescription
from tallybook.commands.definition_files import read_definition
from tallybook.commands.output import confirm, counted, print_json, print_line, print_table
from tallybook.commands.reaching import Json, TableName, Yes, cluster_command, connected
from tallybook.connecting import Reach

_HEAD = ("TABLE", "ID", "COLUMNS", "KEY", "PARTITIONED BY", "BUCKETS", "LOCKS", "VERSION")
Force = Annotated[
    bool, typer.Option("--force", help="even if a column lock is live; its job is told so")
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the application."""
    cluster_command(app, "tables")(tables)
    cluster_command(app, "describe")(describe)
    cluster_command(app, "create")(create)
    cluster_command(app, "alter")(alter)
    cluster_command(app, "rename")(rename)
    cluster_command(app, "truncate")(truncate)
    cluster_command(app, "drop")(drop)


def tables(reach: Reach, json: Json = False) -> None:
    """List the tables of a cluster."""
    with connected(reach) as cluster:
        found = [table_document(table) for table in cluster.tables()]
    if json:
        print_json(found)
    elif not found:
        print_line("there are no tables yet; `tallybook create` makes one")
    else:
        print_table(_HEAD, [_cells(one) for one in found])


def describe(reach: Reach, table: TableName, json: Json = False) -> None:
    """Show what a table is: its columns, how each of them merges, its buckets and partitions."""
    with connected(reach) as cluster:
        described = cluster.table(table).describe()
    if json:
        print_json(table_document(described))
        return
    print_table(("COLUMN", "TYPE", "ROLE"), described.schema.rows())
    print_line(str(described).splitlines()[0])


def create(
    reach: Reach,
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON, or a CREATE TABLE statement")],
    name: Annotated[str | None, typer.Option(help="another name than the file has")] = None,
    buckets: Annotated[
        int | None, typer.Option(min=1, help="4, unless the file says; never changes")
    ] = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="one that is there, and is like it, is no error")
    ] = False,
) -> None:
    """Create a table as a file describes it: JSON, or DDL as Flink and Spark users write it."""
    described = read_definition(file)
    wanted = name or described.name
    if wanted is None:
        raise InvalidInput(f"{file} has no name for the table: say --name")
    settings: dict[str, Any] = {"buckets": buckets or described.buckets}
    settings |= {"column_locks": described.column_locks, "options": dict(described.options) or None}
    settings["if_not_exists"] = if_not_exists or described.if_not_exists
    given = {key: value for key, value in settings.items() if value is not None}
    with connected(reach) as cluster:
        made = cluster.create_table(wanted, described.schema, **given)
        has = counted(made.buckets, "bucket")
        print_line(f"table {made.name} (id {made.table_id}) is there, with {has}")


def alter(
    reach: Reach,
    *,
    table: TableName,
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="'NAME TYPE FUNCTION'", help="add a value column; may be repeated"),
    ] = None,
    drop_column: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="NAME", help="drop a value column, with its values"),
    ] = None,
    rename_column: Annotated[
        list[str] | None, typer.Option("--rename", metavar="OLD=NEW", help="rename a column")
    ] = None,
    retention: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="drop partitions by themselves once they are older; none: keep all"
        ),
    ] = None,
    force: Force = False,
    yes: Yes = False,
) -> None:
    """Alter a table: add, drop and rename columns, set its retention, in this order.

    Each is done by itself; if one is refused, those before it are done.
    """
    added = [_read_column(text) for text in add or ()]
    renamed = [_read_names(text) for text in rename_column or ()]
    dropped = drop_column or []
    if not (added or dropped or renamed or retention):
        raise typer.BadParameter("say what to alter: --add, --drop, --rename or --retention")
    with connected(reach) as cluster:
        found = cluster.table(table)
        for name in dropped:
            found.schema.column(name)  # That there is none is said before anything is asked.
        if retention not in (None, "none"):
            confirm(f"Drop partitions of table {table} once they are {retention} old?", yes=yes)
        if dropped:
            confirm(f"Drop {', '.join(dropped)} of table {table}, with all values?", yes=yes)
        for name, data_type, function in added:
            found.add_column(name, data_type, function)
            print_line(f"table {table} has column {name}")
        for name in dropped:
            found.drop_column(name, force=force)
            print_line(f"table {table} has no column {name} any more")
        for old, new in renamed:
            found.rename_column(old, new)
            print_line(f"column {old} of table {table} is called {new}")
        if retention is not None:
            found.set_retention(None if retention == "none" else retention)
            kept = "are kept" if retention == "none" else f"are dropped after {retention}"
            print_line(f"partitions of table {table} {kept}")


def rename(
    reach: Reach,
    *,
    table: TableName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="the new one", show_default=False)],
) -> None:
    """Give a table another name. Jobs that have it open go on."""
    with connected(reach) as cluster:
        renamed = cluster.rename_table(table, name)
        print_line(f"table {table} is called {renamed.name}")


def truncate(reach: Reach, table: TableName, force: Force = False, yes: Yes = False) -> None:
    """Empty a table; refused while a column lock is live.

    With --force, a job that runs is told that its table was dropped, and commits nothing more.
    Owners are forgotten, too: a job that is started again begins with an empty table, and whatever
    its source gives it from then on is counted.
    """
    with connected(reach) as cluster:
        found = cluster.table(table)
        confirm(f"Delete all rows of table {table}?", yes=yes)
        found.truncate(force=force)
        print_line(f"table {table} is empty")


def drop(reach: Reach, table: TableName, force: Force = False, yes: Yes = False) -> None:
    """Drop a table with its data; refused while a column lock is live."""
    with connected(reach) as cluster:
        cluster.table(table)
        confirm(f"Drop table {table} with all its data?", yes=yes)
        cluster.drop_table(table, force=force)
        print_line(f"table {table} is dropped")


def table_document(table: TableDescription) -> dict[str, Any]:
    """Return what a table is, as JSON has it."""
    schema = table.schema
    return {
        "name": table.name,
        "id": table.table_id,
        "version": schema.version,
        "columns": [
            {"name": name, "type": data_type, "role": role}
            for name, data_type, role in schema.rows()
        ],
        "primary_key": [column.name for column in schema.key_columns],
        "partitioned_by": [column.name for column in schema.partition_columns],
        "buckets": table.buckets,
        "partitions": table.partitions,
        "column_locks": table.column_locks,
        "options": dict(table.options),
    }


def _cells(table: dict[str, Any]) -> tuple[str, ...]:
    return (
        table["name"],
        str(table["id"]),
        str(len(table["columns"])),
        ", ".join(table["primary_key"]),
        ", ".join(table["partitioned_by"]) or "-",
        str(table["buckets"]),
        "yes" if table["column_locks"] else "no",
        str(table["version"]),
    )


def _read_column(text: str) -> tuple[str, str, str]:
    name, _, rest = text.strip().partition(" ")
    data_type, _, function = rest.strip().rpartition(" ")
    if not (name and data_type and function):
        raise typer.BadParameter(f"{text!r}: write 'NAME TYPE FUNCTION', as in 'visits BIGINT sum'")
    return name, data_type.strip(), function


def _read_names(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise typer.BadParameter(f"{text!r}: write OLD=NEW")
    return old, new
