"""RocksDB that stalls: the view waits, and writes all it has once it may."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rocksdict import Rdict, WriteBatch

from foundation.errors import StorageUnavailable
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.view import View
from merge_engine.encoding.keys import KeyCodec
from merge_engine.encoding.stored_rows import StoredRows
from merge_engine.working_set.block import prepare_rows
from tests.conftest import SUMS
from tests.support.buckets import open_view

PATIENT = BucketOptions(stall_deadline_s=60)
IMPATIENT = BucketOptions(stall_deadline_s=0.05)
KEYS = [pa.array([5], pa.int64())]
KEY = KeyCodec([pa.int64()]).encode(KEYS)
ROW = StoredRows(np.ones((1, 1), bool), [pa.array([7])])


class Stalling:
    """A database whose next writes fail; as with the real one, their batches are used up."""

    def __init__(self, database: Rdict, failures: int) -> None:
        self._database = database
        self._failures = failures
        self._used: list[WriteBatch] = []

    def write(self, batch: WriteBatch, options: Any) -> None:
        if any(batch is used for used in self._used):
            raise Exception("this batch is already consumed")
        self._used.append(batch)
        if self._failures:
            self._failures -= 1
            raise Exception("Result incomplete: Write stall")
        self._database.write(batch, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


def stalling_view(path: Path, failures: int, options: BucketOptions) -> View:
    view = open_view(path, "t/0/0", options)
    database = view._database
    assert database._rdict is not None
    database._rdict = Stalling(database._rdict, failures)  # type: ignore[assignment]
    return view


def amount(view: View) -> Any:
    return view.read(KEYS, SUMS.value_columns[:1]).rows.states[0][0].as_py()


def test_a_stall_that_ends_in_time_is_waited_for(tmp_path: Path) -> None:
    view = stalling_view(tmp_path, 3, PATIENT)
    view.apply(view.load(KEY), prepare_rows([0], ROW), 1)
    view.flush()
    view.close()
    again = open_view(tmp_path, "t/0/0", PATIENT)
    assert (again.applied, amount(again)) == (1, 7)
    again.close()


def test_a_stall_that_lasts_is_an_error_that_says_so(tmp_path: Path) -> None:
    view = stalling_view(tmp_path, 1_000, IMPATIENT)
    view.apply(view.load(KEY), prepare_rows([0], ROW), 1)
    with pytest.raises(StorageUnavailable, match="Write stall"):
        view.flush()
    assert amount(view) == 7
    view.close()


def test_a_view_that_was_not_written_says_why_until_it_is(tmp_path: Path) -> None:
    view = stalling_view(tmp_path, 1_000_000, IMPATIENT)
    view.apply(view.load(KEY), prepare_rows([0], ROW), 1)
    with pytest.raises(StorageUnavailable):
        view.write_behind()
    assert view.written == 0
    assert "stall" in str(view.error).lower()
    view._database._rdict._failures = 0  # type: ignore[union-attr]
    view.write_behind()
    assert (view.written, view.error) == (1, None)
    view.close()
