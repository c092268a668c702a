"""Logs over a storage that can be made to fail."""

from pathlib import Path

import pytest

from merge_engine.bucket.log import Log
from tests.support.faulty_storage import FaultyStorage
from tests.support.logs import write_of


@pytest.fixture
def storage(tmp_path: Path) -> FaultyStorage:
    return FaultyStorage(tmp_path / "log")


@pytest.fixture
def log(storage: FaultyStorage) -> Log:
    opened = Log(storage)
    opened.lead()
    return opened


@pytest.fixture
def long_log(storage: FaultyStorage) -> Log:
    """Return a log with leaders at 0 and 1, and writes at [2, 4) and [4, 6)."""
    Log(storage).lead()
    log = Log(storage)
    log.lead()
    log.append(write_of(1, 2))
    log.append(write_of(3, 4))
    return log
