"""The files that a run leaves: `results.md` with charts for people, JSON for machines."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.charts import svg
from benchmarks.figure import NO_GOAL, Chart, Figure, Finding, Skipped
from benchmarks.registry import BENCHMARKS, ONLY_BY_NAME
from benchmarks.report import amount, short

_CHARTS = "results"
_PACKAGES = (
    *("pyarrow", "numpy", "rocksdict", "pyspark", "kazoo", "duckdb", "deltalake", "chdb"),
    *("chdb-core", "adbc-driver-postgresql"),
)


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Where and when a run was made: figures of another machine, or a busy one, are others."""

    date: str
    size: str
    minutes: float
    machine: str
    load_before: float
    commit: str
    versions: Mapping[str, str]


@dataclass
class Run:
    """What a run has found, benchmark by benchmark."""

    findings: dict[str, list[Finding]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def figures(self) -> list[Figure]:
        """Return all figures, in order."""
        return [one for found in self.findings.values() for one in found if isinstance(one, Figure)]

    def charts(self) -> list[Chart]:
        """Return all charts, in order."""
        return [one for found in self.findings.values() for one in found if isinstance(one, Chart)]

    def skipped(self) -> list[Skipped]:
        """Return what was left out, in order."""
        found = (one for findings in self.findings.values() for one in findings)
        return [one for one in found if isinstance(one, Skipped)]


def write(directory: Path, run: Run, circumstances: Circumstances) -> None:
    """Write the files below a directory, in the place of those of an earlier run."""
    charts = directory / _CHARTS
    charts.mkdir(parents=True, exist_ok=True)
    for old in charts.glob("*.svg"):
        old.unlink()
    for chart in run.charts():
        (charts / f"{chart.name}.svg").write_text(svg(chart))
    (directory / "results.md").write_text(markdown(run, circumstances))
    (directory / "results.json").write_text(as_json(run, circumstances))


def as_json(run: Run, circumstances: Circumstances) -> str:
    """Return all that was found, and where."""
    figures = [
        {"benchmark": name, **asdict(one), "met": None if one.goal == NO_GOAL else one.met}
        for name, found in run.findings.items()
        for one in found
        if isinstance(one, Figure)
    ]
    content = {
        **asdict(circumstances),
        "figures": figures,
        "charts": [asdict(chart) for chart in run.charts()],
        "skipped": [asdict(one) for one in run.skipped()],
        "failed": run.failed,
        "seconds": {name: round(seconds, 1) for name, seconds in run.seconds.items()},
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def markdown(run: Run, circumstances: Circumstances) -> str:
    """Return the page: where it was measured, charts with their numbers, and all figures."""
    versions = ", ".join(f"{name} {number}" for name, number in circumstances.versions.items())
    goals = [figure for figure in run.figures() if figure.goal != NO_GOAL]
    lines = [
        "# Results of the benchmarks",
        "",
        f"{_ran(run)}; [what is measured, and how](../docs/benchmarks.md). "
        f"{circumstances.size}, {circumstances.date}, {circumstances.minutes:.0f} minutes, commit "
        f"{circumstances.commit}, on {circumstances.machine}; the load before was "
        f"{circumstances.load_before:.1f}. {versions}.",
        "",
        f"{sum(figure.met for figure in goals)} of {len(goals)} goals are met.",
        "",
        *_bullets(
            "Not measured:", {one.what: one.reason for one in run.skipped()} | dict(run.failed)
        ),
        "## Charts",
        "",
    ]
    for chart in run.charts():
        lines += [f"![{chart.title}]({_CHARTS}/{chart.name}.svg)", "", *_numbers(chart), ""]
    lines += ["## Figures", ""]
    for name, found in run.findings.items():
        figures = [one for one in found if isinstance(one, Figure)]
        if figures:
            lines += [f"### {name.replace('_', ' ')}", "", *_table(figures), ""]
    return "\n".join(lines).rstrip() + "\n"


def _ran(run: Run) -> str:
    """Say which benchmarks these are: all of them, or some."""
    if set(run.findings) >= set(BENCHMARKS) - ONLY_BY_NAME:
        return "Written by `make bench`"
    return f"Written by `python -m benchmarks {' '.join(run.findings)}`, and not by all benchmarks"


def _bullets(title: str, items: Mapping[str, str]) -> list[str]:
    if not items:
        return []
    return [title, "", *(f"- {what}: {reason}" for what, reason in items.items()), ""]


def _numbers(chart: Chart) -> list[str]:
    """Return the values of a bar chart; those of lines are in the JSON, and to be seen."""
    if chart.across:
        return []
    groups = list(dict.fromkeys(place for points in chart.series.values() for place, _ in points))
    rows = [["", *(f"{group}, {chart.unit}" for group in groups)]]
    for who, points in chart.series.items():
        values = dict(points)
        rows.append([who, *(amount(values[one]) if one in values else "-" for one in groups)])
    return _rows(rows)


def _table(figures: Iterable[Figure]) -> list[str]:
    rows = [["figure", "value", "spread", "goal", "", "measured", "baseline", "what"]]
    for one in figures:
        spread = "" if one.spread is None else " .. ".join(map(short, one.spread))
        goal = "" if one.goal == NO_GOAL else _comparison(one.goal)
        verdict = "" if one.goal == NO_GOAL else "met" if one.met else "**missed**"
        rows.append(
            [
                *(f"`{one.name}`", short(one.value), spread, goal, verdict),
                *(one.ours, one.baseline, one.what),
            ]
        )
    return _rows(rows)


def _comparison(goal: str) -> str:
    """Return a goal as people write it: ≥ 1.5, < 200."""
    number = goal.lstrip("<>=")
    sign = goal.removesuffix(number)
    return f"{ {'<=': '≤', '>=': '≥'}.get(sign, sign) } {number}"


def _rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table of Markdown, the first row its head."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def circumstances(*, quick: bool, load_before: float, seconds: float) -> Circumstances:
    """Return where and when this run was made."""
    return Circumstances(
        date=datetime.now().astimezone().isoformat(timespec="minutes"),
        size="Quick run, small sizes (goals are for the full run)" if quick else "Full run",
        minutes=round(seconds / 60, 1),
        machine=_machine(),
        load_before=load_before,
        commit=_commit(),
        versions=_versions(),
    )


def _machine() -> str:
    gibibytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    models = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    model = next(models, platform.machine())
    system = f"{platform.system()} {platform.release()}"
    return f"{os.cpu_count()} cores ({model}), {gibibytes:.0f} GiB, {system}"


def _commit() -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return told.stdout.strip() or "unknown"


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
