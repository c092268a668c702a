"""What every function keeps to: nulls are skipped, and what it cannot take is refused."""

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from merge_engine.aggregates.base import AggregateFunction, Fault
from merge_engine.aggregates.extremes import Max
from tests.support.aggregates import MAP, NAN, build, merged, state_of


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


def test_inputs_that_a_function_cannot_take_are_told_before_any_value_is_seen() -> None:
    complaint = build("rbm32", pa.int64()).check_input(pa.float64())
    assert complaint == "rbm32 takes whole numbers, not DOUBLE"
    assert "ARRAY<BIGINT>" in str(build("hll_sketch", pa.int64()).check_input(pa.list_(pa.int64())))
    assert build("count", pa.int64()).check_input(pa.list_(pa.int64())) is None


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
        (build("hll_sketch", pa.int64()), state_of("theta_sketch")),
        (build("theta_sketch", pa.int64()), state_of("hll_sketch")),
        (build("avg", pa.decimal128(4, 0)), {"sum": Decimal(1), "count": 0}),
        (build("avg", pa.float64()), {"sum": NAN, "count": 0}),
        (build("collect_set", pa.list_(pa.int64()), limit=2), [1, 2, 3]),
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
    function.accept(good)
    states = pa.concat_arrays([good, pa.array([state], function.state_type)])
    with pytest.raises(Fault) as caught:
        function.accept(states)
    assert caught.value.index == 1


def test_a_fault_while_lifting_names_the_run() -> None:
    class Picky(Max):
        def lift(self, values: pa.Array, order: pa.Array | None = None) -> pa.Array:  # noqa: ARG002
            raise Fault(len(values) - 1, "no")

    with pytest.raises(Fault) as caught:
        Picky(pa.int64()).accumulate(pa.array([1, 2, 3, 4]), None, np.array([0, 1, 3]))
    assert caught.value.index == 2
