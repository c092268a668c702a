"""Measuring: ours and a baseline in turn, because machines are noisy and drift."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

from benchmarks.figure import NO_GOAL, Figure

Result = TypeVar("Result")


@dataclass(frozen=True)
class Pairs:
    """Seconds per item, run by run, of ours and of the baseline that ran beside it."""

    ours: Sequence[float]
    baseline: Sequence[float]

    def speed(self, name: str, *, what: str, unit: str, goal: str = NO_GOAL) -> Figure:
        """Return our speed over the baseline's: above 1, ours is the faster."""
        ratios = [theirs / mine for mine, theirs in zip(self.ours, self.baseline, strict=True)]
        return Figure(
            name=name,
            what=what,
            ours=_rate(self.ours, unit),
            baseline=_rate(self.baseline, unit),
            value=median(ratios),
            spread=(min(ratios), max(ratios)),
            goal=goal,
        )

    def duration(self, name: str, *, what: str, goal: str = NO_GOAL) -> Figure:
        """Return our time over the baseline's: below 1, ours is the faster."""
        ratios = [mine / theirs for mine, theirs in zip(self.ours, self.baseline, strict=True)]
        return Figure(
            name=name,
            what=what,
            ours=_milliseconds(self.ours),
            baseline=_milliseconds(self.baseline),
            value=median(ratios),
            spread=(min(ratios), max(ratios)),
            goal=goal,
        )


def interleave(runs: int, steps: int, step: Callable[[], tuple[float, float]]) -> Pairs:
    """Measure `runs` times `steps` steps.

    A step does ours and the baseline, once each, and returns the seconds per item of both.
    """
    ours, baseline = [], []
    for _ in range(runs):
        measured = [step() for _ in range(steps)]
        ours.append(fmean(one for one, _ in measured))
        baseline.append(fmean(other for _, other in measured))
    return Pairs(ours, baseline)


def timed(call: Callable[[], Result]) -> tuple[float, Result]:
    """Return how many seconds a call takes, and what it returns."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def _rate(seconds: Sequence[float], unit: str) -> str:
    rate = 1 / median(seconds)
    if rate < 1e4:
        number = f"{rate:.0f}"
    else:
        number = f"{rate / 1e3:.0f} k" if rate < 1e6 else f"{rate / 1e6:.2f} M"
    return f"{number} {unit}/s"


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e3:,.0f} ms"
