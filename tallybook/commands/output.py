"""What commands print: tables for people, JSON for programs, progress, questions.

On a terminal, tables are Rich's. Elsewhere they are plain: one line per row, never cut, so that
`grep` and `awk` can read them. Data goes to standard output, all else to standard error.
"""

import json
import math
import re
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
# A cell that is longer may be folded, on a terminal.
_FOLDED_CHARACTERS = 10
# Control characters of terminals, and those that change the direction of a text.
_CONTROLS = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def aligned(rows: Sequence[Row]) -> list[str]:
    """Return a line per row, with its cells below those of the first row."""
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]


def print_table(head: Row, rows: Sequence[Row]) -> None:
    """Print rows below their headings; by Rich on a terminal, else plain and never cut.

    On a terminal too narrow for the columns, each row is a block with a line for each cell.
    """
    head, *rows = ([*map(printable, row)] for row in (head, *rows))
    if not sys.stdout.isatty():
        print("\n".join(aligned([head, *rows])))
        return
    console = Console(highlight=False)
    if _least_width([head, *rows]) > console.width:
        blocks = ["\n".join(aligned([*zip(head, row, strict=True)])) for row in rows]
        console.print(escape("\n\n".join(blocks)), soft_wrap=True)
        return
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def _least_width(rows: Sequence[Row]) -> int:
    """Return how wide a terminal has to be for these columns; long cells are folded."""
    widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return sum(min(width, _FOLDED_CHARACTERS) + 2 for width in widths)


def print_line(text: str, style: str = "") -> None:
    """Print a line, in this style if it is for a terminal; never cut or wrapped elsewhere."""
    text = printable(text)
    if sys.stdout.isatty() and style:
        Console(highlight=False).print(escape(text), style=style, soft_wrap=True)
    else:
        print(text)


def print_json(document: Any) -> None:
    """Print one document, for programs."""
    print(json_text(document, indent=2))


def print_json_line(document: Any) -> None:
    """Print one of many documents, each on a line of its own."""
    print(json_text(document))


def json_text(document: Any, indent: int | None = None) -> str:
    """Return a document as JSON that every program reads, and no terminal obeys.

    JSON has no NaN and no infinity: they are texts, as Spark writes them ("NaN", "-Infinity").
    """
    document = _with_texts_for_infinities(document)
    text = json.dumps(
        document, indent=indent, default=json_value, ensure_ascii=False, allow_nan=False
    )
    # JSON escapes what is below a space. Other control characters stand inside texts only.
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _with_texts_for_infinities(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _with_texts_for_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_with_texts_for_infinities(item) for item in value]
    return value


def shown(value: Any) -> str:
    """Return a value as people read it, on one line; null is a dash."""
    if value is None:
        return "-"
    return printable(value.hex() if isinstance(value, bytes) else str(value))


def printable(text: str) -> str:
    """Return a text with what is not to be printed written as in Python.

    A line's end, and what would move the cursor, colour the terminal or turn the text around: names
    and values are whatever somebody has put there.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def json_value(value: Any) -> Any:
    """Return what JSON has in the place of a value that it does not have: bytes as hex, or text."""
    if isinstance(value, bytes):
        return value.hex()
    return str(value)


def complain(text: str) -> None:
    """Say on standard error, in one line, what is wrong."""
    print(printable(" ".join(text.split())), file=sys.stderr)


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
        agreed = typer.confirm(printable(question), err=True)
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
