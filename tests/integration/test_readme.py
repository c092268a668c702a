"""The README's code prints what the README says, and the example runs."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    parts = re.findall(r"```python\n(.*?)```\n\nprints\n\n```\n(.*?)```", text, re.DOTALL)
    assert len(parts) == 2
    code = "".join(code for code, _ in parts)  # The second goes on where the first ends.
    assert _run(["-c", code], tmp_path) == "".join(printed for _, printed in parts)


def test_the_first_table_counts_right(tmp_path: Path) -> None:
    printed = _run([str(ROOT / "examples" / "first_table.py")], tmp_path)
    assert printed.count("{'customer_id': 7, 'orders': 3, 'cents': 650, 'status': 'paid'}") == 2


def _run(arguments: list[str], directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout
