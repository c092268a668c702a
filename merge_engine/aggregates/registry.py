"""All functions by name.

A new function is one class with a `name` in one of the modules below, and its member here.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import pyarrow as pa

from foundation.errors import SchemaError
from foundation.suggestions import did_you_mean
from merge_engine.aggregates import (
    average,
    bitmaps,
    extremes,
    gathered,
    numeric,
    positional,
    sketches,
)
from merge_engine.aggregates.base import AggregateFunction
from merge_engine.schema.types import type_name


class AggFunction(Enum):
    """How the values of a column merge. The value is the name that schemas store."""

    SUM = "sum"
    PRODUCT = "product"
    COUNT = "count"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    BOOL_AND = "bool_and"
    BOOL_OR = "bool_or"
    LAST_VALUE = "last_value"
    FIRST_VALUE = "first_value"
    LAST_VALUE_IGNORE_NULLS = "last_value_ignore_nulls"
    FIRST_VALUE_IGNORE_NULLS = "first_value_ignore_nulls"
    STRING_AGG = "string_agg"
    LISTAGG = "string_agg"  # noqa: PIE796
    ARRAY_AGG = "array_agg"
    COLLECT_SET = "collect_set"
    MERGE_MAP = "merge_map"
    RBM32 = "rbm32"
    RBM64 = "rbm64"
    HLL_SKETCH = "hll_sketch"
    THETA_SKETCH = "theta_sketch"


_MODULES = (average, bitmaps, extremes, gathered, numeric, positional, sketches)

_CLASSES: dict[AggFunction, type[AggregateFunction]] = {
    AggFunction(candidate.name): candidate
    for module in _MODULES
    for candidate in vars(module).values()
    if isinstance(candidate, type)
    and issubclass(candidate, AggregateFunction)
    and "name" in vars(candidate)
}


def find_function(name: str | AggFunction, *, column: str) -> AggFunction:
    """Return the function of this name, whatever its case, and with "-" for "_" or not.

    There is no default: SchemaError names the column and the nearest name that exists.
    """
    if isinstance(name, AggFunction):
        return name
    known = {alias.lower(): member for alias, member in AggFunction.__members__.items()}
    function = known.get(name.strip().replace("-", "_").lower()) if isinstance(name, str) else None
    if function is None:
        hint = did_you_mean(name.strip().replace("-", "_"), known) if isinstance(name, str) else ""
        raise SchemaError(
            f"column '{column}': unknown aggregate function {name!r}{hint}"
            f"{'' if hint else '; known are ' + ', '.join(sorted(known))}"
        )
    return function


def create_function(
    function: AggFunction,
    result_type: pa.DataType,
    parameters: Mapping[str, Any],
    *,
    column: str,
) -> AggregateFunction:
    """Return the function for a column of this type; SchemaError names the column.

    Parameters may be text, as they come from connector options.
    """
    implementation = _CLASSES[function]
    if not implementation.supports(result_type):
        raise SchemaError(
            f"column '{column}': {function.value} cannot have type {type_name(result_type)}; "
            f"it can be {implementation.supported_types}"
        )
    readers = implementation.parameter_readers
    arguments = {}
    for name, value in parameters.items():
        if name not in readers:
            known = f"it has {', '.join(sorted(readers))}" if readers else "it has none"
            raise SchemaError(
                f"column '{column}': {function.value} has no parameter '{name}'; {known}"
            )
        try:
            arguments[name] = readers[name](value)
        except ValueError as error:
            raise SchemaError(
                f"column '{column}': parameter '{name}' of {function.value}: {error}"
            ) from error
    try:
        return implementation(result_type, **arguments)
    except ValueError as error:
        raise SchemaError(f"column '{column}': {function.value}: {error}") from error
