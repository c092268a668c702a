"""What commands print: tables for people, JSON for programs, progress, questions.

On a terminal, tables are Rich's. Elsewhere they are plain: one line per row, never cut, so that
`grep` and `awk` can read them. Data goes to standard output, all else to standard error.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Row = Sequence[str]


def aligned(rows: Sequence[Row]) -> list[str]:
    """Return a line per row, with its cells below those of the first row."""
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]


def print_table(head: Row, rows: Sequence[Row]) -> None:
    """Print rows below their headings; by Rich on a terminal, else plain and never cut."""
    if not sys.stdout.isatty():
        print("\n".join(aligned([head, *rows])))
        return
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    Console(highlight=False).print(table)


def print_line(text: str, style: str = "") -> None:
    """Print a line, in this style if it is for a terminal; never cut or wrapped elsewhere."""
    if sys.stdout.isatty() and style:
        Console(highlight=False).print(escape(text), style=style, soft_wrap=True)
    else:
        print(text)


def print_json(document: Any) -> None:
    """Print one document, for programs."""
    print(json.dumps(document, indent=2, default=json_value, ensure_ascii=False))


def print_json_line(document: Any) -> None:
    """Print one of many documents, each on a line of its own."""
    print(json.dumps(document, default=json_value, ensure_ascii=False))


def json_value(value: Any) -> Any:
    """Return what JSON has in the place of a value that it does not have: bytes as hex, or text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    return str(value)


def complain(text: str) -> None:
    """Say on standard error, in one line, what is wrong."""
    print(" ".join(text.split()), file=sys.stderr)


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is lost; ends the command unless the answer is yes.

    Without a terminal there is nobody to ask: then `--yes` has to have been said.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        complain(f"{question} There is no terminal to ask: say --yes if it is meant")
        raise typer.Exit(2)
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:  # Ctrl-C, or the terminal is gone.
        print(file=sys.stderr)
        raise KeyboardInterrupt from None
    if not agreed:
        complain("nothing was changed")
        raise typer.Exit(1)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show how far a long work is, on standard error if that is a terminal; yields what counts."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(escape(what), total=total)
        yield lambda count: bar.advance(task, count)


def utc(moment_ms: int) -> str:
    """Return a moment as people read it."""
    return datetime.fromtimestamp(moment_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def span(seconds: float) -> str:
    """Return how long that is, in the largest units that it has: `2 d 3 h`, `5 min`, `1.5 s`."""
    if seconds < 0:
        return f"-{span(-seconds)}"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, _ = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min")]
    shown = [f"{count} {unit}" for count, unit in parts if count][:2]
    return " ".join(shown)


def size(count: float) -> str:
    """Return so many bytes as people read them."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 bucket`, `1,000 buckets`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
