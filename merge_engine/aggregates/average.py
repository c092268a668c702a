"""The mean: a sum and a count, divided when it is read."""

from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
        counts = pc.if_else(pc.equal(counts, 0), pa.scalar(None, pa.int64()), counts)
        if pa.types.is_floating(self.result_type):
            return pc.divide(sums, counts.cast(pa.float64(), safe=False))
        # Arrow divides to 20 places more than the sum has and cuts the rest off. Since a count has
        # fewer than 20 digits, what is cut off never decides how the rounding goes.
        quotients = pc.divide(
            sums.cast(pa.decimal256(_WIDEST, self.result_type.scale)),
            counts.cast(pa.decimal256(19, 0)),
        )
        rounded = pc.round(
            quotients, ndigits=self.result_type.scale, round_mode="half_towards_infinity"
        )
        return rounded.cast(self.result_type)

    def validate_states(self, states: pa.Array) -> None:
        sums, counts = pc.struct_field(states, "sum"), pc.struct_field(states, "count")
        incomplete = valid_mask(states) & ~(valid_mask(sums) & valid_mask(counts))
        culprit = first_true(incomplete | (to_numbers(counts, 0) < 0))
        if culprit is not None:
            raise Fault(culprit, "a state of avg needs a sum and a count that is not negative")
        try:
            self.finish(states)
        except pa.ArrowInvalid:
            for index in range(len(states)):
                self._validate_quotient(states, index)
            raise

    def _validate_quotient(self, states: pa.Array, index: int) -> None:
        try:
            self.finish(states.slice(index, 1))
        except pa.ArrowInvalid as error:
            reason = "a state of avg whose quotient does not fit its column"
            raise Fault(index, reason) from error

    def _state(self, sums: pa.Array, counts: pa.Array) -> pa.Array:
        mask = None if sums.null_count == 0 else pa.array(np.logical_not(valid_mask(sums)))
        return pa.StructArray.from_arrays([sums, counts], fields=list(self.state_type), mask=mask)
