"""Functions whose states are the bytes of a set-like object: bitmaps and sketches.

These are the only functions that loop in Python, once per group. A subclass says how to build,
merge and read one object. Its bytes must be a function of the set of values alone, so that merging
what is already there leaves the row as it was.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merge_engine.aggregates.arrays import count_in_runs, valid_mask
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
    def _prepare(self, values: pa.Array) -> Sequence[Any]:
        """Return values that are not null in the form that `_build` takes slices of.

        Raise Fault with the position of a value that the set cannot hold.
        """

    @abstractmethod
    def _build(self, values: Sequence[Any]) -> bytes:
        """Return the set of these values."""

    @abstractmethod
    def _merge(self, states: Sequence[bytes]) -> bytes:
        """Return the union of at least two sets; raise Damaged if one of them is."""

    @abstractmethod
    def _size(self, state: bytes) -> int:
        """Return how many values the set has; raise Damaged if the bytes are no set."""

    def lift(self, values: pa.Array, order: pa.Array | None = None) -> pa.Array:
        return self.accumulate(values, order, np.arange(len(values)))

    def accumulate(self, values: pa.Array, order: pa.Array | None, starts: Starts) -> pa.Array:  # noqa: ARG002
        if pa.types.is_null(values.type):
            return pa.nulls(len(starts), self.state_type)
        lengths = count_in_runs(valid_mask(values), starts)
        ends = np.cumsum(lengths)
        try:
            prepared = self._prepare(values.drop_null())
        except Fault as fault:
            fault.index = int(np.searchsorted(ends, fault.index, side="right"))
            raise
        return pa.array(
            [
                self._build(prepared[end - length : end]) if length else None
                for length, end in zip(lengths.tolist(), ends.tolist(), strict=True)
            ],
            self.state_type,
        )

    def combine(self, older: pa.Array, newer: pa.Array) -> pa.Array:
        pairs = zip(older.to_pylist(), newer.to_pylist(), strict=True)
        return self._merge_groups(iter(pairs))

    def fold(self, states: pa.Array, starts: Starts) -> pa.Array:
        listed = states.to_pylist()
        ends = [*starts.tolist()[1:], len(listed)]
        runs = zip(starts.tolist(), ends, strict=False)
        return self._merge_groups(tuple(listed[start:end]) for start, end in runs)

    def finish(self, states: pa.Array) -> pa.Array:
        if pa.types.is_binary(self.result_type):
            return states
        return pc.fill_null(self._sizes(states), 0)

    def validate_states(self, states: pa.Array) -> None:
        self._sizes(states)

    def _merge_groups(self, groups: Iterator[tuple[bytes | None, ...]]) -> pa.Array:
        merged: list[bytes | None] = []
        for index, group in enumerate(groups):
            # A set that is merged with itself stays as it is, which a replayed state often is.
            present = list(dict.fromkeys(state for state in group if state is not None))
            try:
                merged.append(
                    self._merge(present) if len(present) > 1 else next(iter(present), None)
                )
            except Damaged as error:
                raise Fault(index, f"a state of {self.name} is damaged: {error}") from error
        return pa.array(merged, self.state_type)

    def _sizes(self, states: pa.Array) -> pa.Array:
        sizes: list[int | None] = []
        for index, state in enumerate(states.to_pylist()):
            try:
                sizes.append(None if state is None else self._size(state))
            except Damaged as error:
                raise Fault(index, f"a state of {self.name} is damaged: {error}") from error
        return pa.array(sizes, pa.int64())
