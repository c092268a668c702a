"""Approximate distinct counts of any values, as Apache DataSketches in their compact formats.

Whole numbers, floats and strings are hashed as every DataSketches library hashes them, so the
bytes can be merged elsewhere. The libraries skip the empty string; it counts here, like any value.

The type of the input may differ from batch to batch. Two values are the same one if they are of
the same kind and equal, however they are spelled:

    whole numbers   of any width; also booleans, the days of a date, and a timestamp's microseconds
    floats          of any width; -0.0 equals 0.0, and all NaNs are one value
    decimals        of any precision and scale: 1.5 is 1.50
    timestamps      in any unit and time zone: an instant is the same in seconds and in nanoseconds
    strings         also large ones, views and dictionaries
    binary          also large, views and of fixed size

The whole number 1, the float 1.0, the decimal 1 and the string "1" are four values, though.
Decimals, binary values, and instants that are no BIGINT of microseconds count by a 64-bit hash.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from datasketches import (
    compact_theta_sketch,
    hll_sketch,
    hll_union,
    tgt_hll_type,
    theta_union,
)

from merge_engine.aggregates.arrays import Indices, rows_of_runs, valid_mask
from merge_engine.aggregates.base import Fault, Starts
from merge_engine.aggregates.hash_sets import HashSets, SmallForm, Words
from merge_engine.aggregates.ordering import ORDERED_TYPES, is_ordered
from merge_engine.aggregates.parameters import read_whole_number
from merge_engine.aggregates.serialized import SerializedSet
from merge_engine.aggregates.sketch_hashes import Hashes, hash_values, is_bytes, is_text
from merge_engine.aggregates.sketch_inputs import NO_THETA, read_hll, read_theta
from merge_engine.aggregates.sketch_layout import (
    SmallHll,
    SmallTheta,
    check_hll,
    check_theta,
    hll_in_one_form,
    hll_of_registers,
    theta_of_hashes,
)
from merge_engine.schema.types import type_name

DEFAULT_LG_K = 12
# What registers from elsewhere come to may be beyond BIGINT: the largest double below 2^63.
_LARGEST_ESTIMATE = float(2**63 - 2**10)


class _Sketch(SerializedSet):
    """A sketch of 2^lg_k entries. What counts as one value is written above."""

    def __init__(self, result_type: pa.DataType, lg_k: int = DEFAULT_LG_K) -> None:
        super().__init__(result_type)
        self.lg_k = lg_k

    @property
    def parameters(self) -> dict[str, Any]:
        return {} if self.lg_k == DEFAULT_LG_K else {"lg_k": self.lg_k}

    def check_input(self, input_type: pa.DataType) -> str | None:
        kinds = (is_ordered, is_text, is_bytes, pa.types.is_null)
        if any(matches(input_type) for matches in kinds):
            return None
        return f"{self.name} takes {ORDERED_TYPES}, not {type_name(input_type)}"

    @cached_property
    @abstractmethod
    def _small(self) -> SmallForm:
        """The form of a sketch that still holds all of its hashes."""

    @staticmethod
    @abstractmethod
    def _hashes(first: Hashes, second: Hashes) -> Words:
        """Return what a sketch keeps of hashes, given their halves; it skips a zero."""

    def accumulate(self, values: pa.Array, order: pa.Array | None, starts: Starts) -> pa.Array:  # noqa: ARG002
        if pa.types.is_null(values.type):
            return pa.nulls(len(starts), self.state_type)
        rows = rows_of_runs(starts, len(values))[valid_mask(values)]
        hashes = self._hashes(*hash_values(values.drop_null()))
        kept = hashes > 0
        return self._write(HashSets.of(rows[kept], hashes[kept], len(starts)))

    def _unite(self, states: pa.Array, rows: Indices, count: int) -> pa.Array:
        sets, small = self._small.read(states.fill_null(b""))
        if states.null_count:
            small |= ~valid_mask(states)
        hashes, of_hashes = sets.hashes, rows[sets.rows_of_hashes()]
        if small.all():
            return self._write(HashSets.of(of_hashes, hashes, count))
        # A row that has another one among its states is for the library, as a whole.
        large = np.zeros(count, bool)
        large[rows[~small]] = True
        mine, others = ~large[of_hashes], large[rows]
        united = self._write(HashSets.of(of_hashes[mine], hashes[mine], count))
        numbers = np.cumsum(large) - 1
        chosen = pa.array(np.flatnonzero(others))
        try:
            merged = super()._unite(states.take(chosen), numbers[rows[others]], int(large.sum()))
        except Fault as fault:
            fault.index = int(np.flatnonzero(large)[fault.index])
            raise
        source = np.where(large, count + numbers, np.arange(count))
        return pa.concat_arrays([united, merged]).take(pa.array(source))

    def accept(self, states: pa.Array) -> pa.Array:
        _, ours = self._small.read(states.fill_null(b""))
        others = ~ours & valid_mask(states)
        if not others.any():
            return states
        chosen = np.flatnonzero(others)
        try:
            accepted = super().accept(states.take(pa.array(chosen)))
        except Fault as fault:
            fault.index = int(chosen[fault.index])
            raise
        source = np.arange(len(states))
        source[chosen] = len(states) + np.arange(len(chosen))
        return pa.concat_arrays([states, accepted]).take(pa.array(source))

    def _in_our_form_of(self, hashes: Words) -> bytes | None:
        """Return the bytes of a sketch that holds each of these hashes."""
        state: bytes | None = self._write(
            HashSets.of(np.zeros(len(hashes), np.int64), hashes, 1)
        ).to_pylist()[0]
        return state

    def _write(self, sets: HashSets) -> pa.Array:
        """Return the sketches of these sets, null for an empty one.

        One of too many hashes is the union of several that hold some of them each.
        """
        form = self._small
        small = (sets.lengths > 0) & (sets.lengths <= form.most)
        if small.all():
            return form.write(sets)
        written = form.write(sets.take(np.flatnonzero(small)))
        large = np.flatnonzero(sets.lengths > form.most)
        parts = [form.write(sets.parts(row, form.most)).to_pylist() for row in large.tolist()]
        source = np.full(len(small), -1)
        source[small] = np.arange(len(written))
        source[large] = len(written) + np.arange(len(large))
        both = pa.concat_arrays([written, pa.array(map(self._merge, parts), self.state_type)])
        return both.take(pa.array(source, mask=source < 0))

    def _size(self, state: bytes) -> int:
        return round(min(float(self._from_bytes(state).get_estimate()), _LARGEST_ESTIMATE))

    @abstractmethod
    def _from_bytes(self, state: bytes) -> Any:
        """Return the sketch; raise Damaged if the bytes are none."""


class HllSketch(_Sketch):
    """An HLL sketch of the values that were seen: small, and only good for counting.

        lift(x) = {x}; lift(null) = null
        combine(a, b) = union of a and b; a null is the identity
        finish(a) = the estimated size of a as BIGINT, or the sketch's bytes as BINARY

    The standard error is 1.04 / sqrt(2^lg_k): 1.6 % for lg_k = 12, in at most 4 KB. Small sets are
    counted almost exactly.
    """

    name = "hll_sketch"
    parameter_readers = {"lg_k": read_whole_number(4, 21)}  # noqa: RUF012

    _registers: ClassVar[Any] = tgt_hll_type.HLL_8

    @cached_property
    def _small(self) -> SmallForm:
        return SmallHll(self.lg_k)

    @staticmethod
    def _hashes(first: Hashes, second: Hashes) -> Words:
        # The address is of 26 bits; the six above it count leading zeros, up to 62, and one more.
        high = np.frexp((second >> np.uint64(32)).astype(np.float64))[1]
        low = np.frexp((second & np.uint64(2**32 - 1)).astype(np.float64))[1]
        zeros = np.where(high > 0, 32 - high, 64 - low)
        values = (np.minimum(zeros, 62) + 1).astype(np.uint32)
        return values << np.uint32(26) | (first & np.uint64(2**26 - 1)).astype(np.uint32)

    def _merge(self, states: Sequence[bytes]) -> bytes:
        union = hll_union(self.lg_k)
        for state in states:
            union.update(self._from_bytes(state))
        return hll_in_one_form(union.get_result(self._registers).serialize_compact())

    def _in_our_form(self, state: bytes) -> bytes | None:
        found = read_hll(state, self.lg_k)
        if found.dtype == np.uint32:
            return self._in_our_form_of(found)
        return hll_of_registers(found, self.lg_k) if found.any() else None

    def _from_bytes(self, state: bytes) -> Any:
        check_hll(state, self.lg_k)
        return hll_sketch.deserialize(state)


class ThetaSketch(_Sketch):
    """A theta sketch of the values that were seen: larger, and good for set operations elsewhere.

        lift(x) = {x}; lift(null) = null
        combine(a, b) = union of a and b; a null is the identity
        finish(a) = the estimated size of a as BIGINT, or the sketch's bytes as BINARY

    The standard error is 1 / sqrt(2^lg_k): 1.6 % for lg_k = 12, in at most 32 KB. Sets of up to
    2^lg_k values are counted exactly.
    """

    name = "theta_sketch"
    parameter_readers = {"lg_k": read_whole_number(5, 26)}  # noqa: RUF012

    @cached_property
    def _small(self) -> SmallForm:
        return SmallTheta(self.lg_k)

    @staticmethod
    def _hashes(first: Hashes, second: Hashes) -> Words:  # noqa: ARG004
        return first >> np.uint64(1)

    def _merge(self, states: Sequence[bytes]) -> bytes:
        union = theta_union(self.lg_k)
        for state in states:
            union.update(self._from_bytes(state))
        return bytes(union.get_result().serialize())

    def _in_our_form(self, state: bytes) -> bytes | None:
        found = read_theta(state, self.lg_k)
        if found.theta == NO_THETA:
            return self._in_our_form_of(found.hashes)
        return theta_of_hashes(found.hashes, found.theta)

    def _from_bytes(self, state: bytes) -> Any:
        check_theta(state, self.lg_k)
        return compact_theta_sketch.deserialize(state)
