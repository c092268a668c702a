"""The rows of one bucket that are in memory, in blocks.

Rows come into the newest block, until it is full, and change in place, wherever they are. When the
memory is needed for others, the oldest block *retires*: nothing changes there any more, rows that
are to change move to the newest one first, and as soon as all of it is written elsewhere it is
dropped as a whole. So what is in use stays. A key is in one block, besides those that retire; the
newer one counts.

One call at a time changes something; look-ups run beside it, and see each row whole.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from merge_engine.encoding.key_hashes import Hashes
from merge_engine.encoding.ragged import Flags, all_set
from merge_engine.encoding.stored_rows import SchemaHistory, StoredRows, concatenated, state_types
from merge_engine.working_set.block import Block, Keys, PreparedRows, RowsCopy, is_exact
from merge_engine.working_set.index import ABSENT, Slots


@dataclass(frozen=True)
class Place:
    """Rows of a batch that are in one block: `rows` in the batch, and their slots."""

    block: Block
    rows: Slots
    slots: Slots


class NewRows(NamedTuple):
    """Rows of a batch that are in no block before they are written: which, and their keys."""

    rows: Slots
    keys: Keys


@dataclass(frozen=True)
class Located:
    """Where the rows of a batch are; valid until another call changes the working set.

    `new`: those that come in as they are written, all of their columns, and not before: whoever
    looks up beside a change would find a row without values, in place of the one that is stored.
    """

    size: int
    places: Sequence[Place]
    new: NewRows | None = None

    @property
    def found(self) -> Slots:
        """The rows of the batch that are in memory, place by place."""
        if len(self.places) == 1:
            return self.places[0].rows
        return np.concatenate([np.zeros(0, np.intp), *(place.rows for place in self.places)])

    def missing(self) -> Slots:
        """Return the rows of the batch that are not in memory."""
        found = np.zeros(self.size, bool)
        found[self.found] = True
        return np.flatnonzero(~found)

    def read(self, positions: Iterable[int]) -> StoredRows:
        """Return the columns at these positions, of the rows `found`, in that order."""
        chosen = list(positions)
        parts = [place.block.read(place.slots, chosen) for place in self.places]
        return parts[0] if len(parts) == 1 else concatenated(parts)

    def only(self, chosen: Flags) -> "Located":
        """Return where the chosen rows are; they are numbered anew."""
        if chosen.all():
            return self
        number = np.cumsum(chosen) - 1
        places = []
        for place in self.places:
            kept = chosen.take(place.rows)
            if kept.any():
                rows = number.take(place.rows[kept])
                places.append(Place(place.block, rows, place.slots[kept]))
        return Located(int(number[-1]) + 1, places)


NOWHERE = Located(0, ())


BlockSlots = Sequence[tuple[Block, Slots]]
"""Slots in blocks."""


class DirtyRows(NamedTuple):
    """Rows that are to be written: a copy of them, block by block."""

    blocks: Sequence[Block]
    copies: Sequence[RowsCopy]

    @property
    def slots(self) -> BlockSlots:
        """Where they are."""
        return [(block, copy.slots) for block, copy in zip(self.blocks, self.copies, strict=True)]

    def rows(self) -> tuple[pa.BinaryArray, StoredRows] | None:
        """Return the keys, and whole rows; None if there are none."""
        if not self.copies:
            return None
        keys = pa.concat_arrays([copy.keys.encoded for copy in self.copies])
        return keys, concatenated([copy.rows() for copy in self.copies])


class WorkingSet:
    """Rows of the bucket under its newest schema, by encoded key."""

    def __init__(self, history: SchemaHistory, block_bytes: int) -> None:
        """`block_bytes`: when a block has reached this size, the next one begins."""
        self.history = history
        self._block_bytes = block_bytes
        self._exact = is_exact(history.key_codec.width)
        self._blocks: list[Block] = []
        # For whoever reads beside a change, or changes what is read.
        self.lock = threading.Lock()
        self.nbytes = 0
        self.retiring_bytes = 0

    def __len__(self) -> int:
        return sum(len(block) for block in self._blocks if not block.retiring)

    def rows_there(self, others: Sequence[bytes] = ()) -> int:
        """Return how many rows there are: those that are here and have something, and `others`.

        `others`: encoded keys of rows that are elsewhere; where one is here, too, this counts.
        """
        with self.lock:
            here = [block for block in self._blocks if not block.retiring]
            places = self.locate(self.keys(pa.array(others, pa.binary()))).places if others else ()
            known = sum(len(place.rows) for place in places if not place.block.retiring)
            return sum(block.rows_there() for block in here) + len(others) - known

    def keys(self, encoded: pa.BinaryArray, hashes: Hashes | None = None) -> Keys:
        """Return encoded keys with their numbers; `hashes`: of the keys, if they are known."""
        if self._exact or hashes is None:
            return Keys.of(encoded, exact=self._exact)
        return Keys(hashes, encoded)

    def keys_of(self, columns: Sequence[pa.Array]) -> Keys:
        """Return keys, given as columns, with their numbers."""
        codec = self.history.key_codec
        ids = codec.numbers(columns)
        return self.keys(codec.encode(columns)) if ids is None else Keys(ids, None)

    def locate(self, keys: Keys) -> Located:
        """Return where these rows are, as far as they are here. Beside a change: under the lock."""
        places = []
        rows, left = np.arange(len(keys)), keys
        for block in reversed(self._blocks):
            slots = block.find(left)
            here = slots != ABSENT
            if all_set(here):
                places.append(Place(block, rows, slots))
                break
            if here.any():
                places.append(Place(block, rows[here], slots[here]))
                rest = np.flatnonzero(~here)
                rows, left = rows[rest], left.take(rest)
        return Located(len(keys), places)

    def unretired(self, keys: Keys, located: Located) -> Located:
        """Return where these rows are, once those in blocks that retire have moved."""
        places = []
        for place in located.places:
            if place.block.retiring:
                rows = place.block.read(place.slots, range(len(self.history.position)))
                moved = self.insert(keys.take(place.rows), rows)
                moved.block.mark_dirty(moved.slots[place.block.leave(place.slots)])
                places.append(Place(moved.block, place.rows, moved.slots))
            else:
                places.append(place)
        return Located(located.size, places)

    def insert(self, keys: Keys, rows: StoredRows | None) -> Place:
        """Take in clean rows that are not here; None: nothing is touched in any of them."""
        with self.lock:
            block = self._block_for(len(keys))
            place = Place(block, np.arange(len(keys)), block.insert(keys, rows))
            self._count()
            return place

    def _block_for(self, rows: int) -> Block:
        """Return the block that takes new rows in.

        After one that is full comes one with as much room: to grow as it is filled would move all
        rows, again and again, while somebody waits.
        """
        newest = self._blocks[-1] if self._blocks else None
        if newest is not None and not newest.retiring and newest.takes(rows, self._block_bytes):
            return newest
        types = state_types(self.history.current)
        if newest is None or newest.retiring:
            block = Block(types, exact=self._exact)
        else:
            block = Block(types, exact=self._exact, capacity=newest.capacity)
        self._blocks.append(block)
        return block

    def write(self, located: Located, rows: PreparedRows) -> None:
        """Change rows that are here; of those that are new, all columns."""
        with self.lock:
            for place in located.places:
                whole = len(place.rows) == located.size
                place.block.write(place.slots, rows if whole else rows.take(place.rows))
            if located.new is not None:
                at, keys = located.new
                block = self._block_for(len(at))
                slots = block.insert(keys, None)
                block.write(slots, rows if len(at) == located.size else rows.take(at))
            self._count()

    def copy_dirty(self) -> "DirtyRows":
        """Return all that is dirty, to be written elsewhere.

        Once it is said to be `taken`, `written` or `not_written` is called before the next time.
        """
        dirty = [block for block in self._blocks if block.dirty_rows]
        return DirtyRows(dirty, [block.copy_dirty() for block in dirty])

    def taken(self, slots: BlockSlots) -> None:
        """These rows, all that are dirty, are being written."""
        for block, _ in slots:
            block.taken()

    def written(self, slots: BlockSlots) -> None:
        """These rows are elsewhere by now."""
        for block, _ in slots:
            block.written()

    def not_written(self, slots: BlockSlots) -> None:
        """These rows are not elsewhere: they are dirty again, where they have moved to last.

        The copies that they have left behind are older, and must not be written after it.
        """
        for block, some in slots:
            newer = self._blocks[self._blocks.index(block) + 1 :] if block.retiring else []
            left = some
            for other in reversed(newer):
                there = other.find(block.keys(left))
                other.mark_dirty(there[there != ABSENT])
                left = left[there == ABSENT]
            block.not_written(left)

    def evolve(self, history: SchemaHistory) -> None:
        """Go on under another schema."""
        with self.lock:
            for block in self._blocks:
                block.evolve(state_types(history.current))
            self.history = history
            self._count()

    @property
    def dirty_bytes(self) -> int:
        """About how much memory the dirty rows take."""
        return sum(block.dirty_bytes for block in self._blocks if block.dirty_rows)

    @property
    def dirty_rows(self) -> int:
        """How many rows are dirty."""
        return sum(block.dirty_rows for block in self._blocks)

    def retire_oldest(self) -> int:
        """Let the oldest block go, none of which is dirty; return its size, 0 if there is none."""
        for block in self._blocks:
            if not block.retiring:
                block.retiring = True
                self._count()
                return block.nbytes
        return 0

    def drop_retired(self) -> None:
        """Drop the blocks that have retired, as far as all of them is elsewhere."""
        gone = [block for block in self._blocks if block.retiring and block.may_be_dropped]
        with self.lock:
            self._blocks = [block for block in self._blocks if block not in gone]
            self._count()

    def _count(self) -> None:
        self.nbytes = sum(block.nbytes for block in self._blocks)
        self.retiring_bytes = sum(block.nbytes for block in self._blocks if block.retiring)
