"""Functions whose states are the bytes of a set-like object: bitmaps and sketches.

Where the library has to be asked, these loop in Python, once per group, as no other function does.
A subclass says how to build objects, and to merge and read one. Its bytes must be a function of the
set of values alone, so that merging what is already there leaves the row as it was.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merge_engine.aggregates.arrays import Indices, rows_of_runs
from merge_engine.aggregates.base import AggregateFunction, Fault, Starts


class Damaged(Exception):
    """Bytes that are no object of this kind."""


class SerializedSet(AggregateFunction):
    """A set of values as bytes; a BIGINT column reads as its size, a BINARY one as its bytes.

    A null state is the set of a column that has only seen nulls: its size is 0, as a count's.
    """

    supported_types: ClassVar[str] = "BIGINT (reads as a count) and BINARY (reads as bytes)"

    @classmethod
    def supports(cls, result_type: pa.DataType) -> bool:
        return bool(pa.types.is_int64(result_type) or pa.types.is_binary(result_type))

    @property
    def state_type(self) -> pa.DataType:
        return pa.binary()

    @property
    def input_type(self) -> pa.DataType | None:
        return None

    @abstractmethod
    def _merge(self, states: Sequence[bytes]) -> bytes:
        """Return the union of at least two sets; raise Damaged if one of them is."""

    @abstractmethod
    def _in_our_form(self, state: bytes) -> bytes | None:
        """Return the bytes that we write for a set, None if it is empty; Damaged if it is none."""

    @abstractmethod
    def _size(self, state: bytes) -> int:
        """Return how many values the set has; raise Damaged if the bytes are no set."""

    @abstractmethod
    def accumulate(self, values: pa.Array, order: pa.Array | None, starts: Starts) -> pa.Array:
        """Build the set of each run of raw values."""

    def lift(self, values: pa.Array, order: pa.Array | None = None) -> pa.Array:
        return self.accumulate(values, order, np.arange(len(values)))

    def combine(self, older: pa.Array, newer: pa.Array) -> pa.Array:
        rows = np.tile(np.arange(len(older)), 2)
        return self._unite(pa.concat_arrays([older, newer]), rows, len(older))

    def fold(self, states: pa.Array, starts: Starts) -> pa.Array:
        return self._unite(states, rows_of_runs(starts, len(states)), len(starts))

    def finish(self, states: pa.Array) -> pa.Array:
        if pa.types.is_binary(self.result_type):
            return states
        return pc.fill_null(self._sizes(states), 0)

    def accept(self, states: pa.Array) -> pa.Array:
        accepted: list[bytes | None] = []
        for index, state in enumerate(states.to_pylist()):
            try:
                accepted.append(None if state is None else self._in_our_form(state))
            except Damaged as error:
                raise Fault(index, f"a state of {self.name} cannot be taken: {error}") from error
        return pa.array(accepted, self.state_type)

    def _unite(self, states: pa.Array, rows: Indices, count: int) -> pa.Array:
        """Return the unions of `count` rows, given the row of each state; null if it has none."""
        groups: list[dict[bytes, None]] = [{} for _ in range(count)]
        for row, state in zip(rows.tolist(), states.to_pylist(), strict=True):
            if state is not None:
                # Once: a set that is merged with itself, as a replayed state often is, stays so.
                groups[row][state] = None
        merged: list[bytes | None] = []
        for row, group in enumerate(groups):
            try:
                merged.append(
                    self._merge(list(group)) if len(group) > 1 else next(iter(group), None)
                )
            except Damaged as error:
                raise Fault(row, f"a state of {self.name} is damaged: {error}") from error
        return pa.array(merged, self.state_type)

    def _sizes(self, states: pa.Array) -> pa.Array:
        sizes: list[int | None] = []
        for index, state in enumerate(states.to_pylist()):
            try:
                sizes.append(None if state is None else self._size(state))
            except Damaged as error:
                raise Fault(index, f"a state of {self.name} is damaged: {error}") from error
        return pa.array(sizes, pa.int64())
