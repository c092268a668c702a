"""Short ways to build an aggregate function, feed it and read its result."""

from typing import Any

import numpy as np
import pyarrow as pa

from merge_engine.aggregates.base import AggregateFunction
from merge_engine.aggregates.registry import create_function, find_function

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


def state_of(name: str, **parameters: Any) -> Any:
    function = build(name, pa.binary(), **parameters)
    return read(function, list(range(99)), pa.int64())
