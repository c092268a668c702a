"""The process of an embedded table, killed with SIGKILL while its writer writes: exactly once.

At every failpoint of the writer and of the store that keeps its lock, and then once more while the
next process recovers. A failure prints the seed, and where it was killed.
"""

import os
import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import locks
import recovery
from recovery.embedded.table import Table
from recovery.writer.rows import Rows
from tests.fault.embedded_writer import (
    BUCKETS,
    main,
    rows_of,
    table_schema,
    with_small_parts,
    writer_of,
)
from tests.support.forked import forked

EXAMPLES = int(os.environ.get("TALLYBOOK_EXAMPLES", "0"))
DEADLINE_S = 60

# The failpoints, by the way of recovery that has them, and the visits to be killed at.
PLACES: dict[str, tuple[str, range]] = {
    "writer.acquired": ("undo", range(1, 2)),
    "writer.fenced": ("undo", range(1, 2)),
    "writer.recovered": ("undo", range(1, 2)),
    "writer.ready": ("undo", range(1, 2)),
    "writer.before_put": ("undo", range(1, 9)),
    "writer.put": ("undo", range(1, 9)),
    "writer.sealed": ("undo", range(1, 9)),
    "writer.committed": ("undo", range(1, 9)),
    "put.part_written": ("undo", range(1, 60)),
    "locks.created": ("undo", range(1, 12)),
    "locks.deleted": ("undo", range(1, 2)),
    "storage.linked": ("undo", range(1, 60)),
    "writer.redo_written": ("redo", range(1, 9)),
    "writer.prepared": ("redo", range(1, 9)),
}
# Those that a process comes by that has something to recover.
RECOVERING = {
    "undo": ["writer.acquired", "writer.undone", "writer.paid", "writer.recovered"],
    "redo": ["writer.acquired", "writer.paid", "locks.created", "writer.ready"],
}


def test_every_failpoint_of_writers_and_their_locks_is_killed_at() -> None:
    sources = [Path(package.__file__ or "").parent for package in (locks, recovery)]
    texts = [path.read_text() for source in sources for path in source.rglob("*.py")]
    names = {name for text in texts for name in re.findall(r'\bhit\("([^"]+)"\)', text)}
    own = {name for name in names if name.split(".")[0] in ("writer", "locks", "put")}
    assert own <= {*PLACES, *RECOVERING["undo"], *RECOVERING["redo"]}


def killed_at(directory: Path, way: str, place: str) -> list[int]:
    """Run a process that kills itself there; return the batches that it acknowledged."""
    with forked(main, directory, way, failpoint=place) as child:
        code, said = child.end(DEADLINE_S)
    assert code == -signal.SIGKILL, f"not killed at {place}"
    lines = said.splitlines(keepends=True)
    return [int(line) for line in lines if line.endswith(b"\n")]


def totals(batches: int) -> dict[tuple[str, int], int]:
    """Return what the first batches add up to."""
    sums: Counter[tuple[str, int]] = Counter()
    for batch in range(batches):
        for row in rows_of(batch):
            sums[str(row["day"]), int(row["k"])] += int(row["total"])
    return dict(sums)


def seen(table: Table, isolation: str) -> dict[tuple[str, int], int]:
    rows = table.scan(["total"], isolation=isolation).to_arrow().to_pylist()
    return {(row["day"], row["k"]): row["total"] for row in rows if row["total"] is not None}


def check(directory: Path, way: str, acknowledged: int) -> int:
    """Open the table again: what was acknowledged is there, and the next batch whole or not at all.

    Returns how many batches are committed, with one more that is written here.
    """
    with Table.open(directory / "table") as table:
        before = seen(table, "committed")
        with writer_of(table, directory, way) as writer:
            done = writer.batch + 1
            assert acknowledged <= done <= acknowledged + 1
            assert before in (totals(acknowledged), totals(done))
            assert seen(table, "latest") == seen(table, "committed") == totals(done)
            assert not done or not writer.write(done - 1, Rows(data=rows_of(done - 1)))
            assert writer.write(done, Rows(data=rows_of(done)))
            assert seen(table, "latest") == totals(done + 1)
        return done + 1


@contextmanager
def said(seed: str, notes: list[str]) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}: killed at " + ", ".join(notes))
        raise


@pytest.mark.parametrize("failpoint", PLACES)
def test_each_batch_counts_once_when_the_process_is_killed_at(
    failpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recovery.embedded.table._SIZES", None)  # So that it is put back.
    with_small_parts()
    way, visits = PLACES[failpoint]
    for number in range(1 + EXAMPLES // 10):
        seed, notes = f"{failpoint} {number}", list[str]()
        chance, directory = random.Random(seed), tmp_path / str(number)
        Table.create(directory / "table", table_schema(), buckets=BUCKETS).close()
        with said(seed, notes):
            # The one that recovers starts with something to pay.
            notes.append(f"{failpoint}:{chance.choice(visits)}")
            done = 1 + max(killed_at(directory, way, notes[-1]), default=-1)
            if failpoint in ("writer.put", "put.part_written", "writer.prepared"):
                notes.append(f"{chance.choice(RECOVERING[way])}:1")
                assert killed_at(directory, way, notes[-1]) == []
            check(directory, way, done)


@pytest.mark.parametrize("seed", range(2 + EXAMPLES // 4))
def test_each_batch_counts_once_however_often_its_writer_is_killed_while_it_recovers(
    seed: int, tmp_path: Path
) -> None:
    chance, notes = random.Random(seed), list[str]()
    way = ("undo", "redo")[seed % 2]
    Table.create(tmp_path / "table", table_schema(), buckets=BUCKETS).close()
    first = "writer.put" if way == "undo" else "writer.prepared"
    with said(str(seed), notes):
        notes.append(f"{first}:{chance.randint(1, 5)}")
        done = 1 + max(killed_at(tmp_path, way, notes[-1]), default=-1)
        for place in RECOVERING[way]:
            notes.append(f"{place}:1")
            assert killed_at(tmp_path, way, notes[-1]) == []
        if way == "redo":  # What was promised counts.
            done += 1
        assert check(tmp_path, way, done) == done + 1
