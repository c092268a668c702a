"""A put to several buckets: merged at once where that is less, written side by side."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from foundation.errors import Overflow
from foundation.ids import Token
from foundation.parallel import Mapper
from merge_engine.bucket import put_to_all
from merge_engine.bucket.bucket import Bucket
from merge_engine.merging.merge import merge
from merge_engine.storage.objects import LocalStorage
from recovery.embedded.table import Table
from tests.conftest import SUMS, rows_of, schema_of
from tests.property.through_flight import ThroughFlight

DEADLINE_S = 30
BUCKETS = 4
MIXED = schema_of(
    a=(pa.int64(), "sum"),
    text=(pa.string(), "last_value"),
    items=(pa.list_(pa.string()), "array_agg"),
)


def mixed(seed: int) -> pa.RecordBatch:
    """Return rows some of which delete, some have nulls, and some change nothing."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 60, 100)
    return pa.record_batch(
        {
            "k": keys,
            "a": pa.array(rng.integers(0, 2, 100), mask=rng.random(100) < 0.3),
            "text": pa.array([None if n < 2 else f"t{n}" for n in rng.integers(0, 5, 100)]),
            "items": pa.array([None if n < 2 else f"i{n}" for n in rng.integers(0, 5, 100)]),
            "op": pa.array(["delete" if n == 0 else "upsert" for n in rng.integers(0, 9, 100)]),
        }
    )


def written(table: Table) -> list[list[Any]]:
    """Return what the log says of each change: keys, and states before and after."""
    found = []
    for bucket_id in table.bucket_ids():
        for segment in table.bucket(bucket_id).read_log(0):
            columns = [
                (one.touched_before, one.before, one.touched_after, one.after)
                for one in segment.changes.values()
            ]
            found.append([bucket_id, segment.header.rows, *segment.keys.values()])
            found[-1] += [part.tolist() for column in columns for part in column]
    return found


def test_a_merge_of_all_buckets_at_once_writes_what_one_of_each_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = []
    for few in (0, 20_000):
        monkeypatch.setattr(put_to_all, "_FEW", few)
        with Table.create(tmp_path / str(few), MIXED, buckets=BUCKETS) as table:
            for seed in range(6):
                table.put(mixed(seed), operation_column="op")
                table.put({"k": list(range(9)), "a": [0] * 9})  # Of most keys, nothing changes.
            logs.append(written(table))
    assert logs[0] == logs[1]
    assert len(logs[0]) > 6 * BUCKETS


def test_few_rows_of_many_buckets_are_merged_once(table: Table) -> None:
    with mock.patch("merge_engine.bucket.put_to_all.merge", wraps=merge) as merging:
        table.put({"k": list(range(100)), "a": [1] * 100})
    assert merging.call_count == 1
    assert rows_of(table) == dict.fromkeys(range(100), (1, None))


def test_buckets_that_have_the_token_already_are_left_out(table: Table) -> None:
    keys, token = list(range(100)), Token(epoch=1, batch=1)
    with (
        mock.patch("merge_engine.embedded.table.commit_held", _first_one_only),
        pytest.raises(RuntimeError, match="killed"),
    ):
        table.put({"k": keys, "a": keys}, owner="x", token=token)
    result = table.put({"k": keys, "a": keys}, owner="x", token=token)
    assert [one.repeated for one in result.buckets.values()] == [True, False, False, False]
    assert rows_of(table) == {key: (key, None) for key in keys}
    again = table.put({"k": keys, "a": keys}, owner="x", token=token)
    assert all(one.repeated for one in again.buckets.values())


def _first_one_only(buckets: Sequence[Bucket], plans: Sequence[Any], _: Mapper) -> None:
    buckets[0].commit(plans[0])
    raise RuntimeError("killed")


def test_what_does_not_fit_in_one_bucket_is_written_to_none(table: Table) -> None:
    keys = list(range(100))
    table.put({"k": keys, "a": [2**62] * 100})
    ends = table.end_offsets()
    with pytest.raises(Overflow, match="column 'a', key k=57: sum exceeds"):
        table.put({"k": keys, "a": [1 if key != 57 else 2**62 for key in keys]})
    assert table.end_offsets() == ends


@pytest.mark.parametrize("through", [False, True])
def test_segments_of_one_put_become_durable_side_by_side(tmp_path: Path, through: bool) -> None:
    """However few the cores are: to wait for a disk takes none."""
    all_there = threading.Barrier(BUCKETS)
    create = LocalStorage.create

    def wait_for_the_others(storage: LocalStorage, name: str, data: bytes) -> None:
        all_there.wait(DEADLINE_S)
        create(storage, name, data)

    with mock.patch("os.cpu_count", return_value=1):
        table = Table.create(tmp_path / "table", SUMS, buckets=BUCKETS)
        asked = ThroughFlight(table) if through else table
    asked.put({"k": list(range(100)), "a": [1] * 100})
    with mock.patch.object(LocalStorage, "create", wait_for_the_others):
        result = asked.put({"k": list(range(100)), "a": [1] * 100})
    assert result.changed == 100
    asked.close()
