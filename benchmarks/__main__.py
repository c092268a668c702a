"""Run the benchmarks: `python -m benchmarks [--quick] [--results DIRECTORY] [name ...]`."""

import argparse
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from benchmarks import report, results
from benchmarks.figure import Figure, Setting, Skipped
from benchmarks.registry import BENCHMARKS, ONLY_BY_NAME, ONLY_FULL

# Beside the code, on a real disk: a `/tmp` in memory would make syncs free.
_BUILD = Path(__file__).parent.parent / "build"


def main() -> int:
    """Run the chosen benchmarks, and print what they found; return 1 if one of them failed.

    A missed goal is not a failure. A wrong result is one, and so is any error; the others run all
    the same.
    """
    arguments = _arguments()
    # Ended politely, it still removes its directories and its children.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    load_before, started = os.getloadavg()[0], time.monotonic()
    run = results.Run()
    for name in arguments.names or _default(quick=arguments.quick):
        _measure(run, name, quick=arguments.quick)
    there = results.circumstances(
        quick=arguments.quick, load_before=load_before, seconds=time.monotonic() - started
    )
    print(f"\n{there.size}: {there.minutes:.1f} minutes on {there.machine}.")
    print("Medians of runs in turn.")
    print(report.table(run.figures()), end="\n\n")
    if arguments.results is not None:
        results.write(arguments.results, run, there)
        print(f"Written: {arguments.results / 'results.md'}, results.json, charts.\n")
    for figure in run.figures():
        print(report.machine_line(figure))
    for name, error in run.failed.items():
        print(f"FAILED {name}: {error}", file=sys.stderr)
    return 1 if run.failed else 0


def _default(*, quick: bool) -> list[str]:
    left_out = ONLY_BY_NAME | ONLY_FULL if quick else ONLY_BY_NAME
    return [name for name in BENCHMARKS if name not in left_out]


def _measure(run: results.Run, name: str, *, quick: bool) -> None:
    """Run one benchmark in a directory of its own, which is gone afterwards; note what it finds."""
    print(f"{name} ...", flush=True)
    began = time.monotonic()
    found = run.findings.setdefault(name, [])
    _BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmarks-", dir=_BUILD) as temporary:
        directory = Path(temporary)
        setting = Setting.quick(directory) if quick else Setting(directory=directory)
        try:
            for one in BENCHMARKS[name](setting):
                found.append(one)
                if isinstance(one, Figure):
                    print(f"  {one.name} {one.value:.2f} ({one.goal})", flush=True)
                elif isinstance(one, Skipped):
                    print(f"  skipped: {one.what}: {one.reason}", flush=True)
        except Exception as exc:  # The others are to be measured all the same.
            traceback.print_exc()
            run.failed[name] = f"{type(exc).__name__}: {exc}"
    run.seconds[name] = time.monotonic() - began
    print(f"  {run.seconds[name]:.0f} s", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures Tallybook beside its baselines and peers. The last lines, "
        "`BENCH name value goal`, are for machines.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, and only what they suit: minutes"
    )
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIRECTORY",
        help="write results.md, results.json and charts there",
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"of: {', '.join(BENCHMARKS)}")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
