"""Measure the control plane: `python -m benchmarks.scale leads|commits [options]`.

`docs/scale.md` has what it found, and what that means.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from benchmarks.scale.commits import Commits
from benchmarks.scale.ensemble import Ensemble
from benchmarks.scale.leads import Leads
from benchmarks.scale.owners import OwnerProcess

# Beside the code, on a real disk: a `/tmp` in memory would make syncs free.
_BUILD = Path(__file__).parent.parent.parent / "build"


def main() -> int:
    """Measure, and print what was found line by line."""
    arguments = _arguments()
    _BUILD.mkdir(exist_ok=True)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="scale-", dir=_BUILD) as directory,
        Ensemble(Path(directory)) as ensemble,
    ):
        measure = _leads if arguments.what == "leads" else _commits
        for line in measure(arguments, ensemble):
            print(line, flush=True)
    print(f"{time.monotonic() - began:.0f} s on {os.cpu_count()} cores")
    return 0


def _leads(arguments: argparse.Namespace, ensemble: Ensemble) -> Iterator[str]:
    *others, most = sorted(arguments.go)
    rest = arguments.servers - most - sum(others)
    if rest <= 0:
        raise SystemExit("some servers have to stay: fewer of them can go")
    with closing(Leads(ensemble, arguments.buckets[-1:])) as leads:
        if arguments.at_once:
            yield from leads.join([most, rest, *others])
        else:
            yield from leads.join([most])
            yield from leads.join([rest, *others])
        yield _monitored(ensemble)
        for count in (*others, most):
            yield from leads.go(count)


def _commits(arguments: argparse.Namespace, ensemble: Ensemble) -> Iterator[str]:
    half, count = arguments.owners // 2, arguments.owners
    half_of_them = arguments.servers // 2
    with closing(Leads(ensemble, arguments.buckets, owners=count)) as leads:
        yield from leads.join([half_of_them, arguments.servers - half_of_them], costs=False)
        processes = [
            OwnerProcess(ensemble.address, part) for part in (range(half), range(half, count))
        ]
        try:
            yield f"memory per session of an owner: {processes[0].memory_mib * 1024:,.0f} KiB"
            commits = Commits(ensemble, processes)
            for table in leads.tables:
                yield from commits.measure(table, arguments.seconds)
            yield _monitored(ensemble)
        finally:
            for process in processes:
                process.end()


def _monitored(ensemble: Ensemble) -> str:
    names = ("znode_count", "watch_count", "ephemerals_count", "approximate_data_size")
    [said, *_] = ensemble.monitor()
    memory = ", ".join(f"{mib:.0f}" for mib in ensemble.memory_mib())
    return f"ZooKeeper: { ({name: said.get(name) for name in names}) }; {memory} MiB resident"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("what", choices=["leads", "commits"])
    parser.add_argument("--servers", type=int, default=200)
    parser.add_argument("--buckets", type=int, nargs="+", default=[16, 1000, 10_000])
    parser.add_argument(
        "--at-once", action="store_true", help="all servers start together: no bucket moves then"
    )
    parser.add_argument("--owners", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10.0, help="of commits, per table")
    parser.add_argument(
        "--go", type=int, nargs="+", default=[1, 10, 100], help="how many servers go at once"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
