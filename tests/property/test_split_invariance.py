"""How rows come does not matter: in which batches, folded or raw, to how many buckets, and when."""

import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.ids import BucketId, Token
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.segment import AggMode
from merge_engine.schema.schema import Column
from recovery.embedded.table import Table
from tests.property.table_model import (
    OPERATION,
    Put,
    RawRow,
    Visible,
    as_visible,
    build_schema,
    folded_put,
    raw_put,
    raw_rows,
    visible,
)

EXAMPLES = int(os.environ.get("TALLYBOOK_EXAMPLES", "20"))
# Alone it takes 5 s, beside seven others on two cores 34 s: it is the machine that decides.
DEADLINE_S = 240
SCHEMA = build_schema()


@st.composite
def splits(draw: st.DrawFn, columns: Sequence[Column], rows: Sequence[RawRow]) -> list[Put]:
    """Return the rows as consecutive puts, raw or folded in one or two pieces each."""
    cuts = draw(st.lists(st.integers(0, len(rows)), max_size=4).map(sorted))
    bounds = [0, *cuts, len(rows)]
    puts = []
    for start, stop in pairwise(bounds):
        middle = draw(st.none() | st.integers(start, stop))
        if middle is None:
            puts.append(raw_put(SCHEMA, columns, rows[start:stop]))
        else:
            chunks = [rows[start:middle], rows[middle:stop]]
            puts.append(folded_put(SCHEMA, columns, chunks, AggMode.MERGE_STATE))
    return puts


def table_of(puts: Sequence[Put], buckets: int) -> Visible:
    """Return what a table shows after these puts."""
    options = BucketOptions(behind_max_offsets=3, block_cache_bytes=1 << 20)
    with (
        tempfile.TemporaryDirectory(prefix="tallybook-split-") as directory,
        Table.create(Path(directory), SCHEMA, buckets=buckets, options=options) as table,
    ):
        for put in puts:
            names = [column.name for column in put.columns]
            table.put(put.data, columns=names, mode=put.mode, operation_column=OPERATION)
        return as_visible(table.to_arrow(), SCHEMA)


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_split_any_mode_and_any_number_of_buckets_give_the_same_table(
    data: st.DataObject,
) -> None:
    some = st.lists(st.sampled_from(SCHEMA.value_columns), min_size=1, max_size=5, unique=True)
    columns = data.draw(some)
    rows = data.draw(raw_rows(columns, max_size=12))
    whole = raw_put(SCHEMA, columns, rows)
    expected = visible(whole.apply_to({}), SCHEMA)
    assert table_of([whole], 1) == expected
    split = data.draw(splits(columns, rows))
    assert table_of(split, data.draw(st.integers(1, 4))) == expected


def all_stacks() -> str:
    """Return where every thread of this process stands."""
    frames = sys._current_frames().values()
    return "\n\n".join("".join(traceback.format_stack(frame)[-6:]) for frame in frames)


class Threads:
    """Calls that begin together and must end within the deadline. The threads are daemons, so that
    calls that wait for each other for ever fail the test and nothing else."""

    def __init__(self, *calls: Callable[[], object]) -> None:
        self._errors: list[BaseException] = []
        self._barrier = threading.Barrier(len(calls))
        self._threads = [
            threading.Thread(target=self._run, args=(call,), daemon=True) for call in calls
        ]

    def _run(self, call: Callable[[], object]) -> None:
        try:
            self._barrier.wait(DEADLINE_S)
            call()
        except BaseException as error:
            self._errors.append(error)

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + DEADLINE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
            assert not thread.is_alive(), f"calls wait for each other:\n{all_stacks()}"
        if self._errors:
            raise self._errors[0]


BATCHES = 12


def batches(seed: int) -> list[dict[str, list[Any]]]:
    """Return batches of a writer; string_agg shows their order, and any that is there twice."""
    chance = random.Random(seed)
    sizes = [chance.randint(1, 9) for _ in range(BATCHES)]
    return [
        {
            "day": ["mo"] * size,
            "id": [chance.randrange(12) for _ in range(size)],
            "tags": [f"{number}.{at}" for at in range(size)],
        }
        for number, size in enumerate(sizes)
    ]


def expected_tags(written: Sequence[dict[str, list[Any]]]) -> dict[int, str]:
    """Return what all batches of a writer come to."""
    tags: dict[int, list[str]] = {}
    for one in written:
        for key, tag in zip(one["id"], one["tags"], strict=True):
            tags.setdefault(key, []).append(tag)
    return {key: "|".join(of_key) for key, of_key in tags.items()}


@pytest.mark.parametrize("seed", range(1 + EXAMPLES // 20))
def test_owners_that_write_at_the_same_time_add_up(seed: int, tmp_path: Path) -> None:
    schema = build_schema()
    for name in ("left", "right", "undone"):
        schema = schema.add_column(name, pa.string(), "string_agg", delimiter="|")
    options = BucketOptions(behind_max_offsets=20, undo_max_bytes=400)
    table = Table.create(tmp_path / "table", schema, buckets=3, options=options)
    written = {name: batches(seed * 10 + at) for at, name in enumerate(("left", "right"))}

    def write(name: str) -> None:
        for number, one in enumerate(written[name]):
            data = {"day": one["day"], "id": one["id"], name: one["tags"]}
            for _ in range(2):  # A retry, which changes nothing.
                table.put(data, columns=[name], owner=name, token=Token(1, number))

    def write_and_undo() -> None:
        offsets: dict[BucketId, int] = dict.fromkeys(table.bucket_ids(), 0)
        for number, one in enumerate(batches(seed)):
            data = {"day": one["day"], "id": one["id"], "undone": one["tags"]}
            table.put(data, columns=["undone"], owner="undone", token=Token(1, number))
            table.undo("undone", ["undone"], offsets)

    def read() -> None:
        keys = {"day": ["mo"] * 12, "id": list(range(12))}
        for _ in range(BATCHES):
            for row in table.lookup(keys, ["left"]).to_pylist():
                whole = expected_tags(written["left"]).get(row["id"], "")
                assert whole.startswith(row["left"] or "")
            table.flush()

    def add_up() -> None:
        for _ in range(BATCHES):
            table.put({"day": ["mo"] * 12, "id": list(range(12)), "revenue": [1] * 12})

    def read_all() -> None:
        for _ in range(BATCHES):
            table.to_arrow()
            table.clean(keep_from=dict.fromkeys(table.bucket_ids(), 0))

    Threads(
        *(lambda name=name: write(name) for name in written),
        *(write_and_undo, read, add_up, add_up, read_all),
    ).run()
    for _ in range(2):
        for name, of_name in written.items():
            rows = table.to_arrow([name]).to_pylist()
            found = {row["id"]: row[name] for row in rows if row[name] is not None}
            assert found == expected_tags(of_name), f"seed {seed}"
        rows = table.to_arrow(["revenue", "undone"]).to_pylist()
        assert {row["id"]: row["revenue"] for row in rows} == dict.fromkeys(range(12), 2 * BATCHES)
        assert {row["undone"] for row in rows} == {None}
        table.close()
        table = Table.open(tmp_path / "table")
    table.close()


def test_tables_opened_by_several_threads_at_once_open_each_bucket_once(tmp_path: Path) -> None:
    Table.create(tmp_path / "table", SCHEMA, buckets=4).close()
    with Table.open(tmp_path / "table") as table:
        one = {"day": ["mo"] * 12, "id": list(range(12)), "revenue": [1] * 12}
        Threads(*(lambda: table.put(one) for _ in range(6))).run()
        assert {row["revenue"] for row in table.to_arrow().to_pylist()} == {6}
