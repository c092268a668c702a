"""The packages: what they export, and which of them may import which."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RANK = {
    "tallybook": 6,
    "sink": 5,
    "server": 4,
    "recovery": 3,
    "merge_engine": 2,
    "locks": 2,
    "foundation": 1,
}


@pytest.mark.parametrize(
    "name", ["foundation", "locks", "merge_engine", "merge_engine.aggregates", "tallybook"]
)
def test_a_package_exports_what_it_shows_and_nothing_else(name: str) -> None:
    package = importlib.import_module(name)
    visible = {
        item
        for item, value in vars(package).items()
        if not item.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(package.__all__) == visible
    assert package.__all__ == sorted(package.__all__)


def test_imports_go_one_way() -> None:
    wrong = []
    for name, rank in RANK.items():
        for path in (ROOT / name).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                for module in _imported(node):
                    other = module.partition(".")[0]
                    if other != name and RANK.get(other, 0) >= rank:
                        wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module or ""]
    return []


def test_importing_tallybook_brings_in_neither_spark_nor_pandas() -> None:
    program = "import sys, tallybook; print([m for m in ('pyspark', 'pandas') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
