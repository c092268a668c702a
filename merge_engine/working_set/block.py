"""Some rows of a working set: keys, touched bits, states, and which of them are dirty.

A row keeps its slot as long as the block lives. Rows only come: a block goes as a whole, once
all of it was written elsewhere.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merge_engine.encoding.ragged import Flags
from merge_engine.encoding.stored_rows import StoredRows
from merge_engine.working_set.columns import (
    Column,
    Prepared,
    VariableColumn,
    grown,
    make_column,
    prepare,
)
from merge_engine.working_set.index import Index, Slots
from merge_engine.working_set.key_ids import EXACT_WIDTH, Ids, key_ids, keys_of

_FIRST_CAPACITY = 256
StateTypes = Mapping[int, pa.DataType]
"""The types of the states, by column id, in the order of the schema."""


class Keys:
    """Encoded keys, and their numbers in the index."""

    def __init__(self, ids: Ids, encoded: pa.BinaryArray | None) -> None:
        """`encoded`: None where the numbers say it all."""
        self.ids = ids
        self._encoded = encoded

    @classmethod
    def of(cls, encoded: pa.BinaryArray, *, exact: bool) -> "Keys":
        """`exact`: they are keys of 8 bytes."""
        return cls(key_ids(encoded, exact=exact), None if exact else encoded)

    @property
    def encoded(self) -> pa.BinaryArray:
        """The keys as bytes."""
        return keys_of(self.ids) if self._encoded is None else self._encoded

    def take(self, rows: Slots) -> "Keys":
        """Return the keys of these rows."""
        encoded = None if self._encoded is None else self._encoded.take(pa.array(rows))
        return Keys(self.ids.take(rows), encoded)

    def __len__(self) -> int:
        return len(self.ids)


class PreparedRows(NamedTuple):
    """Some columns of rows, ready to be written."""

    positions: Sequence[int]
    touched: Flags
    states: Sequence[Prepared]

    def take(self, rows: Slots) -> "PreparedRows":
        """Return some of the rows."""
        states = [state.take(rows) for state in self.states]
        return PreparedRows(self.positions, self.touched.take(rows, axis=0), states)


NOTHING = PreparedRows((), np.zeros((0, 0), bool), ())


def prepare_rows(positions: Sequence[int], rows: StoredRows) -> PreparedRows:
    """Get rows ready that have the columns at these positions of the schema."""
    flags = rows.touched
    states = [prepare(state, flags[:, j]) for j, state in enumerate(rows.states)]
    return PreparedRows(positions, flags, states)


class RowsCopy(NamedTuple):
    """Rows as they were in their slots. To copy is quick; to make rows of it can wait."""

    slots: Slots
    keys: Keys
    touched: Flags
    states: Sequence[Callable[[], pa.Array]]

    def rows(self) -> StoredRows:
        """Return the rows."""
        return StoredRows(self.touched, [state() for state in self.states])


class Block:
    """Rows by slot."""

    def __init__(self, types: StateTypes, *, exact: bool, capacity: int = _FIRST_CAPACITY) -> None:
        """`exact`: all keys are 8 bytes long. `capacity`: room for so many rows; it grows."""
        self._index = Index(capacity)
        self._ids: Ids = np.zeros(capacity, np.uint64)
        self._keys = None if exact else VariableColumn(pa.binary(), capacity)
        self._column_ids = tuple(types)
        self._columns: list[Column] = [make_column(one, capacity) for one in types.values()]
        self._touched = np.zeros((capacity, len(types)), bool)
        self._dirty = np.zeros(capacity, bool)
        self.dirty_rows = 0
        self.retiring = False
        self._being_written = False
        self._count = 0
        self.nbytes = 0
        self._measure()

    def __len__(self) -> int:
        return self._count

    def rows_there(self) -> int:
        """Return how many rows have something: not those that were deleted, or never written."""
        return int(np.count_nonzero(self._touched[: self._count].any(axis=1)))

    @property
    def capacity(self) -> int:
        """How many rows it has room for."""
        return len(self._ids)

    def takes(self, rows: int, max_bytes: int) -> bool:
        """Whether so many new rows may come here, if a block is to stay below this size."""
        if self._count + rows <= self.capacity:
            return self.nbytes < max_bytes
        return 2 * self.nbytes <= max_bytes

    def find(self, keys: Keys) -> Slots:
        """Return the slots of the keys, or ABSENT."""
        if self._keys is None:
            return self._index.find(keys.ids, self._ids)
        stored = self._keys

        def same_keys(slots: Slots, rows: Slots) -> Flags:
            wanted = keys.encoded if len(rows) == len(keys) else keys.encoded.take(pa.array(rows))
            equal = pc.equal(stored.encoded(slots), wanted)
            flags: Flags = equal.to_numpy(zero_copy_only=False)
            return flags

        return self._index.find(keys.ids, self._ids, same_keys)

    def keys(self, slots: Slots) -> Keys:
        """Return the keys of these slots."""
        stored = self._keys
        return Keys(self._ids.take(slots), None if stored is None else stored.encoded(slots))

    def insert(self, keys: Keys, rows: StoredRows | None) -> Slots:
        """Take in clean rows that are not there yet; None: nothing is touched in any of them."""
        first, count = self._count, len(keys)
        end = first + count
        if end > len(self._ids):
            self._grow(max(end, 2 * len(self._ids)))
        slots = np.arange(first, end)
        self._ids[first:end] = keys.ids
        if self._keys is not None:
            self._keys.write(slots, Prepared(keys.encoded, None))
        if rows is not None:
            self._write(slots, prepare_rows(range(len(self._columns)), rows))
        self._index.insert(self._ids, first, count)
        self._count = end
        self._measure()
        return slots

    def read(self, slots: Slots, positions: Iterable[int]) -> StoredRows:
        """Return the columns at these positions of the schema."""
        chosen = list(positions)
        touched = self._touched.take(slots, axis=0)
        if chosen != list(range(len(self._columns))):
            touched = touched[:, chosen]
        return StoredRows(touched, [self._columns[at].read(slots) for at in chosen])

    def write(self, slots: Slots, rows: PreparedRows) -> None:
        """Change columns of rows, which are dirty from then on."""
        self._write(slots, rows)
        self.dirty_rows += len(slots) - int(np.count_nonzero(self._dirty.take(slots)))
        self._dirty[slots] = True
        self._measure()

    def _write(self, slots: Slots, rows: PreparedRows) -> None:
        for j, position in enumerate(rows.positions):
            self._touched[slots, position] = rows.touched[:, j]
            self._columns[position].write(slots, rows.states[j])

    def copy_dirty(self) -> "RowsCopy":
        """Return all that is dirty."""
        slots = np.flatnonzero(self._dirty[: self._count])
        states = [column.copy(slots) for column in self._columns]
        return RowsCopy(slots, self.keys(slots), self._touched.take(slots, axis=0), states)

    def taken(self) -> None:
        """What is dirty is being written. The block stays until `written` or `not_written`."""
        self._being_written = True
        self._dirty[:] = False
        self.dirty_rows = 0

    def written(self) -> None:
        """What was being written is."""
        self._being_written = False

    def not_written(self, slots: Slots) -> None:
        """What was being written is not: these rows are dirty."""
        self.mark_dirty(slots)
        self._being_written = False

    def mark_dirty(self, slots: Slots) -> None:
        """Have these rows written with the next ones."""
        self._dirty[slots] = True
        self.dirty_rows = int(np.count_nonzero(self._dirty))

    def leave(self, slots: Slots) -> Slots:
        """Rows move to another block: return the positions of those that are dirty, there now."""
        dirty = np.flatnonzero(self._dirty.take(slots))
        self._dirty[slots] = False
        self.dirty_rows = int(np.count_nonzero(self._dirty))
        return dirty

    @property
    def may_be_dropped(self) -> bool:
        """Whether all that is here is elsewhere, too."""
        return not self.dirty_rows and not self._being_written

    @property
    def dirty_bytes(self) -> int:
        """About how much memory the dirty rows take."""
        return self.dirty_rows * -(-self.nbytes // len(self._ids))

    def evolve(self, types: StateTypes) -> None:
        """Go on with other columns: those that are new are untouched in all rows."""
        known = {column: at for at, column in enumerate(self._column_ids)}
        touched = np.zeros((len(self._ids), len(types)), bool)
        columns = []
        for position, (column, data_type) in enumerate(types.items()):
            if column in known:
                touched[:, position] = self._touched[:, known[column]]
                columns.append(self._columns[known[column]])
            else:
                columns.append(make_column(data_type, len(self._ids)))
        self._column_ids, self._columns, self._touched = tuple(types), columns, touched
        self._measure()

    def _grow(self, capacity: int) -> None:
        self._ids = grown(self._ids, capacity)
        self._touched = grown(self._touched, capacity)
        self._dirty = grown(self._dirty, capacity)
        for column in self._columns:
            column.grow(capacity)
        if self._keys is not None:
            self._keys.grow(capacity)

    def _measure(self) -> None:
        columns = self._columns if self._keys is None else [*self._columns, self._keys]
        own = self._index.nbytes + self._ids.nbytes + self._touched.nbytes + self._dirty.nbytes
        self.nbytes = own + sum(column.nbytes for column in columns)


def is_exact(width: int | None) -> bool:
    """Tell whether keys of this width (None: of several) are their own numbers."""
    return width == EXACT_WIDTH
