"""The corners of the functions: nulls, NaN, overflow, damaged states, wrong definitions."""

import json
import math
import random
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyroaring import BitMap, BitMap64

import merge_engine.aggregates
from merge_engine.aggregates import (
    AggFunction,
    AggregateFunction,
    Fault,
    create_function,
    find_function,
)
from merge_engine.aggregates.extremes import Max
from merge_engine.errors import SchemaError

NAN = float("nan")
INT64_MAX = 2**63 - 1
MAP = pa.map_(pa.string(), pa.int64())
UTC = pa.timestamp("us", tz="UTC")


def build(name: str, result_type: pa.DataType, **parameters: Any) -> AggregateFunction:
    function = find_function(name, column="c")
    return create_function(function, result_type, parameters, column="c")


def merged(function: AggregateFunction, older: Any, newer: Any) -> Any:
    """Merge two raw values and read the result."""
    kind = function.input_type or pa.array([older, newer]).type
    states = [function.lift(pa.array([value], kind)) for value in (older, newer)]
    return function.finish(function.combine(*states)).to_pylist()[0]


def read(function: AggregateFunction, values: list[Any], kind: pa.DataType | None = None) -> Any:
    """Accumulate the values of one key and read the result."""
    array = pa.array(values, kind or function.input_type)
    return function.finish(function.accumulate(array, None, np.array([0]))).to_pylist()[0]


def by_order(function: AggregateFunction, rows: list[tuple[Any, Any]]) -> Any:
    """Put rows of (value, order) one by one, and read the result."""
    state: pa.Array | None = None
    for value, order in rows:
        newer = function.lift(
            pa.array([value], function.input_type), pa.array([order], function.order_type)
        )
        state = newer if state is None else function.combine(state, newer)
    assert state is not None
    return function.finish(state).to_pylist()[0]


# --- Nulls, NaN, zeros --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("sum", pa.int64(), 5),
        ("product", pa.int64(), 5),
        ("avg", pa.float64(), 2.5),
        ("min", pa.string(), ""),
        ("max", pa.float64(), NAN),
        ("bool_and", pa.bool_(), False),
        ("bool_or", pa.bool_(), False),
        ("last_value_ignore_nulls", pa.string(), ""),
        ("first_value_ignore_nulls", pa.binary(), b""),
        ("string_agg", pa.string(), ""),
        ("merge_map", MAP, [("a", None)]),
    ],
)
def test_a_null_on_either_side_is_skipped(name: str, kind: pa.DataType, value: Any) -> None:
    function = build(name, kind)
    for result in (merged(function, None, value), merged(function, value, None)):
        assert result == value or (math.isnan(result) and math.isnan(value))
    assert merged(function, None, None) is None


def test_a_null_counts_as_nothing_and_never_makes_a_count_null() -> None:
    function = build("count", pa.int64())
    assert read(function, [None, None], pa.string()) == 0
    assert read(function, [None, "", "x"], pa.string()) == 2
    assert read(function, [None], pa.null()) == 0
    nothing = pa.nulls(1, pa.int64())
    assert function.combine(nothing, nothing).to_pylist() == [0]
    assert function.finish(nothing).to_pylist() == [0]


def test_a_null_first_value_stays_first_and_a_null_last_value_is_last() -> None:
    assert merged(build("first_value", pa.int64()), None, 1) is None
    assert merged(build("last_value", pa.int64()), 1, None) is None


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


def test_a_sum_of_negative_zeros_is_negative_zero() -> None:
    function = build("sum", pa.float64())
    assert math.copysign(1, merged(function, -0.0, None)) == -1
    assert math.copysign(1, merged(function, None, -0.0)) == -1
    assert math.copysign(1, read(function, [None, -0.0, -0.0])) == -1


def test_float_overflow_is_infinity_as_ieee_has_it() -> None:
    largest = 3.4e38
    assert merged(build("sum", pa.float32()), largest, largest) == math.inf
    assert read(build("product", pa.float64()), [1e300, 1e300]) == math.inf
    assert math.isnan(merged(build("sum", pa.float64()), math.inf, -math.inf))


def test_strings_sort_by_their_bytes() -> None:
    assert merged(build("max", pa.string()), "\uffff", "\U0001f600") == "\U0001f600"
    assert merged(build("min", pa.binary()), b"\xff", b"\x7f") == b"\x7f"


# --- Exactness and overflow ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "values", "type_text"),
    [
        ("sum", pa.int64(), [INT64_MAX, 1], "BIGINT"),
        ("sum", pa.int64(), [-INT64_MAX, -2], "BIGINT"),
        ("sum", pa.int8(), [100, 100], "TINYINT"),
        ("sum", pa.decimal128(5, 2), [Decimal("999.99"), Decimal("0.01")], "DECIMAL(5,2)"),
        ("sum", pa.decimal128(38, 0), [Decimal("9" * 38), Decimal(1)], "DECIMAL(38,0)"),
        ("product", pa.int64(), [2**62, 2], "BIGINT"),
        ("product", pa.int32(), [2**16, 2**16], "INT"),
        ("product", pa.decimal128(5, 2), [Decimal(100), Decimal(10)], "DECIMAL(5,2)"),
    ],
)
def test_overflow_is_a_fault_that_names_the_type_and_the_position(
    name: str, kind: pa.DataType, values: list[Any], type_text: str
) -> None:
    function = build(name, kind)
    one = values[0] ** 0
    attempts: list[Callable[[], pa.Array]] = [
        lambda: function.combine(
            pa.array([one, values[0]], kind), pa.array([one, values[1]], kind)
        ),
        lambda: function.fold(pa.array([one, *values], kind), np.array([0, 1])),
    ]
    for attempt in attempts:
        with pytest.raises(Fault) as caught:
            attempt()
        assert caught.value.index == 1
        assert caught.value.overflow
        assert caught.value.reason == f"{name} exceeds {type_text}"


def test_what_a_null_decimal_hides_is_not_added() -> None:
    kind = pa.decimal128(9, 2)
    whole = pa.array([Decimal(1), Decimal(2), Decimal(4)], kind)
    validity = pa.array([True, False, True]).buffers()[1]
    hiding = pa.Array.from_buffers(kind, 3, [validity, whole.buffers()[1]])
    function = build("sum", kind)
    assert function.fold(hiding, np.array([0])).to_pylist() == [Decimal(5)]
    assert function.combine(hiding, whole).to_pylist() == [Decimal(2), Decimal(2), Decimal(8)]


def test_a_sum_may_leave_its_type_in_between() -> None:
    assert read(build("sum", pa.int64()), [INT64_MAX, 1, -1]) == INT64_MAX
    assert read(build("sum", pa.int8()), [127] * 100 + [-127] * 99) == 127
    assert read(build("product", pa.int64()), [INT64_MAX, INT64_MAX, 0]) == 0


def test_a_product_that_needs_more_decimal_places_is_refused_not_rounded() -> None:
    function = build("product", pa.decimal128(10, 2))
    assert merged(function, Decimal("1.50"), Decimal("0.50")) == Decimal("0.75")
    with pytest.raises(Fault, match=r"more than the 2 decimal places.*larger scale, or DOUBLE"):
        merged(function, Decimal("0.15"), Decimal("0.15"))


def test_an_average_is_rounded_half_up_away_from_zero() -> None:
    function = build("avg", pa.decimal128(5, 1))
    assert merged(function, Decimal("0.1"), Decimal("0.2")) == Decimal("0.2")
    assert merged(function, Decimal("-0.1"), Decimal("-0.2")) == Decimal("-0.2")
    assert read(function, [Decimal("999.9")] * 1000) == Decimal("999.9")


def test_an_average_with_a_count_of_zero_is_null() -> None:
    function = build("avg", pa.float64())
    state = pa.array([{"sum": 0.0, "count": 0}, None], function.state_type)
    function.validate_states(state)
    assert function.finish(state).to_pylist() == [None, None]


# --- Order --------------------------------------------------------------------------------------


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


# --- Gathering ----------------------------------------------------------------------------------


def test_strings_are_joined_with_the_delimiter_and_empty_ones_stay() -> None:
    assert read(build("string_agg", pa.string()), ["a", None, "", "b"]) == "a,,b"
    assert read(build("listagg", pa.string(), delimiter=" - "), ["a", "b"]) == "a - b"
    assert read(build("string_agg", pa.string(), delimiter=""), ["a", "b"]) == "ab"
    assert read(build("string_agg", pa.string()), [""]) == ""
    assert read(build("string_agg", pa.string()), [None]) is None


def test_a_value_that_contains_the_delimiter_is_one_item() -> None:
    function = build("string_agg", pa.string(), limit=2)
    assert read(function, ["a,b", "c", "d"]) == "c,d"
    assert read(function, ["a,b", "c"]) == "a,b,c"


def test_a_limit_keeps_the_newest() -> None:
    function = build("array_agg", pa.list_(pa.int64()), limit=2)
    assert read(function, [1, 2, None, 3]) == [2, 3]
    two = pa.array([[1, 2]], pa.list_(pa.int64()))
    assert function.combine(two, pa.array([[3]], two.type)).to_pylist() == [[2, 3]]
    assert function.combine(two, pa.array([[3, 4, 5]], two.type)).to_pylist() == [[4, 5]]


def test_a_set_that_grows_past_its_limit_is_a_fault() -> None:
    function = build("collect_set", pa.list_(pa.string()), limit=2)
    assert read(function, ["b", "a", "b", None]) == ["b", "a"]
    states = pa.array([["a"], ["a", "b"]], function.state_type)
    with pytest.raises(Fault, match="past its limit of 2") as caught:
        function.combine(states, pa.array([["a"], ["c"]], function.state_type))
    assert caught.value.index == 1


def test_a_set_has_one_nan_and_two_zeros() -> None:
    result = read(build("collect_set", pa.list_(pa.float64())), [NAN, 0.0, -NAN, -0.0, 0.0])
    assert [str(number) for number in result] == ["nan", "0.0", "-0.0"]


def test_a_set_tells_nested_values_apart_by_their_parts() -> None:
    kind = pa.list_(pa.list_(pa.string()))
    values = [["a", "b"], ["ab"], [], [None], ["a", "b"], [""]]
    assert read(build("collect_set", kind), values) == [["a", "b"], ["ab"], [], [None], [""]]


def test_the_later_value_of_a_map_key_wins_and_the_key_stays_in_place() -> None:
    function = build("merge_map", MAP)
    assert merged(function, [("a", 1), ("b", 2)], [("c", 3), ("a", None)]) == [
        ("a", None),
        ("b", 2),
        ("c", 3),
    ]


def test_of_equal_keys_in_one_map_the_last_wins() -> None:
    function = build("merge_map", MAP)
    assert read(function, [[("a", 1), ("b", 2), ("a", 3)]]) == [("a", 3), ("b", 2)]
    lifted = function.lift(pa.array([[("a", 1), ("a", 3)], None, []], MAP))
    assert lifted.to_pylist() == [[("a", 3)], None, []]


def test_items_that_a_null_list_hides_are_not_seen() -> None:
    hiding = pa.ListArray.from_arrays(
        pa.array([0, 2, 3], pa.int32()), pa.array([1, 2, 3]), mask=pa.array([True, False])
    )
    function = build("array_agg", pa.list_(pa.int64()))
    assert function.fold(hiding, np.array([0])).to_pylist() == [[3]]


# --- Bitmaps and sketches -----------------------------------------------------------------------


def test_bitmaps_read_as_a_count_or_as_bytes_of_the_portable_format() -> None:
    values = [3, None, 1, 3, 2**32 - 1]
    assert read(build("rbm32", pa.int64()), values, pa.int64()) == 3
    data = read(build("rbm32", pa.binary()), values, pa.int64())
    assert list(BitMap.deserialize(data)) == [1, 3, 2**32 - 1]
    data = read(build("rbm64", pa.binary()), [2**64 - 1, 0], pa.uint64())
    assert list(BitMap64.deserialize(data)) == [0, 2**64 - 1]
    assert read(build("rbm32", pa.int64()), [None], pa.int64()) == 0


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [("rbm32", pa.int64(), -1), ("rbm32", pa.int64(), 2**32), ("rbm64", pa.int8(), -128)],
)
def test_a_number_outside_a_bitmap_is_a_fault_that_shows_it(
    name: str, kind: pa.DataType, value: int
) -> None:
    function = build(name, pa.int64())
    values = pa.array([1, None, 2, None, value, 3], kind)
    with pytest.raises(Fault, match=f"^at 1: {value} is outside") as caught:
        function.accumulate(values, None, np.array([0, 3, 5]))
    assert caught.value.index == 1
    with pytest.raises(Fault) as caught:
        function.lift(values)
    assert caught.value.index == 4


def test_a_bitmap_has_the_same_bytes_whether_runs_came_before_or_after_the_rest() -> None:
    # {1..4, 10} takes ten bytes as runs and as an array: a tie that the library leaves open.
    for name in ("rbm32", "rbm64"):
        function = build(name, pa.binary())
        run, rest, both = (
            function.accumulate(pa.array(values), None, np.array([0]))
            for values in ([1, 2, 3, 4], [10], [1, 2, 3, 4, 10])
        )
        assert function.combine(run, rest) == both
        assert function.combine(both, run) == both


def test_a_full_container_has_the_same_bytes_however_it_was_filled() -> None:
    function = build("rbm32", pa.binary())
    everything = np.arange(65536)
    even, odd, whole = (
        function.accumulate(pa.array(values), None, np.array([0]))
        for values in (everything[::2], everything[1::2], everything)
    )
    assert function.combine(even, odd) == whole


def test_large_bitmaps_with_containers_of_every_kind_stay_in_one_form() -> None:
    generator = random.Random(5)
    values = [
        *range(100_000, 200_000),
        *generator.sample(range(300_000, 365_000), 30_000),
        *(2**40 + number for number in (1, 2, 3, 4, 10)),
        *(2**41 + 3 * number for number in range(100)),
        *(2**20 * number for number in range(5)),
    ]
    function = build("rbm64", pa.binary())
    whole = function.accumulate(pa.array(values), None, np.array([0]))
    generator.shuffle(values)
    parts = [values[:50_000], values[50_000:], [2**40 + number for number in (1, 2, 3, 4)]]
    pieces = [function.accumulate(pa.array(part), None, np.array([0])) for part in parts]
    assert function.combine(function.combine(pieces[2], pieces[0]), pieces[1]) == whole
    assert build("rbm64", pa.int64()).finish(whole).to_pylist() == [len(set(values))]


@pytest.mark.parametrize("name", ["rbm32", "rbm64", "hll_sketch", "theta_sketch"])
@pytest.mark.parametrize("garbage", [b"", b"\x00", b"garbage, not a bitmap", b"\xff" * 64])
def test_bytes_that_are_no_set_are_a_fault(name: str, garbage: bytes) -> None:
    function = build(name, pa.int64())
    good = function.accumulate(pa.array([1]), None, np.array([0]))
    states = pa.array([None, good[0].as_py(), garbage], pa.binary())
    function.validate_states(states.slice(0, 2))
    for attempt in (
        function.validate_states,
        lambda bad: function.combine(bad, good.take([0] * 3)),
    ):
        with pytest.raises(Fault, match="is damaged") as caught:
            attempt(states)
        assert caught.value.index == 2


@pytest.mark.parametrize("name", ["rbm32", "rbm64", "hll_sketch", "theta_sketch"])
def test_damaged_bytes_never_do_worse_than_raise(name: str) -> None:
    seed = random.randrange(2**32)
    generator = random.Random(seed)
    function = build(name, pa.int64())
    refused = 0
    for _ in range(400):
        spread = generator.choice([20, 1000, 2**20])
        count = generator.choice([1, 5, 50, 700])
        values = pa.array([generator.randrange(spread) for _ in range(count)])
        good = function.accumulate(values, None, np.array([0]))
        damaged = bytearray(good[0].as_py())
        if generator.random() < 0.5:
            del damaged[generator.randrange(len(damaged)) :]
        for _ in range(min(len(damaged), generator.randrange(4))):
            damaged[min(generator.randrange(len(damaged)), generator.randrange(200))] ^= 1 + (
                generator.randrange(255)
            )
        states = pa.array([bytes(damaged)], pa.binary())
        try:
            function.validate_states(states)
            function.finish(function.combine(good, states))
        except Fault:
            refused += 1
    assert refused > 100, f"seed {seed}"


def test_an_hll_sketch_whose_mode_is_damaged_does_not_end_the_process() -> None:
    # Read as registers of four bits, this one crashed the library when it was merged.
    function = build("hll_sketch", pa.int64(), lg_k=5)
    state = bytearray(state_of("hll_sketch", lg_k=5))
    for mode in {*range(256)} - {state[7]}:
        state[7] = mode
        with pytest.raises(Fault, match="do not fit together"):
            function.validate_states(pa.array([bytes(state)], pa.binary()))


@pytest.mark.parametrize("name", ["hll_sketch", "theta_sketch"])
@pytest.mark.parametrize("count", [1, 7, 8, 24, 25, 31, 32, 33, 100, 500])
@pytest.mark.parametrize("lg_k", [5, 8, 9])
def test_any_single_damaged_byte_of_a_sketch_is_noticed_or_harmless(
    name: str, count: int, lg_k: int
) -> None:
    function = build(name, pa.int64(), lg_k=lg_k)
    values = pa.array([f"value-{number}" for number in range(count)])
    good = function.accumulate(values, None, np.array([0]))
    function.validate_states(good)
    generator = random.Random(count)
    data = good[0].as_py()
    for position in {*range(min(len(data), 64)), generator.randrange(len(data))}:
        damaged = bytearray(data)
        damaged[position] ^= 1 + generator.randrange(255)
        states = pa.array([bytes(damaged)], pa.binary())
        try:
            function.finish(function.combine(good, states))
        except Fault:
            continue
        # Only hashes are free to be anything, as long as they are in order.
        assert position >= 8, f"byte {position} of the header"
    with pytest.raises(Fault):
        function.validate_states(pa.array([data + b"\0"], pa.binary()))


@pytest.mark.parametrize("name", ["hll_sketch", "theta_sketch"])
def test_sketches_estimate_within_their_error_bound(name: str) -> None:
    function = build(name, pa.int64())
    distinct = 50_000
    values = pa.array([f"user-{number}" for number in range(distinct)] * 2)
    states = function.accumulate(values, None, np.arange(0, 2 * distinct, 20_000))
    estimate = function.finish(function.fold(states, np.array([0]))).to_pylist()[0]
    # Four standard errors of 1.6 %; the hashes are fixed, so this always gives the same number.
    assert abs(estimate - distinct) < 0.065 * distinct
    assert estimate != distinct


@pytest.mark.parametrize("name", ["hll_sketch", "theta_sketch"])
@pytest.mark.parametrize(
    ("kind", "values", "distinct"),
    [
        (pa.int8(), [1, 2, 1], 2),
        (pa.uint64(), [2**64 - 1, 2**64 - 2, 2**63], 3),
        (pa.float64(), [0.0, -0.0, NAN, -NAN, 1.5], 3),
        (pa.string(), ["", "a", "", "\x00"], 3),
        (pa.binary(), [b"", b"a", b"", b"\xff"], 3),
        (pa.bool_(), [True, False, True], 2),
        (pa.date32(), [0, 1, 0], 2),
        (pa.timestamp("us"), [0, 1, 0], 2),
        (pa.decimal128(38, 2), [Decimal("1.50"), Decimal("-1.5"), Decimal("9" * 36)], 3),
    ],
)
def test_sketches_count_values_of_every_plain_type(
    name: str, kind: pa.DataType, values: list[Any], distinct: int
) -> None:
    function = build(name, pa.int64())
    assert function.check_input(kind) is None
    assert read(function, [*values, None], kind) == distinct


def test_decimals_of_another_scale_are_the_same_values_to_a_sketch() -> None:
    function = build("theta_sketch", pa.binary())
    narrow = read(function, [Decimal("1.5"), Decimal(100)], pa.decimal128(5, 1))
    assert read(function, [Decimal("1.50"), Decimal(100)], pa.decimal128(38, 9)) == narrow


def test_inputs_that_a_function_cannot_take_are_told_before_any_value_is_seen() -> None:
    complaint = build("rbm32", pa.int64()).check_input(pa.float64())
    assert complaint == "rbm32 takes whole numbers, not DOUBLE"
    assert "ARRAY<BIGINT>" in str(build("hll_sketch", pa.int64()).check_input(pa.list_(pa.int64())))
    assert build("count", pa.int64()).check_input(pa.list_(pa.int64())) is None


# --- States from outside ------------------------------------------------------------------------


def state_of(name: str, **parameters: Any) -> Any:
    function = build(name, pa.binary(), **parameters)
    return read(function, list(range(99)), pa.int64())


@pytest.mark.parametrize(
    ("function", "state"),
    [
        (build("count", pa.int64()), -1),
        (build("avg", pa.float64()), {"sum": 1.0, "count": -1}),
        (build("avg", pa.float64()), {"sum": None, "count": 1}),
        (build("avg", pa.decimal128(4, 0)), {"sum": Decimal(50000), "count": 2}),
        (build("array_agg", pa.list_(pa.int64())), [1, None]),
        (build("string_agg", pa.string()), [None]),
        (build("collect_set", pa.list_(pa.int64())), [1, 2, 1]),
        (build("merge_map", MAP), [("a", 1), ("a", 2)]),
        (build("last_value", pa.int64(), order_by="t"), None),
        (build("first_value_ignore_nulls", pa.int64(), order_by="t"), {"value": None, "order": 1}),
        (build("hll_sketch", pa.int64()), state_of("hll_sketch", lg_k=8)),
        (
            build("theta_sketch", pa.int64(), lg_k=5),
            state_of("theta_sketch", lg_k=12),
        ),
    ],
    ids=lambda part: repr(part) if isinstance(part, AggregateFunction) else "",
)
def test_a_state_that_no_writer_makes_is_refused_with_its_position(
    function: AggregateFunction, state: Any
) -> None:
    good = function.lift(
        pa.array([1], pa.int8()).cast(function.input_type or pa.int64())
        if not pa.types.is_map(function.result_type)
        else pa.array([[("a", 1)]], MAP),
        None if function.order_type is None else pa.array([1], function.order_type),
    )
    function.validate_states(good)
    states = pa.concat_arrays([good, pa.array([state], function.state_type)])
    with pytest.raises(Fault) as caught:
        function.validate_states(states)
    assert caught.value.index == 1


def test_a_fault_while_lifting_names_the_run() -> None:
    class Picky(Max):
        def lift(self, values: pa.Array, order: pa.Array | None = None) -> pa.Array:  # noqa: ARG002
            raise Fault(len(values) - 1, "no")

    with pytest.raises(Fault) as caught:
        Picky(pa.int64()).accumulate(pa.array([1, 2, 3, 4]), None, np.array([0, 1, 3]))
    assert caught.value.index == 2


# --- Definitions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["last_value_ignore_nulls", "LAST-VALUE-IGNORE-NULLS", " Last_Value_ignore-nulls"]
)
def test_names_are_found_whatever_their_case_and_hyphens(name: str) -> None:
    assert find_function(name, column="c") is AggFunction.LAST_VALUE_IGNORE_NULLS


def test_listagg_is_string_agg() -> None:
    assert find_function("LISTAGG", column="c") is AggFunction.STRING_AGG
    assert AggFunction.__members__["LISTAGG"] is AggFunction.STRING_AGG
    assert find_function(AggFunction.SUM, column="c") is AggFunction.SUM


def test_an_unknown_name_is_an_error_with_the_column_and_the_nearest_name() -> None:
    with pytest.raises(SchemaError, match=r"column 'tags'.*'string_ag'.*did you mean 'string_agg'"):
        find_function("string_ag", column="tags")
    with pytest.raises(SchemaError, match=r"column 'tags'.*'zzz'.*known are .*sum"):
        find_function("zzz", column="tags")
    with pytest.raises(SchemaError, match="column 'tags'"):
        find_function(None, column="tags")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("sum", pa.string(), "sum cannot have type STRING; it can be TINYINT"),
        ("product", pa.decimal128(38, 2), "DECIMAL of at most 37 digits"),
        ("count", pa.int32(), "it can be BIGINT"),
        ("avg", pa.int64(), "it can be DOUBLE and DECIMAL"),
        ("max", pa.list_(pa.int64()), "ARRAY<BIGINT>; it can be BOOLEAN, numbers"),
        ("bool_or", pa.int64(), "it can be BOOLEAN"),
        ("string_agg", pa.binary(), "it can be STRING"),
        ("array_agg", pa.string(), "it can be ARRAY<T>"),
        ("merge_map", pa.string(), "it can be MAP<K,V>"),
        ("rbm32", pa.int32(), r"it can be BIGINT \(reads as a count\)"),
    ],
)
def test_a_type_that_the_function_cannot_have_is_an_error(
    name: str, kind: pa.DataType, text: str
) -> None:
    with pytest.raises(SchemaError, match=f"^column 'c': .*{text}"):
        build(name, kind)


@pytest.mark.parametrize(
    ("name", "kind", "parameters", "text"),
    [
        ("sum", pa.int64(), {"limit": 1}, "sum has no parameter 'limit'; it has none"),
        ("string_agg", pa.string(), {"size": 1}, "no parameter 'size'; it has delimiter, limit"),
        ("string_agg", pa.string(), {"delimiter": 1}, "'delimiter' of string_agg: 1 is not a text"),
        ("string_agg", pa.string(), {"limit": "many"}, "'many' is not a whole number"),
        ("string_agg", pa.string(), {"limit": "-1"}, "'-1' is not a whole number"),
        ("string_agg", pa.string(), {"limit": 0}, "0 is not a whole number from 1 on"),
        ("string_agg", pa.string(), {"limit": True}, "True is not a whole number"),
        ("string_agg", pa.string(), {"limit": 1.0}, "1.0 is not a whole number"),
        ("hll_sketch", pa.int64(), {"lg_k": 22}, "22 is not a whole number from 4 to 21"),
        ("last_value", pa.int64(), {"order_by": ""}, "'' is not the name of a column"),
        ("last_value", pa.int64(), {"order_type": "BIGINT"}, "order_type needs order_by"),
        ("last_value", pa.int64(), {"order_by": "t", "order_type": "WORD"}, "WORD"),
        (
            "last_value",
            pa.int64(),
            {"order_by": "t", "order_type": "ARRAY<BIGINT>"},
            "order_type ARRAY<BIGINT> has no order",
        ),
    ],
)
def test_a_wrong_parameter_is_an_error_that_names_the_column(
    name: str, kind: pa.DataType, parameters: dict[str, Any], text: str
) -> None:
    with pytest.raises(SchemaError, match=f"^column 'c': .*{text}"):
        build(name, kind, **parameters)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (build("string_agg", pa.string(), delimiter=",", limit="100"), {"limit": 100}),
        (build("string_agg", pa.string(), delimiter="|"), {"delimiter": "|"}),
        (build("array_agg", pa.list_(pa.int64()), limit=7), {"limit": 7}),
        (build("last_value", pa.int64(), order_by="t", order_type=UTC), {"order_by": "t"}),
        (
            build("last_value", pa.int64(), order_by="t", order_type=pa.decimal128(5, 1)),
            {"order_by": "t", "order_type": "DECIMAL(5,1)"},
        ),
        (build("hll_sketch", pa.int64(), lg_k="12"), {}),
        (build("theta_sketch", pa.binary(), lg_k="10"), {"lg_k": 10}),
        (build("merge_map", MAP), {}),
    ],
    ids=repr,
)
def test_parameters_are_stored_as_json_and_give_the_same_function_again(
    given: AggregateFunction, stored: dict[str, Any]
) -> None:
    assert given.parameters == stored
    loaded = json.loads(json.dumps(given.parameters))
    assert build(given.name, given.result_type, **loaded) == given
    assert hash(build(given.name, given.result_type, **loaded)) == hash(given)


def test_functions_that_differ_in_a_parameter_are_not_equal() -> None:
    assert build("string_agg", pa.string(), limit=1) != build("string_agg", pa.string(), limit=2)
    assert build("sum", pa.int64()) != build("sum", pa.int32())
    assert build("sum", pa.int64()) != build("product", pa.int64())


def test_the_package_exports_what_it_says() -> None:
    exported = merge_engine.aggregates.__all__
    assert exported == sorted(exported)
    assert all(hasattr(merge_engine.aggregates, name) for name in exported)
