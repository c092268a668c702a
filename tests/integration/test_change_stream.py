"""Streams of changes on a real cluster, with Spark's part played by hand: no gap, no overlap.

What Spark itself does with them is in `test_spark_stream.py`; here a micro-batch takes
milliseconds, and the query can be killed between any two of its steps: by a seed that a failure
prints and TALLYBOOK_SEED repeats.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foundation.failpoints import arm
from recovery.writer.redo import RedoLog
from tests.support.faulty_storage import interrupt
from tests.support.stream_scene import (
    APPLY,
    KEYS,
    Scene,
    leave_uncommitted,
    stream_scene,
    write,
)
from tests.support.streams import (
    STEPS,
    Cells,
    Died,
    apply_changes,
    as_sorted,
    dying,
    in_log_order,
    table_at,
)

SEED = int(os.environ.get("TALLYBOOK_SEED", random.randrange(1 << 32)))


@pytest.fixture(scope="module")
def module_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with stream_scene(tmp_path_factory.mktemp("streams")) as scene:
        yield scene


@pytest.fixture
def scene(module_scene: Scene) -> Iterator[Scene]:
    yield module_scene
    module_scene.close()


def move(rng: random.Random, column: str) -> dict[str, Any]:
    """Return rows that move amounts between keys: their sum is 0."""
    keys = rng.sample(KEYS, rng.choice([2, 4, 6]))
    amounts = [rng.randint(1, 9) for _ in keys[::2]]
    return {"k": keys, column: [sign * one for one in amounts for sign in (1, -1)]}


# --- Exactly once, wherever it dies ---------------------------------------------------------------


class Sums:
    """Two owners that move amounts between the keys of all buckets, and sometimes die."""

    def __init__(self, scene: Scene, rng: random.Random) -> None:
        self.scene, self.rng = scene, rng
        self.table = scene.table(buckets=4)
        self._writers = {
            name: scene.writer(self.table, f"owner of {name}", name) for name in ("a", "b")
        }

    def begin(self) -> None:
        """Give each key something."""
        for name, writer in self._writers.items():
            write(writer, {"k": list(KEYS), name: [100] * len(KEYS)})

    def go_on(self, batches: int = 1) -> None:
        """Commit so many batches; one of them may be tried, and undone, first."""
        for _ in range(batches):
            name, writer = self.rng.choice(sorted(self._writers.items()))
            if self.rng.random() < 0.2:
                leave_uncommitted(writer, **{name: 1000})
            write(writer, move(self.rng, name))

    def leave_something(self) -> None:
        """Leave work behind that no commit covers."""
        leave_uncommitted(self._writers["a"], a=5000)


def is_whole(cells: Cells) -> bool:
    """Whether the sums are what they were: no batch was applied in part."""
    sums = {name: sum(v for (_, of), v in cells.items() if of == name) for name in ("a", "b")}
    return sums == {"a": 100 * len(KEYS), "b": 100 * len(KEYS)}


@pytest.mark.parametrize("mode", ["changes", "upserts"])
@pytest.mark.parametrize("start", ["full", "earliest", "latest", "cut"])
def test_a_stream_is_exact_whichever_step_the_query_dies_at(
    scene: Scene, start: str, mode: str
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(f"{SEED} {start} {mode}")
    sums = Sums(scene, rng)
    sums.begin()
    sums.go_on(3)
    first = sums.table.cut()
    given = str(first) if start == "cut" else start
    stream = scene.stream(sums.table, given, mode=mode, maxRowsPerTrigger=5)
    for _ in range(6):
        sums.go_on(rng.randint(0, 2))
        if rng.random() < 0.3:
            sums.leave_something()
        stream.start()
        for _ in range(rng.randint(0, 3)):
            try:
                if stream.step(dying(rng.choice([*STEPS, "none", "none"]))) is None:
                    break
            except Died:
                sums.go_on(rng.randint(0, 2))
                break
    stream.run()

    cells: Cells = {}
    if start in ("latest", "cut"):
        cells = table_at(sums.table, stream.since)
        assert start == "latest" or cells == table_at(sums.table, first)
    for number, records in sorted(stream.batches.items()):
        APPLY[mode](cells, records)
        assert cells == table_at(sums.table, stream.cut(number))
        # What the owners begin with is two batches.
        assert len(cells) < 2 * len(KEYS) or is_whole(cells), f"batch {number}"
    assert cells == table_at(sums.table)
    assert is_whole(cells)


@pytest.mark.parametrize("start", ["full", "latest", "earliest"])
def test_batch_0_that_is_repeated_later_has_what_it_had(scene: Scene, start: str) -> None:
    table = scene.table()
    writer = scene.writer(table, "w", "ab")
    write(writer, a=1, b=1)
    stream = scene.stream(table, start)
    stream.start()
    with pytest.raises(Died):
        stream.step(dying("sunk"))
    write(writer, a=10, b=10)
    # The option says where a stream starts, not where it goes on.
    stream.options["start"] = "earliest" if start != "earliest" else "latest"
    batches = stream.run()
    assert len(batches) == 2
    assert {row["a"] for row in batches[0]} == (set() if start == "latest" else {1})
    assert {row["a"] for row in batches[1]} == {1, 11}
    assert len(batches[1]) == 2 * len(KEYS)


# --- Limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["changes", "upserts"])
def test_a_micro_batch_has_no_more_rows_than_it_may_unless_it_is_one_batch(
    scene: Scene, mode: str
) -> None:
    table = scene.table(buckets=4)
    writer = scene.writer(table, "w", "a")
    sizes = [2, 3, 1, 12, 4, 4, 4, 2, 7, 1, 1, 1]
    for number, size in enumerate(sizes):
        write(writer, {"k": list(range(size)), "a": [number + 1] * size})
    stream = scene.stream(table, "earliest", mode=mode, maxRowsPerTrigger=8)
    batches = stream.run()
    ends = [stream.cut(number).batches["w"] for number in range(len(batches))]
    assert ends[-1] == len(sizes) - 1
    before = -1
    for records, end in zip(batches, ends, strict=True):
        assert len(records) <= 8 or end - before == 1
        before = end
    if mode == "upserts":
        assert ends == [2, 3, 5, 7, 9, 11]
    cells: Cells = {}
    for records in batches:
        APPLY[mode](cells, records)
    assert cells == table_at(table)


def test_it_ends_where_the_table_stood_although_a_writer_goes_on(scene: Scene) -> None:
    table = scene.table()
    writer = scene.writer(table, "w", "a")
    write(writer, a=1)
    stream = scene.stream(table, "earliest", maxRowsPerTrigger=2 * len(KEYS))
    for _ in range(3):
        write(writer, a=1)
    stream.start()
    count = 0
    while stream.step() is not None:
        write(writer, a=1)
        count += 1
        assert count < 10
    assert stream.cut().batches == {"w": 3}
    assert stream.run()[-1]
    assert stream.cut().batches == {"w": 3 + count}


# --- What makes micro-batches ---------------------------------------------------------------------


def test_an_idle_table_makes_no_micro_batches_though_locks_are_renewed(scene: Scene) -> None:
    table = scene.table()
    writer = scene.writer(table, "w", "a")
    other = scene.writer(table, "v", "b")
    write(writer, a=1)
    stream = scene.stream(table, "full")
    stream.start(available_now=False)
    assert stream.step()
    for _ in range(2):
        assert stream.step() is None
        before = table.cut()
        writer.renew()
        other.renew()
        assert table.cut().time_ms >= before.time_ms
    leave_uncommitted(writer, a=7)
    assert stream.step() is None, "what nobody has committed is no news"
    write(writer, a=10)
    assert {row["a"] for row in stream.step() or ()} == {1, 11}
    assert stream.step() is None or stream.step() is None


def test_a_batch_that_is_larger_than_the_limit_is_one_micro_batch_and_no_second(
    scene: Scene,
) -> None:
    table = scene.table()
    writer = scene.writer(table, "w", "a")
    stream = scene.stream(table, "earliest", maxRowsPerTrigger=1)
    write(writer, a=1)
    assert [len(one) for one in stream.run()] == [len(KEYS)]


# --- What is never seen ---------------------------------------------------------------------------


def test_undone_work_never_comes_nor_what_is_not_committed(scene: Scene) -> None:
    table = scene.table()
    writer = scene.writer(table, "w", "a")
    stream = scene.stream(table, "earliest", maxRowsPerTrigger=2)
    write(writer, a=1)
    leave_uncommitted(writer, a=1000)
    assert {row["a"] for row in stream.run()[-1]} == {1}
    write(writer, a=10)  # What was left is undone first.
    leave_uncommitted(writer, a=2000)
    stream.run()
    writer.close()
    taker = scene.writer(table, "taker", "a", handover=True)
    write(taker, a=100)
    stream.run()
    assert {row["a"] for row in stream.records} == {1, 11, 111}
    assert {row["_owner"] for row in stream.records} == {"w", "taker"}


def test_a_promised_batch_comes_when_it_was_rolled_forward(scene: Scene, tmp_path: Path) -> None:
    table = scene.table()
    redo = RedoLog.open(str(tmp_path / "redo"))
    writer = scene.writer(table, "w", "a", redo=redo)
    write(writer, a=1)
    stream = scene.stream(table, "full")
    stream.start(available_now=False)
    stream.step()
    with arm("writer.prepared", interrupt), pytest.raises(KeyboardInterrupt):
        write(writer, a=10)
    assert stream.step() is None
    seen: list[Any] = []

    def look() -> None:
        """Have a cut taken while it is decided, and not yet written."""
        while (batch := stream.step()) is not None:
            seen.append(batch)

    again = table.writer(owner_id="w", columns=["a"], redo=redo)
    with arm("writer.acquired", look):
        again.start()
    assert seen == [[]], "somebody has acquired a lock: that there is no news is not certain"
    assert {row["a"] for row in stream.step() or ()} == {1, 11}
    assert stream.step() is None
    again.close()


# --- Records --------------------------------------------------------------------------------------


def test_records_are_those_of_changes(scene: Scene) -> None:
    table = scene.table()
    writer = scene.writer(table, "w", "ab")
    since = table.cut()
    write(writer, a=1, b=2)
    write(writer, {"k": [1, 2], "op": ["delete", "upsert"], "a": [0, 5], "b": [0, 5]})
    stream = scene.stream(table, since)
    [records] = stream.run()
    expected = table.changes(since).to_arrow().to_pylist()
    assert as_sorted(records) == as_sorted(expected)
    assert set(records[0]) == {*table.changes(since).schema.names}
    last = [row for row in in_log_order(records) if row["_batch"] == 1]
    kinds = sorted((row["k"], row["_change_type"], row["a"]) for row in last)
    assert kinds == [(1, "delete", 1), (2, "update_postimage", 6), (2, "update_preimage", 1)]
    assert {row["_owner"] for row in records} == {"w"}
    assert {tuple(row["_changed_columns"]) for row in records} == {("a", "b")}


def test_rows_at_the_start_are_inserts_of_the_cut(scene: Scene) -> None:
    table = scene.table()
    write(scene.writer(table, "w", "a"), a=1)
    stream = scene.stream(table)
    [rows] = stream.run()
    assert sorted(row["k"] for row in rows) == list(KEYS)
    for row in rows:
        assert (row["_change_type"], row["_changed_columns"]) == ("insert", ["a", "b"])
        assert (row["a"], row["b"]) == (1, None)
        assert row["_commit_timestamp"] == stream.cut().time
        assert row["_bucket"] is row["_log_offset"] is row["_owner"] is row["_batch"] is None


def test_records_about_other_columns_do_not_come(scene: Scene) -> None:
    table = scene.table()
    one, both = scene.writer(table, "one", "b"), None
    stream = scene.stream(table, "earliest", columns="k,a")
    keys_only = scene.stream(table, "earliest", columns="k")
    upserts = scene.stream(table, "earliest", columns="k,a", mode="upserts")
    write(one, b=1)
    assert stream.run() == [[]]
    assert upserts.run() == [[]]
    assert sorted(row["k"] for row in keys_only.run()[0]) == list(KEYS)
    one.close()
    both = scene.writer(table, "both", "ab", handover=True)
    write(both, a=2, b=1)
    found = stream.run()[-1]
    assert {tuple(row["_changed_columns"]) for row in found} == {("a",)}
    assert {row["a"] for row in found} == {None, 2}
    assert "b" not in found[0]
    assert {(row["_change_type"], row["a"]) for row in upserts.run()[-1]} == {("upsert", 2)}


def test_upserts_have_the_whole_row_of_a_key_and_the_key_of_one_that_is_gone(
    scene: Scene,
) -> None:
    table = scene.table()
    one, other = scene.writer(table, "one", "a"), scene.writer(table, "other", "b")
    stream = scene.stream(table, "full", mode="upserts")
    write(one, a=1)
    assert {row["_change_type"] for row in stream.run()[0]} == {"upsert"}
    write(other, {"k": [1], "b": [5]})
    write(other, {"k": [1], "b": [5]})
    write(one, {"k": [2, 3], "op": ["delete", "delete"], "a": [0, 0]})
    write(one, {"k": [3], "a": [9]})
    [records] = stream.run()
    assert sorted(tuple(row.values()) for row in records) == [
        ("delete", 2, None, None),
        ("upsert", 1, 1, 10),
        ("upsert", 3, 9, None),
    ]


# --- Tables without locks -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["changes", "upserts"])
@pytest.mark.parametrize("start", ["full", "earliest"])
def test_a_table_without_locks_streams_put_by_put(scene: Scene, start: str, mode: str) -> None:
    table = scene.table(column_locks=False)
    stream = scene.stream(table, start, mode=mode, maxRowsPerTrigger=6)
    table.put({"k": list(KEYS), "a": [1] * len(KEYS)})
    stream.run()
    for number in range(5):
        table.put({"k": [number, number + 1, 7], "a": [10] * 3})
    assert len(stream.run()) > 1
    cells: Cells = {}
    for number, records in sorted(stream.batches.items()):
        APPLY[mode](cells, records)
        assert cells == table_at(table, stream.cut(number))
    assert cells == table_at(table)
    stream.start(available_now=False)
    assert stream.step() is None


@pytest.mark.parametrize("limit", [{}, {"maxRowsPerTrigger": 2}])
def test_without_locks_what_is_brought_back_by_hand_comes_as_it_was_written(
    scene: Scene, limit: dict[str, Any]
) -> None:
    table = scene.table(column_locks=False)
    stream = scene.stream(table, "full", **limit)
    table.put({"k": list(KEYS), "a": [1] * len(KEYS)})
    stream.run()
    offsets = table.end_offsets()
    table.put({"k": [1, 2], "a": [10, 10]}, owner="me")
    table.put({"k": [3, 2], "a": [10, 10]}, owner="you")
    stream.run()
    table.put({"k": [4, 1], "a": [10, 10]}, owner="me")
    table.put({"k": [5, 4], "b": [10, 10]}, owner="you")
    table.undo("me", ["a"], offsets)
    stream.run()
    cells: Cells = {}
    for number, records in sorted(stream.batches.items()):
        apply_changes(cells, records)
        assert cells == table_at(table, stream.cut(number))
    assert cells == table_at(table)
