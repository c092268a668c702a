"""Which way a batch goes when nobody has said."""

from typing import Any

import pytest

from sink.routing import RecentBatches, goes_by_driver

MOST = 1_000_000


@pytest.mark.parametrize(
    ("recent", "executors", "by_driver"),
    [
        ([], 0, True),
        ([], 50, True),
        ([MOST], 0, True),
        ([MOST], 1, True),
        ([MOST + 1], 0, False),
        ([MOST], 2, False),
        ([MOST // 2], 2, True),
        ([MOST // 10], 10, True),
        ([MOST // 10 + 1], 10, False),
        # Few rows are never worth two stages.
        ([10_000], 5_000, True),
        ([10_001], 5_000, False),
        # One odd batch does not change the way, two of three do.
        ([10, 5 * MOST, 10], 0, True),
        ([5 * MOST, 10, 5 * MOST], 0, False),
    ],
)
def test_the_driver_takes_less_the_more_executors_there_are(
    recent: list[int], executors: int, by_driver: bool
) -> None:
    assert goes_by_driver(recent, MOST, executors) is by_driver


def test_a_low_limit_is_kept_however_few_rows_that_are() -> None:
    assert goes_by_driver([15], 15, 8)
    assert not goes_by_driver([16], 15, 0)


def test_executors_are_counted_now_and_then_and_only_the_last_batches_matter() -> None:
    now = 0.0
    counted: list[Any] = []

    def count(context: Any) -> int:
        counted.append(context)
        return 4

    recent = RecentBatches(MOST, count=count, clock=lambda: now)
    for rows in (MOST, MOST, MOST):
        recent.add(rows)
    assert not recent.go_by_driver("spark")
    for rows in (10, 10):
        recent.add(rows)
        now += 10
        by_driver = recent.go_by_driver("spark")
    assert by_driver
    assert counted == ["spark"]
    now += 10
    recent.go_by_driver("spark")
    assert counted == ["spark", "spark"]
