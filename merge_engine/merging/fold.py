"""Folding: a batch of rows becomes one update per key, before any bucket is asked."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merge_engine.aggregates.base import AggregateFunction, Fault
from merge_engine.bucket.segment import AggMode
from merge_engine.encoding.key_hashes import Hashes, key_hashes
from merge_engine.encoding.keys import KeyCodec
from merge_engine.encoding.ragged import Flags
from merge_engine.merging.batch import BatchRows, value_function
from merge_engine.merging.grouping import Groups, Positions, group_numbers, group_rows
from merge_engine.merging.refused_keys import RefusedKeys
from merge_engine.schema.schema import Column


@dataclass(frozen=True, kw_only=True)
class Update:
    """What a put or an undo wants: one row per key; `hashes` of the keys, where they are known.

    Per key and written column: does it apply at all (else the stored state stays), is the stored
    state left out (a delete or a replace came before), and is there a new state (else the column
    ends up untouched).
    """

    key_names: tuple[str, ...]
    encoded_keys: pa.BinaryArray
    hashes: Hashes | None = None
    keys: Sequence[pa.Array]
    columns: tuple[Column, ...]
    applies: Flags
    resets: Flags
    touches: Flags
    states: Sequence[pa.Array]
    mode: AggMode
    rows: int

    def __len__(self) -> int:
        return len(self.encoded_keys)

    def split(self, parts: Sequence[Positions]) -> "list[Update]":
        """Return what is wanted of the keys at these positions, part by part.

        They are slices of one copy: to copy each part takes about as long as to copy all of them.
        """
        if not parts:
            return []
        positions = np.concatenate(parts)
        index = pa.array(positions)
        sorted_by_part = replace(
            self,
            encoded_keys=self.encoded_keys.take(index),
            hashes=None if self.hashes is None else self.hashes.take(positions),
            keys=[array.take(index) for array in self.keys],
            applies=self.applies[positions],
            resets=self.resets[positions],
            touches=self.touches[positions],
            states=[array.take(index) for array in self.states],
        )
        ends = accumulate(map(len, parts), initial=0)
        return [sorted_by_part._slice(slice(start, stop)) for start, stop in pairwise(ends)]

    def without(self, keys: Collection[bytes]) -> "Update":
        """Return the same without these keys, as the table encodes them."""
        if not keys:
            return self
        found = pc.is_in(self.encoded_keys, pa.array(list(keys), self.encoded_keys.type))
        return self.split([np.flatnonzero(~np.asarray(found.to_numpy(zero_copy_only=False)))])[0]

    def _slice(self, rows: slice) -> "Update":
        return replace(
            self,
            encoded_keys=self.encoded_keys[rows],
            hashes=None if self.hashes is None else self.hashes[rows],
            keys=[array[rows] for array in self.keys],
            applies=self.applies[rows],
            resets=self.resets[rows],
            touches=self.touches[rows],
            states=[array[rows] for array in self.states],
            rows=rows.stop - rows.start,
        )


def joined(updates: Sequence[Update]) -> Update:
    """Return one update of all keys, one update after the other; their columns are the same."""
    first = updates[0]
    hashes = [update.hashes for update in updates if update.hashes is not None]
    return replace(
        first,
        encoded_keys=pa.concat_arrays([update.encoded_keys for update in updates]),
        hashes=np.concatenate(hashes) if len(hashes) == len(updates) else None,
        keys=_concatenated([update.keys for update in updates]),
        applies=np.concatenate([update.applies for update in updates]),
        resets=np.concatenate([update.resets for update in updates]),
        touches=np.concatenate([update.touches for update in updates]),
        states=_concatenated([update.states for update in updates]),
        rows=sum(update.rows for update in updates),
    )


def _concatenated(columns: Sequence[Sequence[pa.Array]]) -> list[pa.Array]:
    return [pa.concat_arrays(arrays) for arrays in zip(*columns, strict=True)]


def fold(rows: BatchRows, key_codec: KeyCodec) -> Update:
    """Reduce the rows to one per key, in the order of the batch.

    Within a key, a delete drops what came before it: the rows before, and the stored states.
    """
    numbers = key_codec.numbers(rows.keys)
    if numbers is not None:  # Bytes are made of the keys that are left only.
        groups, hashes = group_numbers(numbers), None
        keys = list(rows.keys)
    else:
        encoded = key_codec.encode(rows.keys)
        hashes = None if key_codec.width == 8 else key_hashes(encoded)
        groups = group_rows(encoded, hashes)
        keys = [*rows.keys, encoded]
    if not groups.in_order:
        first = pa.array(groups.first_rows)
        keys = [array.take(first) for array in keys]
        hashes = None if hashes is None else hashes.take(groups.first_rows)
    if numbers is not None:
        encoded = key_codec.encode(keys)
    else:
        *keys, encoded = keys
    count = len(groups.starts)
    deleted, written = np.zeros(count, bool), np.ones(count, bool)
    if rows.deletes is not None:
        groups, deleted, written = _after_last_delete(groups, rows.deletes)
    states = []
    refused = RefusedKeys(rows.key_names, keys)
    for column, values, order in zip(rows.columns, rows.values, rows.orders, strict=True):
        compute = partial(_fold_column, value_function(column), values, order, mode=rows.mode)
        try:
            state = compute(groups)
        except Fault as fault:
            positions, attempt = np.flatnonzero(written), _of_some(groups, compute)
            refused.add(column, positions, attempt, fault)
            continue
        states.append(state if written.all() else _spread(state, written))
    refused.check()
    shape = (count, len(rows.columns))
    resets = deleted if rows.mode is not AggMode.REPLACE else np.ones(count, bool)
    return Update(
        key_names=rows.key_names,
        encoded_keys=encoded,
        hashes=hashes,
        keys=keys,
        columns=rows.columns,
        applies=np.broadcast_to(True, shape),
        resets=np.broadcast_to(resets[:, None], shape),
        touches=np.broadcast_to(written[:, None], shape),
        states=states,
        mode=rows.mode,
        rows=len(rows),
    )


def _of_some(
    groups: Groups, compute: Callable[[Groups], pa.Array]
) -> Callable[[int, int], pa.Array]:
    """Return what computes a column for some of the groups only: from one to another."""
    return lambda start, stop: compute(groups.between(start, stop))


def _spread(states: pa.Array, written: Flags) -> pa.Array:
    """Put the states, in order, where `written` is true, and nulls elsewhere."""
    return states.take(pa.array(np.cumsum(written) - 1, mask=~written))


def _fold_column(
    function: AggregateFunction,
    values: pa.Array,
    order: pa.Array | None,
    groups: Groups,
    mode: AggMode,
) -> pa.Array:
    if len(groups.starts) == 0:
        return pa.nulls(0, function.state_type)
    if mode is not AggMode.ACCUMULATE and groups.in_order:
        return values
    if mode is AggMode.REPLACE:
        return values.take(pa.array(groups.last_rows))
    if mode is AggMode.MERGE_STATE:
        return function.fold(values.take(pa.array(groups.order)), groups.starts)
    if groups.in_order:
        return function.accumulate(values, order, groups.starts)
    return function.accumulate_rows(values, order, groups.order, groups.starts)


def _after_last_delete(groups: Groups, deletes: Flags) -> tuple[Groups, Flags, Flags]:
    """Return the groups of the rows after each key's last delete, and per key whether there was
    a delete and whether rows are left. Keys without rows have no group in the result."""
    positions = np.arange(len(groups.order))
    marks = np.where(deletes[groups.order], positions, -1)
    last = np.maximum.reduceat(marks, groups.starts)
    kept = positions > last[groups.of_row]
    counts = np.add.reduceat(kept.astype(np.int64), groups.starts)
    written = counts > 0
    starts = (np.cumsum(counts) - counts)[written]
    return Groups(groups.order[kept], starts), last >= 0, written
