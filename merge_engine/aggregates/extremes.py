"""The least and the greatest value of a column; of booleans, "and" and "or"."""

from typing import ClassVar

import pyarrow as pa

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
        return states.take(pa.array(self.preference.pick(states, starts)))


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
