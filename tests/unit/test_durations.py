"""Durations as people write them."""

from datetime import timedelta
from typing import Any

import pytest

from foundation.durations import read_duration, show_duration
from foundation.errors import InvalidInput


@pytest.mark.parametrize(
    ("written", "expected", "shown"),
    [
        ("30 days", timedelta(days=30), "30 days"),
        ("1d", timedelta(days=1), "1 day"),
        ("2 Weeks", timedelta(days=14), "14 days"),
        (" 36h ", timedelta(hours=36), "36 hours"),
        ("90min", timedelta(minutes=90), "90 minutes"),
        ("61 s", timedelta(seconds=61), "61 seconds"),
        (timedelta(milliseconds=1500), timedelta(milliseconds=1500), "2 seconds"),
    ],
)
def test_what_is_written_is_read_and_said_back(
    written: Any, expected: timedelta, shown: str
) -> None:
    assert read_duration(written) == expected
    assert show_duration(expected) == shown
    assert read_duration(shown) >= expected


@pytest.mark.parametrize(
    "wrong", ["", "3", "days", "3 fortnights", "-1 day", "1.5 h", 3, None, "0 s", "9" * 12 + " w"]
)
def test_what_is_no_duration_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="duration"):
        read_duration(wrong)
    with pytest.raises(InvalidInput, match="longer than nothing"):
        read_duration(timedelta(days=-1))
