"""Sketches that still hold each of their hashes, of many rows at once.

As long as few values were seen, a sketch is a head of a few words and hashes in ascending order,
and the union of two is the union of their hashes. Most rows of most tables never see more. So these
are read, united and written by whole columns; the library does the others, one by one, and those
of more than a few hashes.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from merge_engine.aggregates.arrays import Indices
from merge_engine.encoding import ragged
from merge_engine.encoding.ragged import Flags

Words = npt.NDArray[np.unsignedinteger[Any]]

# Of more hashes, a column of sketches would take much memory while it is sorted, and the library is
# about as fast.
MANY = 64


@dataclass(frozen=True)
class HashSets:
    """The sets of some rows: `lengths` of them, and their hashes, set after set, each ascending."""

    hashes: Words
    lengths: Indices

    @classmethod
    def of(cls, rows: Indices, hashes: Words, count: int) -> "HashSets":
        """Return the sets of `count` rows; of each hash, the row it belongs to, in any order."""
        if hashes.dtype.itemsize == 4:
            both = np.sort(rows.astype(np.uint64) << np.uint64(32) | hashes)
            both = both[_is_first(both)]
            rows, hashes = (both >> np.uint64(32)).view(np.int64), both.astype(hashes.dtype)
        else:
            order = np.lexsort((hashes, rows))
            rows, hashes = rows[order], hashes[order]
            first = _is_first(rows) | _is_first(hashes)
            rows, hashes = rows[first], hashes[first]
        return cls(hashes, np.bincount(rows, minlength=count))

    def rows_of_hashes(self) -> Indices:
        """Return, for each hash, the number of its row."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def take(self, rows: Indices) -> "HashSets":
        """Return the sets of some rows."""
        starts = np.cumsum(self.lengths) - self.lengths
        lengths = self.lengths[rows]
        return HashSets(self.hashes[ragged.ranges(starts[rows], lengths)], lengths)

    def parts(self, row: int, most: int) -> "HashSets":
        """Return the set of one row as several, of at most so many hashes each."""
        whole = self.take(np.array([row]))
        full, rest = divmod(len(whole.hashes), most)
        return HashSets(whole.hashes, np.array([most] * full + [rest] * bool(rest), np.int64))


class SmallForm(ABC):
    """How the bytes of such sketches look: a head, and the hashes, all in words of one size.

    `most`: how many hashes one may hold; each is less than `below`. The size of a sketch tells how
    many it has. Heads differ in size by one word at most.
    """

    word: ClassVar[type[np.unsignedinteger[Any]]]
    below: ClassVar[int]
    most: int

    @abstractmethod
    def heads(self, counts: Indices) -> tuple[Words, Indices]:
        """Return the heads of sketches of so many hashes, a row for each, and their lengths.

        That of none may be anything.
        """

    @abstractmethod
    def count(self, sizes: Indices) -> Indices:
        """Return how many hashes sketches of so many words have, if they are of this form."""

    def _heads(self, counts: Indices) -> tuple[Words, Indices]:
        """Do the same as `heads`, each of them once: most counts are small, and come often."""
        most = int(counts.max(initial=0))
        if most > len(counts):
            return self.heads(counts)
        heads, sizes = self.heads(np.arange(most + 1))
        return heads.take(counts, axis=0), sizes.take(counts)

    def write(self, sets: HashSets) -> pa.BinaryArray:
        """Return sketches of these sets, none of which is empty or has more than `most`."""
        heads, head_sizes = self._heads(sets.lengths)
        sizes = head_sizes + sets.lengths
        starts = np.cumsum(sizes) - sizes
        words = np.empty(int(sizes.sum()), self.word)
        for column in range(heads.shape[1]):  # Where a head is shorter, a hash comes there next.
            words[starts + column] = heads[:, column]
        words[ragged.ranges(starts + head_sizes, sets.lengths)] = sets.hashes
        bounds = ragged.offsets_of(sizes * words.itemsize)
        return ragged.over(bounds, words.view(np.uint8))

    def read(self, states: pa.BinaryArray) -> tuple[HashSets, Flags]:
        """Return the sets of sketches without nulls, and which of them are to be read here.

        Those are of this form, in full, with at most `MANY` hashes. The set of another is empty.
        """
        width = np.dtype(self.word).itemsize
        lengths = ragged.lengths(states).astype(np.int64)
        if (lengths % width).any():
            return HashSets(np.zeros(0, self.word), np.zeros_like(lengths)), lengths < 0
        words = ragged.data(states).view(self.word)
        sizes = lengths // width
        starts = np.cumsum(sizes) - sizes
        counts = self.count(sizes)
        fits = (counts > 0) & (counts <= min(self.most, MANY))
        counts = counts * fits
        heads, head_sizes = self._heads(counts)
        for column in range(heads.shape[1]):
            rows = np.flatnonzero(fits & (column < head_sizes))
            fits[rows] = words[starts[rows] + column] == heads[rows, column]
        body = HashSets(words[ragged.ranges(starts + head_sizes, counts)], counts)
        fits &= _are_sound(body, self.below)
        if fits.all():
            return body, fits
        kept = np.repeat(fits, counts)
        return HashSets(body.hashes[kept], counts * fits), fits


def _is_first(values: npt.NDArray[Any]) -> Flags:
    """Return which values differ from the one before."""
    first = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return first


def _are_sound(sets: HashSets, below: int) -> Flags:
    """Return which sets are in ascending order, without a zero, and none of them too high."""
    hashes, rows = sets.hashes, sets.rows_of_hashes()
    wrong = (hashes == 0) | (hashes >= below)
    wrong[1:] |= (hashes[1:] <= hashes[:-1]) & (rows[1:] == rows[:-1])
    result = np.ones(len(sets.lengths), bool)
    result[rows[wrong]] = False
    return result
