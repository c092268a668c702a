"""The first and the last value, by arrival or by the order of another column.

Without `order_by` a state is the value itself. With it, a state is struct<value, order>: what has
been chosen remembers the order it was chosen by, so a late event never wins, however the rows are
split into batches.
"""

from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merge_engine.aggregates.arrays import Indices, Mask, choose, valid_mask
from merge_engine.aggregates.base import AggregateFunction, Fault, Rows, Starts
from merge_engine.aggregates.ordering import ORDERED_TYPES, Preference, is_ordered, pick_end
from merge_engine.aggregates.parameters import read_name, read_type
from merge_engine.schema.types import type_name

DEFAULT_ORDER_TYPE = pa.timestamp("us", tz="UTC")


class _Positional(AggregateFunction):
    """What first and last have in common; they differ in two constants.

    A null order never beats one that is not null; among null orders, and among equal ones, arrival
    decides. NaN is the greatest order.
    """

    parameter_readers = {"order_by": read_name, "order_type": read_type}  # noqa: RUF012
    preference: ClassVar[Preference]
    ignores_nulls: ClassVar[bool]

    def __init__(
        self,
        result_type: pa.DataType,
        order_by: str | None = None,
        order_type: pa.DataType | None = None,
    ) -> None:
        super().__init__(result_type)
        if order_by is None and order_type is not None:
            raise ValueError("order_type needs order_by")
        self._order_by = order_by
        self._order_type = order_type or DEFAULT_ORDER_TYPE
        if not is_ordered(self._order_type):
            given = type_name(self._order_type)
            raise ValueError(f"order_type {given} has no order; it can be {ORDERED_TYPES}")

    @property
    def state_type(self) -> pa.DataType:
        if self._order_by is None:
            return self.result_type
        return pa.struct([("value", self.result_type), ("order", self._order_type)])

    @property
    def parameters(self) -> dict[str, Any]:
        if self._order_by is None:
            return {}
        if self._order_type == DEFAULT_ORDER_TYPE:
            return {"order_by": self._order_by}
        return {"order_by": self._order_by, "order_type": type_name(self._order_type)}

    @property
    def order_by(self) -> str | None:
        return self._order_by

    @property
    def order_type(self) -> pa.DataType | None:
        return None if self._order_by is None else self._order_type

    def lift(self, values: pa.Array, order: pa.Array | None = None) -> pa.Array:
        if self._order_by is None:
            return values
        mask = pa.array(~valid_mask(values)) if self.ignores_nulls else None
        return pa.StructArray.from_arrays([values, order], fields=list(self.state_type), mask=mask)

    def combine(self, older: pa.Array, newer: pa.Array) -> pa.Array:
        if self._order_by is None:
            newer_wins = np.full(len(older), self.preference.newest)
        else:
            newer_wins = self.preference.newer_wins(
                pc.struct_field(older, "order"), pc.struct_field(newer, "order")
            )
        if self.ignores_nulls:
            newer_wins = (newer_wins | ~valid_mask(older)) & valid_mask(newer)
        return choose(newer_wins, older, newer)

    def fold(self, states: pa.Array, starts: Starts) -> pa.Array:
        order = None if self._order_by is None else pc.struct_field(states, "order")
        return states.take(pa.array(self._pick(states, order, starts)))

    def accumulate(self, values: pa.Array, order: pa.Array | None, starts: Starts) -> pa.Array:
        if self._order_by is None:
            order = None
        winners = pa.array(self._pick(values, order, starts))
        return self.lift(values.take(winners), None if order is None else order.take(winners))

    def accumulate_rows(
        self, values: pa.Array, order: pa.Array | None, rows: Rows, starts: Starts
    ) -> pa.Array:
        if self._order_by is None and not (self.ignores_nulls and values.null_count):
            ends = pick_end(len(rows), starts, newest=self.preference.newest)
            return self.lift(values.take(pa.array(rows[ends])))
        return super().accumulate_rows(values, order, rows, starts)

    def finish(self, states: pa.Array) -> pa.Array:
        return states if self._order_by is None else pc.struct_field(states, "value")

    def accept(self, states: pa.Array) -> pa.Array:
        if self._order_by is None:
            return states
        if self.ignores_nulls:
            malformed = valid_mask(states) & ~valid_mask(pc.struct_field(states, "value"))
            reason = f"a state of {self.name} has an order but no value"
        else:
            malformed = ~valid_mask(states)
            reason = f"a state of {self.name} with order_by is null"
        if malformed.any():
            raise Fault(int(np.argmax(malformed)), reason)
        return states

    def _pick(self, candidates: pa.Array, order: pa.Array | None, starts: Starts) -> Indices:
        eligible: Mask | None = None
        if self.ignores_nulls and candidates.null_count:
            eligible = valid_mask(candidates)
        if order is not None:
            return self.preference.pick(order, starts, eligible)
        newest = self.preference.newest
        return pick_end(len(candidates), starts, newest=newest, eligible=eligible)


class LastValue(_Positional):
    """The last value, nulls included.

    lift(x) = x
    combine(a, b) = b; with order_by: b if order(b) >= order(a) else a
    """

    name = "last_value"
    preference = Preference(largest=True, newest=True)
    ignores_nulls = False


class FirstValue(_Positional):
    """The first value, nulls included: a null first value stays first.

    lift(x) = x
    combine(a, b) = a; with order_by: b if order(b) < order(a) else a
    """

    name = "first_value"
    preference = Preference(largest=False, newest=False)
    ignores_nulls = False


class LastValueIgnoreNulls(_Positional):
    """The last value that is not null.

    lift(x) = x
    combine(a, b) = b; with order_by: b if order(b) >= order(a) else a; null is the identity
    """

    name = "last_value_ignore_nulls"
    preference = LastValue.preference
    ignores_nulls = True


class FirstValueIgnoreNulls(_Positional):
    """The first value that is not null.

    lift(x) = x
    combine(a, b) = a; with order_by: b if order(b) < order(a) else a; null is the identity
    """

    name = "first_value_ignore_nulls"
    preference = FirstValue.preference
    ignores_nulls = True
