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
from decimal import Context, Decimal
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from datasketches import (
    compact_theta_sketch,
    hll_sketch,
    hll_union,
    tgt_hll_type,
    theta_union,
    update_theta_sketch,
)
from xxhash import xxh64_intdigest

from merge_engine.aggregates.ordering import ORDERED_TYPES, is_ordered
from merge_engine.aggregates.parameters import read_whole_number
from merge_engine.aggregates.serialized import SerializedSet
from merge_engine.aggregates.sketch_layout import check_hll, check_theta, hll_in_one_form
from merge_engine.schema.types import type_name

DEFAULT_LG_K = 12

_EXACT = Context(prec=76)
_TEXTS = (pa.string(), pa.large_string(), pa.string_view())
_BYTES = (pa.binary(), pa.large_binary(), pa.binary_view())
_LEAST, _MOST = -(2**63), 2**63 - 1
_MICROSECONDS = {"s": 1_000_000, "ms": 1_000}


class _Sketch(SerializedSet):
    """A sketch of 2^lg_k entries. What counts as one value is written above."""

    def __init__(self, result_type: pa.DataType, lg_k: int = DEFAULT_LG_K) -> None:
        super().__init__(result_type)
        self.lg_k = lg_k

    @property
    def parameters(self) -> dict[str, Any]:
        return {} if self.lg_k == DEFAULT_LG_K else {"lg_k": self.lg_k}

    def check_input(self, input_type: pa.DataType) -> str | None:
        kinds = (is_ordered, _is_text, _is_bytes, pa.types.is_null)
        if any(matches(input_type) for matches in kinds):
            return None
        return f"{self.name} takes {ORDERED_TYPES}, not {type_name(input_type)}"

    def _prepare(self, values: pa.Array) -> list[Any]:
        return _hashable(values)

    def _size(self, state: bytes) -> int:
        return round(float(self._from_bytes(state).get_estimate()))

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

    def _build(self, values: Sequence[Any]) -> bytes:
        sketch = hll_sketch(self.lg_k, self._registers)
        for value in values:
            sketch.update(value)
        return hll_in_one_form(sketch.serialize_compact())

    def _merge(self, states: Sequence[bytes]) -> bytes:
        union = hll_union(self.lg_k)
        for state in states:
            union.update(self._from_bytes(state))
        return hll_in_one_form(union.get_result(self._registers).serialize_compact())

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

    def _build(self, values: Sequence[Any]) -> bytes:
        sketch = update_theta_sketch(self.lg_k)
        for value in values:
            sketch.update(value)
        # Cut to 2^lg_k entries: how many more a sketch has depends on the order of its values.
        sketch.trim()
        return bytes(sketch.compact().serialize())

    def _merge(self, states: Sequence[bytes]) -> bytes:
        union = theta_union(self.lg_k)
        for state in states:
            union.update(self._from_bytes(state))
        return bytes(union.get_result().serialize())

    def _from_bytes(self, state: bytes) -> Any:
        check_theta(state, self.lg_k)
        return compact_theta_sketch.deserialize(state)


def _is_text(kind: pa.DataType) -> bool:
    return kind in _TEXTS


def _is_bytes(kind: pa.DataType) -> bool:
    return kind in _BYTES or bool(pa.types.is_fixed_size_binary(kind))


def _hashable(values: pa.Array) -> list[Any]:
    """Return values that are not null as integers, floats or strings that the sketches hash."""
    kind = values.type
    if _is_text(kind):
        empty = _hash(b"")
        return [text or empty for text in values.to_pylist()]
    if pa.types.is_decimal(kind):
        return [_hash(_digits(number)) for number in values.to_pylist()]
    if _is_bytes(kind):
        return [_hash(content) for content in values.to_pylist()]
    if pa.types.is_timestamp(kind):
        return _instants(values.view(pa.int64()).to_numpy().tolist(), kind.unit)
    if pa.types.is_date32(kind):
        values = values.view(pa.int32())
    numbers = values.to_numpy(zero_copy_only=False)
    if numbers.dtype == np.uint64:
        # Beyond 2^63 the library would take them for floats.
        numbers = numbers.view(np.int64)
    return list(numbers.tolist())


def _instants(numbers: list[int], unit: str) -> list[int]:
    """Return instants in microseconds; a hash for those that are not so many, or beyond 64 bits."""
    if unit == "us":
        return numbers
    if unit == "ns":
        parts = [divmod(number, 1_000) for number in numbers]
        return [_hash(b"%d.%03d" % (whole, rest)) if rest else whole for whole, rest in parts]
    microseconds = [number * _MICROSECONDS[unit] for number in numbers]
    return [
        number if _LEAST <= number <= _MOST else _hash(b"%d" % number) for number in microseconds
    ]


def _digits(number: Decimal) -> bytes:
    """Return the same bytes for 1.5 and 1.50, as the scale may differ between batches."""
    return f"{number.normalize(_EXACT):f}".encode()


def _hash(content: bytes) -> int:
    """Return a hash in the range of BIGINT."""
    return xxh64_intdigest(content) - (1 << 63)
