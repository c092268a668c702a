"""The mean: a sum and a count, divided when it is read."""

from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merge_engine.aggregates import limbs
from merge_engine.aggregates.arrays import Mask, first_true, to_numbers, valid_mask
from merge_engine.aggregates.base import AggregateFunction, Fault, Starts
from merge_engine.aggregates.numeric import Count, Sum
from merge_engine.encoding.ragged import only_where

_WIDEST = 38


class Avg(AggregateFunction):
    """The mean of the values that are not null.

        lift(x) = (x, 1); lift(null) = null
        combine((s, n), (t, m)) = (s + t, n + m); a null is the identity
        finish((s, n)) = s / n; null if the state is null

    Of DOUBLE, it takes any number. Of DECIMAL(p, s) it is exact up to the division, which rounds
    half up (away from zero) to s decimal places. Where the quotients of two states fit the column,
    so does that of both together, which lies between them.
    """

    name = "avg"
    rounds_input = True
    supported_types: ClassVar[str] = "DOUBLE and DECIMAL"

    def __init__(self, result_type: pa.DataType) -> None:
        super().__init__(result_type)
        sum_type = result_type
        if pa.types.is_decimal(result_type):
            sum_type = pa.decimal128(_WIDEST, result_type.scale)
        self._sum = Sum(sum_type)
        self._count = Count(pa.int64())

    @classmethod
    def supports(cls, result_type: pa.DataType) -> bool:
        return bool(pa.types.is_float64(result_type) or pa.types.is_decimal128(result_type))

    @property
    def state_type(self) -> pa.DataType:
        return pa.struct([("sum", self._sum.result_type), ("count", pa.int64())])

    def lift(self, values: pa.Array, order: pa.Array | None = None) -> pa.Array:  # noqa: ARG002
        return self._state(values.cast(self._sum.result_type), self._count.lift(values))

    def combine(self, older: pa.Array, newer: pa.Array) -> pa.Array:
        return self._state(
            self._sum.combine(pc.struct_field(older, "sum"), pc.struct_field(newer, "sum")),
            self._count.combine(pc.struct_field(older, "count"), pc.struct_field(newer, "count")),
        )

    def fold(self, states: pa.Array, starts: Starts) -> pa.Array:
        return self._state(
            self._sum.fold(pc.struct_field(states, "sum"), starts),
            self._count.fold(pc.struct_field(states, "count"), starts),
        )

    def accumulate(self, values: pa.Array, order: pa.Array | None, starts: Starts) -> pa.Array:
        return self._state(
            self._sum.fold(values.cast(self._sum.result_type), starts),
            self._count.accumulate(values, order, starts),
        )

    def finish(self, states: pa.Array) -> pa.Array:
        sums, counts = pc.struct_field(states, "sum"), pc.struct_field(states, "count")
        if pa.types.is_floating(self.result_type):
            counts = pc.if_else(pc.equal(counts, 0), pa.scalar(None, pa.int64()), counts)
            return pc.divide(sums, counts.cast(pa.float64(), safe=False))
        quotients, outside = self._divide(sums, counts)
        # None of them is outside, but states that were stored before `accept` refused those.
        return only_where(~outside, quotients)

    def accept(self, states: pa.Array) -> pa.Array:
        sums, counts = pc.struct_field(states, "sum"), pc.struct_field(states, "count")
        incomplete = valid_mask(states) & ~(valid_mask(sums) & valid_mask(counts))
        numbers = to_numbers(counts, 0)
        culprit = first_true(incomplete | (numbers < 0))
        if culprit is not None:
            raise Fault(culprit, "a state of avg needs a sum and a count that is not negative")
        empty = numbers == 0
        culprit = first_true(empty & valid_mask(states) & ~self._is_zero(sums))
        if culprit is not None:
            raise Fault(culprit, "a state of avg has a sum of no values, which is not zero")
        if pa.types.is_decimal(self.result_type):
            culprit = first_true(self._divide(sums, counts)[1])
            if culprit is not None:
                raise Fault(culprit, "a state of avg whose quotient does not fit its column")
        return only_where(~empty, states)

    def _divide(self, sums: pa.Array, counts: pa.Array) -> tuple[pa.Array, Mask]:
        """Return the quotients of decimals, and where they do not fit the column."""
        numbers = to_numbers(counts, 0)
        valid = valid_mask(sums) & (numbers > 0)
        return limbs.divide(sums, numbers, self.result_type, valid)

    @staticmethod
    def _is_zero(sums: pa.Array) -> Mask:
        is_zero: Mask = to_numbers(pc.equal(sums, pa.scalar(0, sums.type)), False)
        return is_zero

    def _state(self, sums: pa.Array, counts: pa.Array) -> pa.Array:
        mask = None if sums.null_count == 0 else pa.array(np.logical_not(valid_mask(sums)))
        return pa.StructArray.from_arrays([sums, counts], fields=list(self.state_type), mask=mask)
