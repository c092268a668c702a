"""A fault campaign: random faults, several at once, against the load that never stops.

    python -m tests.multihost.campaign --seconds 600 --seed 7 [--spark]

In rounds: faults come and go for a minute, with restarts, alters and snapshots in between, and then
all is healed and has to be as before. What is tried is a function of the seed; when it happens is
the machine's. Ends with a report and a verdict, and with 1 if anything was wrong.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.multihost.bed import Bed, running_bed
from tests.multihost.faults import FAULTS
from tests.multihost.verdict import pass_verdict

# Those that can meet any other: they wait for nobody, neither when they begin nor when they end.
TOGETHER = (
    "server without S3",
    "server without ZooKeeper",
    "ZooKeeper two to one",
    "cable pulled",
    "host paused",
    "server killed",
    "server hears nothing",
    "leader of ZooKeeper killed",
    "S3 away",
    "S3 slow",
    "clock moved",
    "200 ms, 2 % lost",
)
ALONE = ("rolling restart", "planned move")
_MOST_AT_ONCE = 3
_ROUND_S = 60.0
_LONGEST_S = 20.0


@dataclass
class Report:
    """What was tried, and how long it took until all was as before."""

    tried: Counter[str] = field(default_factory=Counter)
    recoveries_s: list[float] = field(default_factory=list)

    def told(self, bed: Bed) -> str:
        """Return it as text: faults by kind, times to recovery, the slowest of each client."""
        lines = [f"{count:5}  {name}" for name, count in sorted(self.tried.items())]
        times = ", ".join(f"{seconds:.0f}" for seconds in sorted(self.recoveries_s))
        lines.append(f"seconds until all was as before, after each round: {times}")
        for kind in sorted(bed.history.kinds()):
            done = sorted(each.seconds for each in bed.history.of(kind, 0))
            middle = done[len(done) // 2]
            lines.append(f"{len(done):5}  {kind}: median {middle:.2f} s, slowest {done[-1]:.1f} s")
        return "\n".join(lines)


class Campaign:
    """Faults on one bed, chosen by a seed."""

    def __init__(self, bed: Bed, seed: int) -> None:
        self._bed = bed
        self._chance = random.Random(seed)
        self.report = Report()
        self._active: dict[str, tuple[float, ExitStack]] = {}

    def run(self, seconds: float) -> None:
        """Do round after round for so long; AssertionError as soon as something is wrong."""
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            self._round(min(over, time.monotonic() + _ROUND_S))
            if self._chance.random() < 0.3:
                self._alone(self._chance.choice(ALONE))
            if self._chance.random() < 0.3:
                self._restart_clients()

    def _round(self, until: float) -> None:
        """Have faults come and go, heal all that is left, and wait until all is as before."""
        try:
            while time.monotonic() < until:
                self._end_those_that_are_over(time.monotonic())
                if len(self._active) < _MOST_AT_ONCE and self._chance.random() < 0.5:
                    self._begin()
                self._bed.revive()
                time.sleep(self._chance.uniform(0.2, 3))
        finally:
            self._end_those_that_are_over(float("inf"))
        self._recover()

    def _begin(self) -> None:
        name = self._chance.choice([name for name in TOGETHER if name not in self._active])
        lasts_s = self._chance.uniform(0.5, _LONGEST_S)
        self._bed.history.note(f"{name}, for {lasts_s:.1f} s")
        self.report.tried[name] += 1
        stack = ExitStack()
        stack.enter_context(FAULTS[name](self._bed, self._chance))
        self._active[name] = (time.monotonic() + lasts_s, stack)

    def _end_those_that_are_over(self, now: float) -> None:
        for name, (over, stack) in list(self._active.items()):
            if over <= now:
                del self._active[name]
                stack.close()
                self._bed.history.note(f"{name} is over")

    def _alone(self, name: str) -> None:
        self._bed.history.note(name)
        self.report.tried[name] += 1
        with FAULTS[name](self._bed, self._chance):
            pass
        self._recover()

    def _restart_clients(self) -> None:
        """Kill all clients of the load: the writer's next self pays what it owes."""
        self._bed.history.note("the clients are killed, and started again")
        self.report.tried["clients killed"] += 1
        self._bed.load.kill()
        self._bed.load.start()
        self._recover()

    def _recover(self) -> None:
        began = time.monotonic()
        self._bed.revive()
        self._bed.settle(while_waiting=self._bed.revive)
        self.report.recoveries_s.append(time.monotonic() - began)
        self._bed.history.note(f"all is as before, after {self.report.recoveries_s[-1]:.1f} s")
        assert not self._bed.history.wrong, self._bed.history.wrong


def main(arguments: list[str]) -> int:
    """Run a campaign, and print what was done and found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spark", action="store_true", help="with sinks, by both routes")
    options = parser.parse_args(arguments)
    settings = {"seed": options.seed, "with_spark": options.spark, "more_clients": ["operator"]}
    with tempfile.TemporaryDirectory(prefix="tallybook-campaign-") as directory:
        try:
            with running_bed(Path(directory, "bed"), follow=_print, **settings) as bed:
                return _try(bed, Campaign(bed, options.seed), options.seconds)
        except pytest.skip.Exception as exc:
            print(f"there can be no campaign here: {exc}")
            return 2


def _try(bed: Bed, campaign: Campaign, seconds: float) -> int:
    wrong = None
    try:
        campaign.run(seconds)
        pass_verdict(bed)
    except AssertionError as exc:
        wrong = exc
    _print(campaign.report.told(bed))
    if wrong is None:
        _print("verdict: right. All batches once and whole, the changes lead to it, nothing leaked")
        return 0
    _print(f"{bed.history.told(time.monotonic() - 180)}\nverdict: WRONG. {wrong}")
    return 1


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
