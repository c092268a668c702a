"""A writer killed with SIGKILL, at every failpoint and at any time, loses nothing and doubles none.

The parent knows what the child acknowledged, and so what must be there, and which operation was in
flight, and so may be there: whole or not at all in each bucket. `TALLYBOOK_EXAMPLES` makes a
longer run. A failure prints the seed; `python -m tests.fault.killed_writer` repeats the child.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from merge_engine.bucket.log_names import LogNames
from merge_engine.bucket.segment import SegmentKind, decode_segment, segment_name
from merge_engine.merging.hashing import bucket_of
from recovery.embedded.table import Table
from tests.fault.killed_writer import (
    BUCKETS,
    OPTIONS,
    OWNERS,
    Offsets,
    Step,
    clean,
    end_offsets,
    failpoint_names,
    main,
    operations,
    roll_up,
    send,
    table_schema,
    undo,
)
from tests.property.models import Row, model_fold, same
from tests.support.forked import Forked, forked

EXAMPLES = int(os.environ.get("TALLYBOOK_EXAMPLES", "0"))
DEADLINE_S = 60

# The failpoints, and up to which visit the child may come before it is killed there.
LATEST_VISIT = {
    "clean.before_mark": 2,
    "clean.deleted": 9,
    "clean.marked": 2,
    "log.created": 25,
    "log.encoded": 25,
    "put.applied": 25,
    "put.logged": 25,
    "put.planned": 25,
    "roll_up.created": 4,
    "roll_up.deleted": 4,
    "roll_up.read": 3,
    "storage.linked": 30,
    "storage.written": 30,
    "undo.planned": 8,
    "view.before_write": 12,
    "view.file_made": 4,
    "view.written": 12,
}

Cells = dict[int, dict[str, tuple[Row, ...]]]
Visible = dict[int, dict[str, Any]]
SCHEMA = table_schema()


def test_every_failpoint_of_the_engine_is_killed_at() -> None:
    # Those of snapshots are `test_snapshot_kill`'s.
    names = [name for name in failpoint_names() if not name.startswith("snapshot.")]
    assert sorted(LATEST_VISIT) == names


@dataclass
class History:
    """What was acknowledged: the operations so far, and the table that they make."""

    seed: int
    done: int = 0
    cells: Cells = field(default_factory=dict)
    committed: dict[str, Cells] = field(default_factory=dict)
    offsets: Offsets = field(default_factory=dict)
    last_put: dict[str, Step] = field(default_factory=dict)

    def in_flight(self) -> Step:
        """Return the first operation that was not acknowledged."""
        return next(islice(operations(self.seed), self.done, None))

    def advance(self, acknowledged: list[dict[str, Any]]) -> None:
        """Take the acknowledgements of a child."""
        for each in acknowledged:
            assert each["done"] == self.done, f"seed {self.seed}: {each} out of order"
            self.finish(self.in_flight(), each.get("committed"))

    def finish(self, step: Step, offsets: dict[str, int] | None = None) -> None:
        """Count the operation as done."""
        self.cells = self.after(step)
        self.done += 1
        if step.kind in ("put", "delete"):
            self.last_put[step.owner] = step
        elif step.kind == "undo":
            self.last_put.pop(step.owner, None)
        elif step.kind == "commit":
            assert offsets is not None
            self.offsets[step.owner] = offsets
            self.committed[step.owner] = only(self.cells, OWNERS[step.owner])

    def after(self, step: Step) -> Cells:
        """Return what the table is once this is done."""
        mine = OWNERS[step.owner]
        if step.kind == "undo":
            others = [name for names in OWNERS.values() for name in names if name not in mine]
            kept, back = only(self.cells, others), self.committed.get(step.owner, {})
            return {key: {**kept.get(key, {}), **back.get(key, {})} for key in {**kept, **back}}
        cells = {key: dict(row) for key, row in self.cells.items()}
        for row in step.rows:
            columns = cells.setdefault(row["id"], {})
            for name in mine:
                if row.get("operation", "delete") == "delete":
                    columns.pop(name, None)
                else:
                    order = at_order(row["at"]) if name == "status" else None
                    columns[name] = (*columns.get(name, ()), (row[name], order))
        return {key: columns for key, columns in cells.items() if columns}


def at_order(microsecond: int) -> Any:
    return pa.scalar(microsecond, pa.timestamp("us", tz="UTC")).as_py()


def only(cells: Cells, names: Any) -> Cells:
    kept = {key: {n: row[n] for n in names if n in row} for key, row in cells.items()}
    return {key: row for key, row in kept.items() if row}


def visible(cells: Cells) -> Visible:
    functions = {column.name: column.function for column in SCHEMA.value_columns}
    return {
        key: {
            name: same(model_fold(function, row[name]) if name in row else None)
            for name, function in functions.items()
            if function is not None
        }
        for key, row in cells.items()
    }


def seen(table: Table) -> Visible:
    rows = table.to_arrow().to_pylist()
    found = {row.pop("id"): {name: same(value) for name, value in row.items()} for row in rows}
    assert len(found) == len(rows), "a key is there twice"
    return found


@contextmanager
def started(directory: Path, history: History, failpoint: str | None) -> Iterator[Forked]:
    """Start a child that begins with the operation in flight; it has ended on exit."""
    arguments = (str(directory), history.seed, history.done, history.offsets)
    with forked(main, *arguments, failpoint=failpoint) as child:
        yield child


def acknowledgements(output: bytes) -> list[dict[str, Any]]:
    """Return the complete lines; what a kill cut off was not acknowledged."""
    return [json.loads(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")]


def run_until_killed_at(directory: Path, history: History, failpoint: str) -> None:
    """Run a child that kills itself at the failpoint (`name:visit`), and count what it did."""
    with started(directory, history, failpoint) as child:
        code, output = child.end(DEADLINE_S)
    assert code == -signal.SIGKILL, f"seed {history.seed}: not killed at {failpoint}"
    history.advance(acknowledgements(output))


def run_until_killed_after(directory: Path, history: History, count: int, delay_s: float) -> None:
    """Kill a child some time after so many acknowledgements."""
    output = b""
    with started(directory, history, None) as child:
        deadline = time.monotonic() + DEADLINE_S
        while (part := child.read(deadline - time.monotonic())) is not None:
            assert part, f"seed {history.seed}: the child ended by itself"
            had_enough = output.count(b"\n") >= count
            output += part
            if output.count(b"\n") >= count and not had_enough:
                deadline = time.monotonic() + delay_s
        child.kill()
        code, rest = child.end(DEADLINE_S)
        output += rest
    assert code == -signal.SIGKILL
    assert output.count(b"\n") >= count, f"seed {history.seed}: too slow"
    history.advance(acknowledgements(output))


def check_and_finish(directory: Path, history: History) -> None:
    """Reopen the table, compare, finish what was in flight, and compare again."""
    step = history.in_flight()
    with Table.open(directory, options=OPTIONS) as table:
        check_half_way(seen(table), history, step)
        send_again_what_was_acknowledged(table, history, step)
        check_half_way(seen(table), history, step)
        offsets = None
        if step.kind in ("put", "delete"):
            send(table, step)
            again = send(table, step)
            assert all(result.repeated for result in again.buckets.values())
        elif step.kind == "undo":
            for _ in range(2):
                undo(table, step.owner, history.offsets.get(step.owner, {}))
        elif step.kind == "clean":
            clean(table, history.offsets)
            check_cleaned(directory)
        elif step.kind == "roll up":
            roll_up(table)
            check_rolled_up(directory)
        elif step.kind == "commit":
            offsets = end_offsets(table)
        history.finish(step, offsets)
        assert seen(table) == visible(history.cells)
        ids = table.bucket_ids()
        is_log_whole = all(table.bucket(bucket_id).start_offset == 0 for bucket_id in ids)
    if is_log_whole:
        view = directory / f"rebuilt-{history.done}"
        with Table.open(directory, options=OPTIONS, view_directory=view) as rebuilt:
            assert seen(rebuilt) == visible(history.cells)


def check_half_way(found: Visible, history: History, step: Step) -> None:
    """Check that all that was acknowledged is there, and the operation in flight whole or not."""
    before, after = visible(history.cells), visible(history.after(step))
    if step.kind == "undo":
        # It goes back step by step: its columns are where they were at some offset in between.
        own = OWNERS[step.owner]
        assert without(own, found) == without(own, before)
        return
    numbers = bucket_of([pa.array(range(20), pa.int64())], BUCKETS).tolist()
    groups = [[key for key in range(20) if numbers[key] == n] for n in range(BUCKETS)]
    for group in groups:
        old, new, now = (
            {key: rows[key] for key in group if key in rows} for rows in (before, after, found)
        )
        assert now in (old, new), f"seed {history.seed}, operation {history.done}: {step}"


def without(columns: Sequence[str], rows: Visible) -> dict[int, dict[str, Any]]:
    """Return the cells of the other columns that have a value."""
    cells = {
        key: {
            name: cell
            for name, cell in row.items()
            if name not in columns and cell != ("NoneType", None)
        }
        for key, row in rows.items()
    }
    return {key: row for key, row in cells.items() if row}


def send_again_what_was_acknowledged(table: Table, history: History, step: Step) -> None:
    """Send each owner's last put again: its token is known, or it had changed nothing."""
    for owner, put in history.last_put.items():
        if owner != step.owner:
            results = send(table, put).buckets.values()
            assert all(result.repeated or result.changed == 0 for result in results)


def check_cleaned(directory: Path) -> None:
    """Check that a clean that was killed has been finished by the next."""
    for log in (directory / "log" / "table").iterdir():
        marks = sorted(int(path.stem) for path in log.glob("*.start"))
        assert len(marks) <= 1
        for path in log.glob("*.seg"):
            if marks and int(path.stem) < marks[0]:
                kind = decode_segment(path.name, path.read_bytes()).header.kind
                assert kind is SegmentKind.LEADER


def check_rolled_up(directory: Path) -> None:
    """Check that what was rolled up by whoever was killed has been finished by the next."""
    for log in (directory / "log" / "table").iterdir():
        names = LogNames.of(path.name for path in log.iterdir() if path.is_file())
        ranges = names.to_ranges()
        for base in names.bases:
            if ranges.at(base) is not None:
                name = segment_name(base)
                kind = decode_segment(name, (log / name).read_bytes()).header.kind
                assert kind is SegmentKind.LEADER


def new_table(directory: Path) -> Path:
    Table.create(directory / "table", SCHEMA, buckets=BUCKETS).close()
    return directory / "table"


@contextmanager
def seed_on_failure(seed: int) -> Iterator[Callable[[str], None]]:
    """Say how to repeat what failed; the yielded function notes what was done."""
    notes: list[str] = []
    try:
        yield notes.append
    except BaseException as error:
        error.add_note(f"seed {seed}: " + "; ".join(notes))
        raise


@pytest.mark.parametrize("failpoint", LATEST_VISIT)
def test_nothing_is_lost_or_doubled_when_the_writer_is_killed_at(
    failpoint: str, tmp_path: Path
) -> None:
    for round_number in range(1 + EXAMPLES // 10):
        seed = random.Random(f"{failpoint} {round_number}").randrange(1 << 30)
        directory = tmp_path / str(round_number)
        directory.mkdir()
        kill_twice(failpoint, seed, new_table(directory))


def kill_twice(failpoint: str, seed: int, directory: Path) -> None:
    """Kill a child, look; then kill one that recovers from the kill of another, and look again."""
    chance = random.Random(seed)
    history = History(seed)
    others = ["storage.linked", "view.before_write", "view.written", "log.created", "put.logged"]
    with seed_on_failure(seed) as note:
        for chain in ([failpoint], [failpoint, chance.choice(others)]):
            for place, name in enumerate(chain):
                armed = f"{name}:{chance.randint(1, 3 if place else LATEST_VISIT[name])}"
                note(f"from operation {history.done} on killed at {armed}")
                run_until_killed_at(directory, history, armed)
            check_and_finish(directory, history)


@pytest.mark.parametrize("seed", range(3 + EXAMPLES))
def test_nothing_is_lost_or_doubled_when_the_writer_is_killed_at_any_time(
    seed: int, tmp_path: Path
) -> None:
    directory, history, chance = new_table(tmp_path), History(seed), random.Random(seed)
    with seed_on_failure(seed) as note:
        for _ in range(2):
            count, delay_s = chance.randrange(60), chance.random() * 0.05
            note(f"from operation {history.done} on killed {delay_s} s after {count} more")
            run_until_killed_after(directory, history, count, delay_s)
            check_and_finish(directory, history)
