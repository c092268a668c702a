"""What every aggregate function means, in plain Python, and values to try it on.

`model_fold(function, rows)` is the specification: it sees all rows of one key at once, as (value,
order) pairs from the oldest to the newest, and returns what a reader should see. It knows nothing
of states, batches or Arrow. `values_for` and `orders_for` generate such rows; `same` makes results
comparable (NaN equals NaN, and 0.0 is not -0.0).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal, localcontext
from functools import reduce
from operator import add, mul
from typing import Any

import numpy as np
import pyarrow as pa
from datasketches import hll_sketch, tgt_hll_type, update_theta_sketch
from hypothesis import strategies as st
from pyroaring import BitMap, BitMap64

from merge_engine.aggregates.base import AggregateFunction
from merge_engine.aggregates.registry import AggFunction, create_function

Row = tuple[Any, Any]
Values = list[Any]

EPOCH = datetime(2024, 1, 1, tzinfo=UTC)
STRINGS = pa.list_(pa.string())
POINT = pa.struct([("x", pa.float64()), ("tags", STRINGS)])


def case(function: AggFunction, result_type: pa.DataType, **parameters: Any) -> AggregateFunction:
    """Build a function as a schema would."""
    return create_function(function, result_type, parameters, column="tested")


def _positional(function: AggFunction) -> list[AggregateFunction]:
    return [
        case(function, pa.string()),
        case(function, pa.map_(pa.string(), pa.int64())),
        case(function, pa.float64(), order_by="at"),
        case(function, POINT, order_by="at", order_type=pa.float64()),
        case(function, pa.int32(), order_by="at", order_type="STRING"),
        case(function, pa.bool_(), order_by="at", order_type="DECIMAL(5,1)"),
    ]


_ORDERED = [
    *(pa.bool_(), pa.int8(), pa.int64(), pa.float32(), pa.float64(), pa.decimal128(38, 3)),
    *(pa.string(), pa.binary(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", tz="UTC")),
]

_NUMBERS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()),
    pa.decimal128(18, 2),
]

_ELEMENTS = [pa.int64(), pa.float64(), pa.string(), POINT, pa.decimal128(9, 2)]

CASES: dict[AggFunction, list[AggregateFunction]] = {
    AggFunction.SUM: [case(AggFunction.SUM, kind) for kind in [*_NUMBERS, pa.decimal128(38, 0)]],
    AggFunction.PRODUCT: [
        case(AggFunction.PRODUCT, kind) for kind in [*_NUMBERS, pa.decimal128(37, 2)]
    ],
    AggFunction.COUNT: [case(AggFunction.COUNT, pa.int64())],
    AggFunction.AVG: [
        case(AggFunction.AVG, kind)
        for kind in (pa.float64(), pa.decimal128(9, 2), pa.decimal128(38, 0))
    ],
    AggFunction.MIN: [case(AggFunction.MIN, kind) for kind in _ORDERED],
    AggFunction.MAX: [case(AggFunction.MAX, kind) for kind in _ORDERED],
    AggFunction.BOOL_AND: [case(AggFunction.BOOL_AND, pa.bool_())],
    AggFunction.BOOL_OR: [case(AggFunction.BOOL_OR, pa.bool_())],
    AggFunction.LAST_VALUE: _positional(AggFunction.LAST_VALUE),
    AggFunction.FIRST_VALUE: _positional(AggFunction.FIRST_VALUE),
    AggFunction.LAST_VALUE_IGNORE_NULLS: _positional(AggFunction.LAST_VALUE_IGNORE_NULLS),
    AggFunction.FIRST_VALUE_IGNORE_NULLS: _positional(AggFunction.FIRST_VALUE_IGNORE_NULLS),
    AggFunction.STRING_AGG: [
        case(AggFunction.STRING_AGG, pa.string()),
        case(AggFunction.STRING_AGG, pa.string(), delimiter="", limit=3),
        case(AggFunction.STRING_AGG, pa.string(), delimiter=" | "),
    ],
    AggFunction.ARRAY_AGG: [
        *(case(AggFunction.ARRAY_AGG, pa.list_(kind)) for kind in _ELEMENTS),
        case(AggFunction.ARRAY_AGG, STRINGS, limit=2),
    ],
    AggFunction.COLLECT_SET: [
        *(case(AggFunction.COLLECT_SET, pa.list_(kind)) for kind in _ELEMENTS),
        case(AggFunction.COLLECT_SET, pa.list_(pa.map_(pa.string(), STRINGS))),
        case(AggFunction.COLLECT_SET, pa.list_(pa.bool_()), limit=2),
    ],
    AggFunction.MERGE_MAP: [
        case(AggFunction.MERGE_MAP, pa.map_(pa.string(), pa.int64())),
        case(AggFunction.MERGE_MAP, pa.map_(pa.float64(), POINT)),
    ],
    AggFunction.RBM32: [case(AggFunction.RBM32, kind) for kind in (pa.int64(), pa.binary())],
    AggFunction.RBM64: [case(AggFunction.RBM64, kind) for kind in (pa.int64(), pa.binary())],
    AggFunction.HLL_SKETCH: [
        case(AggFunction.HLL_SKETCH, pa.int64()),
        case(AggFunction.HLL_SKETCH, pa.binary(), lg_k=8),
    ],
    AggFunction.THETA_SKETCH: [
        case(AggFunction.THETA_SKETCH, pa.int64()),
        case(AggFunction.THETA_SKETCH, pa.binary(), lg_k=5),
    ],
}


def same(value: Any) -> Any:
    """Return something that is equal iff the values are: bit by bit, but all NaNs alike."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value.hex()
    if isinstance(value, dict):
        return {name: same(value[name]) for name in sorted(value)}
    if isinstance(value, list | tuple):
        return [same(part) for part in value]
    return (type(value).__name__, value)


# --- Values -------------------------------------------------------------------------------------

_SPECIAL_FLOATS = [math.nan, math.inf, -math.inf, 0.0, -0.0]

# Sums of a few dozen of these are exact, even as FLOAT; so are products of the powers of two.
_DYADIC = st.integers(-64, 64).map(lambda number: number / 8) | st.sampled_from(_SPECIAL_FLOATS)
_POWERS = st.sampled_from([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0, *_SPECIAL_FLOATS])


def input_type_of(function: AggregateFunction) -> pa.DataType:
    """Return the type of the raw values: the declared one, or one that the function takes."""
    if function.input_type is not None:
        return function.input_type
    return {"rbm32": pa.int64(), "rbm64": pa.uint64(), "count": STRINGS}.get(
        function.name, pa.string()
    )


def values_for(function: AggregateFunction) -> st.SearchStrategy[Any]:
    """Return raw values for the function, nulls among them, that make no overflow."""
    return st.none() | _present_values_for(function)


def orders_for(function: AggregateFunction) -> st.SearchStrategy[Any]:
    """Return values for the column that the function orders by; few, so that they often tie."""
    if function.order_type is None:
        return st.none()
    if pa.types.is_timestamp(function.order_type):
        present = st.integers(0, 3).map(lambda second: EPOCH + timedelta(seconds=second))
        return st.none() | present
    return st.none() | values_of(function.order_type)


def _present_values_for(function: AggregateFunction) -> st.SearchStrategy[Any]:
    kind = input_type_of(function)
    if function.name in ("sum", "avg", "product"):
        if pa.types.is_floating(kind):
            return _POWERS if function.name == "product" else _DYADIC
        # Seven factors of two are already too large for a TINYINT.
        largest = 1 if pa.types.is_int8(kind) and function.name == "product" else 2
        small = st.integers(-largest, largest)
        return small.map(Decimal) if pa.types.is_decimal(kind) else small
    if function.name == "rbm32":
        return _around(0, 1 << 16, (1 << 32) - 8)
    if function.name == "rbm64":
        return _around(0, 1 << 16, 1 << 32, (1 << 64) - 8)
    return values_of(kind)


def _around(*places: int) -> st.SearchStrategy[int]:
    # Close together, so that runs form and containers change from one kind to another.
    return st.builds(add, st.sampled_from(places), st.integers(0, 7))


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Return values of a table type, none of them null at the top; few, so that they repeat."""
    if pa.types.is_nested(kind):
        return _nested_values_of(kind)
    if pa.types.is_floating(kind):
        return st.sampled_from([*_SPECIAL_FLOATS, 1.5, -1.5])
    if pa.types.is_decimal(kind):
        return st.sampled_from([Decimal("-2.0"), Decimal(0), Decimal("1.5"), Decimal("10.5")])
    if pa.types.is_timestamp(kind):
        start = EPOCH if kind.tz else EPOCH.replace(tzinfo=None)
        return st.integers(-2, 2).map(lambda second: start + timedelta(seconds=second))
    plain: dict[pa.DataType, st.SearchStrategy[Any]] = {
        pa.bool_(): st.booleans(),
        pa.string(): st.sampled_from(["", "a", "b", "ab", "ä", "\U0001f600", "\uffff"]),
        pa.binary(): st.sampled_from([b"", b"\x00", b"\x00\x01", b"\xff"]),
        pa.date32(): st.integers(-2, 2).map(lambda day: date(1970, 1, 3) + timedelta(days=day)),
    }
    if kind in plain:
        return plain[kind]
    highest = 2 ** (kind.bit_width - 1) - 1
    return st.sampled_from([0, 1, -1, 2, highest, -highest - 1])


def _nested_values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_list(kind):
        return st.lists(st.none() | values_of(kind.value_type), max_size=2)
    if pa.types.is_map(kind):
        entries = st.tuples(values_of(kind.key_type), st.none() | values_of(kind.item_type))
        return st.lists(entries, max_size=3)
    return st.fixed_dictionaries({field.name: st.none() | values_of(field.type) for field in kind})


# --- Meanings -----------------------------------------------------------------------------------


def model_fold(function: AggregateFunction, rows: Sequence[Row]) -> Any:
    """Return what a reader sees after all these rows, oldest first; at least one."""
    if function.name in _OF_ROWS:
        return _OF_ROWS[function.name](function, rows)
    present = [value for value, _ in rows if value is not None]
    if not present and not counts(function):
        return None
    return _OF_VALUES[function.name](function, present)


def counts(function: AggregateFunction) -> bool:
    """Whether the function reads as a number of values, which is 0 where there were only nulls."""
    sets = ("rbm32", "rbm64", "hll_sketch", "theta_sketch")
    is_set = function.name in sets and pa.types.is_int64(function.result_type)
    return is_set or function.name == "count"


def _average(function: AggregateFunction, values: Values) -> Any:
    if not pa.types.is_decimal(function.result_type):
        return reduce(add, values) / len(values)
    with localcontext(prec=100):
        unit = Decimal(1).scaleb(-function.result_type.scale)
        return (sum(values, Decimal(0)) / len(values)).quantize(unit, ROUND_HALF_UP)


def _rank(value: Any) -> tuple[bool, Any]:
    """Sort NaN above everything."""
    if isinstance(value, float) and math.isnan(value):
        return (True, 0.0)
    return (False, value)


def _least(_: AggregateFunction, values: Values) -> Any:
    return min(values, key=_rank)


def _greatest(_: AggregateFunction, values: Values) -> Any:
    return max(values, key=_rank)


def _last(function: AggregateFunction, rows: Sequence[Row]) -> Any:
    chosen: Row | None = None
    for row in _candidates(function, rows):
        if chosen is None or function.order_by is None or chosen[1] is None:
            chosen = row
        else:
            chosen = row if row[1] is not None and _rank(row[1]) >= _rank(chosen[1]) else chosen
    return None if chosen is None else chosen[0]


def _first(function: AggregateFunction, rows: Sequence[Row]) -> Any:
    chosen: Row | None = None
    for row in _candidates(function, rows):
        if chosen is None:
            chosen = row
        elif function.order_by is None or row[1] is None:
            continue
        elif chosen[1] is None or _rank(row[1]) < _rank(chosen[1]):
            chosen = row
    return None if chosen is None else chosen[0]


def _candidates(function: AggregateFunction, rows: Sequence[Row]) -> Iterable[Row]:
    if function.name.endswith("_ignore_nulls"):
        return [row for row in rows if row[0] is not None]
    return rows


def _newest(function: AggregateFunction, values: Values) -> Values:
    return values[-function.parameters.get("limit", len(values)) :]


def _joined(function: AggregateFunction, values: Values) -> str:
    delimiter: str = function.parameters.get("delimiter", ",")
    return delimiter.join(_newest(function, values))


def _distinct(_: AggregateFunction, values: Values) -> Values:
    seen: dict[str, Any] = {}
    for value in values:
        seen.setdefault(repr(same(value)), value)
    return list(seen.values())


def _updated(_: AggregateFunction, values: Values) -> Values:
    entries: dict[str, tuple[Any, Any]] = {}
    for key, value in (entry for one_map in values for entry in one_map):
        first_key = entries.get(repr(same(key)), (key, None))[0]
        entries[repr(same(key))] = (first_key, value)
    return list(entries.values())


def _bitmap(function: AggregateFunction, values: Values) -> Any:
    if pa.types.is_int64(function.result_type):
        return len(set(values))
    bitmap = (BitMap if function.name == "rbm32" else BitMap64)(sorted(set(values)))
    bitmap.run_optimize()
    return bitmap.serialize()


def _hll(function: AggregateFunction, values: Values) -> Any:
    if pa.types.is_int64(function.result_type):
        return len(set(values))
    sketch = hll_sketch(function.parameters["lg_k"], tgt_hll_type.HLL_8)
    for value in _countable(values):
        sketch.update(value)
    # Few enough values to be a plain list of hashes after eight bytes of header.
    data = sketch.serialize_compact()
    return data[:8] + np.sort(np.frombuffer(data[8:], dtype="<u4")).tobytes()


def _theta(function: AggregateFunction, values: Values) -> Any:
    if pa.types.is_int64(function.result_type):
        return len(set(values))
    sketch = update_theta_sketch(function.parameters["lg_k"])
    for value in _countable(values):
        sketch.update(value)
    return sketch.compact().serialize()


def _countable(values: Values) -> Values:
    # DataSketches skip the empty string; ours count it as this number, the xxHash64 of nothing.
    return [value or 0xEF46DB3751D8E999 - (1 << 63) for value in values]


_OF_ROWS: dict[str, Callable[[AggregateFunction, Sequence[Row]], Any]] = {
    "last_value": _last,
    "first_value": _first,
    "last_value_ignore_nulls": _last,
    "first_value_ignore_nulls": _first,
}

_OF_VALUES: dict[str, Callable[[AggregateFunction, Values], Any]] = {
    "sum": lambda _, values: reduce(add, values),
    "product": lambda _, values: reduce(mul, values),
    "count": lambda _, values: len(values),
    "avg": _average,
    "min": _least,
    "max": _greatest,
    "bool_and": lambda _, values: all(values),
    "bool_or": lambda _, values: any(values),
    "string_agg": _joined,
    "array_agg": _newest,
    "collect_set": _distinct,
    "merge_map": _updated,
    "rbm32": _bitmap,
    "rbm64": _bitmap,
    "hll_sketch": _hll,
    "theta_sketch": _theta,
}
