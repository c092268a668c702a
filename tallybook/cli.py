"""The command line: `tallybook COMMAND`. What the commands do is in `tallybook.commands`."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from foundation.versions import version_of
from tallybook.commands import (
    bench,
    doctor,
    export,
    leases,
    locks,
    partitions,
    rows,
    serving,
    status,
    tables,
    tier,
    verify,
)

_GROUPS = (
    serving,
    status,
    tables,
    rows,
    export,
    locks,
    leases,
    partitions,
    tier,
    bench,
    doctor,
    verify,
)

app = typer.Typer(
    name="tallybook",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # Rich's own would take [/chroot] for one of its tags.
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"tallybook {version_of('tallybook')}")
        raise typer.Exit


@app.callback()
def _tallybook(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="show it, and end"),
    ] = False,
) -> None:
    """Aggregate tables that merge on write. Exit codes: 0 fine, 1 something is wrong, 2 usage."""


for group in _GROUPS:
    group.add_commands(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    try:
        app(args=list(sys.argv[1:] if argv is None else argv), prog_name="tallybook")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    return 0
