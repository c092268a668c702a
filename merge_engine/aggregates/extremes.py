"""The least and the greatest value of a column; of booleans, "and" and "or"."""

from typing import ClassVar

import numpy as np
import pyarrow as pa
from pyarrow.types import is_integer

from merge_engine.aggregates.arrays import choose
from merge_engine.aggregates.base import Starts, ValueIsState
from merge_engine.aggregates.ordering import ORDERED_TYPES, Preference, is_ordered


class _Extreme(ValueIsState):
    """The value that is preferred to all others; its subclasses differ in their preference."""

    supported_types: ClassVar[str] = ORDERED_TYPES
    preference: ClassVar[Preference]

    @classmethod
    def supports(cls, result_type: pa.DataType) -> bool:
        return is_ordered(result_type)

    def combine(self, older: pa.Array, newer: pa.Array) -> pa.Array:
        return choose(self.preference.newer_wins(older, newer), older, newer)

    def fold(self, states: pa.Array, starts: Starts) -> pa.Array:
        found = self._fold_numbers(states, starts)
        if found is None:
            found = states.take(pa.array(self.preference.pick(states, starts)))
        return found

    def _fold_numbers(self, states: pa.Array, starts: Starts) -> pa.Array | None:
        """The same for numbers that NumPy orders as we do; None if there may be others.

        NaN is no number there, and of 0.0 and -0.0 it may return either.
        """
        is_float = pa.types.is_floating(states.type)
        if states.null_count or not len(states) or not (is_float or is_integer(states.type)):
            return None
        reduce = np.maximum if self.preference.largest else np.minimum
        found = reduce.reduceat(states.to_numpy(), starts)
        if is_float and (np.isnan(found) | (found == 0)).any():
            return None
        return pa.array(found, states.type)


class Min(_Extreme):
    """The least value that is not null; NaN is the greatest, as in Spark.

    lift(x) = x
    combine(a, b) = b if b < a else a; a null is the identity
    """

    name = "min"
    preference = Preference(largest=False, newest=False)


class Max(_Extreme):
    """The greatest value that is not null; NaN is the greatest, as in Spark.

    lift(x) = x
    combine(a, b) = b if b > a else a; a null is the identity
    """

    name = "max"
    preference = Preference(largest=True, newest=False)


class _Boolean(_Extreme):
    """An extreme of booleans, false being less than true."""

    supported_types: ClassVar[str] = "BOOLEAN"

    @classmethod
    def supports(cls, result_type: pa.DataType) -> bool:
        return bool(pa.types.is_boolean(result_type))


class BoolAnd(_Boolean):
    """Whether all values that are not null are true.

    lift(x) = x
    combine(a, b) = a and b; a null is the identity
    """

    name = "bool_and"
    preference = Min.preference


class BoolOr(_Boolean):
    """Whether any value that is not null is true.

    lift(x) = x
    combine(a, b) = a or b; a null is the identity
    """

    name = "bool_or"
    preference = Max.preference
