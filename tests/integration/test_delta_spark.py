"""Copies as Delta's own Spark reads them, in another Python: there is none for Spark 4.3.

`TALLYBOOK_DELTA_SPARK=/path/to/python pytest tests/integration/test_delta_spark.py`, where that
Python has pyspark and delta-spark, and Maven's jars can be had.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tallybook as tb
from tests.support import delta_spark_read
from tests.support.tiering import KINDS, TieringScene, tiering_scene, write

PYTHON = os.environ.get("TALLYBOOK_DELTA_SPARK")
pytestmark = [
    pytest.mark.spark,
    pytest.mark.skipif(
        PYTHON is None,
        reason="Delta-Spark has no release for Spark 4.3, which is installed here; "
        "TALLYBOOK_DELTA_SPARK names a Python that has both for another Spark",
    ),
]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieringScene]:
    with tiering_scene(tmp_path_factory.mktemp("delta-spark")) as running:
        yield running
        running.close()


@pytest.mark.parametrize("kind", ["vectors", "rewrite"])
def test_delta_spark_reads_every_version_as_it_was(scene: TieringScene, kind: str) -> None:
    table, lake = scene.table(), scene.lake()
    writer = scene.writer(table)
    for number in range(12):  # With compactions, and a checkpoint.
        keys = [number, number + 1, 100 + number]
        write(writer, {"k": keys, "a": [1] * 3, "b": [number] * 3})
        if number % 4 == 3:
            write(writer, {"k": [number], "a": [0], "b": [0], "op": ["delete"]})
        scene.tier(table, lake, **KINDS[kind])
    last = tb.tiering.find(lake).version
    assert list(Path(lake, "_delta_log").glob("*.checkpoint.parquet"))
    command = [str(PYTHON), delta_spark_read.__file__, lake, *map(str, range(last + 1))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [
        json.loads(line.removeprefix("rows "))
        for line in done.stdout.splitlines()
        if line.startswith("rows ")
    ]
    assert len(found) == last + 1
    for version, rows in enumerate(found):
        ours = tb.tiering.find(lake, version).to_arrow().to_pylist()
        assert sorted(map(repr, rows)) == sorted(map(repr, ours)), version
