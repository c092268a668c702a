"""Functions that keep what they saw: arrays, joined strings, sets and maps."""

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import BatchTooLarge
from merge_engine.aggregates.arrays import (
    Indices,
    any_in_runs,
    count_in_runs,
    first_true,
    valid_mask,
)
from merge_engine.aggregates.base import AggregateFunction, Fault, Starts
from merge_engine.aggregates.identity import identity_codes
from merge_engine.aggregates.lists import Lists
from merge_engine.aggregates.parameters import read_text, read_whole_number
from merge_engine.encoding import ragged

DEFAULT_DELIMITER = ","

# How many items a list of Arrow's can have, and how many bytes a text.
_LONGEST = 2**31 - 1
_LONGEST_TEXT = 2**31 - 2

_read_limit = read_whole_number(1)


class _Gathered(AggregateFunction):
    """States are lists (or maps); merging is concatenation, then whatever `_settle` makes of it."""

    parameter_readers = {"limit": _read_limit}  # noqa: RUF012

    def __init__(self, result_type: pa.DataType, limit: int | None = None) -> None:
        super().__init__(result_type)
        self.limit = limit
        # What counts: no list of Arrow's has more items, and NumPy no larger numbers than 64 bits.
        self._most = None if limit is None else min(limit, _LONGEST)

    @property
    def state_type(self) -> pa.DataType:
        return self.result_type

    @property
    def input_type(self) -> pa.DataType | None:
        return self.state_type.value_type

    @property
    def parameters(self) -> dict[str, Any]:
        return {} if self.limit is None else {"limit": self.limit}

    def lift(self, values: pa.Array, order: pa.Array | None = None) -> pa.Array:  # noqa: ARG002
        valid = valid_mask(values)
        return self._to_states(Lists(values.drop_null(), valid.astype(np.int64), valid))

    def combine(self, older: pa.Array, newer: pa.Array) -> pa.Array:
        return self._to_states(Lists.of(older).concatenate(Lists.of(newer)))

    def fold(self, states: pa.Array, starts: Starts) -> pa.Array:
        return self._to_states(Lists.of(states).fold(starts))

    def accumulate(self, values: pa.Array, order: pa.Array | None, starts: Starts) -> pa.Array:  # noqa: ARG002
        valid = valid_mask(values)
        rows = Lists(values.drop_null(), count_in_runs(valid, starts), any_in_runs(valid, starts))
        return self._to_states(rows)

    def accept(self, states: pa.Array) -> pa.Array:
        rows = Lists.of(states)
        self._refuse_nulls(rows)
        return self._to_states(rows)

    def _refuse_nulls(self, rows: Lists) -> None:
        culprit = first_true(~valid_mask(rows.items))
        if culprit is not None:
            row = int(rows.rows_of_items()[culprit])
            raise Fault(row, f"a state of {self.name} has a null in it")

    @abstractmethod
    def _settle(self, rows: Lists) -> Lists:
        """Return what becomes of rows that were concatenated."""

    def _to_states(self, rows: Lists) -> pa.Array:
        return self._settle(rows).to_array(self.state_type)


class _Newest(_Gathered):
    """States are what came last, up to the limit."""

    def combine(self, older: pa.Array, newer: pa.Array) -> pa.Array:
        return self._to_states(Lists.of(older).concatenate(Lists.of(newer), newest=self._most))

    def _settle(self, rows: Lists) -> Lists:
        return rows.newest(self._most)


class ArrayAgg(_Newest):
    """All values that are not null, oldest first; with `limit`, the newest so many.

    lift(x) = [x]; lift(null) = null
    combine(a, b) = the last `limit` of a ++ b; a null is the identity
    """

    name = "array_agg"
    supported_types: ClassVar[str] = "ARRAY<T>"

    @classmethod
    def supports(cls, result_type: pa.DataType) -> bool:
        return bool(pa.types.is_list(result_type))


class StringAgg(_Newest):
    """All strings that are not null, oldest first, joined by `delimiter`; `limit` as for array_agg.

    lift(x) = [x]; lift(null) = null
    combine(a, b) = the last `limit` of a ++ b; a null is the identity
    finish([x, y, ...]) = x + delimiter + y + ...
    """

    name = "string_agg"
    supported_types: ClassVar[str] = "STRING"
    parameter_readers = {"delimiter": read_text, "limit": _read_limit}  # noqa: RUF012

    def __init__(
        self,
        result_type: pa.DataType,
        delimiter: str = DEFAULT_DELIMITER,
        limit: int | None = None,
    ) -> None:
        super().__init__(result_type, limit)
        self.delimiter = delimiter

    @classmethod
    def supports(cls, result_type: pa.DataType) -> bool:
        return bool(pa.types.is_string(result_type))

    @property
    def state_type(self) -> pa.DataType:
        return pa.list_(self.result_type)

    @property
    def parameters(self) -> dict[str, Any]:
        changed = {} if self.delimiter == DEFAULT_DELIMITER else {"delimiter": self.delimiter}
        return changed | super().parameters

    def finish(self, states: pa.Array) -> pa.Array:
        # What combines into a text that is too long is refused; several rows may still be.
        sizes = self._sizes(Lists.of(states))
        if sizes is not None and sizes.sum() > _LONGEST_TEXT:
            raise BatchTooLarge(f"{sizes.sum():,} bytes in one column; read fewer rows at a time")
        return pc.binary_join(states, self.delimiter)

    def _settle(self, rows: Lists) -> Lists:
        rows = super()._settle(rows)
        sizes = self._sizes(rows)
        if sizes is not None:
            culprit = first_true(sizes > _LONGEST_TEXT)
            if culprit is not None:
                reason = f"the text grows to {sizes[culprit]:,} bytes, beyond the 2 GiB of a STRING"
                raise Fault(culprit, f"{reason}; give the column a limit", overflow=True)
        return rows

    def _sizes(self, rows: Lists) -> Indices | None:
        """Return how long the texts are; None if all together are no longer than one may be."""
        items = rows.items.view(pa.binary())
        delimiter = len(self.delimiter.encode())
        bounds = ragged.offsets(items).astype(np.int64)
        if int(bounds[-1] - bounds[0]) + len(items) * delimiter <= _LONGEST_TEXT:
            return None
        sizes: Indices = np.diff(bounds[rows.offsets()])
        sizes += np.maximum(rows.lengths - 1, 0) * delimiter
        return sizes


class CollectSet(_Gathered):
    """The distinct values that are not null, in the order they were first seen.

        lift(x) = [x]; lift(null) = null
        combine(a, b) = a ++ (b without what a has); a null is the identity

    Values are equal if their bits are, and NaN equals NaN. A set that would grow past `limit` is an
    error: nothing is lost silently.
    """

    name = "collect_set"
    supported_types: ClassVar[str] = "ARRAY<T>"

    @classmethod
    def supports(cls, result_type: pa.DataType) -> bool:
        return bool(pa.types.is_list(result_type))

    def accept(self, states: pa.Array) -> pa.Array:
        rows = Lists.of(states)
        self._refuse_nulls(rows)
        _refuse_duplicates(rows, "a state of collect_set has a value twice")
        self._check_limit(rows.lengths)
        return states

    def _settle(self, rows: Lists) -> Lists:
        first, _, lengths = _distinct(rows)
        self._check_limit(lengths)
        return rows if len(first) == len(rows.items) else rows.take_items(first, lengths)

    def _check_limit(self, lengths: Indices) -> None:
        culprit = None if self.limit is None else first_true(lengths > self.limit)
        if culprit is not None:
            reason = f"the set grows past its limit of {self.limit} values"
            raise Fault(culprit, reason, overflow=True)


class MergeMap(_Gathered):
    """One map out of all, the later value winning for each key; keys stay where first seen.

        lift(x) = x, of equal keys in one map the last
        combine(a, b) = a updated with b; a null map is the identity

    A null that a key is mapped to is a value like any other.
    """

    name = "merge_map"
    supported_types: ClassVar[str] = "MAP<K,V>"
    parameter_readers = {}  # noqa: RUF012

    @classmethod
    def supports(cls, result_type: pa.DataType) -> bool:
        return bool(pa.types.is_map(result_type))

    @property
    def input_type(self) -> pa.DataType | None:
        return self.result_type

    def lift(self, values: pa.Array, order: pa.Array | None = None) -> pa.Array:  # noqa: ARG002
        return self._to_states(Lists.of(values))

    def accumulate(self, values: pa.Array, order: pa.Array | None, starts: Starts) -> pa.Array:  # noqa: ARG002
        # Raw maps fold like states: the last of equal keys wins within a map as between two.
        return self.fold(values, starts)

    def accept(self, states: pa.Array) -> pa.Array:
        _refuse_duplicates(Lists.of(states), "a state of merge_map has a key twice")
        return states

    def _settle(self, rows: Lists) -> Lists:
        first, last, lengths = _distinct(rows)
        if len(first) == len(rows.items):
            return rows
        values: pa.Array = rows.mapped
        keys, mapped = rows.items.take(pa.array(first)), values.take(pa.array(last))
        return Lists(keys, lengths, rows.valid, mapped)


def _distinct(rows: Lists) -> tuple[Indices, Indices, Indices]:
    """Return, for the distinct items of each row: first positions, last positions, and how many.

    The items of a row come in the order of their first positions.
    """
    codes = identity_codes(rows.items).astype(np.int64)
    row = rows.rows_of_items()
    _, first, number = np.unique(
        row * (len(codes) + 1) + codes, return_index=True, return_inverse=True
    )
    last = np.empty(len(first), dtype=np.int64)
    last[number] = np.arange(len(codes))
    in_order = np.argsort(first)
    lengths = np.bincount(row[first], minlength=len(rows.lengths))
    return first[in_order], last[in_order], lengths


def _refuse_duplicates(rows: Lists, reason: str) -> None:
    _, _, lengths = _distinct(rows)
    culprit = first_true(lengths != rows.lengths)
    if culprit is not None:
        raise Fault(culprit, reason)
