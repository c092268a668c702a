"""The least, the greatest, the first and the last: by value, and by an order."""

import math

import pyarrow as pa

from tests.support.aggregates import NAN, UTC, build, by_order, merged, read

# By value


def test_nan_is_the_greatest_number() -> None:
    assert math.isnan(merged(build("max", pa.float64()), NAN, math.inf))
    assert math.isnan(merged(build("max", pa.float32()), math.inf, NAN))
    assert merged(build("min", pa.float64()), NAN, math.inf) == math.inf
    assert merged(build("min", pa.float64()), math.inf, -NAN) == math.inf


def test_of_equal_extremes_the_older_is_kept_down_to_the_sign_of_zero() -> None:
    for name in ("min", "max"):
        function = build(name, pa.float64())
        for older, newer in ((0.0, -0.0), (-0.0, 0.0)):
            assert math.copysign(1, merged(function, older, newer)) == math.copysign(1, older)
            assert math.copysign(1, read(function, [older, newer])) == math.copysign(1, older)


def test_strings_sort_by_their_bytes() -> None:
    assert merged(build("max", pa.string()), "\uffff", "\U0001f600") == "\U0001f600"
    assert merged(build("min", pa.binary()), b"\xff", b"\x7f") == b"\x7f"


def test_a_null_first_value_stays_first_and_a_null_last_value_is_last() -> None:
    assert merged(build("first_value", pa.int64()), None, 1) is None
    assert merged(build("last_value", pa.int64()), 1, None) is None


# By an order


def test_a_late_event_does_not_replace_the_last_value() -> None:
    function = build("last_value", pa.string(), order_by="t", order_type="BIGINT")
    assert by_order(function, [("new", 5), ("late", 4)]) == "new"
    assert by_order(function, [("one", 5), ("other", 5)]) == "other"
    assert by_order(function, [("one", 5), (None, 6)]) is None
    assert by_order(function, [("one", 5), ("two", None)]) == "one"
    assert by_order(function, [("one", None), ("two", None)]) == "two"


def test_a_late_event_does_become_the_first_value() -> None:
    function = build("first_value", pa.string(), order_by="t", order_type="BIGINT")
    assert by_order(function, [("new", 5), ("earlier", 4)]) == "earlier"
    assert by_order(function, [("one", 5), ("other", 5)]) == "one"
    assert by_order(function, [("one", 5), ("two", None)]) == "one"
    assert by_order(function, [("one", None), ("two", 7)]) == "two"
    assert by_order(function, [("one", None), ("two", None)]) == "one"


def test_a_null_is_no_event_when_nulls_are_ignored() -> None:
    function = build("last_value_ignore_nulls", pa.string(), order_by="t", order_type="BIGINT")
    assert by_order(function, [("one", 5), (None, 6), ("late", 4)]) == "one"
    assert by_order(function, [(None, 6), ("one", 5)]) == "one"
    assert by_order(function, [(None, 6), (None, 5)]) is None


def test_nan_is_the_greatest_order() -> None:
    last = build("last_value", pa.int64(), order_by="t", order_type=pa.float64())
    first = build("first_value", pa.int64(), order_by="t", order_type=pa.float64())
    assert by_order(last, [(1, NAN), (2, math.inf)]) == 1
    assert by_order(first, [(1, NAN), (2, math.inf)]) == 2


def test_the_order_is_a_timestamp_unless_told_otherwise() -> None:
    function = build("last_value", pa.int64(), order_by="t")
    assert (function.order_by, function.order_type) == ("t", UTC)
    assert build("last_value", pa.int64()).order_type is None
