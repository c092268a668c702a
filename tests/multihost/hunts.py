"""Shows that a campaign can fail: a rule of the specification is switched off, and it is noticed.

    python -m tests.multihost.hunts [--seconds 60] [--seed 0] [RULE ...]

Servers and clients break the rule (`without`); faults are those that let it matter. Prints a line
per rule: after how long it was noticed, and by what, or that it was not.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.multihost.bed import running_bed
from tests.multihost.campaign import Campaign, settings_of
from tests.multihost.verdict import pass_verdict

_KILLED = ("server killed",)
_DEPOSED = ("host paused", "server without ZooKeeper")
_IN_DOUBT = ("server hears nothing", "S3 away", "server without S3")
_SLOW = ("200 ms, 2 % lost",)

HUNTS: dict[str, tuple[str, ...]] = {
    "fence": _DEPOSED,
    "current": _KILLED,
    "leaders": _DEPOSED,
    "term": (*_KILLED, *_DEPOSED),
    "closed": _KILLED,
    "doubt": _IN_DOUBT,
    "dedupe": _KILLED,
    "token": _KILLED,
    "seal": _KILLED,
    "undo": _KILLED,
    "touched": _KILLED,
    "debt": _KILLED,
    "pin": _KILLED,
    "self": _KILLED,
    "redo": _KILLED,
    "decided": _KILLED,
    "commit": _KILLED,
    "release": _KILLED,
    "stable": _KILLED,
    "cut": _KILLED,
    "counter": _SLOW,
    "newer": _KILLED,
}
"""By rule: the faults in which it matters."""
OF_SOURCES = ("plan", "columns", "former")
"""Rules that no fault here lets matter: they are about what a source sends a second time."""
# As few as see it: the more there are, the less each of them does.
_CLIENTS = ("plain", "observer", "rivals")


def hunt(rule: str, seconds: float, seed: int) -> str:
    """Say after how long a campaign without the rule has failed, and by what; or that it did not.

    The time is from when the bed has settled.
    """
    with tempfile.TemporaryDirectory(prefix="tallybook-hunt-") as directory:
        where = Path(directory, "bed")
        started = time.monotonic()
        try:
            with running_bed(where, **settings_of(seed, _CLIENTS, without=rule)) as bed:
                started = time.monotonic()
                if bed.history.wrong:
                    return f"found before the first fault: {bed.history.wrong[0]}"
                Campaign(bed, seed, HUNTS[rule]).run(seconds)
                pass_verdict(bed)
        except AssertionError as exc:
            return f"found after {time.monotonic() - started:.0f} s: {exc}"
        return f"not found in {time.monotonic() - started:.0f} s"


def main(arguments: list[str]) -> None:
    """Hunt for each rule that is named, or for all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("rules", nargs="*", metavar="RULE")
    options = parser.parse_args(arguments)
    for rule in options.rules or HUNTS:
        found = " ".join(hunt(rule, options.seconds, options.seed).split())
        print(f"{rule}: {found[:400]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
