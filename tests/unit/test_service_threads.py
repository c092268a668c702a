"""Calls of a server beside each other: none waits for a thread that waits for it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from recovery.embedded.table import Table
from recovery.leader.led_bucket import LedBucket
from tests.conftest import SUMS
from tests.property.through_flight import ThroughFlight

DEADLINE_S = 30


def test_a_put_is_not_held_up_by_undos_that_wait_for_its_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, waiting = threading.Event(), threading.Event()
    check_put, undo = LedBucket.check_put, LedBucket.undo_unlocked

    def hold(led: LedBucket, *arguments: Any) -> None:
        held.set()
        assert waiting.wait(DEADLINE_S)
        check_put(led, *arguments)

    def wait_for_it(led: LedBucket, *arguments: Any, **settings: Any) -> Any:
        waiting.set()
        return undo(led, *arguments, **settings)

    with mock.patch("os.cpu_count", return_value=1):
        table = ThroughFlight(Table.create(tmp_path / "table", SUMS, buckets=2))
    keys = list(range(20))
    table.put({"k": keys, "a": keys}, owner="x")
    monkeypatch.setattr(LedBucket, "check_put", hold)
    monkeypatch.setattr(LedBucket, "undo_unlocked", wait_for_it)
    pool = ThreadPoolExecutor(2)
    putting = pool.submit(table.put, {"k": keys, "a": keys})
    assert held.wait(DEADLINE_S)
    undoing = pool.submit(table.undo, "x", ["a"], dict.fromkeys(table.bucket_ids(), 0))
    assert putting.result(DEADLINE_S).changed == 19
    assert sum(result.changed for result in undoing.result(DEADLINE_S).values()) == 20
    pool.shutdown()
    table.close()
