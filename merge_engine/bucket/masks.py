"""A mask: old states by key, which take the place of those stored, for a reader that looks back.

It is made of the before-images of changes, the oldest per key and column. What is at hand is sorted
and set aside as a *run* whenever it has reached a size: the first few in memory, further ones on
disk, where they are mapped into memory page by page. A reader goes through the runs in key order,
a range of keys at a time, and puts together what they have of it.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from merge_engine.bucket.options import MEBIBYTE
from merge_engine.bucket.segment import Segment
from merge_engine.bucket.undo import Images, concat, first_images, images_of
from merge_engine.encoding.keys import KeyCodec
from merge_engine.encoding.ragged import Flags
from merge_engine.encoding.stored_rows import SchemaHistory, state_type
from merge_engine.schema.schema import Column
from merge_engine.storage.scratch import Scratch, ScratchFile

RUN_BYTES = 32 * MEBIBYTE
# So many runs stay in memory.
_RUNS_IN_MEMORY = 2
_ROWS_PER_BATCH = 16_384
# Images of more segments are put together: an array costs memory of its own, however few its rows.
_MOST_PARTS = 256


class Mask:
    """Old states by encoded key. Safe for threads once it is loaded."""

    def __init__(self, columns: Sequence[Column], runs: Sequence["_Run"]) -> None:
        """`runs`: of a key and column, the first that has one counts."""
        self._runs = list(runs)
        self._nothing = _nothing(columns)

    def between(self, after: bytes | None, to: bytes | None) -> Images:
        """Return what is about the keys after `after`, up to and including `to`; None: no end.

        One row per key, in key order; `keys` is one array, of encoded keys.
        """
        found = [run.between(after, to) for run in self._runs]
        found = [images for images in found if len(images)]
        if not found:
            return self._nothing
        return found[0] if len(found) == 1 else first_images(concat(found), _encoded)

    def ranges(self, after: bytes | None, to: bytes | None, rows: int) -> Iterator[bytes | None]:
        """Yield where to cut (after, to] so that no range has much more than so many rows.

        The last one is `to`.
        """
        while True:
            ends = [end for run in self._runs if (end := run.after_rows(after, rows)) is not None]
            cut = min(ends, default=None)
            if cut is None or (to is not None and cut >= to):
                yield to
                return
            yield cut
            after = cut


class _Run:
    """Images of distinct keys, in key order: in one piece in memory, or in batches on disk."""

    def __init__(self, batches: Sequence[pa.RecordBatch], file: ScratchFile | None = None) -> None:
        """`file`: where the batches are, unless they are in memory; its room is theirs."""
        self._batches = batches
        self._file = file
        self._last_keys = [batch.column(0)[-1].as_py() for batch in batches]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)]).tolist()

    def between(self, after: bytes | None, to: bytes | None) -> Images:
        """Return the images of the keys in (after, to]."""
        start = 0 if after is None else self._position_after(after)
        stop = self._starts[-1] if to is None else self._position_after(to)
        first = bisect_right(self._starts, start) - 1
        parts = [
            _to_images(batch.slice(max(start - at, 0), min(stop, end) - max(start, at)))
            for batch, at, end in zip(
                self._batches[first:], self._starts[first:], self._starts[first + 1 :], strict=False
            )
            if at < stop and end > start
        ]
        return concat(parts) if parts else _to_images(self._batches[0].slice(0, 0))

    def after_rows(self, after: bytes | None, rows: int) -> bytes | None:
        """Return the key so many rows after this one; None if there are fewer."""
        at = (0 if after is None else self._position_after(after)) + rows - 1
        if at >= self._starts[-1]:
            return None
        batch = bisect_right(self._starts, at) - 1
        key: bytes = self._batches[batch].column(0)[at - self._starts[batch]].as_py()
        return key

    def _position_after(self, key: bytes) -> int:
        """Return how many rows are at or before the key."""
        number = bisect_right(self._last_keys, key)
        if number == len(self._batches):
            return int(self._starts[-1])
        keys = self._batches[number].column(0)
        inside = bisect_right(range(len(keys)), key, key=lambda at: keys[at].as_py())
        return int(self._starts[number]) + inside


def load_mask(
    later: Iterable[Segment],
    history: SchemaHistory,
    *,
    since: Iterable[Segment] = (),
    scratch: Scratch | None = None,
    run_bytes: int = RUN_BYTES,
) -> Mask | None:
    """Return the mask of these changes, which are in the order of the log; None if there are none.

    `later`: changes that the rows have, and that are not to be seen: the oldest state before them
    is. `since`: changes that the rows do not have, and that are to be seen: the newest state after
    them is. None is of a key and column of the other. Columns that the schema does not have any
    more are left out. StorageFull: it does not fit into memory, and there is no room on disk.
    """
    scratch = scratch or Scratch()
    back = _Runs(history, scratch, run_bytes, newest=False)
    for segment in later:
        back.add(segment)
    ahead = _Runs(history, scratch, run_bytes, newest=True)
    for segment in since:
        ahead.add(segment.reversed())
    runs = [*ahead.finish(), *back.finish()]
    return Mask(history.current.value_columns, runs) if runs else None


class _Runs:
    """Sets images aside, run by run. `newest`: of a key's images the last one counts."""

    def __init__(
        self, history: SchemaHistory, scratch: Scratch, run_bytes: int, *, newest: bool
    ) -> None:
        self._history = history
        self._scratch = scratch
        self._run_bytes = run_bytes
        self._newest = newest
        self._parts: list[Images] = []
        self._size = 0
        self._runs: list[_Run] = []

    def add(self, segment: Segment) -> None:
        """Take the images of a segment's changes."""
        schema = self._history.current
        self._history.check_knows(segment.header.schema_version)
        if not segment.changes:
            return
        self._parts.append(images_of(segment, schema.value_columns, schema))
        self._size += self._parts[-1].nbytes
        if self._size > self._run_bytes or len(self._parts) >= _MOST_PARTS:
            self._parts = [self._together()]
            self._size = self._parts[0].nbytes
            if self._size > self._run_bytes // 2:
                spill = self._scratch if len(self._runs) >= _RUNS_IN_MEMORY else None
                self._set_aside(spill)

    def finish(self) -> list["_Run"]:
        """Return all runs, those that count most first."""
        if self._parts:
            self._parts = [self._together()]
            if len(self._parts[0]):
                self._set_aside(None)
        return self._runs[::-1] if self._newest else self._runs

    def _together(self) -> Images:
        parts = self._parts[::-1] if self._newest else self._parts
        return first_images(concat(parts), self._history.key_codec.encode)

    def _set_aside(self, spill: Scratch | None) -> None:
        self._runs.append(_to_run(self._parts[0], self._history.key_codec, spill))
        self._parts, self._size = [], 0


def _encoded(keys: Sequence[pa.Array]) -> pa.BinaryArray:
    return keys[0]


def _nothing(columns: Sequence[Column]) -> Images:
    flags: Flags = np.zeros((0, len(columns)), bool)
    states = [pa.nulls(0, state_type(column)) for column in columns]
    return Images([pa.nulls(0, pa.binary())], flags, flags, states)


def _to_run(images: Images, codec: KeyCodec, scratch: Scratch | None) -> "_Run":
    """Set images of distinct keys aside, in memory or in a scratch file.

    As batches: the key, then per column whether there is one, whether it is touched, the state.
    """
    arrays = [codec.encode(images.keys)]
    for j, state in enumerate(images.states):
        arrays += [pa.array(images.has[:, j]), pa.array(images.touched[:, j]), state]
    table = pa.table(arrays, names=[str(at) for at in range(len(arrays))])
    batches = table.to_batches(max_chunksize=_ROWS_PER_BATCH)
    return _Run(batches) if scratch is None else _spilled(batches, scratch)


def _to_images(batch: pa.RecordBatch) -> Images:
    flags = [
        batch.column(at).to_numpy(zero_copy_only=False)
        for at in range(1, batch.num_columns)
        if at % 3
    ]
    return Images(
        [batch.column(0)],
        np.stack(flags[0::2], axis=1),
        np.stack(flags[1::2], axis=1),
        [batch.column(at) for at in range(3, batch.num_columns, 3)],
    )


def _spilled(batches: Sequence[pa.RecordBatch], scratch: Scratch) -> _Run:
    """Write batches to a scratch file, and return them as that is mapped into memory."""
    file = scratch.file()
    with pa.ipc.new_file(pa.PythonFile(file, "w"), batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    file.flush()
    reader = pa.ipc.open_file(pa.memory_map(file.path))
    return _Run([reader.get_batch(at) for at in range(reader.num_record_batches)], file)
