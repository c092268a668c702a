"""Measuring: ours and a baseline in turn, because machines are noisy and drift."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
            ours=_duration(self.ours),
            baseline=_duration(self.baseline),
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


def peak_mib(process: int | str = "self") -> float:
    """Return the largest resident size that a process has had, as Linux counts it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    if found is None:
        raise OSError(f"/proc/{process}/status does not tell the peak memory")
    return int(found[1]) / 1024


def until_idle(deadline_s: float = 5.0) -> None:
    """Wait until nothing else runs: what one has left to do must not fall into another's turn."""
    deadline = time.monotonic() + deadline_s
    busy_before, all_before = _cpu_ticks()
    while time.monotonic() < deadline:
        time.sleep(0.1)
        busy, every = _cpu_ticks()
        if busy - busy_before <= 0.1 * (every - all_before):
            return
        busy_before, all_before = busy, every


def _cpu_ticks() -> tuple[int, int]:
    """Return how long the cores were busy, and how long altogether; 0 where nobody tells."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return 0, 0
    ticks = [int(number) for number in first.split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _rate(seconds: Sequence[float], unit: str) -> str:
    rate = 1 / median(seconds)
    if rate < 1e4:
        number = f"{rate:.0f}"
    else:
        number = f"{rate / 1e3:.0f} k" if rate < 1e6 else f"{rate / 1e6:.2f} M"
    return f"{number} {unit}/s"


def _duration(seconds: Sequence[float]) -> str:
    middle = median(seconds)
    return f"{middle * 1e3:,.0f} ms" if middle >= 0.001 else f"{middle * 1e6:.2f} µs"
