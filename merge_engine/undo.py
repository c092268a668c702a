"""Undo: of a debtor's changes in a range of the log, the first before-image per key and column.

Memory is bounded whatever the range: when the images at hand grow past the limit, the keys are
halved by their hash, and the other half is left for another pass over the log.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from merge_engine.fold import Update
from merge_engine.grouping import Positions, group_by_key
from merge_engine.hashing import spark_xxhash64
from merge_engine.keys import KeyCodec
from merge_engine.ragged import Flags
from merge_engine.schema import Column, Schema
from merge_engine.segment import AggMode, Segment
from merge_engine.stored import state_type

# The low bits of a key's hash chose its bucket; those above are as good as new.
_SLICE_SHIFT = 40
# Keys that agree in all of these bits cannot be told apart, and are undone together.
_MOST_SLICES = 1 << (64 - _SLICE_SHIFT)
# Images of more segments are put together: an array costs memory of its own, however few its rows.
_MOST_PARTS = 256


@dataclass(frozen=True)
class _Images:
    """Before-images in log order: keys, and per column whether there is one, and which."""

    keys: Sequence[pa.Array]
    has: Flags
    touched: Flags
    states: Sequence[pa.Array]

    @property
    def nbytes(self) -> int:
        arrays = [*self.keys, *self.states]
        return int(self.has.nbytes + self.touched.nbytes + sum(array.nbytes for array in arrays))

    def take(self, positions: Positions) -> "_Images":
        index = pa.array(positions)
        return _Images(
            [array.take(index) for array in self.keys],
            self.has[positions],
            self.touched[positions],
            [array.take(index) for array in self.states],
        )


class FirstImages:
    """Of changes that are added in the order of the log, the first before-image per key and column.

    Of the keys of one slice only: those whose hash has this residue.
    """

    def __init__(
        self, columns: Sequence[Column], schema: Schema, *, modulus: int = 1, residue: int = 0
    ) -> None:
        self.nbytes = 0
        self._columns = columns
        self._schema = schema
        self._codec = KeyCodec([column.type for column in schema.key_columns])
        self._modulus = modulus
        self._residue = residue
        self._parts: list[_Images] = []

    def add(self, segment: Segment) -> None:
        """Add the changes of a segment, if there are any."""
        if segment.changes:
            images = _images_of(segment, self._columns, self._schema)
            self._parts.append(_in_slice(images, self._modulus, self._residue))
            self.nbytes += self._parts[-1].nbytes
            if len(self._parts) >= _MOST_PARTS:
                self._set(_concat(self._parts))

    def reduce(self) -> None:
        """Drop all but the first images."""
        if self._parts:
            self._set(_first_images(_concat(self._parts), self._codec))

    def halve(self) -> tuple[int, int] | None:
        """Drop half of the slice; return the other half's modulus and residue.

        None: it cannot be halved any more. Only after `reduce`.
        """
        if self._modulus >= _MOST_SLICES or not self._parts or len(self._parts[0].has) <= 1:
            return None
        dropped = 2 * self._modulus, self._residue + self._modulus
        self._modulus *= 2
        self._set(_in_slice(self._parts[0], self._modulus, self._residue))
        return dropped

    def to_update(self) -> Update | None:
        """Return what brings these keys and columns back; None if there is nothing to bring."""
        self.reduce()
        if not self._parts or not len(self._parts[0].has):
            return None
        return _to_update(self._parts[0], self._columns, self._schema, self._codec)

    def _set(self, images: _Images) -> None:
        self._parts = [images]
        self.nbytes = images.nbytes


def undo_updates(
    read_log: Callable[[], Iterable[Segment]],
    debtor: str,
    columns: Sequence[Column],
    schema: Schema,
    *,
    max_bytes: int,
) -> Iterator[Update]:
    """Yield updates that together bring the debtor's columns back to where the range begins.

    `read_log` gives the segments of the range, anew for every pass. Each update is for keys of its
    own; a range without changes of the debtor yields nothing.
    """
    slices = [(1, 0)]
    while slices:
        modulus, residue = slices.pop()
        images = FirstImages(columns, schema, modulus=modulus, residue=residue)
        for segment in read_log():
            if segment.header.owner != debtor:
                continue
            images.add(segment)
            if images.nbytes > max_bytes:
                images.reduce()
            while images.nbytes > max_bytes and (dropped := images.halve()) is not None:
                slices.append(dropped)
        update = images.to_update()
        if update is not None:
            yield update


def _images_of(segment: Segment, columns: Sequence[Column], schema: Schema) -> _Images:
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
    images = _Images(keys, has, touched, states)
    return images if has.any(axis=1).all() else images.take(np.flatnonzero(has.any(axis=1)))


def _in_slice(images: _Images, modulus: int, residue: int) -> _Images:
    if modulus == 1:
        return images
    hashes = spark_xxhash64(images.keys).view(np.uint64) >> np.uint64(_SLICE_SHIFT)
    return images.take(np.flatnonzero(hashes % np.uint64(modulus) == residue))


def _concat(parts: Sequence[_Images]) -> _Images:
    """Put images, older ones first, one behind the other."""
    if len(parts) == 1:
        return parts[0]
    return _Images(
        [pa.concat_arrays(arrays) for arrays in zip(*(part.keys for part in parts), strict=True)],
        np.concatenate([part.has for part in parts]),
        np.concatenate([part.touched for part in parts]),
        [pa.concat_arrays(arrays) for arrays in zip(*(part.states for part in parts), strict=True)],
    )


def _first_images(images: _Images, codec: KeyCodec) -> _Images:
    """Reduce to one row per key, in key order: for each column the oldest image it has."""
    if not len(images.has):
        return images
    groups = group_by_key(codec.encode(images.keys))
    first = groups.first_rows
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
    return _Images([array.take(pa.array(first)) for array in images.keys], has, touched, states)


def _to_update(
    images: _Images, columns: Sequence[Column], schema: Schema, codec: KeyCodec
) -> Update:
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
        rows=len(images.has),
    )
