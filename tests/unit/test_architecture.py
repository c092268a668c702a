"""The map and the pages are true: what they name is there, and what is public is tried."""

import ast
import inspect
import io
import json
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

import tallybook as tb
from tests.support.documented import NAMES, page
from tests.unit.test_packages import RANK

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MAP = (DOCS / "architecture.md").read_text()
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


SOURCES = [path for package in RANK for path in sorted((ROOT / package).rglob("*.py"))]
# Of the specification; of deltalake, Polars and DuckDB.
_FOREIGN = {"after_cut"} | {"to_pyarrow_table", "get_add_actions", "read_delta", "scan_delta"}
_FOREIGN |= {"delta_scan", "read_parquet", "union_by_name", "missing_columns"}
_FOREIGN |= {"hll_sketch_agg", "theta_sketch_agg"}


def test_what_the_map_names_is_there() -> None:
    paths = re.findall(r"`((?:[a-z_]+/)+(?:[\w.-]+)?)`", MAP)
    assert len(paths) > 60
    missing = [path for path in paths if not any((base / path).exists() for base in (ROOT, DOCS))]
    assert not missing


def test_files_and_modules_that_are_named_are_there() -> None:
    """On all pages, and in what docstrings and comments say."""
    folders = "|".join([*RANK, "tests", "docs", "benchmarks", "examples"])
    missing = []
    for path in [*map(ROOT.joinpath, NAMES), *SOURCES]:
        text = path.read_text()
        for file in re.findall(rf"`((?:{folders})/[\w/.-]*\.(?:py|md))`", text):
            if not (ROOT / file).exists():
                missing.append((path.name, file))
        for dotted in re.findall(rf"`((?:{folders})(?:\.\w+){{2,}})`", text):
            module = ROOT / dotted.replace(".", "/")
            if not any(one.with_suffix(".py").exists() for one in (module, module.parent)):
                missing.append((path.name, dotted))
    assert not missing


@cache
def words_of_code() -> set[str]:
    """Return all names and words of strings in the packages and benchmarks, without docstrings.

    And what the examples are called.
    """
    words = set(RANK) | {path.stem for path in (ROOT / "examples").glob("*.py")}
    for path in [*SOURCES, *(ROOT / "benchmarks").rglob("*.py")]:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.NAME or not token.string.startswith('"""'):
                words.update(re.findall(r"\w+", token.string))
    return words


def test_a_name_after_a_path_is_defined_there() -> None:
    named = re.findall(r"`([\w/]+\.py)`\s+\(`(\w+)`\)", MAP)
    assert len(named) >= 6
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {getattr(node, "name", None) for node in tree.body}, (path, name)


def test_everyday_changes_have_a_place() -> None:
    section = MAP.partition("## If you want to change")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 14


@pytest.mark.parametrize("name", tb.__all__)
def test_a_public_name_is_documented_and_tried(name: str) -> None:
    """Code of the pages is run by a test, so what stands there is tried, too."""
    told = [page for page in PAGES if re.search(rf"\b{name}\b", page.read_text())]
    assert told, f"no page tells of tb.{name}"
    tests = (path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert any(re.search(rf"\b{name}\b", text) for text in tests), f"no test uses {name}"


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("docs/")])
def test_a_function_that_a_page_names_is_in_the_code(name: str) -> None:
    """What was renamed in the code is not called by its old name: `take_lead`, `list_servers`."""
    named = {
        word
        for _, code in page(name).codes()
        for word in re.findall(r"(?<![\w/-])[a-z]+(?:_[a-z]+)+(?![\w*/.])", code)
        if not word.startswith("tallybook_")  # A metric, of whose name the code has the middle.
    }
    unknown = named - words_of_code() - _FOREIGN
    assert not unknown


@cache
def strings_of_benchmarks() -> list[str]:
    """Return patterns of the strings in the benchmarks, what is put in being any word or none."""
    patterns = []
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [getattr(part, "value", None) for part in parts]
            if isinstance(texts[0], str) and len(texts[0]) > 3:
                words = (re.escape(t) if isinstance(t, str) else r"\w*" for t in texts)
                patterns.append("".join(words))
    return patterns


def test_figures_that_the_page_or_a_recorded_run_names_are_measured() -> None:
    """Also those with digits; the parts of names that are filled in may be any."""
    text = (DOCS / "benchmarks.md").read_text()
    cells = re.findall(r"^\| (`\w+_\w+`(?:, `\w+`)*) \|", text, re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"\w+", cell)}
    assert len(names) > 30
    recorded = ROOT / "benchmarks" / "results.json"
    if recorded.exists():
        names |= {figure["name"] for figure in json.loads(recorded.read_text())["figures"]}
    measured = re.compile("|".join(strings_of_benchmarks()))
    assert not {name for name in names if not measured.fullmatch(name)}


def test_what_pages_say_of_public_classes_is_tried() -> None:
    """Members of what `tb` exports, and errors: none is documented and used by no test."""
    members = {name for name in vars(tb.errors) if name[0].isupper()}
    for name in tb.__all__:
        if inspect.isclass(kind := getattr(tb, name)):
            members.update(one for one in dir(kind) if not one.startswith("_"))
    told = {
        word
        for name in NAMES
        for _, code in page(name).codes()
        for word in re.findall(r"\w+", code)
    }
    blocks = (block.text for name in NAMES for block in page(name).blocks if block.kind != "text")
    tests = (path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    tried = {word for text in (*blocks, *tests) for word in re.findall(r"\w+", text)}
    untried = (members & told) - tried
    assert not untried


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_says_of_tb_exists(page: Path) -> None:
    for dotted in set(re.findall(r"\btb\.([A-Za-z_][\w.]*\w)", page.read_text())):
        found: object = tb
        for part in dotted.split("."):
            assert hasattr(found, part), f"{page.name}: there is no tb.{dotted}"
            found = getattr(found, part)
