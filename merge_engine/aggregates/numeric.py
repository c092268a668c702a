"""Sums, products and counts: exact for integers and decimals, IEEE for floats, never wrapping."""

import math
from decimal import Context
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from merge_engine.aggregates import limbs
from merge_engine.aggregates.arrays import (
    Mask,
    any_in_runs,
    count_in_runs,
    first_true,
    from_numbers,
    may_have_nulls,
    run_lengths,
    to_numbers,
    valid_mask,
)
from merge_engine.aggregates.base import Fault, Rows, Starts, ValueIsState
from merge_engine.schema.types import type_name

NUMBER_TYPES = "TINYINT, SMALLINT, INT, BIGINT, FLOAT, DOUBLE and DECIMAL"

# Two factors need twice the digits, and Arrow's widest decimal has 76.
_PRODUCT_DIGITS = 37
_EXACT = Context(prec=76)
# Products of integers that may have wrapped around, and those that have for certain.
_NEAR_64_BITS, _BEYOND_64_BITS = 2.0**62, 2.0**65
# Arrow's division by more than 32 bits gives wrong results for some numbers: see `limbs`.
_DIVISOR_DIGITS = 9


def is_number(data_type: pa.DataType) -> bool:
    """Whether the type is a signed integer, a float or a decimal of a table."""
    return bool(
        pa.types.is_signed_integer(data_type)
        or pa.types.is_float32(data_type)
        or pa.types.is_float64(data_type)
        or pa.types.is_decimal128(data_type)
    )


class Sum(ValueIsState):
    """The sum of the values that are not null.

        lift(x) = x
        combine(a, b) = a + b; combine(null, b) = b; combine(a, null) = a

    A run is added exactly: only its final sum has to fit the column. Float sums are exact as far as
    doubles are, so they may depend on how rows were split in their last digits.
    """

    name = "sum"
    supported_types: ClassVar[str] = NUMBER_TYPES

    @classmethod
    def supports(cls, result_type: pa.DataType) -> bool:
        return is_number(result_type)

    def combine(self, older: pa.Array, newer: pa.Array) -> pa.Array:
        valid = valid_mask(older) | valid_mask(newer)
        if not pa.types.is_floating(self.result_type):
            return self._fit(*limbs.add_pairs(older, newer, valid))
        # Minus zero is the identity of IEEE addition: 0.0 would turn a sum of -0.0 into 0.0.
        with np.errstate(all="ignore"):
            return from_numbers(
                to_numbers(older, -0.0) + to_numbers(newer, -0.0), self.result_type, valid
            )

    def fold(self, states: pa.Array, starts: Starts) -> pa.Array:
        valid = any_in_runs(valid_mask(states), starts)
        if not pa.types.is_floating(self.result_type):
            return self._fit(*limbs.add_runs(states, starts, valid))
        with np.errstate(all="ignore"):
            sums = np.add.reduceat(to_numbers(states, -0.0).astype(np.float64), starts)
            numbers = sums.astype(self.result_type.to_pandas_dtype())
        return from_numbers(numbers, self.result_type, valid)

    def _fit(self, sums: pa.Array, outside: Mask) -> pa.Array:
        culprit = first_true(outside)
        if culprit is not None:
            reason = f"{self.name} exceeds {type_name(self.result_type)}"
            raise Fault(culprit, reason, overflow=True)
        return sums


class Count(Sum):
    """How many values are not null.

    lift(x) = 1; lift(null) = 0
    combine(a, b) = a + b, where a null is 0
    """

    name = "count"
    supported_types: ClassVar[str] = "BIGINT"

    @classmethod
    def supports(cls, result_type: pa.DataType) -> bool:
        return bool(pa.types.is_int64(result_type))

    @property
    def input_type(self) -> pa.DataType | None:
        return None

    def lift(self, values: pa.Array, order: pa.Array | None = None) -> pa.Array:  # noqa: ARG002
        return pa.array(valid_mask(values).astype(np.int64))

    def combine(self, older: pa.Array, newer: pa.Array) -> pa.Array:
        return pc.fill_null(super().combine(older, newer), 0)

    def fold(self, states: pa.Array, starts: Starts) -> pa.Array:
        return pc.fill_null(super().fold(states, starts), 0)

    def accumulate(self, values: pa.Array, order: pa.Array | None, starts: Starts) -> pa.Array:  # noqa: ARG002
        if not may_have_nulls(values):
            return pa.array(run_lengths(starts, len(values)), pa.int64())
        return pa.array(count_in_runs(valid_mask(values), starts))

    def accumulate_rows(
        self,
        values: pa.Array,
        order: pa.Array | None,  # noqa: ARG002
        rows: Rows,
        starts: Starts,
    ) -> pa.Array:
        if not may_have_nulls(values):
            return pa.array(run_lengths(starts, len(rows)), pa.int64())
        return pa.array(count_in_runs(valid_mask(values)[rows], starts))

    def finish(self, states: pa.Array) -> pa.Array:
        return pc.fill_null(states, 0) if states.null_count else states

    def accept(self, states: pa.Array) -> pa.Array:
        culprit = first_true(to_numbers(states, 0) < 0)
        if culprit is not None:
            raise Fault(culprit, f"a count of {states[culprit]} is negative")
        return pc.fill_null(states, 0)


class Product(ValueIsState):
    """The product of the values that are not null.

        lift(x) = x
        combine(a, b) = a * b; combine(null, b) = b; combine(a, null) = a

    Decimal products are exact or an error. Rounding to the column's scale is not an option: the
    result would depend on how the rows were split into batches.
    """

    name = "product"
    supported_types: ClassVar[str] = (
        f"{NUMBER_TYPES.replace('DECIMAL', 'DECIMAL of at most')} {_PRODUCT_DIGITS} digits"
    )

    @classmethod
    def supports(cls, result_type: pa.DataType) -> bool:
        if pa.types.is_decimal128(result_type):
            return bool(result_type.precision <= _PRODUCT_DIGITS)
        return is_number(result_type)

    def combine(self, older: pa.Array, newer: pa.Array) -> pa.Array:
        if pa.types.is_decimal(self.result_type):
            return self._multiply_decimals(older, newer)
        valid = valid_mask(older) | valid_mask(newer)
        pairs = np.stack([to_numbers(older, 1), to_numbers(newer, 1)], axis=1).ravel()
        return self._multiply_runs(pairs, np.arange(0, len(pairs), 2), valid)

    def fold(self, states: pa.Array, starts: Starts) -> pa.Array:
        if pa.types.is_decimal(self.result_type):
            return super().fold(states, starts)
        valid = any_in_runs(valid_mask(states), starts)
        return self._multiply_runs(to_numbers(states, 1), starts, valid)

    def _multiply_runs(self, numbers: npt.NDArray[Any], starts: Starts, valid: Mask) -> pa.Array:
        with np.errstate(all="ignore"):
            if pa.types.is_floating(self.result_type):
                products = np.multiply.reduceat(numbers.astype(np.float64), starts)
                floats = products.astype(self.result_type.to_pandas_dtype())
                return from_numbers(floats, self.result_type, valid)
            products = np.multiply.reduceat(numbers.astype(np.int64), starts)
            # How large they are, to fifteen digits. A zero makes its product zero, however much the
            # others have wrapped; no other whole number makes one smaller.
            sizes = np.multiply.reduceat(np.abs(numbers.astype(np.float64)), starts)
            sizes[any_in_runs(numbers == 0, starts)] = 0.0
        limits = np.iinfo(self.result_type.to_pandas_dtype())
        outside = (products < limits.min) | (products > limits.max) | (sizes > _BEYOND_64_BITS)
        ends = starts + run_lengths(starts, len(numbers))
        for run in np.flatnonzero((sizes >= _NEAR_64_BITS) & (sizes <= _BEYOND_64_BITS)):
            # No part of such a product is larger than the whole, so none grows beyond its bits.
            exact = math.prod(numbers[starts[run] : ends[run]].tolist())
            outside[run] = not limits.min <= exact <= limits.max
            products[run] = 0 if outside[run] else exact
        culprit = first_true(outside & valid)
        if culprit is not None:
            reason = f"product exceeds {type_name(self.result_type)}"
            raise Fault(culprit, reason, overflow=True)
        return from_numbers(products, self.result_type, valid)

    def _multiply_decimals(self, older: pa.Array, newer: pa.Array) -> pa.Array:
        own = self.result_type
        wide = pa.decimal256(own.precision, own.scale)
        exact = pc.multiply(older.cast(wide), newer.cast(wide))
        scaled = exact
        try:
            for scale in range(2 * own.scale - _DIVISOR_DIGITS, own.scale, -_DIVISOR_DIGITS):
                scaled = scaled.cast(pa.decimal256(scaled.type.precision, scale))
            products = scaled.cast(own)
        except pa.ArrowInvalid:
            raise self._decimal_fault(exact) from None
        return pc.coalesce(products, newer, older)

    def _decimal_fault(self, products: pa.Array) -> Fault:
        """Find the product that cannot be cast; only after the cast of all has failed."""
        own = self.result_type
        limit = 10 ** (own.precision + own.scale)
        for index, product in enumerate(products.to_pylist()):
            if product is None:
                continue
            # The product as an integer: it has twice the column's scale.
            unscaled = int(product.scaleb(2 * own.scale, _EXACT))
            if abs(unscaled) >= limit:
                return Fault(index, f"product exceeds {type_name(own)}", overflow=True)
            if unscaled % 10**own.scale:
                reason = (
                    f"product needs more than the {own.scale} decimal places of {type_name(own)}; "
                    "use a larger scale, or DOUBLE"
                )
                return Fault(index, reason, overflow=True)
        raise AssertionError("a cast that failed as a whole succeeds for each value")
