"""Lay the pages out for mkdocs as they lie in the repository, so that links hold.

    python docs/site.py build/docs

The notebook becomes a page, and the decisions get a list.
"""

import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TREES = ("docs", "examples", "benchmarks/results")
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/results.md", "tests/README.md")


def page_of_notebook(text: str) -> str:
    """Return the cells of a notebook, with what they print, as Markdown."""
    parts = ["[This page as a notebook](quick-start.ipynb)"]
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join(line for output in cell["outputs"] for line in output["text"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    first, heading, *others = parts
    return "\n\n".join([heading, first, *others]) + "\n"


def list_of_decisions(pages: list[Path]) -> str:
    """Return a page with a link to each of them, by its heading."""
    titles = [page.read_text().splitlines()[0].lstrip("# ") for page in pages]
    lines = [
        f"- [{title}](decisions/{page.name})" for page, title in zip(pages, titles, strict=True)
    ]
    return "\n".join(["# Decisions", "", *lines, ""])


def lay_out(target: Path) -> None:
    """Make `target` anew."""
    shutil.rmtree(target, ignore_errors=True)
    for tree in TREES:
        skipped = shutil.ignore_patterns("__pycache__", "site.py")
        shutil.copytree(ROOT / tree, target / tree, ignore=skipped)
    for name in FILES:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)
    docs = target / "docs"
    notebook = (docs / "quick-start.ipynb").read_text()
    (docs / "quick-start.md").write_text(page_of_notebook(notebook))
    (docs / "decisions.md").write_text(list_of_decisions(sorted((docs / "decisions").glob("*.md"))))
    # A folder is no page of a site.
    readme = target / "README.md"
    readme.write_text(readme.read_text().replace("(docs/decisions/)", "(docs/decisions.md)"))


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
