"""RocksDB that stalls: the view waits, and writes all it has once it may."""

from pathlib import Path
from typing import Any

import pytest
from rocksdict import Rdict, WriteBatch

from foundation.errors import StorageUnavailable
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.view import View

OPTIONS = BucketOptions(stall_deadline_s=0.05)


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


def stalling_view(path: Path, failures: int) -> View:
    view = View(path, "t/0/0", OPTIONS, OPTIONS.to_cache())
    view._database = Stalling(view._database, failures)  # type: ignore[assignment]
    return view


def test_a_stall_that_ends_in_time_is_waited_for(tmp_path: Path) -> None:
    view = stalling_view(tmp_path, 3)
    view.apply([b"rkey"], [b"value"], 1)
    view.flush()
    view.close()
    again = View(tmp_path, "t/0/0", OPTIONS, OPTIONS.to_cache())
    assert (again.applied, again.get([b"rkey"])) == (1, [b"value"])
    again.close()


def test_a_stall_that_lasts_is_an_error_that_says_so(tmp_path: Path) -> None:
    view = stalling_view(tmp_path, 1_000)
    view.apply([b"rkey"], [b"value"], 1)
    with pytest.raises(StorageUnavailable, match="Write stall"):
        view.flush()
    assert view.get([b"rkey"]) == [b"value"]
    view.close()
