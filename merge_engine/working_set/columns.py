"""The states of one column, by slot.

Of a fixed width, they are records in an array, changed in place. Otherwise they are encoded, one
after the other in a buffer that only grows: a change appends, and the slot points there from then
on. When more than half of the buffer is out of use, what is in use moves to a new one.

What is written is prepared before: `write` itself cannot fail for what is in the states.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from merge_engine.encoding import ragged
from merge_engine.encoding.codec import (
    Records,
    decode,
    encode,
    fixed_width,
    from_records,
    record_type,
    to_records,
)
from merge_engine.encoding.ragged import Bytes, Flags
from merge_engine.working_set.index import Slots

# Buffers with less than this out of use are left alone.
_MUCH = 1 << 20
# Up to so many values are read sooner one by one: Arrow's `take` and `cast` are slow to begin.
_FEW = 64
# The types whose values are their own bytes.
_AS_IT_IS = (pa.string(), pa.binary())


class Prepared(NamedTuple):
    """States that are ready to be written: records, or encoded values; and which are not null."""

    values: Records | pa.BinaryArray
    valid: Flags | None

    def take(self, rows: Slots) -> "Prepared":
        """Return the states of some of the rows."""
        index = rows if isinstance(self.values, np.ndarray) else pa.array(rows)
        valid = None if self.valid is None else self.valid.take(rows)
        return Prepared(self.values.take(index), valid)


class Column(Protocol):
    """The states of one column, by slot; null where none was written."""

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""

    def read(self, slots: Slots) -> pa.Array:
        """Return the states of these slots."""

    def copy(self, slots: Slots) -> Callable[[], pa.Array]:
        """Return what `read` returns now, to be made when it is called, whatever changes since."""

    def write(self, slots: Slots, states: Prepared) -> None:
        """Set the states of these slots, which are all different."""

    def grow(self, capacity: int) -> None:
        """Have room for so many slots."""


def make_column(data_type: pa.DataType, capacity: int) -> Column:
    """Return a column for states of this type, all null."""
    kind = VariableColumn if fixed_width(data_type) is None else FixedColumn
    return kind(data_type, capacity)


def prepare(states: pa.Array, touched: Flags) -> Prepared:
    """Get states ready to be written; those that are not touched are null."""
    states = ragged.only_where(touched, states)
    make: Callable[[pa.Array], Any] = encode if fixed_width(states.type) is None else to_records
    return Prepared(make(states), ragged.validity(states))


class FixedColumn:
    """States of a fixed width."""

    def __init__(self, data_type: pa.DataType, capacity: int) -> None:
        self._type = data_type
        self._records: Records = np.zeros(capacity, record_type(data_type))
        self._valid = np.zeros(capacity, bool)

    @property
    def nbytes(self) -> int:
        return self._records.nbytes + self._valid.nbytes

    def read(self, slots: Slots) -> pa.Array:
        return self.copy(slots)()

    def copy(self, slots: Slots) -> Callable[[], pa.Array]:
        records, valid = self._records.take(slots), self._valid.take(slots)
        return lambda: from_records(records, self._type, None if ragged.all_set(valid) else valid)

    def write(self, slots: Slots, states: Prepared) -> None:
        self._records[slots] = states.values
        self._valid[slots] = True if states.valid is None else states.valid

    def grow(self, capacity: int) -> None:
        self._records = grown(self._records, capacity)
        self._valid = grown(self._valid, capacity)


class VariableColumn:
    """States of any other type, each as the bytes that `codec.encode` makes of it."""

    def __init__(self, data_type: pa.DataType, capacity: int) -> None:
        self._type = data_type
        self._valid = np.zeros(capacity, bool)
        # The value of slot i is that between the bounds `_entries[i]` and the next one. The first
        # of them is empty: that of all slots that were never written.
        self._entries = np.zeros(capacity, np.int64)
        self._bounds = np.zeros(2, np.int64)
        self._bytes: Bytes = np.zeros(0, np.uint8)
        self._count = 1
        self._in_use = 0

    @property
    def nbytes(self) -> int:
        own = self._valid.nbytes + self._entries.nbytes
        return own + self._bounds.nbytes + self._bytes.nbytes

    def read(self, slots: Slots) -> pa.Array:
        return self.copy(slots)()

    def copy(self, slots: Slots) -> Callable[[], pa.Array]:
        if len(slots) <= _FEW and self._type in _AS_IT_IS:
            few = self._few(slots)
            return lambda: pa.array(few, self._type)
        values = self.encoded(slots)
        return lambda: decode(values, self._type)

    def encoded(self, slots: Slots) -> pa.BinaryArray:
        """Return the states as they are kept; ColumnTooLarge for more than Arrow can hold."""
        if len(slots) <= _FEW:
            return pa.array(self._few(slots), pa.binary())
        entries = self._entries.take(slots)
        sizes = self._bounds.take(entries + 1) - self._bounds.take(entries)
        ragged.offsets_of(sizes)
        values = self._all().take(pa.array(entries)).cast(pa.binary())
        valid = self._valid.take(slots)
        return values if valid.all() else ragged.with_validity(values, valid)

    def _few(self, slots: Slots) -> list[bytes | None]:
        """The same value by value."""
        values: list[bytes | None] = []
        for slot in slots.tolist():
            entry = self._entries.item(slot)
            begin, end = self._bounds.item(entry), self._bounds.item(entry + 1)
            there = self._valid.item(slot)
            values.append(self._bytes[begin:end].tobytes() if there else None)
        return values

    def write(self, slots: Slots, states: Prepared) -> None:
        old = self._entries.take(slots)
        self._in_use -= int((self._bounds.take(old + 1) - self._bounds.take(old)).sum())
        self._entries[slots] = self._append(states.values)
        self._valid[slots] = True if states.valid is None else states.valid
        self._tidy_up()

    def grow(self, capacity: int) -> None:
        self._entries = grown(self._entries, capacity)
        self._valid = grown(self._valid, capacity)

    def _append(self, values: pa.BinaryArray) -> npt.NDArray[np.int64]:
        """Put values at the end; return their entries."""
        count, size = len(values), int(self._bounds[self._count])
        added = ragged.data(values)
        needed = size + len(added)
        if needed > len(self._bytes):  # Twice that; less, if it will be tidied up before.
            enough = min(2 * needed, self._room(len(added)))
            self._bytes = grown(self._bytes, max(enough, needed))
        if self._count + count >= len(self._bounds):
            self._bounds = grown(self._bounds, 2 * (self._count + count) + 1)
        self._bytes[size : size + len(added)] = added
        ends = np.cumsum(ragged.lengths(values), dtype=np.int64)
        self._bounds[self._count + 1 : self._count + 1 + count] = ends + size
        entries = np.arange(self._count, self._count + count)
        self._count += count
        self._in_use += len(added)
        return entries

    def _room(self, added: int = 0) -> int:
        """Return about how long the buffer is, with so many more bytes in use, when it is tidied
        up: one as long as that need not grow before."""
        return 2 * (self._in_use + added) + self._entries.nbytes + _MUCH

    def _tidy_up(self) -> None:
        """Drop what is out of use, if it is most of what there is."""
        size = int(self._bounds[self._count])
        spare = max(self._count - len(self._entries), 0) * self._bounds.itemsize
        if size + spare <= self._room():
            return
        kept = self._all().take(pa.array(self._entries))
        _, bounds, data = kept.buffers()
        ends = np.frombuffer(bounds, np.int64, len(kept) + 1, kept.offset * 8)
        used = int(ends[-1])
        values = np.frombuffer(data, np.uint8, used) if used else np.zeros(0, np.uint8)
        self._bytes = _refilled(self._bytes, values, self._room())
        self._bounds = _refilled(self._bounds, np.concatenate([[0], ends]), 3 * len(kept))
        self._entries = np.arange(1, len(kept) + 1)
        self._count, self._in_use = len(kept) + 1, used

    def _all(self) -> pa.LargeBinaryArray:
        buffers = [None, pa.py_buffer(self._bounds), pa.py_buffer(self._bytes)]
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), self._count, buffers)


def _refilled(array: npt.NDArray[Any], values: npt.NDArray[Any], room: int) -> npt.NDArray[Any]:
    """Return an array that begins with the values: one with so much room, or that which there is,
    if it is not much longer. To touch new memory takes longer than to copy."""
    room = max(room, len(values))
    if not len(values) <= len(array) <= 2 * room:
        array = np.empty(room, array.dtype)
    array[: len(values)] = values
    return array


def grown(array: npt.NDArray[Any], capacity: int) -> npt.NDArray[Any]:
    """Return the array with room for more: zeros at its end."""
    result = np.zeros((capacity, *array.shape[1:]), array.dtype)
    result[: len(array)] = array
    return result
