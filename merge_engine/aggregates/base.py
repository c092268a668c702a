"""The contract of an aggregate function: a monoid over columns, on whole Arrow arrays.

    lift(raw)              one input value as a state
    combine(older, newer)  associative; works element by element on two arrays of states
    finish(state)          what a reader sees
    accept(states)         states from outside, in the form that the function gives its own

The identity is "never written" (the touched bit of a row is clear), so `combine` only ever meets
states that exist. A *null* state is a state like any other; what it means is the function's to say
(for functions that skip nulls: nothing but nulls have been seen so far, and combining it with x
gives x).

`finish` never fails: a state of which nothing can be read is refused where it comes in, by
`accept`, and `combine` refuses to make one, as it refuses to overflow. What `combine` makes of
accepted states is as `accept` would return it, so what is stored does not depend on the order of
rows in a batch. Only several rows together may read as more than one array holds: `BatchTooLarge`.

`fold` and `accumulate` reduce the consecutive runs of an array, one run per key, to one state each.
No run is empty, and together they cover the array. Both follow from `combine` and `lift`; a
function overrides them only to be faster, never to mean something else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Rows = npt.NDArray[np.int64]
Starts = npt.NDArray[np.int64]


class Fault(Exception):
    """A value that the function cannot take, or a result that does not fit.

    `index` is a position in the arrays given to `combine`, or the number of the run in `fold` and
    `accumulate`; `reason` completes the sentence "column 'x', key 7: ...". The merge turns it into
    an error that names both.
    """

    def __init__(self, index: int, reason: str, *, overflow: bool = False) -> None:
        super().__init__(index, reason)
        self.index = index
        self.reason = reason
        self.overflow = overflow

    def __str__(self) -> str:
        # Not fixed when it is raised: on its way up the index changes from a row to a run.
        return f"at {self.index}: {self.reason}"


class AggregateFunction(ABC):
    """One column's way to merge: its types and its parameters are fixed when the schema is built.

    A subclass names its parameters as keyword arguments of `__init__`; `parameters` gives back
    those that differ from their defaults, so that a schema can be stored and read again. Two
    functions are equal iff name, result type and parameters are.

    What the registry needs to know before it builds one:

        name               how schemas spell the function
        supported_types    the result types, in words, for the error message
        supports(type)     whether a column of this type can have the function
        parameter_readers  parameter name -> reader of its value; a reader raises ValueError
    """

    name: ClassVar[str]
    # Whether numbers may be rounded on their way to `input_type`, as an average rounds anyway.
    rounds_input: ClassVar[bool] = False
    supported_types: ClassVar[str] = "any type"
    parameter_readers: ClassVar[Mapping[str, Callable[[Any], Any]]] = {}

    def __init__(self, result_type: pa.DataType) -> None:
        self.result_type = result_type

    @classmethod
    def supports(cls, result_type: pa.DataType) -> bool:  # noqa: ARG003
        """Whether a column of this type can have the function."""
        return True

    @property
    @abstractmethod
    def state_type(self) -> pa.DataType:
        """The Arrow type of a state: what the row stores and the log carries."""

    @property
    def input_type(self) -> pa.DataType | None:
        """The type that raw values are cast to before `lift`; None: any type is taken as it is."""
        return self.result_type

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that differ from their defaults, as JSON values."""
        return {}

    @property
    def order_by(self) -> str | None:
        """The input column that decides what is first or last, if any."""
        return None

    @property
    def order_type(self) -> pa.DataType | None:
        """The type of the `order_by` column."""
        return None

    def check_input(self, input_type: pa.DataType) -> str | None:  # noqa: ARG002
        """Return what is wrong with raw values of this type, or None if they can be taken.

        To be asked where `input_type` is None. The answer completes "column 'x': ...".
        """
        return None

    @abstractmethod
    def lift(self, values: pa.Array, order: pa.Array | None = None) -> pa.Array:
        """Return one state per raw value."""

    @abstractmethod
    def combine(self, older: pa.Array, newer: pa.Array) -> pa.Array:
        """Merge two equally long arrays of states, element by element."""

    def finish(self, states: pa.Array) -> pa.Array:
        """Return what a reader sees, in the column's declared type."""
        return states

    def accept(self, states: pa.Array) -> pa.Array:
        """Return states from outside as `combine` would have made them.

        Fault at the first one that is not well-formed, or that a reader could not read.
        """
        return states

    def fold(self, states: pa.Array, starts: Starts) -> pa.Array:
        """Reduce each run of states (run i begins at starts[i]) to one, oldest first.

        Neighbours are combined in rounds: as many calls as the logarithm of the longest run.
        """
        lengths = np.diff(starts, append=len(states))
        run = np.repeat(np.arange(len(starts)), lengths)
        while len(states) > len(starts):
            position = np.arange(len(run)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            has_partner = np.zeros(len(run), dtype=bool)
            has_partner[:-1] = (position[:-1] % 2 == 0) & (run[:-1] == run[1:])
            older = np.flatnonzero(has_partner)
            try:
                merged = self.combine(
                    states.take(pa.array(older)), states.take(pa.array(older + 1))
                )
            except Fault as fault:
                fault.index = int(run[older[fault.index]])
                raise
            kept = np.flatnonzero(position % 2 == 0)
            source = kept.copy()
            source[has_partner[kept]] = len(states) + np.arange(len(older))
            states = pa.concat_arrays([states, merged]).take(pa.array(source))
            run, lengths = run[kept], (lengths + 1) // 2
        return states

    def accumulate(self, values: pa.Array, order: pa.Array | None, starts: Starts) -> pa.Array:
        """Reduce each run of raw values to one state, oldest first."""
        try:
            states = self.lift(values, order)
        except Fault as fault:
            fault.index = int(np.searchsorted(starts, fault.index, side="right")) - 1
            raise
        return self.fold(states, starts)

    def accumulate_rows(
        self, values: pa.Array, order: pa.Array | None, rows: Rows, starts: Starts
    ) -> pa.Array:
        """Accumulate `values[rows]`; for functions that need not look at every row of a run."""
        index = pa.array(rows)
        ordered = None if order is None else order.take(index)
        return self.accumulate(values.take(index), ordered, starts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AggregateFunction):
            return NotImplemented
        mine = (self.name, self.result_type, self.parameters)
        return mine == (other.name, other.result_type, other.parameters)

    def __hash__(self) -> int:
        return hash((self.name, str(self.result_type)))

    def __repr__(self) -> str:
        inside = "".join(f", {name}={value!r}" for name, value in self.parameters.items())
        return f"{self.name}({self.result_type}{inside})"


class ValueIsState(AggregateFunction):
    """A function whose state is a value of the column: lift(x) = x."""

    @property
    def state_type(self) -> pa.DataType:
        return self.result_type

    def lift(self, values: pa.Array, order: pa.Array | None = None) -> pa.Array:  # noqa: ARG002
        return values
