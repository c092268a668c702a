"""What is printed: a table for people, and a line per figure for machines."""

import textwrap
from collections.abc import Sequence

from benchmarks.figure import NO_GOAL, Figure

_WIDTH = 100
_ROW = "{:<36}{:>15}{:>15}{:>7}{:>12}{:>7}  {}"


def table(figures: Sequence[Figure]) -> str:
    """Return the figures beside their baselines, those that miss their goal marked."""
    lines = [
        _ROW.format("figure", "measured", "baseline", "value", "spread", "goal", "").rstrip(),
        "-" * _WIDTH,
    ]
    for figure in figures:
        spread = "" if figure.spread is None else "..".join(map(short, figure.spread))
        verdict = "" if figure.goal == NO_GOAL else "met" if figure.met else "MISSED"
        cells = (figure.ours, figure.baseline, short(figure.value), spread, figure.goal, verdict)
        lines.append(_ROW.format(figure.name, *cells).rstrip())
        lines += textwrap.wrap(figure.what, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def machine_line(figure: Figure) -> str:
    """Return `BENCH name value goal`."""
    return f"BENCH {figure.name} {figure.value:.4f} {figure.goal}"


def short(value: float) -> str:
    """Return a number with as many digits as mean something here."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def amount(value: float) -> str:
    """Return a number, large ones with `k` or `M`: 12, 3.4 k, 1.25 M."""
    for size, letter in ((1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
