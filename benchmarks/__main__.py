"""Run the benchmarks: `python -m benchmarks [--quick] [name ...]`."""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report
from benchmarks.figure import Figure, Setting
from benchmarks.registry import BENCHMARKS

# Beside the code, on a real disk: a `/tmp` in memory would make syncs free.
_BUILD = Path(__file__).parent.parent / "build"


def main() -> None:
    """Run the chosen benchmarks, and print what they found. A missed goal is not a failure."""
    arguments = _arguments()
    # Ended politely, it still removes its directories and its child.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = arguments.names or list(BENCHMARKS)
    started = time.monotonic()
    figures: list[Figure] = []
    for name in names:
        print(f"{name} ...", flush=True)
        found = _run(name, quick=arguments.quick)
        figures += found
        for figure in found:  # Now already: the next one may fail.
            print(f"  {figure.name} {figure.value:.2f} ({figure.goal})", flush=True)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    size = (
        "Quick run, SMALL SIZES (the goals are for the full run)" if arguments.quick else "Full run"
    )
    print(
        f"\n{size}: {minutes} min {seconds} s on {os.cpu_count()} cores. Medians of runs in turn."
    )
    print(report.table(figures), end="\n\n")
    for figure in figures:
        print(report.machine_line(figure))


def _run(name: str, *, quick: bool) -> list[Figure]:
    """Run one benchmark in a directory of its own, which is gone afterwards."""
    _BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmarks-", dir=_BUILD) as temporary:
        directory = Path(temporary)
        setting = Setting.quick(directory) if quick else Setting(directory=directory)
        return list(BENCHMARKS[name](setting))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures Tallybook beside its baselines. The last lines, "
        "`BENCH name value goal`, are for machines.",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, a few minutes")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of: {', '.join(BENCHMARKS)}")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    return arguments


if __name__ == "__main__":
    main()
