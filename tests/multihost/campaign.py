"""A fault campaign: random faults, several at once, against the load that never stops.

    python -m tests.multihost.campaign --seconds 600 --seed 7 [--spark] [--without RULE]

In rounds: faults come and go for a minute, and then all is healed and has to be as before; clients
alter, drop, create, lease, take over and fill in the meantime (`load`). Which faults there are, in
which order and for how long, is a function of the seed; when they happen, and what the clients do
at that moment, is the machine's. Prints each event as a line, a report and a verdict. Ends with 1
if anything was wrong.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.multihost.bed import Bed, running_bed
from tests.multihost.faults import FAULTS, OF_SPARK
from tests.multihost.load import ALWAYS, BETWEEN
from tests.multihost.parts import Part
from tests.multihost.tiering_job import KIND as TIERING
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
CLIENTS = (*ALWAYS, *BETWEEN, TIERING)
_MOST_AT_ONCE = 3
_ROUND_S = 60.0
_LONGEST_S = 20.0
_LOOK_S = 0.2


@dataclass(frozen=True)
class Planned:
    """A fault to come: so long after the one before it; its victim is chosen by `chance`."""

    after_s: float
    name: str
    lasts_s: float
    chance: random.Random


def plan(seed: int, names: Sequence[str]) -> Iterator[Planned]:
    """Yield faults without end, a function of the seed."""
    chance = random.Random(f"faults {seed}")
    while True:
        yield Planned(
            after_s=chance.uniform(0.2, 5),
            name=chance.choice(names),
            lasts_s=chance.uniform(0.5, _LONGEST_S),
            chance=random.Random(chance.random()),
        )


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
    """Faults on one bed, chosen by a seed, of those that are named or of all."""

    def __init__(self, bed: Bed, seed: int, names: Sequence[str] = TOGETHER) -> None:
        self._bed = bed
        self._plan = plan(seed, names)
        self._alone = ALONE if set(TOGETHER) <= set(names) else ()
        self._chance = random.Random(f"rounds {seed}")
        self.report = Report()
        self._active: dict[str, tuple[float, ExitStack]] = {}

    def run(self, seconds: float) -> None:
        """Do round after round for so long; AssertionError as soon as something is wrong."""
        over = time.monotonic() + seconds
        while time.monotonic() < over:
            self._round(min(over, time.monotonic() + _ROUND_S))
            act, kill = self._chance.random(), self._chance.random()
            if self._alone and act < 0.3:
                self._do(self._chance.choice(self._alone))
            if kill < 0.3:
                self._kill(self._chance.choice(self._bed.clients))

    def _round(self, until: float) -> None:
        """Have faults come and go, heal all that is left, and wait until all is as before."""
        try:
            while time.monotonic() < until:
                planned = next(self._plan)
                self._wait(min(until, time.monotonic() + planned.after_s))
                while self._has_no_room_for(planned.name) and time.monotonic() < until:
                    self._wait(time.monotonic() + _LOOK_S)
                if time.monotonic() < until:
                    self._begin(planned)
        finally:
            self._end_those_that_are_over(float("inf"))
        self._recover()

    def _has_no_room_for(self, name: str) -> bool:
        return name in self._active or len(self._active) >= _MOST_AT_ONCE

    def _wait(self, until: float) -> None:
        """Look after what runs, end what is over, and see whether all is right."""
        while True:
            self._end_those_that_are_over(time.monotonic())
            self._bed.revive()
            self._check()
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(_LOOK_S, left_s))

    def _begin(self, planned: Planned) -> None:
        self._bed.history.note(f"{planned.name}, for {planned.lasts_s:.1f} s")
        self.report.tried[planned.name] += 1
        stack = ExitStack()
        stack.enter_context(FAULTS[planned.name](self._bed, planned.chance))
        self._active[planned.name] = (time.monotonic() + planned.lasts_s, stack)

    def _end_those_that_are_over(self, now: float) -> None:
        for name, (over, stack) in list(self._active.items()):
            if over <= now:
                del self._active[name]
                stack.close()
                self._bed.history.note(f"{name} is over")

    def _do(self, name: str) -> None:
        self._bed.history.note(name)
        self.report.tried[name] += 1
        with FAULTS[name](self._bed, self._chance):
            pass
        self._recover()

    def _kill(self, clients: Part) -> None:
        """Kill clients, writers among them: their next self pays what they owe."""
        self._bed.history.note(f"{clients.program.name} is killed, and started again")
        self.report.tried[f"{clients.program.name} killed"] += 1
        clients.kill()
        clients.start()
        self._recover()

    def _recover(self) -> None:
        began = time.monotonic()
        self._bed.settle(while_waiting=self._look)
        self.report.recoveries_s.append(time.monotonic() - began)
        self._bed.history.note(f"all is as before, after {self.report.recoveries_s[-1]:.1f} s")

    def _look(self) -> None:
        self._bed.revive()
        self._check()

    def _check(self) -> None:
        self._bed.leaders()
        if self._bed.history.wrong:
            raise Wrong("; ".join(self._bed.history.wrong))


class Wrong(AssertionError):
    """A client has seen what it must not see."""


def settings_of(
    seed: int,
    clients: Sequence[str] = CLIENTS,
    *,
    with_spark: bool = False,
    without: str | None = None,
) -> dict[str, Any]:
    """Return the settings of a bed for a campaign."""
    return {
        "seed": seed,
        "with_spark": with_spark,
        "with_tiering": TIERING in clients,
        "kinds": [kind for kind in clients if kind != TIERING],
        "without": without,
    }


def main(arguments: list[str]) -> int:
    """Run a campaign, and print what was done and found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spark", action="store_true", help="with sinks, by both routes")
    parser.add_argument("--without", metavar="RULE", help="of the specification, switched off")
    parser.add_argument("--faults", nargs="*", choices=(*TOGETHER, *OF_SPARK))
    parser.add_argument("--clients", nargs="*", default=CLIENTS)
    parser.add_argument("--keep", type=Path, help="where the bed's disks and logs are to stay")
    options = parser.parse_args(arguments)
    settings = settings_of(
        options.seed, options.clients, with_spark=options.spark, without=options.without
    )
    all_of_them = (*TOGETHER, *OF_SPARK) if options.spark else TOGETHER
    with tempfile.TemporaryDirectory(prefix="tallybook-campaign-") as directory:
        try:
            where = options.keep or Path(directory, "bed")
            with running_bed(where, follow=_print, **settings) as bed:
                campaign = Campaign(bed, options.seed, options.faults or all_of_them)
                return _try(bed, campaign, options.seconds)
        except pytest.skip.Exception as exc:
            print(f"there can be no campaign here: {exc}")
            return 2


def _try(bed: Bed, campaign: Campaign, seconds: float) -> int:
    wrong = None
    try:
        campaign.run(seconds)
        bed.history.note("the load ends")
        pass_verdict(bed)
    except AssertionError as exc:
        wrong = exc
    if wrong is not None:
        _print(bed.history.told(time.monotonic() - 180))
    _print(campaign.report.told(bed))
    if wrong is None:
        _print("verdict: right. All batches once and whole, the changes lead to it, nothing leaked")
        return 0
    _print(f"verdict: WRONG. {wrong}")
    return 1


def _print(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
