"""The map is true: what it names is there, and what is exported is tried."""

import ast
import re
from pathlib import Path

import pytest

import tallybook as tb

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MAP = (DOCS / "architecture.md").read_text()
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def test_what_the_map_names_is_there() -> None:
    paths = re.findall(r"`((?:[a-z_]+/)+(?:[\w.-]+)?)`", MAP)
    assert len(paths) > 60
    missing = [path for path in paths if not any((base / path).exists() for base in (ROOT, DOCS))]
    assert not missing


def test_a_name_after_a_path_is_defined_there() -> None:
    named = re.findall(r"`([\w/]+\.py)`\s+\(`(\w+)`\)", MAP)
    assert len(named) >= 6
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {getattr(node, "name", None) for node in tree.body}, (path, name)


def test_the_twelve_everyday_changes_have_a_place() -> None:
    section = MAP.partition("## If you want to change")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 12


@pytest.mark.parametrize("name", tb.__all__)
def test_a_public_name_is_documented_and_tried(name: str) -> None:
    """Code of the pages is run by a test, so what stands there is tried, too."""
    told = [page for page in PAGES if re.search(rf"\b{name}\b", page.read_text())]
    assert told, f"no page tells of tb.{name}"
    tests = (path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert any(re.search(rf"\b{name}\b", text) for text in tests), f"no test uses {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_says_of_tb_exists(page: Path) -> None:
    for dotted in set(re.findall(r"\btb\.([A-Za-z_][\w.]*\w)", page.read_text())):
        found: object = tb
        for part in dotted.split("."):
            assert hasattr(found, part), f"{page.name}: there is no tb.{dotted}"
            found = getattr(found, part)
