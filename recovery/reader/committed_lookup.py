"""Look-ups at a cut: the state of keys without what came after it.

A mask is an undo that is not written: of all changes that came after the cut, whosever they are,
the first before-image per key and column takes the place of what is stored.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from foundation.errors import CutTooOld
from foundation.parallel import Mapper, in_turn
from merge_engine.aggregates.arrays import choose
from merge_engine.bucket.bucket import Bucket, StoredAt
from merge_engine.bucket.options import MEBIBYTE
from merge_engine.bucket.segment import Change, Segment
from merge_engine.bucket.undo import undo_updates
from merge_engine.encoding.stored_rows import SchemaHistory, StoredRows, finished
from merge_engine.merging.fold import Update
from merge_engine.schema.schema import Column
from recovery.reader.cut import BucketCut
from recovery.reader.later import later_headers, read_later

_MASK_MAX_BYTES = 64 * MEBIBYTE


class Asked(NamedTuple):
    """Keys of one bucket, in the table's types, and the cut at which they are to be seen there.

    `confirm`: raises unless the bucket is led here; without it, its log is asked.
    """

    bucket: Bucket
    cut: BucketCut
    key_columns: Sequence[pa.Array]
    confirm: Callable[[], object] | None = None


def committed_lookup(
    asked: Sequence[Asked],
    columns: Sequence[Column],
    mapper: Mapper = in_turn,
    *,
    found: str | None = None,
) -> list[pa.RecordBatch]:
    """Look keys up as they are at the cut, in each bucket; the cut was taken before.

    `found`: the name of a last column that says whether there is such a row. Deposed: another
    leader has come, and may know more. CutTooOld: the log that it takes is gone.
    """
    return mapper(lambda one: _committed(one, columns, found), asked)


def settled_lookup(
    asked: Sequence[Asked],
    columns: Sequence[Column],
    mapper: Mapper = in_turn,
    *,
    found: str | None = None,
) -> list[pa.RecordBatch] | None:
    """Look keys up as they are, if all that these buckets have is in the cut; None if it is not.

    What is in a cut is in all later ones: so the rows are the same as at a cut that is taken now,
    however old this one is, and nobody has to take it. Deposed: as for `committed_lookup`.
    """
    rows = mapper(lambda one: _settled(one, columns, found), asked)
    settled = [one for one in rows if one is not None]
    return settled if len(settled) == len(rows) else None


def _settled(wanted: Asked, columns: Sequence[Column], found: str | None) -> pa.RecordBatch | None:
    bucket, cut, key_columns, confirm = wanted
    # Whether there is a row is for all columns to say.
    stored = bucket.stored(key_columns, columns if found is None else None)
    (confirm or bucket.confirm)()
    try:
        if later_headers(bucket, cut, stored.offset):
            return None
    except CutTooOld:
        return None
    if found is None:
        return finished(stored.history, key_columns, stored.rows, columns)
    return _shown(stored.history, key_columns, stored.rows, columns, found)


def _committed(wanted: Asked, columns: Sequence[Column], found: str | None) -> pa.RecordBatch:
    bucket, _, key_columns, confirm = wanted
    stored = bucket.stored(key_columns)
    (confirm or bucket.confirm)()
    rows = stored.rows
    encoded = stored.history.key_codec.encode(key_columns)
    # Whether there is a row is for all columns to say.
    masked = columns if found is None else stored.history.current.value_columns
    for update in _masks(wanted, stored, encoded, masked):
        rows = _masked(rows, stored.history, update, encoded)
    return _shown(stored.history, key_columns, rows, columns, found)


def _shown(
    history: SchemaHistory,
    key_columns: Sequence[pa.Array],
    rows: StoredRows,
    columns: Sequence[Column],
    found: str | None,
) -> pa.RecordBatch:
    """Return what is asked for of whole rows, as a reader sees it."""
    there = None if found is None else (found, rows.there)
    return finished(
        history, key_columns, rows.only(history.positions(columns)), columns, found=there
    )


def _masks(
    wanted: Asked, stored: StoredAt, encoded: pa.BinaryArray, columns: Sequence[Column]
) -> Iterator[Update]:
    """Yield what undoing all that came later would write, as far as these keys and columns go."""
    bucket, cut = wanted.bucket, wanted.cut
    asked = {column.id for column in columns}  # Once, though values and states may be asked for.
    hidden = [column for column in stored.history.current.value_columns if column.id in asked]
    ids = {column.id for column in hidden}
    later = [
        header
        for header in later_headers(bucket, cut, stored.offset)
        if not ids.isdisjoint(header.column_ids)
    ]
    backwards = (
        _only(segment, stored.history, ids, encoded)
        for segment in read_later(bucket, cut, reversed(later))
    )
    updates = undo_updates(backwards, hidden, stored.history.current, max_bytes=_MASK_MAX_BYTES)
    return (update for _, update in updates if len(update))


def _only(
    segment: Segment, history: SchemaHistory, columns: set[int], asked: pa.BinaryArray
) -> Segment:
    """Return the changes of these columns and keys."""
    keys = [segment.keys[column.id] for column in history.current.key_columns]
    wanted = pc.is_in(history.key_codec.encode(keys), value_set=asked)
    flags = wanted.to_numpy(zero_copy_only=False)
    changes = {
        column: Change(
            change.touched_before[flags],
            change.before.filter(wanted),
            change.touched_after[flags],
            change.after.filter(wanted),
        )
        for column, change in segment.changes.items()
        if column in columns
    }
    kept = {column: array.filter(wanted) for column, array in segment.keys.items()}
    return replace(segment, keys=kept, changes=changes)


def _masked(
    rows: StoredRows, history: SchemaHistory, update: Update, asked: pa.BinaryArray
) -> StoredRows:
    """Put the update's states in the place of those stored; a key may be asked for twice."""
    at = pc.index_in(asked, value_set=update.encoded_keys)
    found = at.is_valid().to_numpy(zero_copy_only=False)
    index = at.fill_null(0).to_numpy()
    touched, states = rows.touched.copy(), list(rows.states)
    for j, column in enumerate(update.columns):
        position = history.position[column.id]
        applies = found & update.applies[index, j]
        touched[:, position] = np.where(applies, update.touches[index, j], touched[:, position])
        states[position] = choose(applies, states[position], update.states[j].take(at))
    return StoredRows(touched, states)
