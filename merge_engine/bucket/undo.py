"""Undo: of a debtor's changes in a range of the log, the first before-image per key and column.

The range is gone through backwards, in windows that fit into memory, and each window's first images
bring its keys back to where the window begins. So memory is bounded whatever the range, the log is
read once, and after the last window, which is the oldest, all keys are where the range begins.

Each step is an undo by itself, to the offset where its window begins, and says so in the log. What
an undo has taken back already is thereby known, and left alone: one that was cut off is gone on
with, and doing it twice changes nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from merge_engine.bucket.segment import AggMode, Segment, SegmentHeader
from merge_engine.encoding.keys import KeyCodec
from merge_engine.encoding.ragged import Flags
from merge_engine.encoding.stored_rows import state_type
from merge_engine.merging.fold import Update
from merge_engine.merging.grouping import Positions, group_by_key
from merge_engine.schema.schema import Column, Schema

# Images of more segments are put together: an array costs memory of its own, however few its rows.
_MOST_PARTS = 256


class UndoRange(NamedTuple):
    """The offsets of a bucket whose changes are to be undone; `until` None: to the log's end."""

    from_offset: int
    until: int | None = None


def to_the_end() -> bool:
    """Go on, whatever the time."""
    return True


@dataclass(frozen=True)
class Images:
    """Before-images: keys, and per column whether there is one, and which."""

    keys: Sequence[pa.Array]
    has: Flags
    touched: Flags
    states: Sequence[pa.Array]

    def __len__(self) -> int:
        return len(self.has)

    @property
    def nbytes(self) -> int:
        """How much memory they take."""
        arrays = [*self.keys, *self.states]
        return int(self.has.nbytes + self.touched.nbytes + sum(array.nbytes for array in arrays))

    def take(self, positions: Positions) -> "Images":
        """Return these rows only."""
        index = pa.array(positions)
        return Images(
            [array.take(index) for array in self.keys],
            self.has[positions],
            self.touched[positions],
            [array.take(index) for array in self.states],
        )


def undo_updates(
    backwards: Iterable[Segment],
    columns: Sequence[Column],
    schema: Schema,
    *,
    max_bytes: int,
    max_rows: int | None = None,
    go_on: Callable[[], bool] = to_the_end,
) -> Iterator[tuple[int, Update]]:
    """Yield updates that, applied one after the other, bring the columns back, and to which offset.

    `backwards`: the segments whose changes are to be taken back, the last one first. One at a time
    is read, and each update is to be applied before the next is asked for. When `go_on` says no,
    what was read is an update, however little it is.
    """
    codec = KeyCodec([column.type for column in schema.key_columns])
    window: list[Images] = []
    size = rows = begin = 0
    for segment in backwards:
        images = images_of(segment, columns, schema)
        too_many = max_rows is not None and rows + len(images) > max_rows
        if window and (too_many or size + images.nbytes > max_bytes):
            yield begin, _to_update(window, columns, schema, codec)
            window, size, rows = [], 0, 0
        window.append(images)
        size, rows = size + images.nbytes, rows + len(images)
        begin = segment.header.base_offset
        if len(window) >= _MOST_PARTS:
            window = [first_images(concat(window[::-1]), codec.encode)]
            size, rows = window[0].nbytes, len(window[0])
        if not go_on():
            yield begin, _to_update(window, columns, schema, codec)
            window, size, rows = [], 0, 0
    if window:
        yield begin, _to_update(window, columns, schema, codec)


def undone_already(
    headers: Sequence[SegmentHeader], columns: Sequence[Column], start: int
) -> frozenset[int]:
    """Return the bases of an owner's segments that undos among them, of these columns, took back.

    With the undos themselves: what one of them restored, it has restored, and no more is to be done
    about the changes that it was for. One that goes back beyond `start` is a change like others.
    """
    wanted = {column.id for column in columns}
    taken_back = set()
    back_to: int | None = None
    for header in reversed(headers):
        goes_to = header.undo_from if wanted <= set(header.column_ids) else None
        if goes_to is not None and goes_to >= start:
            back_to = goes_to if back_to is None else min(back_to, goes_to)
            taken_back.add(header.base_offset)
        elif back_to is not None and header.end_offset > back_to:
            taken_back.add(header.base_offset)
    return frozenset(taken_back)


def _to_update(
    window: Sequence[Images], columns: Sequence[Column], schema: Schema, codec: KeyCodec
) -> Update:
    """Return what brings the window's keys back; its newest images come first."""
    images = first_images(concat(window[::-1]), codec.encode)
    return Update(
        key_names=tuple(column.name for column in schema.key_columns),
        encoded_keys=codec.encode(images.keys),
        keys=images.keys,
        columns=tuple(columns),
        applies=images.has,
        resets=np.broadcast_to(True, images.has.shape),
        touches=images.touched,
        states=images.states,
        mode=AggMode.REPLACE,
        rows=len(images),
    )


def images_of(segment: Segment, columns: Sequence[Column], schema: Schema) -> Images:
    """Return the before-images that a segment has of these columns."""
    if not segment.changes:
        return _none(columns, schema)
    keys = [segment.keys[column.id] for column in schema.key_columns]
    shape = (len(keys[0]), len(columns))
    has, touched = np.zeros(shape, bool), np.zeros(shape, bool)
    states = []
    for j, column in enumerate(columns):
        change = segment.changes.get(column.id)
        if change is None:
            states.append(pa.nulls(shape[0], state_type(column)))
        else:
            has[:, j], touched[:, j] = True, change.touched_before
            states.append(change.before)
    images = Images(keys, has, touched, states)
    if has.all() or has.any(axis=1).all():
        return images
    return images.take(np.flatnonzero(has.any(axis=1)))


def _none(columns: Sequence[Column], schema: Schema) -> Images:
    flags = np.zeros((0, len(columns)), bool)
    keys = [pa.nulls(0, column.type) for column in schema.key_columns]
    return Images(keys, flags, flags, [pa.nulls(0, state_type(column)) for column in columns])


def concat(parts: Sequence[Images]) -> Images:
    """Put images one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Images(
        [pa.concat_arrays(arrays) for arrays in zip(*(part.keys for part in parts), strict=True)],
        np.concatenate([part.has for part in parts]),
        np.concatenate([part.touched for part in parts]),
        [pa.concat_arrays(arrays) for arrays in zip(*(part.states for part in parts), strict=True)],
    )


def first_images(images: Images, encode: Callable[[Sequence[pa.Array]], pa.BinaryArray]) -> Images:
    """Reduce images, older ones first, to one row per key, in key order: the oldest per column.

    `encode`: of keys, to bytes in their order.
    """
    if not len(images):
        return images
    groups = group_by_key(encode(images.keys))
    first = groups.first_rows
    if images.has.all():  # The oldest image of a key has all columns.
        return images if groups.in_order else images.take(first)
    has = np.logical_or.reduceat(images.has[groups.order], groups.starts)
    touched = np.zeros_like(has)
    states = []
    missing = len(groups.order)
    for j, state in enumerate(images.states):
        candidates = np.where(images.has[groups.order, j], np.arange(missing), missing)
        oldest = np.minimum.reduceat(candidates, groups.starts)
        source = groups.order[np.where(has[:, j], oldest, 0)]
        touched[:, j] = images.touched[source, j] & has[:, j]
        states.append(state.take(pa.array(source, mask=~has[:, j])))
    return Images([array.take(pa.array(first)) for array in images.keys], has, touched, states)
