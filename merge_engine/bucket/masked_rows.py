"""The table at an earlier offset, from rows that are pinned at a later one.

    rows(S) = rows(A) with, per key and column, the first before-image of the changes in [S, A)

These images are the *mask*: an undo of everybody's changes that is not written. Under it, a row
that was changed since has its old states, one that was deleted since is there again, and one that
was inserted since has no touched bit left, so it is no row.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from foundation.errors import CorruptView
from merge_engine.aggregates.arrays import choose
from merge_engine.bucket.masks import Mask
from merge_engine.bucket.pinned_rows import PinnedRows
from merge_engine.bucket.segment import Segment
from merge_engine.bucket.undo import Images
from merge_engine.encoding.ragged import Flags
from merge_engine.encoding.row_codec import RowCodec, versions
from merge_engine.encoding.stored_rows import SchemaHistory, StoredRows, finished, state_type
from merge_engine.merging.grouping import group_by_key
from merge_engine.schema.schema import Column


def cut_segments(segments: Iterable[Segment], start: int, stop: int) -> Iterator[Segment]:
    """Yield segments without their rows outside of the offsets [start, stop)."""
    for segment in segments:
        header = segment.header
        first = max(start - header.base_offset, 0)
        last = min(stop, header.end_offset) - header.base_offset
        whole = not segment.changes or (first == 0 and last == header.rows)
        yield segment if whole else segment.slice(first, last - first)


def finished_rows(
    pinned: PinnedRows,
    history: SchemaHistory,
    columns: Sequence[Column],
    *,
    mask: Mask | None = None,
    after: bytes | None = None,
    batch_rows: int = 50_000,
) -> Iterator[tuple[pa.BinaryArray, pa.RecordBatch]]:
    """Yield encoded keys, and the rows as a reader sees them, in key order; no batch is empty.

    They are the rows after the key `after`; a batch has at most `batch_rows` of them.
    """
    for keys, rows in _rows(pinned, _Decoder(history, columns), mask, after, batch_rows):
        present, there = _existing(keys, rows)
        shown = there.only(history.positions(columns))
        data = finished(history, history.key_codec.decode(present), shown, columns)
        for start in range(0, len(present), batch_rows):
            yield present.slice(start, batch_rows), data.slice(start, batch_rows)


def _existing(keys: pa.BinaryArray, rows: StoredRows) -> tuple[pa.BinaryArray, StoredRows]:
    """Leave out what is no row: inserted under the mask, or only in columns dropped since."""
    if rows.touched.all():  # Many times faster than to ask row by row.
        return keys, rows
    exists: Flags = np.asarray(rows.touched.any(axis=1))
    return (keys, rows) if exists.all() else (keys.filter(pa.array(exists)), rows.take(exists))


def _rows(
    pinned: PinnedRows,
    decoder: "_Decoder",
    mask: Mask | None,
    after: bytes | None,
    batch_rows: int,
) -> Iterator[tuple[pa.BinaryArray, StoredRows]]:
    masked = None if mask is None else _Masked(mask, decoder, batch_rows)
    for keys, values in pinned.batches(after, batch_rows):
        rows = decoder.decode(values)
        if masked is None:
            yield keys, rows
        else:
            last = keys[-1].as_py()
            yield from masked.up_to(last, keys, rows, after)
            after = last
    if masked is not None:
        nothing = pa.array([], pa.binary())
        yield from masked.up_to(None, nothing, decoder.decode(nothing), after)


class _Masked:
    """Rows under a mask, which may have far more of a range of keys than the rows do."""

    def __init__(self, mask: Mask, decoder: "_Decoder", batch_rows: int) -> None:
        self._mask = mask
        self._decoder = decoder
        self._batch_rows = batch_rows

    def up_to(
        self, to: bytes | None, keys: pa.BinaryArray, rows: StoredRows, after: bytes | None
    ) -> Iterator[tuple[pa.BinaryArray, StoredRows]]:
        """Yield all rows with keys in (after, to], of which these are the stored ones."""
        begin = 0
        for cut in self._mask.ranges(after, to, self._batch_rows):
            end = len(keys)
            if cut is not None and cut != to:
                end = bisect_right(range(len(keys)), cut, key=lambda at: keys[at].as_py())
            some = StoredRows(
                rows.touched[begin:end], [state.slice(begin, end - begin) for state in rows.states]
            )
            yield self._merged(keys.slice(begin, end - begin), some, self._mask.between(after, cut))
            after, begin = cut, end

    def _merged(
        self, keys: pa.BinaryArray, rows: StoredRows, images: Images
    ) -> tuple[pa.BinaryArray, StoredRows]:
        """Put the images in the place of the stored states, and the rows that are only there."""
        if not len(images):
            return keys, rows
        # One group per key: its stored row, if there is one, comes before its masked one.
        every = pa.concat_arrays([keys, images.keys[0]])
        groups = group_by_key(every)
        first = groups.first_rows
        last = groups.order[np.append(groups.starts[1:], len(every)) - 1]
        is_stored, is_masked = first < len(keys), last >= len(keys)
        stored_at = np.where(is_stored, first, 0)
        masked_at = np.where(is_masked, last - len(keys), 0)
        applies = images.has[masked_at] & is_masked[:, None]
        touched = images.touched[masked_at]
        if len(keys):
            stored_touched = rows.touched[stored_at] & is_stored[:, None]
            touched = np.where(applies, touched, stored_touched)
        else:
            touched = touched & applies
        from_stored = pa.array(stored_at, mask=~is_stored)
        from_mask = pa.array(masked_at, mask=~is_masked)
        chosen = [
            choose(
                applies[:, position],
                rows.states[position].take(from_stored),
                images.states[position].take(from_mask),
            )
            for position in self._decoder.positions
        ]
        states = self._decoder.spread(chosen, len(first))
        return every.take(pa.array(first)), StoredRows(touched, states)


class _Decoder:
    """Decodes stored rows: the touched bits of all columns, and the states of those asked for.

    The states of the other columns are null.
    """

    def __init__(self, history: SchemaHistory, columns: Sequence[Column]) -> None:
        self._history = history
        self._types = [state_type(column) for column in history.current.value_columns]
        self._codec = RowCodec(history.current.version, self._types)
        position = history.position
        self.positions = sorted({position[c.id] for c in columns if c.id in position})

    def decode(self, values: pa.BinaryArray) -> StoredRows:
        """Return the rows under the current schema."""
        try:
            if (versions(values) != self._codec.version).any():
                return self._history.decode(values.to_pylist())
            touched, chosen = self._codec.decode_checked(values, self.positions)
        except ValueError as exc:
            raise CorruptView(f"a stored row cannot be read ({exc}); rebuild the view") from exc
        return StoredRows(touched, self.spread(chosen, len(values)))

    def spread(self, chosen: Sequence[pa.Array], count: int) -> list[pa.Array]:
        """Return an array per column: these states where they belong, and nulls elsewhere."""
        states = dict(zip(self.positions, chosen, strict=True))
        return [
            states[position] if position in states else pa.nulls(count, data_type)
            for position, data_type in enumerate(self._types)
        ]
