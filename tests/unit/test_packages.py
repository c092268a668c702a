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
    "pyspark_tallybook": 6,
    "tallybook": 6,
    "sink": 5,
    "server": 4,
    "recovery": 3,
    "merge_engine": 2,
    "locks": 2,
    "foundation": 1,
}


@pytest.mark.parametrize("name", ["merge_engine.aggregates", "tallybook"])
def test_a_package_exports_what_it_shows_and_nothing_else(name: str) -> None:
    package = importlib.import_module(name)
    visible = {
        item
        for item, value in vars(package).items()
        if not item.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(package.__all__) - {"errors", "spark", "tiering"} == visible
    assert package.__all__ == sorted(package.__all__)


@pytest.mark.parametrize("name", RANK)
def test_a_package_tells_what_is_in_it(name: str) -> None:
    """Each docstring lists all modules and rooms of its package, one line each."""
    for init in [ROOT / name / "__init__.py", *(ROOT / name).glob("*/__init__.py")]:
        modules = [path.stem for path in init.parent.glob("[!_]*.py")]
        rooms = [f"{path.parent.name}/" for path in init.parent.glob("*/__init__.py")]
        told = [line.split(" ", 1)[0] for line in (docstring(init) or "").split("\n")[2:]]
        assert sorted(told) == sorted(modules + rooms), init


def docstring(path: Path) -> str | None:
    return ast.get_docstring(ast.parse(path.read_text()))


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


# What the rooms of `server` may import of each other.
ROOMS = {"protocol": set(), "client": {"protocol"}, "tablet": {"protocol"}}


@pytest.mark.parametrize("room", ROOMS)
def test_client_and_tablet_have_in_common_what_goes_over_the_network(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in (ROOT / "server" / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for module in _imported(node)
        if module.startswith("server.") and module.split(".")[1] not in {room, *ROOMS[room]}
    ]
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
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=180
    )
    assert done.stdout.strip() == "[]"
