"""What a benchmark finds (figures with goals, charts, what it left out), and on what terms."""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
class Chart:
    """Numbers that say more as a picture: bars in groups, or lines over a quantity.

    Every series has its points in order: the groups of bars by their names, or the places of a
    line as numbers. `name` is that of the file. Values are all greater than nothing. Only lines
    can be `logarithmic`: bars begin at nothing, or their lengths would lie.
    """

    name: str
    title: str
    unit: str
    series: Mapping[str, Sequence[tuple[str | float, float]]]
    across: str = ""
    logarithmic: bool = True


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Something that was not measured, and why: nothing is left out silently."""

    what: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a benchmark may write, and how large it is.

    `keys`, `large_keys` and `small_keys` are what the names of the figures call `1m`, `10m` and
    `10k`, `sizes` the tables whose cost per event is compared. `latency_s` is how long puts, and
    `rush_s` how long threads that look keys up, are observed at a time. A run is `steps` measured
    batches; a figure is the median of `runs` runs.
    """

    directory: Path
    keys: int = 1_000_000
    large_keys: int = 10_000_000
    small_keys: int = 10_000
    batch_rows: int = 100_000
    backfill_rows: int = 4_000_000
    sizes: tuple[int, ...] = (1_000_000, 5_000_000, 10_000_000, 20_000_000)
    latency_s: float = 60.0
    rush_s: float = 2.0
    runs: int = 4
    steps: int = 2

    @classmethod
    def quick(cls, directory: Path) -> "Setting":
        """Return sizes that take seconds; the ratios are those of a table that fits in memory."""
        return cls(
            directory=directory,
            keys=100_000,
            large_keys=1_000_000,
            batch_rows=50_000,
            backfill_rows=1_000_000,
            sizes=(100_000, 500_000, 1_000_000, 2_000_000),
            latency_s=5.0,
            rush_s=0.75,
            runs=3,
            steps=1,
        )


Finding: TypeAlias = Figure | Chart | Skipped
Benchmark: TypeAlias = Callable[[Setting], Iterator[Finding]]
