"""Decimal averages and products against Python's integers, over all precisions and scales."""

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from merge_engine.aggregates.base import Fault
from tests.support.aggregates import build, merged

COUNTS = st.one_of(
    st.integers(1, 1_000),
    st.integers(1, 2**63 - 1),
    st.integers(0, 62).map(lambda bits: 2**bits),
    st.integers(2, 63).map(lambda bits: 2**bits - 1),
    st.integers(0, 18).map(lambda digits: 10**digits),
)


def numbers(precision: int) -> st.SearchStrategy[int]:
    """Whole numbers of so many digits, with those among them that long division gets wrong."""
    largest = 10**precision - 1
    bits = st.integers(0, largest.bit_length() - 1)
    positive = st.one_of(
        st.integers(0, largest),
        st.integers(0, precision).map(lambda digits: 10**digits - 1),
        bits.map(lambda count: 2**count - 1),
        bits.map(lambda count: (2**count - 1) << 32),
    ).map(lambda number: number % (largest + 1))
    return st.builds(lambda number, sign: number * sign, positive, st.sampled_from([1, -1]))


def decimal(number: int, scale: int) -> Decimal:
    digits = tuple(map(int, str(abs(number))))
    return Decimal((int(number < 0), digits, -scale))


def half_up(number: int, divisor: int) -> int:
    rounded = (2 * abs(number) + divisor) // (2 * divisor)
    return rounded if number >= 0 else -rounded


@given(st.integers(1, 38), st.data())
def test_an_average_is_the_nearest_number_and_half_goes_away_from_zero(
    precision: int, data: st.DataObject
) -> None:
    near = st.tuples(numbers(precision), COUNTS, st.integers(-2, 2), st.booleans())
    drawn = data.draw(st.lists(near, max_size=6))
    # With these numbers, in every scale that there is.
    for scale in range(precision + 1):
        function = build("avg", pa.decimal128(precision, scale))
        states, expected = [], []
        for quotient, count, more, halfway in drawn:
            total = quotient * count + more + (count // 2 if halfway else 0)
            total = max(-(10**38 - 1), min(total, 10**38 - 1))
            if abs(half_up(total, count)) < 10**precision:
                states.append({"sum": decimal(total, scale), "count": count})
                expected.append(decimal(half_up(total, count), scale))
        array = pa.array([*states, None, {"sum": Decimal(0), "count": 0}], function.state_type)
        function.accept(array)
        assert function.finish(array).to_pylist() == [*expected, None, None]
        assert function.finish(array.slice(1)).to_pylist() == [*expected, None, None][1:]


@given(st.integers(1, 37), st.data())
@example(precision=37, data=None)
def test_a_decimal_product_is_exact_or_refused(precision: int, data: st.DataObject | None) -> None:
    if data is None:
        scale, left, right = 14, 2**80 - 1, 10**14
    else:
        scale = data.draw(st.integers(0, precision))
        powers = st.integers(0, precision - 1).map(lambda digits: 10**digits)
        left = data.draw(numbers(precision))
        right = data.draw(powers | numbers(precision))
    function = build("product", pa.decimal128(precision, scale))
    exact = left * right
    fits = exact % 10**scale == 0 and abs(exact) < 10 ** (precision + scale)
    if fits:
        product = merged(function, decimal(left, scale), decimal(right, scale))
        assert product == decimal(abs(exact) // 10**scale * (1 if exact >= 0 else -1), scale)
    else:
        with pytest.raises(Fault, match=r"exceeds|decimal places"):
            merged(function, decimal(left, scale), decimal(right, scale))
