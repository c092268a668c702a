"""Pinned rows: all rows of a view as they were at one moment, for as long as a reader needs them.

rocksdict has two iterators that stand still while the database is written, provided that they are
opened before (those of a rocksdict Snapshot show later writes): `items`, which is fast, only goes
forward, and ends at a corrupt block as if the data did; and `iter`, which takes longer, but can be
sent anywhere and knows its status. Both are opened at the pin. Who reads on where `items` stands
has its speed. Everybody else is served by `iter`, up to there; and so is who comes to the end of
`items`: either there is nothing after it, or `iter` says what is wrong.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain, islice

import numpy as np
import pyarrow as pa
from rocksdict import RdictIter

from foundation.errors import Closed
from merge_engine.bucket.database import Database, Items
from merge_engine.bucket.options import MEBIBYTE
from merge_engine.encoding import ragged

# A batch that reaches so many bytes has fewer rows than were asked for. It is looked at every few
# rows, and after very few first: rows may have megabytes.
_ENOUGH_BYTES = 6 * MEBIBYTE
_CHUNK_ROWS, _FIRST_ROWS = 1024, 8

Batch = tuple[pa.BinaryArray, pa.BinaryArray]
"""Encoded keys, in order, and values."""


class PinnedRows:
    """The rows below one prefix, as of when this was made. Safe for threads.

    It holds the database open, which lets go of it when it is closed itself.
    """

    def __init__(self, database: Database, prefix: bytes, *, owned: bool = False) -> None:
        """Pin what the database holds now.

        `owned`: the database is there for these rows only, and is closed with them.
        """
        self._prefix = prefix
        self._database = database
        self._owned = owned
        self._lock = threading.Lock()
        # No other reference to an iterator may outlive a call: it would keep the database open.
        self._iterator: RdictIter | None = None
        self._items: Items | None = None
        with self._lock:  # It may be let go of as soon as the database knows of it.
            self._iterator, self._items = database.pin(self, prefix)
        self._items_at: bytes | None = None  # The key that `items` gave last.

    def batches(self, after: bytes | None, batch_size: int) -> Iterator[Batch]:
        """Yield the rows after the key `after` (None: all), in key order.

        Batches have `batch_size` rows, or fewer if the rows are large. May be called any number of
        times. Closed, from the next batch on, once the rows were closed.
        """
        while True:
            keys, values = self.read(after, batch_size)
            if not len(keys):
                return
            after = keys[-1].as_py()
            yield keys, values

    def read(self, after: bytes | None, count: int) -> Batch:
        """Return the next rows after a key, at most so many; none if there are no more."""
        with self._lock:
            if self._iterator is None:
                raise Closed("these rows were closed; begin another scan")
            with self._database.inside():
                keys, values = self._read_on(count) if self._stands_at(after) else ([], [])
                if not keys:
                    keys, values = self._read_after(after, count)
        return self._without_prefix(keys), ragged.from_pybytes_list(values)

    def close(self) -> None:
        """Let go of the rows, after the batch that is just being read. Closing twice is fine."""
        self.let_go()
        if self._owned:
            self._database.close()

    def let_go(self) -> None:
        """Do the same, for the database that is being closed."""
        with self._lock:
            self._iterator = self._items = None

    def inherited(self) -> list[object]:
        """Return what must not be destroyed in a forked child."""
        return [self._iterator, self._items]

    def _stands_at(self, key: bytes | None) -> bool:
        return self._items is not None and self._items_at == key

    def _read_on(self, count: int) -> tuple[list[bytes], list[bytes]]:
        """Return the rows where `items` stands. Nothing is done in Python row by row."""
        assert self._items is not None
        found: list[bytes] = []
        size = 0
        while (rows := len(found) // 2) < count and size < _ENOUGH_BYTES:
            enough = (_ENOUGH_BYTES - size) * rows // max(size, 1) + 1 if rows else _FIRST_ROWS
            wanted = min(_CHUNK_ROWS, count - rows, enough)
            more = list(chain.from_iterable(islice(self._items, wanted)))
            found += more
            size += sum(map(len, more[1::2]))
            if len(more) < 2 * wanted:
                self._items = None
                break
        keys, values = found[::2], found[1::2]
        if keys:
            self._items_at = keys[-1][len(self._prefix) :]
        return keys, values

    def _read_after(self, after: bytes | None, count: int) -> tuple[list[bytes], list[bytes]]:
        assert self._iterator is not None
        self._iterator.seek(self._after_key(after))
        keys, values = _read_forward(self._iterator, count)
        self._iterator.status()
        if self._items is not None and self._items_at is not None:
            # A reader who was here before comes up to where `items` stands: it goes on with that.
            met = bisect_left(keys, self._prefix + self._items_at)
            if met < len(keys) and keys[met] == self._prefix + self._items_at:
                keys, values = keys[: met + 1], values[: met + 1]
        return keys, values

    def _after_key(self, key: bytes | None) -> bytes:
        """Return the least key, as it is stored, that is greater than this one."""
        return self._prefix if key is None else self._prefix + key + b"\x00"

    def _without_prefix(self, keys: list[bytes]) -> pa.BinaryArray:
        """Return keys as encoded. All at once: a slice of each of them would take much longer."""
        stored = ragged.from_pybytes_list(keys)
        width = len(self._prefix)
        starts = ragged.offsets(stored)[:-1]
        kept = np.ones(len(ragged.data(stored)), bool)
        for at in range(width):
            kept[starts + at] = False
        bounds = ragged.offsets_of(ragged.lengths(stored) - width)
        return ragged.over(bounds, ragged.data(stored)[kept])


def _read_forward(iterator: RdictIter, count: int) -> tuple[list[bytes], list[bytes]]:
    valid, step = iterator.valid, iterator.next
    get_key, get_value = iterator.key, iterator.value
    keys: list[bytes] = []
    values: list[bytes] = []
    size = 0
    while len(keys) < count and size < _ENOUGH_BYTES and valid():
        value = get_value()
        keys.append(get_key())
        values.append(value)
        size += len(value)
        step()
    return keys, values
