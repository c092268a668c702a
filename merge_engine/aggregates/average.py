"""The mean: a sum and a count, divided when it is read."""

from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merge_engine.aggregates import limbs
from merge_engine.aggregates.arrays import first_true, to_numbers, valid_mask
from merge_engine.aggregates.base import AggregateFunction, Fault, Starts
from merge_engine.aggregates.numeric import Count, Sum

_WIDEST = 38


class Avg(AggregateFunction):
    """The mean of the values that are not null.

        lift(x) = (x, 1); lift(null) = null
        combine((s, n), (t, m)) = (s + t, n + m); a null is the identity
        finish((s, n)) = s / n; null if n = 0 or the state is null

    Of DOUBLE, it takes any number. Of DECIMAL(p, s) it is exact up to the division, which rounds
    half up (away from zero) to s decimal places.
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
        numbers = to_numbers(counts, 0)
        valid = valid_mask(sums) & (numbers > 0)
        quotients, outside = limbs.divide(sums, numbers, self.result_type, valid)
        culprit = first_true(outside)
        if culprit is not None:
            raise Fault(culprit, "a state of avg whose quotient does not fit its column")
        return quotients

    def validate_states(self, states: pa.Array) -> None:
        sums, counts = pc.struct_field(states, "sum"), pc.struct_field(states, "count")
        incomplete = valid_mask(states) & ~(valid_mask(sums) & valid_mask(counts))
        culprit = first_true(incomplete | (to_numbers(counts, 0) < 0))
        if culprit is not None:
            raise Fault(culprit, "a state of avg needs a sum and a count that is not negative")
        self.finish(states)

    def _state(self, sums: pa.Array, counts: pa.Array) -> pa.Array:
        mask = None if sums.null_count == 0 else pa.array(np.logical_not(valid_mask(sums)))
        return pa.StructArray.from_arrays([sums, counts], fields=list(self.state_type), mask=mask)
