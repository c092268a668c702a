"""What a run leaves behind: a page, charts that are well-formed, and JSON; and how it ends."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import __main__ as program
from benchmarks import results
from benchmarks.charts import svg
from benchmarks.figure import Chart, Figure, Finding, Setting, Skipped
from benchmarks.peers.reference import WrongResult
from benchmarks.registry import BENCHMARKS, ONLY_BY_NAME, ONLY_FULL

ROOT = Path(__file__).parents[2]
FIGURES = [
    Figure(
        name="ours_vs_theirs",
        what="ours, against a|b",
        ours="2.00 M events/s",
        baseline="1.00 M events/s",
        value=2.0,
        spread=(1.5, 2.25),
        goal=">=1.5",
    ),
    Figure(name="pause_ms", what="a pause", ours="300 ms", baseline="-", value=300, goal="<200"),
    Figure(name="only_to_be_known", what="bytes", ours="1", baseline="-", value=1),
]
BARS = Chart(
    name="bars",
    title="Who is <fast> & who is not",
    unit="events/s",
    series={"ours": [("many", 2e6), ("few", 40.0)], "theirs": [("many", 1e6)]},
)
LINES = Chart(
    name="lines",
    title="Over time",
    unit="ms",
    across="seconds",
    series={"longest": [(0.0, 30.0), (1.0, 90.0)], "p50": [(0.0, 10.0), (1.0, 11.0)]},
    logarithmic=False,
)
THERE = results.Circumstances(
    date="2026-11-17T12:00+00:00",
    size="Full run",
    minutes=20.5,
    machine="2 cores",
    load_before=0.1,
    commit="abc1234",
    versions={"Python": "3.11", "duckdb": "2.0.0"},
)


def run_of(*findings: Finding) -> results.Run:
    return results.Run(findings={"a_benchmark": list(findings)}, seconds={"a_benchmark": 1.23})


def test_the_page_says_what_was_met_and_what_was_missed() -> None:
    page = results.markdown(run_of(*FIGURES), THERE)
    assert "1 of 2 goals are met." in page
    assert "| `ours_vs_theirs` | 2.00 | 1.50 .. 2.25 | ≥ 1.5 | met | 2.00 M events/s |" in page
    assert "| `pause_ms` | 300 |  | < 200 | **missed** | 300 ms | - | a pause |" in page
    assert "| `only_to_be_known` | 1.00 |  |  |  | 1 | - | bytes |" in page
    assert "ours, against a\\|b" in page
    assert "2 cores" in page
    assert "duckdb 2.0.0" in page


def test_the_page_names_what_was_skipped_and_what_failed() -> None:
    run = run_of(Skipped(what="nobody, 1 M keys", reason="it is not installed"))
    run.failed["another"] = "WrongResult: total of key 1"
    page = results.markdown(run, THERE)
    assert "- nobody, 1 M keys: it is not installed" in page
    assert "- another: WrongResult: total of key 1" in page


def test_all_rows_of_a_table_have_as_many_cells_as_its_head() -> None:
    page = results.markdown(run_of(*FIGURES, BARS, LINES), THERE)
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    assert len(tables) == 2
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1


@pytest.mark.parametrize("chart", [BARS, LINES], ids=lambda chart: chart.name)
def test_a_chart_is_well_formed_and_stays_on_its_canvas(chart: Chart) -> None:
    root = ElementTree.fromstring(svg(chart))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert chart.title in texts
    assert set(chart.series) <= set(texts)
    for element in root.iter():
        for name, most in (("x", width), ("y", height), ("width", width), ("height", height)):
            assert 0 <= float(element.attrib.get(name, 0)) <= most
        for point in element.attrib.get("points", "").split():
            x, y = map(float, point.split(","))
            assert (0 <= x <= width, 0 <= y <= height) == (True, True)


def test_bars_of_a_group_are_as_long_as_their_values_are_large() -> None:
    root = ElementTree.fromstring(svg(BARS))
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if "x" in e.attrib]
    ours, theirs, few = (float(bar.attrib["width"]) for bar in bars)
    assert ours == 2 * theirs
    assert few == ours  # The longest of its own group.


def test_a_run_is_written_and_replaces_the_one_before(tmp_path: Path) -> None:
    results.write(tmp_path, run_of(*FIGURES, BARS, LINES), THERE)
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"bars.svg", "lines.svg"}
    results.write(tmp_path, run_of(*FIGURES, BARS), THERE)
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"bars.svg"}
    page = (tmp_path / "results.md").read_text()
    for picture in re.findall(r"\]\((results/[^)]+)\)", page):
        assert (tmp_path / picture).exists()
    told = json.loads((tmp_path / "results.json").read_text())
    assert told["machine"] == "2 cores"
    assert told["versions"]["duckdb"] == "2.0.0"
    assert [figure["met"] for figure in told["figures"]] == [True, False, None]
    assert told["figures"][0]["spread"] == [1.5, 2.25]
    assert told["charts"][0]["series"]["ours"] == [["many", 2e6], ["few", 40.0]]


def _right(_: Setting) -> Iterator[Finding]:
    yield FIGURES[0]


def _wrong(_: Setting) -> Iterator[Finding]:
    yield FIGURES[1]
    raise WrongResult("a peer has 1 row, not 2")


def test_a_wrong_result_fails_the_run_and_the_others_are_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(program, "BENCHMARKS", {"wrong": _wrong, "right": _right})
    monkeypatch.setattr("signal.signal", lambda *_: None)
    arguments = ["benchmarks", "--results", str(tmp_path), "wrong", "right"]
    monkeypatch.setattr("sys.argv", arguments)
    assert program.main() == 1
    said = capsys.readouterr()
    assert "FAILED wrong: WrongResult: a peer has 1 row, not 2" in said.err
    assert "BENCH ours_vs_theirs 2.0000 >=1.5" in said.out
    assert "wrong: WrongResult" in (tmp_path / "results.md").read_text()
    monkeypatch.setattr("sys.argv", ["benchmarks", "right"])
    assert program.main() == 0


def test_what_is_left_out_of_a_run_is_a_benchmark() -> None:
    assert set(BENCHMARKS) >= ONLY_BY_NAME | ONLY_FULL
    assert not ONLY_BY_NAME & ONLY_FULL
