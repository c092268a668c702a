"""Every aggregate function, for every kind of column, is the monoid that its model describes."""

from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import reduce
from operator import add, mul
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merge_engine.aggregates.base import AggregateFunction, Fault, Starts
from merge_engine.aggregates.registry import AggFunction
from tests.property.models import (
    CASES,
    Row,
    case,
    input_type_of,
    model_fold,
    orders_for,
    same,
    values_for,
)
from tests.support.examples import examples

Runs = list[list[Row]]

thorough = settings(max_examples=examples(6, per=10), deadline=None, print_blob=True)

each_function = pytest.mark.parametrize(
    "function", [function for functions in CASES.values() for function in functions], ids=repr
)


def runs_for(function: AggregateFunction, *, shortest: int = 1) -> st.SearchStrategy[Runs]:
    rows = st.tuples(values_for(function), orders_for(function))
    return st.lists(st.lists(rows, min_size=shortest, max_size=7), max_size=4)


def slice_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Build an array that begins in the middle of its buffers, as a slice of a batch does."""
    hidden = [values[-1], None] if values else [None]
    return pa.array([*hidden, *values, None], kind).slice(len(hidden), len(values))


def accumulate(function: AggregateFunction, runs: Runs) -> pa.Array:
    values, order, starts = arrays_of(function, runs)
    return function.accumulate(values, order, starts)


def arrays_of(function: AggregateFunction, runs: Runs) -> tuple[pa.Array, pa.Array | None, Starts]:
    rows = [row for run in runs for row in run]
    starts = np.cumsum([0, *(len(run) for run in runs)])[: len(runs)]
    order = None
    if function.order_type is not None:
        order = slice_of([order for _, order in rows], function.order_type)
    return slice_of([value for value, _ in rows], input_type_of(function)), order, starts


def assert_same(actual: pa.Array, expected: pa.Array) -> None:
    actual.validate(full=True)
    assert actual.type == expected.type
    assert same(actual.to_pylist()) == same(expected.to_pylist())


def test_every_function_of_the_registry_is_tested_here() -> None:
    assert set(CASES) == set(AggFunction)
    assert all(CASES.values())


@each_function
@thorough
@given(data=st.data())
def test_what_a_reader_sees_is_what_the_model_says(
    function: AggregateFunction, data: st.DataObject
) -> None:
    runs = data.draw(runs_for(function))
    states = accumulate(function, runs)
    assert states.type == function.state_type
    function.accept(states)
    finished = function.finish(states)
    finished.validate(full=True)
    assert finished.type == function.result_type
    assert same(finished.to_pylist()) == same([model_fold(function, run) for run in runs])


@each_function
@thorough
@given(data=st.data())
def test_the_fast_ways_to_reduce_runs_mean_the_same_as_combine(
    function: AggregateFunction, data: st.DataObject
) -> None:
    runs = data.draw(runs_for(function))
    values, order, starts = arrays_of(function, runs)
    lifted = function.lift(values, order)
    assert lifted.type == function.state_type
    by_combine = AggregateFunction.fold(function, lifted, starts)
    assert_same(function.fold(lifted, starts), by_combine)
    assert_same(function.accumulate(values, order, starts), by_combine)
    shuffled = np.array(data.draw(st.permutations(range(len(values)))), np.int64)
    places = np.argsort(shuffled)
    scattered = values.take(pa.array(shuffled))
    scattered_order = None if order is None else order.take(pa.array(shuffled))
    by_rows = function.accumulate_rows(scattered, scattered_order, places, starts)
    assert_same(by_rows, function.accumulate(values, order, starts))


@each_function
@thorough
@given(data=st.data())
def test_combine_is_associative(function: AggregateFunction, data: st.DataObject) -> None:
    rows = st.tuples(values_for(function), orders_for(function))
    parts = st.tuples(*[st.lists(rows, min_size=1, max_size=3)] * 3)
    keys = data.draw(st.lists(parts, max_size=4))
    first, second, third = (accumulate(function, [key[part] for key in keys]) for part in range(3))
    assert_same(
        function.combine(function.combine(first, second), third),
        function.combine(first, function.combine(second, third)),
    )


@each_function
@thorough
@given(data=st.data())
def test_merging_the_states_of_any_split_equals_accumulating_all_rows(
    function: AggregateFunction, data: st.DataObject
) -> None:
    runs = data.draw(runs_for(function, shortest=2))
    cuts = [data.draw(st.integers(1, len(run) - 1)) for run in runs]
    older = accumulate(function, [run[:cut] for run, cut in zip(runs, cuts, strict=True)])
    newer = accumulate(function, [run[cut:] for run, cut in zip(runs, cuts, strict=True)])
    assert_same(function.combine(older, newer), accumulate(function, runs))


@pytest.mark.parametrize(
    "function", [f for functions in CASES.values() for f in functions if f.order_by], ids=repr
)
@thorough
@given(data=st.data())
def test_a_late_event_never_wins(function: AggregateFunction, data: st.DataObject) -> None:
    rows = st.tuples(values_for(function), orders_for(function))
    # No two orders are equal, so that arrival decides nothing.
    distinct = st.lists(rows, min_size=2, max_size=4, unique_by=lambda row: place_of(row[1]))
    run = data.draw(distinct)
    shuffled = data.draw(st.permutations(run))
    one, other = (function.finish(accumulate(function, [rows])) for rows in (run, shuffled))
    assert_same(one, other)


def place_of(order: Any) -> Any:
    """Return something that is equal iff two orders are."""
    return "NaN" if order != order else order  # noqa: PLR0124


INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
EXACT = [*INTEGERS, pa.decimal128(3, 0), pa.decimal128(18, 2), pa.decimal128(38, 0)]


def unscaled_limit(kind: pa.DataType) -> int:
    """Return the largest value of an exact type, in units of its last digit."""
    if pa.types.is_decimal(kind):
        return int(10**kind.precision) - 1
    return int(2 ** (kind.bit_width - 1)) - 1


def lowest_unscaled(kind: pa.DataType) -> int:
    return -unscaled_limit(kind) - (0 if pa.types.is_decimal(kind) else 1)


def exact_array(unscaled: list[int | None], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_decimal(kind):
        return slice_of(unscaled, kind)
    digits = [
        None if n is None else Decimal((n < 0, tuple(map(int, str(abs(n)))), -kind.scale))
        for n in unscaled
    ]
    return slice_of(digits, kind)


def check_overflow(
    function: AggregateFunction, runs: list[list[int | None]], exact: list[int | None]
) -> None:
    """Compare `fold`, and `combine` if runs are pairs, with the exact results of integers."""
    kind, limit = function.result_type, unscaled_limit(function.result_type)
    lowest = lowest_unscaled(kind)
    outside = [
        n for n, total in enumerate(exact) if total is not None and not lowest <= total <= limit
    ]
    states = exact_array([value for run in runs for value in run], kind)
    starts = np.cumsum([0, *(len(run) for run in runs)])[: len(runs)]
    attempts: list[Callable[[], pa.Array]] = [
        lambda: function.fold(states, starts),
        lambda: function.accumulate(states, None, starts),
    ]
    if all(len(run) == 2 for run in runs):
        older, newer = (exact_array([run[side] for run in runs], kind) for side in (0, 1))
        attempts.append(lambda: function.combine(older, newer))
    for attempt in attempts:
        if outside:
            with pytest.raises(Fault) as caught:
                attempt()
            assert caught.value.index == outside[0]
            assert caught.value.overflow
            assert f"{function.name} exceeds" in caught.value.reason
        else:
            assert_same(attempt(), exact_array(exact, kind))


def extreme_runs(kind: pa.DataType, length: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    limit = unscaled_limit(kind)
    lowest = lowest_unscaled(kind)
    near = st.integers(-2, 2) | st.integers(limit - 2, limit) | st.integers(lowest, lowest + 2)
    anything = near | st.integers(lowest, limit) | st.none()
    return length.flatmap(
        lambda size: st.lists(st.lists(anything, min_size=size, max_size=size), max_size=5)
    )


@pytest.mark.parametrize("kind", EXACT, ids=str)
@settings(thorough, max_examples=examples(30, per=4))
@given(data=st.data())
def test_a_sum_is_exact_or_a_fault_that_names_its_run(
    kind: pa.DataType, data: st.DataObject
) -> None:
    runs = data.draw(extreme_runs(kind, st.integers(1, 5)))
    sums = [[n for n in run if n is not None] for run in runs]
    check_overflow(case(AggFunction.SUM, kind), runs, [sum(run) if run else None for run in sums])


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
@settings(thorough, max_examples=examples(30, per=4))
@given(data=st.data())
def test_a_product_is_exact_or_a_fault_that_names_its_run(
    kind: pa.DataType, data: st.DataObject
) -> None:
    runs = data.draw(extreme_runs(kind, st.integers(1, 5)))
    factors = [[n for n in run if n is not None] for run in runs]
    exact = [reduce(mul, run) if run else None for run in factors]
    check_overflow(case(AggFunction.PRODUCT, kind), runs, exact)


@settings(thorough, max_examples=examples(30, per=4))
@given(data=st.data())
def test_a_decimal_average_is_rounded_half_up_from_the_exact_quotient(data: st.DataObject) -> None:
    function = case(AggFunction.AVG, pa.decimal128(20, 3))
    amounts = st.integers(10**20 - 3, 10**20 - 1) | st.integers(-(10**20) + 1, 10**20 - 1)
    values = data.draw(st.lists(amounts.map(lambda n: Decimal(f"{n}e-3")), min_size=1, max_size=9))
    rows: list[Row] = [(value, None) for value in values]
    finished = function.finish(accumulate(function, [rows])).to_pylist()
    assert finished == [model_fold(function, rows)]


@pytest.mark.parametrize(
    "function",
    [
        case(AggFunction.HLL_SKETCH, pa.binary(), lg_k=5),
        case(AggFunction.THETA_SKETCH, pa.binary(), lg_k=5),
        case(AggFunction.RBM32, pa.binary()),
        case(AggFunction.RBM64, pa.binary()),
    ],
    ids=repr,
)
@settings(thorough, max_examples=examples(30, per=4))
@given(data=st.data())
def test_equal_sets_have_equal_bytes_however_large_and_however_they_came_about(
    function: AggregateFunction, data: st.DataObject
) -> None:
    ranges = st.tuples(
        st.sampled_from([0, 50, 65536]), st.integers(0, 90), st.sampled_from([1, 2, 3])
    )
    chosen = data.draw(st.lists(ranges, min_size=1, max_size=6))
    values = [start + step * n for start, count, step in chosen for n in range(count + 1)]

    def set_of(members: list[int]) -> pa.Array:
        return function.accumulate(pa.array(members, pa.int64()), None, np.array([0]))

    whole = set_of(sorted(set(values)))
    cut = data.draw(st.integers(1, len(values)))
    parts = [values[:cut], values[cut // 2 :], values[: cut // 2 + 1][::-1]]
    pieces = [set_of(part) for part in parts if part]
    assert_same(reduce(function.combine, pieces), whole)
    assert_same(function.combine(whole, pieces[0]), whole)


def test_the_helpers_of_this_file_do_not_hide_an_overflow() -> None:
    function = case(AggFunction.SUM, pa.int8())
    with pytest.raises(pytest.fail.Exception):
        check_overflow(function, [[1, 2]], [reduce(add, [127, 1])])
