"""The states of a function, for those who read them as they are."""

from typing import Any

import pyarrow as pa

from merge_engine.aggregates.base import AggregateFunction, ValueIsState


class StateOf(ValueIsState):
    """Another function's monoid, whose values are that function's states.

        lift(s) = s
        combine(a, b) = that of the function

    It is for readers, so the registry does not have it: no schema names it.
    """

    name = "state_of"

    def __init__(self, function: AggregateFunction) -> None:
        super().__init__(function.state_type)
        self._function = function

    @property
    def parameters(self) -> dict[str, Any]:
        return {"function": repr(self._function)}

    def combine(self, older: pa.Array, newer: pa.Array) -> pa.Array:
        return self._function.combine(older, newer)

    def accept(self, states: pa.Array) -> pa.Array:
        return self._function.accept(states)
