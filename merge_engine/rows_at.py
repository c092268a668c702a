"""The table at an earlier offset, from rows that are pinned at a later one.

    rows(S) = rows(A) with, per key and column, the first before-image of the changes in [S, A)

These images are the *mask*: an undo of everybody's changes that is not written. Under it, a row
that was changed since has its old states, one that was deleted since is there again, and one that
was inserted since has no touched bit left, so it is no row.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from merge_engine.aggregates.arrays import choose
from merge_engine.errors import CorruptView, Retryable
from merge_engine.grouping import group_by_key
from merge_engine.options import MEBIBYTE
from merge_engine.pinned import PinnedRows
from merge_engine.ragged import Flags
from merge_engine.rows import RowCodec, versions
from merge_engine.schema import Column
from merge_engine.segment import Segment
from merge_engine.stored import SchemaHistory, StoredRows, finished, state_type
from merge_engine.undo import FirstImages

MASK_MAX_BYTES = 256 * MEBIBYTE


@dataclass(frozen=True)
class Mask:
    """Old states by key, in key order: per value column whether there is one, and which."""

    keys: pa.BinaryArray
    has: Flags
    touched: Flags
    states: Sequence[pa.Array]

    def __len__(self) -> int:
        return len(self.keys)

    def between(self, after: bytes | None, to: bytes | None) -> "Mask":
        """Return what is about the keys behind `after`, up to and including `to`; None: no end."""
        start = 0 if after is None else self._behind(after)
        stop = len(self) if to is None else self._behind(to)
        return Mask(
            self.keys.slice(start, stop - start),
            self.has[start:stop],
            self.touched[start:stop],
            [state.slice(start, stop - start) for state in self.states],
        )

    def _behind(self, key: bytes) -> int:
        return bisect_right(range(len(self)), key, key=lambda at: self.keys[at].as_py())


def load_mask(
    segments: Iterable[Segment],
    history: SchemaHistory,
    *,
    start: int,
    stop: int,
    max_bytes: int = MASK_MAX_BYTES,
) -> Mask | None:
    """Return the mask of the changes in [start, stop), which are these; None if there are none.

    Columns that the schema does not have any more are left out. Retryable: it would be too large.
    """
    schema = history.current
    images = FirstImages(schema.value_columns, schema)
    reduce_at = max_bytes
    for segment in segments:
        history.check_knows(segment.header.schema_version)
        images.add(segment)
        if images.nbytes > reduce_at:
            images.reduce()
            _check_size(images, start, stop, max_bytes)
            # Not with every segment from now on: only when there is as much again.
            reduce_at = max(max_bytes, 2 * images.nbytes)
    update = images.to_update()
    _check_size(images, start, stop, max_bytes)
    if update is None:
        return None
    return Mask(update.encoded_keys, update.applies, update.touches, update.states)


def _check_size(images: FirstImages, start: int, stop: int, max_bytes: int) -> None:
    if images.nbytes > max_bytes:
        raise Retryable(
            f"{stop - start:,} changes, at the log offsets [{start}, {stop}), are not committed "
            f"for certain, and to leave them out takes more than {max_bytes:,} bytes of memory; "
            'scan again when they are committed, or with isolation="latest"'
        )


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

    They are the rows behind the key `after`; a batch has at most `batch_rows` of them.
    """
    for keys, rows in _rows(pinned, _Decoder(history, columns), mask, after, batch_rows):
        present, there = _existing(keys, rows)
        data = finished(history, history.key_codec.decode(present), there, columns)
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
    for keys, values in pinned.batches(after, batch_rows):
        rows = decoder.decode(values)
        if mask is None:
            yield keys, rows
            continue
        last = keys[-1].as_py()
        yield _masked(keys, rows, mask.between(after, last), decoder)
        after = last
    if mask is not None:
        rest = mask.between(after, None)
        yield rest.keys, StoredRows(rest.touched, rest.states)


def _masked(
    keys: pa.BinaryArray, rows: StoredRows, mask: Mask, decoder: "_Decoder"
) -> tuple[pa.BinaryArray, StoredRows]:
    """Put the mask's states in the place of those stored, and the rows that are only there."""
    if not len(mask):
        return keys, rows
    # One group per key: its stored row, if there is one, comes before its masked one.
    every = pa.concat_arrays([keys, mask.keys])
    groups = group_by_key(every)
    first = groups.first_rows
    last = groups.order[np.append(groups.starts[1:], len(every)) - 1]
    is_stored, is_masked = first < len(keys), last >= len(keys)
    stored_at, mask_at = np.where(is_stored, first, 0), np.where(is_masked, last - len(keys), 0)
    applies = mask.has[mask_at] & is_masked[:, None]
    stored_touched = rows.touched[stored_at] & is_stored[:, None]
    touched = np.where(applies, mask.touched[mask_at], stored_touched)
    from_stored = pa.array(stored_at, mask=~is_stored)
    from_mask = pa.array(mask_at, mask=~is_masked)
    chosen = [
        choose(
            applies[:, position],
            rows.states[position].take(from_stored),
            mask.states[position].take(from_mask),
        )
        for position in decoder.positions
    ]
    return every.take(pa.array(first)), StoredRows(touched, decoder.spread(chosen, len(first)))


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
