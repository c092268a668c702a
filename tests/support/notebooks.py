"""Notebooks, as tests read them: code cells run in order, and print what the notebook says.

    python -m tests.support.notebooks docs/quick-start.ipynb

writes down what the cells print, on a cluster of its own. Notebooks print; they display nothing.
"""

import io
import json
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tallybook
from tests.support.markdown import BadPage
from tests.support.spark_session import quiet_spark


def run_notebook(path: Path, address: str, spark: Any) -> None:
    """Run a notebook's cells with a cluster that there is; BadPage where one prints otherwise."""
    for number, cell, printed in _run(path, address, spark):
        said = "".join(text for output in cell["outputs"] for text in output["text"])
        if said != printed:
            raise BadPage(f"cell {number} of {path.name} says\n{said}, and prints\n{printed}")


def _run(path: Path, address: str, spark: Any) -> Any:
    notebook = json.loads(path.read_text())
    namespace: dict[str, Any] = {"__name__": "notebook"}
    cluster = SimpleNamespace(
        address=address, connect=lambda: tallybook.connect(address), stop=lambda: None
    )
    cluster.start = lambda: cluster
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tallybook, "LocalCluster", lambda *_, **__: cluster)
        patch.setattr(type(spark), "stop", lambda _: None)
        for number, cell in enumerate(notebook["cells"]):
            if cell["cell_type"] == "code":
                printed = io.StringIO()
                with redirect_stdout(printed):
                    code = compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec")
                    exec(code, namespace)
                yield number, cell, printed.getvalue()


def main(path: Path) -> None:
    """Run the notebook and write its output into it."""
    from server.launch.local_cluster import LocalCluster  # noqa: PLC0415

    notebook = json.loads(path.read_text())
    with (
        tempfile.TemporaryDirectory() as directory,
        quiet_spark("local[2]") as spark,
        LocalCluster(Path(directory) / "cluster", servers=2) as local,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(directory)
        for count, (number, _, printed) in enumerate(_run(path, local.address, spark), 1):
            text = printed.splitlines(keepends=True)
            output = {"name": "stdout", "output_type": "stream", "text": text}
            notebook["cells"][number] |= {
                "execution_count": count,
                "outputs": [output] * bool(text),
            }
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
