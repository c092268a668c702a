"""Finds the slots of keys by 64-bit numbers: open addressing, a whole batch at a time.

The table has a slot per place, or -1. A number begins at a place that it says, and goes on to the
next one as long as others are there. So a batch takes a few passes, each over those that are left.
Nothing is ever taken out: an index goes with its block.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from merge_engine.working_set.key_ids import Ids

Slots = npt.NDArray[np.intp]
SameKeys = Callable[[Slots, Slots], npt.NDArray[np.bool_]]
"""Tells which slots have the very keys of these rows of the batch."""

ABSENT = -1
_FIRST_BITS = 10
# The part of the table that may be taken.
_LOAD = 0.5
_SPREAD_NUMBER = 0x9E3779B97F4A7C15
_SPREAD = np.uint64(_SPREAD_NUMBER)
_LOW_64 = (1 << 64) - 1
_FEW = 64


class Index:
    """Slots by number. Slot i has the number `ids[i]`, in an array that the owner keeps."""

    def __init__(self, capacity: int = 0) -> None:
        """`capacity`: room for so many slots; it grows."""
        self._make(_bits_for(capacity))

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self._table.nbytes

    def find(self, wanted: Ids, ids: Ids, same_keys: SameKeys | None = None) -> Slots:
        """Return the slot of each number, or ABSENT.

        `same_keys`: where a number may be that of several keys, this decides.
        """
        if len(wanted) <= _FEW and same_keys is None:
            return self._find_few(wanted, ids)
        if same_keys is not None:  # Nearly always, the numbers alone are right.
            slots = self.find(wanted, ids)
            found = np.flatnonzero(slots != ABSENT)
            if same_keys(slots[found], found).all():
                return slots
        places = self._first_places(wanted)
        slots = self._table.take(places).astype(np.intp)
        rows = self._going_on(np.arange(len(wanted)), slots, wanted, ids, same_keys)
        places = places[rows]
        while len(rows):
            places = (places + 1) & self._mask
            slots[rows] = self._table.take(places)
            left = self._going_on(rows, slots[rows], wanted, ids, same_keys)
            if len(left) < len(rows):
                places = places[np.searchsorted(rows, left)]
            rows = left
        return slots

    def _find_few(self, wanted: Ids, ids: Ids) -> Slots:
        """The same one by one: for a look-up of few keys, NumPy's calls cost more than they do."""
        table, shift, mask = self._table.item, 64 - self._bits, self._mask
        slots = []
        for number in wanted.tolist():
            place = (number * _SPREAD_NUMBER & _LOW_64) >> shift
            while (slot := table(place)) != ABSENT and ids.item(slot) != number:
                place = (place + 1) & mask
            slots.append(slot)
        return np.array(slots, np.intp)

    def _going_on(
        self, rows: Slots, slots: Slots, wanted: Ids, ids: Ids, same_keys: SameKeys | None
    ) -> Slots:
        """Return the rows that have met a slot that is not theirs."""
        taken = slots != ABSENT
        theirs = ids.take(slots) == wanted.take(rows)  # That of ABSENT is anything.
        theirs &= taken
        if same_keys is not None and theirs.any():
            found = np.flatnonzero(theirs)
            theirs[found] = same_keys(slots[found], rows[found])
        left: Slots = rows[taken & ~theirs]
        return left

    def insert(self, ids: Ids, first: int, count: int) -> None:
        """Take in the slots from `first` on, `count` of them, whose keys are not there yet."""
        end = first + count
        bits = _bits_for(end)
        if bits > self._bits:
            self._make(bits)
            first = 0
        slots = np.arange(first, end, dtype=np.int32)
        places = self._first_places(ids[first:end])
        while len(slots):
            free = self._table.take(places) == ABSENT
            self._table[places[free]] = slots[free]
            # Where several wanted one place, the last has it.
            left = self._table.take(places) != slots
            slots, places = slots[left], (places[left] + 1) & self._mask

    def _make(self, bits: int) -> None:
        self._bits, self._mask = bits, (1 << bits) - 1
        self._shift = np.uint64(64 - bits)
        self._table = np.full(1 << bits, ABSENT, np.int32)

    def _first_places(self, ids: Ids) -> Slots:
        return ((ids * _SPREAD) >> self._shift).astype(np.intp)


def _bits_for(slots: int) -> int:
    """Return of how many bits the places are in a table for so many slots."""
    bits = _FIRST_BITS
    while slots > _LOAD * (1 << bits):
        bits += 1
    return bits
