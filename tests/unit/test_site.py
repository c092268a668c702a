"""The documentation as a site: every page is in it, and mkdocs has nothing to complain of."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.documented import NAMES, ROOT

MKDOCS = Path(sys.executable).parent / "mkdocs"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads what mkdocs has functions for as nothing."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


@pytest.fixture
def settings() -> dict[str, Any]:
    return dict(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader))


def _pages(nav: Any) -> Iterator[str]:
    for entry in nav:
        for inside in entry.values():
            yield from [inside] if isinstance(inside, str) else _pages(inside)


def test_every_page_is_to_be_found_once(settings: dict[str, Any]) -> None:
    made = {"docs/quick-start.md", "docs/decisions.md", "benchmarks/results.md"}
    elsewhere = {name for name in NAMES if name.startswith(("docs/decisions/", "tests/"))}
    assert sorted(_pages(settings["nav"])) == sorted({*NAMES, *made} - elsewhere)


def test_the_site_is_made_and_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    if not MKDOCS.exists():
        pytest.skip("mkdocs is not installed (the extra docs has it)")
    shutil.copyfile(ROOT / "mkdocs.yml", tmp_path / "mkdocs.yml")
    subprocess.run(
        [sys.executable, "docs/site.py", str(tmp_path / "build/docs")],
        cwd=ROOT, check=True, timeout=180,
    )  # fmt: skip

    def build() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(MKDOCS), "build", "--strict"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    done = build()
    assert done.returncode == 0, done.stderr
    front = (tmp_path / "build/site/index.html").read_text()
    assert 'src="docs/images/status-page.png"' in front
    assert "orders" in (tmp_path / "build/site/docs/quick-start.html").read_text()
    with (tmp_path / "build/docs/docs/examples.md").open("a") as page:
        page.write("\n[nowhere](nowhere.md)\n")
    assert "'nowhere.md'" in build().stderr
