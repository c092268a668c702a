"""What must be true of a copy in a lake, whatever was killed: compared with its table, and read.

Each version is looked at in the lake's own objects, not by what the job makes of them.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa

import tallybook as tb
from server.client.remote_table import RemoteTable
from sink.lake.letters import id_of
from sink.lake.state import step_of, vectors_name

Row = tuple[Any, ...]


def sorted_rows(table: pa.Table) -> list[Row]:
    """Return the rows, by key."""
    return sorted(tuple(row.values()) for row in table.to_pylist())


def check_copy(path: Path, table: RemoteTable) -> None:
    """Compare the copy as it is now with the table at its cut, row for row, by two readers."""
    copy = tb.tiering.find(str(path))
    names = ["k", *(column.name for column in table.schema.value_columns)]
    expected = sorted_rows(table.scan(at=copy.cut).to_arrow().select(names))
    found = sorted_rows(copy.to_arrow().select(names))
    assert found == expected
    assert len({row[0] for row in found}) == len(found) == copy.rows
    if (path / "_delta_log").exists():
        scanned = pa.table(deltalake.DeltaTable(str(path)).scan())
        assert sorted_rows(scanned.select(names)) == expected, "delta-rs reads something else"


def commits(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Return what each version says, line by line."""
    [directory] = [path / name for name in ("_delta_log", "_tallybook") if (path / name).exists()]
    found = {int(one.stem): one for one in directory.glob(f"{'[0-9]' * 20}.json")}
    return {
        version: [json.loads(line) for line in found[version].read_text().splitlines()]
        for version in sorted(found)
    }


def marks(path: Path) -> list[dict[str, Any]]:
    """Return how far each version says it has come, in their order."""
    return [mark for actions in commits(path).values() for mark in _marks(actions)]


def _marks(actions: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for action in actions:
        if "mark" in action:
            yield action["mark"]
        if "metaData" in action:
            mark = json.loads(action["metaData"]["configuration"]["tallybook.mark"])
            [told] = [one["txn"]["version"] for one in actions if "txn" in one]
            assert told == mark["step"]
            yield mark


def check_steps(path: Path) -> None:
    """Each step was committed once, one after the other; so was each round."""
    if not (found := commits(path)):
        return
    assert [*found] == list(range(len(found)))
    told = marks(path)
    assert [mark["step"] for mark in told] == list(range(len(found)))
    assert len({mark["lake"] for mark in told}) == 1
    for before, after in pairwise(told):
        assert after["round"] - before["round"] in (0, 1)
        if after["round"] == before["round"]:
            assert after["cut"] == before["cut"], "a round was committed in two parts"


def named(path: Path) -> set[str]:
    """Return all objects that any version needs."""
    names: set[str] = set()
    for actions in commits(path).values():
        for action in actions:
            names |= {one["name"] for one in action.get("files", ())}
            if "add" in action:
                names.add(action["add"]["path"])
                vector = action["add"].get("deletionVector")
                if vector is not None:
                    names.add(vectors_name(id_of(vector["pathOrInlineDv"])))
    return names


def objects(path: Path) -> set[str]:
    """Return all objects beside the log; what a killed process had not linked yet is none."""
    found = {one.name for one in path.iterdir() if one.is_file()}
    return {name for name in found if not name.startswith(".creating-")}


def left_over(path: Path) -> set[str]:
    """Return the objects that no version names; all those that one names must be there."""
    there, needed = objects(path), named(path)
    assert needed <= there, f"gone, though a version needs them: {sorted(needed - there)}"
    assert all(step_of(name) is not None for name in there)
    return there - needed
