"""Arrays of lists and maps as flat items and lengths, so that index arithmetic can merge them."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from merge_engine.aggregates.arrays import Indices, Mask, any_in_runs, valid_mask, validity_buffer
from merge_engine.aggregates.base import Starts
from merge_engine.encoding.ragged import ranges


@dataclass(frozen=True, eq=False)
class Lists:
    """One row per list: the items of all rows in order, and how many belong to each.

    `mapped` has what map keys are mapped to, item by item; None for lists. A null row has no items.
    """

    items: pa.Array
    lengths: Indices
    valid: Mask
    mapped: pa.Array | None = None

    @classmethod
    def of(cls, array: pa.Array) -> "Lists":
        """Take an array of lists or maps apart."""
        offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        valid = valid_mask(array)
        lengths = np.diff(offsets)
        first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
        is_map = pa.types.is_map(array.type)
        items = (array.keys if is_map else array.values).slice(first, count)
        mapped = array.items.slice(first, count) if is_map else None
        rows = cls(items, lengths, valid, mapped)
        if lengths[~valid].any():
            # A null may hide items, which Arrow permits.
            return rows.take_items(np.flatnonzero(np.repeat(valid, lengths)), lengths * valid)
        return rows

    def offsets(self) -> Indices:
        """Return where each row begins among the items, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def rows_of_items(self) -> Indices:
        """Return, for each item, the number of its row."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def take_items(self, index: Indices, lengths: Indices) -> "Lists":
        """Return rows of the same validity with other items, by their positions."""
        chosen = pa.array(index)
        mapped = None if self.mapped is None else self.mapped.take(chosen)
        return Lists(self.items.take(chosen), lengths, self.valid, mapped)

    def newest(self, limit: int | None) -> "Lists":
        """Return the rows cut to their last `limit` items."""
        if limit is None or not (self.lengths > limit).any():
            return self
        kept = np.minimum(self.lengths, limit)
        return self.take_items(ranges(self.offsets()[1:] - kept, kept), kept)

    def fold(self, starts: Starts) -> "Lists":
        """Concatenate the rows of each run; null only if all of them are."""
        lengths = np.add.reduceat(self.lengths, starts)
        return Lists(self.items, lengths, any_in_runs(self.valid, starts), self.mapped)

    def concatenate(self, newer: "Lists", newest: int | None = None) -> "Lists":
        """Concatenate row by row, these items first; null only if both rows are.

        `newest`: no more than so many of a row, the last ones.
        """
        lengths = np.stack([self.lengths, newer.lengths], axis=1)
        ends = np.stack([self.offsets()[1:], newer.offsets()[1:] + len(self.items)], axis=1)
        if newest is not None:
            lengths[:, 1] = np.minimum(lengths[:, 1], newest)
            lengths[:, 0] = np.minimum(lengths[:, 0], newest - lengths[:, 1])
        mapped = None
        if self.mapped is not None:
            mapped = pa.concat_arrays([self.mapped, newer.mapped])
        both = Lists(
            pa.concat_arrays([self.items, newer.items]),
            lengths.ravel(),
            self.valid | newer.valid,
            mapped,
        )
        kept = ranges((ends - lengths).ravel(), lengths.ravel())
        return both.take_items(kept, lengths.sum(axis=1))

    def to_array(self, data_type: pa.DataType) -> pa.Array:
        """Put the array together again."""
        offsets = pa.py_buffer(self.offsets().astype(np.int32))
        children = [self.items]
        if pa.types.is_map(data_type):
            entries = pa.struct([data_type.key_field, data_type.item_field])
            children = [pa.StructArray.from_arrays([self.items, self.mapped], fields=list(entries))]
        buffers = [validity_buffer(self.valid), offsets]
        return pa.Array.from_buffers(data_type, len(self.lengths), buffers, children=children)
