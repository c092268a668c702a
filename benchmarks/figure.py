"""A figure: one measured number with its goal, and the terms on which it is measured."""

import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

NO_GOAL = "-"
_GOAL = re.compile(r"(<=|>=|<|>)(\d+(?:\.\d+)?)")
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number, and what a reader needs to judge it.

    `value` is the median of the runs, and `spread` the least and the greatest of them, if there was
    more than one. `goal` is a comparison such as `>=0.5`, or `-` for a figure that is only to be
    known; goals are for the full sizes.
    """

    name: str
    what: str
    ours: str
    baseline: str
    value: float
    spread: tuple[float, float] | None = None
    goal: str = NO_GOAL

    def __post_init__(self) -> None:
        if self.goal != NO_GOAL and not _GOAL.fullmatch(self.goal):
            raise ValueError(f"{self.name}: {self.goal!r} is not a goal such as '>=0.5'")

    @property
    def met(self) -> bool:
        """Whether the value is what the goal asks for."""
        goal = _GOAL.fullmatch(self.goal)
        return goal is None or _COMPARISONS[goal[1]](self.value, float(goal[2]))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a benchmark may write, and how large it is.

    `keys` and `large_keys` are what the names of the figures call `1m` and `10m`. A run is `steps`
    measured batches; a figure is the median of `runs` runs.
    """

    directory: Path
    keys: int = 1_000_000
    large_keys: int = 10_000_000
    small_keys: int = 10_000
    batch_rows: int = 100_000
    backfill_rows: int = 20_000_000
    runs: int = 5
    steps: int = 4

    @classmethod
    def quick(cls, directory: Path) -> "Setting":
        """Return sizes that take seconds; the ratios are those of a table that fits in memory."""
        return cls(
            directory=directory,
            keys=100_000,
            large_keys=1_000_000,
            backfill_rows=1_000_000,
            runs=3,
            steps=2,
        )


Benchmark: TypeAlias = Callable[[Setting], Iterator[Figure]]
