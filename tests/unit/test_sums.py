"""Counts, sums, products and averages: exact, and refused where they overflow."""

import math
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from merge_engine.aggregates.base import Fault
from tests.support.aggregates import INT64_MAX, build, merged, read


def test_a_null_counts_as_nothing_and_never_makes_a_count_null() -> None:
    function = build("count", pa.int64())
    assert read(function, [None, None], pa.string()) == 0
    assert read(function, [None, "", "x"], pa.string()) == 2
    assert read(function, [None], pa.null()) == 0
    nothing = pa.nulls(1, pa.int64())
    assert function.combine(nothing, nothing).to_pylist() == [0]
    assert function.finish(nothing).to_pylist() == [0]


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


def test_a_product_is_multiplied_out_only_if_it_may_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied = []

    def prod(factors: list[int]) -> int:
        product = 1
        for factor in factors:
            product *= factor
            assert abs(product) <= 2**65, "numbers that grow make the time quadratic"
        multiplied.append(product)
        return product

    monkeypatch.setattr(math, "prod", prod)
    function = build("product", pa.int64())
    for hopeless in ([2**62] * 100_000, [-2] * 100_000, [*range(1, 100_000)]):
        with pytest.raises(Fault, match="product exceeds BIGINT"):
            read(function, hopeless)
        assert read(function, [*hopeless, 0]) == 0
    assert multiplied == []
    assert read(function, [1, -1] * 50_000 + [2] * 62 + [-2]) == -(2**63)
    assert multiplied == [-(2**63)]


@pytest.mark.parametrize(
    ("factors", "product"),
    [
        ([2**32, 2**31 - 1], 2**63 - 2**32),
        ([-(2**62), 2], -(2**63)),
        ([2**63 - 1, 1, -1], 1 - 2**63),
        ([-(2**63), 1], -(2**63)),
        ([3037000499, 3037000499], 3037000499**2),
    ],
)
def test_products_that_just_fit_are_exact(factors: list[int], product: int) -> None:
    assert read(build("product", pa.int64()), factors) == product
    for beyond in ([*factors, -2], [*factors, 3]):
        with pytest.raises(Fault, match="product exceeds BIGINT"):
            read(build("product", pa.int64()), beyond)


def test_a_decimal_product_that_arrow_divides_wrongly_is_right() -> None:
    # 2^80 - 1 as digits. Arrow's quotient of it by 10^14 is too small.
    number = Decimal("12089258196.14629174706175")
    assert merged(build("product", pa.decimal128(37, 14)), number, Decimal(1)) == number


def test_an_average_is_rounded_half_up_away_from_zero() -> None:
    function = build("avg", pa.decimal128(5, 1))
    assert merged(function, Decimal("0.1"), Decimal("0.2")) == Decimal("0.2")
    assert merged(function, Decimal("-0.1"), Decimal("-0.2")) == Decimal("-0.2")
    assert read(function, [Decimal("999.9")] * 1000) == Decimal("999.9")


def test_an_average_with_a_count_of_zero_is_null() -> None:
    function = build("avg", pa.float64())
    state = pa.array([{"sum": 0.0, "count": 0}, None], function.state_type)
    assert function.accept(state).to_pylist() == [None, None]
    assert function.finish(state).to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("precision", "scale", "largest"),
    [(38, 0, "9" * 38), (37, 5, "9" * 32 + ".99999"), (1, 1, "0.9")],
)
def test_an_average_of_the_largest_number_and_zeros_is_rounded_right(
    precision: int, scale: int, largest: str
) -> None:
    function = build("avg", pa.decimal128(precision, scale))
    number = Decimal(largest)
    for zeros in range(1, 9):
        with localcontext(prec=100):
            quotient = number / (zeros + 1)
            expected = quotient.quantize(Decimal(1).scaleb(-scale), rounding=ROUND_HALF_UP)
        assert read(function, [number, *[Decimal(0)] * zeros]) == expected
        assert (
            read(function, [number.copy_negate(), *[Decimal(0)] * zeros]) == expected.copy_negate()
        )


def test_a_state_whose_quotient_does_not_fit_is_found_at_once() -> None:
    function = build("avg", pa.decimal128(3, 0))
    good, bad = {"sum": Decimal(1998), "count": 2}, {"sum": Decimal(1999), "count": 2}
    states = pa.array([good, None, bad, good], function.state_type)
    with pytest.raises(Fault, match="whose quotient does not fit") as caught:
        function.accept(states)
    assert caught.value.index == 2
    function.accept(states.slice(3))
