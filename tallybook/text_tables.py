"""Rows of text as columns of a table, for people."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line per row, with its cells below those of the first row."""
    *widths, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
