"""The merge: what is stored, and what a batch brings, to what is stored from now on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from merge_engine.aggregates.arrays import choose
from merge_engine.aggregates.base import AggregateFunction, Fault
from merge_engine.bucket.segment import Change
from merge_engine.encoding import ragged
from merge_engine.encoding.codec import same
from merge_engine.encoding.ragged import Flags
from merge_engine.encoding.stored_rows import StoredRows
from merge_engine.merging.fold import Update
from merge_engine.merging.refused_keys import RefusedKeys


@dataclass(frozen=True)
class Merged:
    """The rows that changed: their keys' positions in the update, the update's columns of the rows
    after it, and the changes."""

    changed: Flags
    after: StoredRows
    changes: Sequence[Change]

    def split(self, sizes: Sequence[int]) -> "list[Merged]":
        """Return what becomes of the update's first keys, of those after them, and so on."""
        ends = np.cumsum([0, *sizes])
        kept = np.concatenate([[0], np.cumsum(self.changed)])[ends]
        parts = []
        for at in range(len(sizes)):
            start, stop = kept[at], kept[at + 1]
            states = [state[start:stop] for state in self.after.states]
            after = StoredRows(self.after.touched[start:stop], states)
            changes = [change.slice(start, stop) for change in self.changes]
            parts.append(Merged(self.changed[ends[at] : ends[at + 1]], after, changes))
        return parts


def merge(update: Update, stored: StoredRows) -> Merged:
    """Merge an update into the stored rows of its keys; rows that stay the same are left out.

    `stored` has the update's columns. Raises an error that names column and key if a result does
    not fit.
    """
    with ragged.told_if_too_large():
        return _merge(update, stored)


def _merge(update: Update, stored: StoredRows) -> Merged:
    refused = RefusedKeys(update.key_names, update.keys)
    touched = np.empty_like(stored.touched)
    states = []
    changed = np.zeros(len(update), bool)
    for j in range(len(update.columns)):
        before_touched, before = stored.touched[:, j], stored.states[j]
        after_touched = np.where(update.applies[:, j], update.touches[:, j], before_touched)
        after = _merge_column(update, j, before_touched, before, refused)
        if refused:
            continue
        touched[:, j] = after_touched
        states.append(after)
        both = before_touched & after_touched
        changed |= before_touched != after_touched
        changed |= both & ~same(before, after)
    refused.check()
    after_rows = StoredRows(touched, states)
    if not changed.all():
        stored, after_rows = stored.take(changed), after_rows.take(changed)
    changes = [
        Change(
            stored.touched[:, j],
            stored.states[j],
            after_rows.touched[:, j],
            after_rows.states[j],
        )
        for j in range(len(update.columns))
    ]
    return Merged(changed, after_rows, changes)


def _merge_column(
    update: Update, j: int, before_touched: Flags, before: pa.Array, refused: RefusedKeys
) -> pa.Array:
    """Return the column's states after the update; what stands where it is untouched is void."""
    column, new = update.columns[j], update.states[j]
    assert column.function is not None
    applies = update.applies[:, j]
    combines = applies & before_touched & update.touches[:, j] & ~update.resets[:, j]
    try:
        merged = _combine_where(column.function, combines, before, new)
    except Fault as fault:
        chosen, combine = np.flatnonzero(combines), column.function.combine

        def attempt(start: int, stop: int) -> None:
            index = pa.array(chosen[start:stop])
            combine(before.take(index), new.take(index))

        refused.add(column, chosen, attempt, fault)
        return before
    return merged if applies.all() else choose(applies, before, merged)


def _combine_where(
    function: AggregateFunction, where: Flags, before: pa.Array, new: pa.Array
) -> pa.Array:
    """Combine the states where the flag is set; elsewhere the new one stands.

    A Fault has the index among those where it is set.
    """
    if where.all():
        return function.combine(before, new)
    chosen = np.flatnonzero(where)
    if len(chosen) == 0:
        return new
    index = pa.array(chosen)
    combined = function.combine(before.take(index), new.take(index))
    source = np.arange(len(new))
    source[chosen] = len(new) + np.arange(len(chosen))
    return pa.concat_arrays([new, combined]).take(pa.array(source))
