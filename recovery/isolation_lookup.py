"""Committed look-ups: the state of keys without anybody's uncommitted work.

A mask is an undo that is not written: of an owner's changes since its offset, the first
before-image per key and column takes the place of what is stored. Masks do not meet: while work is
unresolved, nobody else writes its columns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from locks.offsets import BucketKey
from locks.records import LockRecord
from merge_engine.aggregates.arrays import choose
from merge_engine.bucket import Bucket, StoredAt
from merge_engine.fold import Update
from merge_engine.options import MEBIBYTE
from merge_engine.parallel import Item, Result
from merge_engine.schema import Column
from merge_engine.segment import Change, Segment, SegmentKind
from merge_engine.stored import SchemaHistory, StoredRows, finished
from merge_engine.together import Mapper
from merge_engine.undo import undo_updates
from recovery.isolation import ReadRecords, Unresolved, undo_start, unresolved

_MASK_MAX_BYTES = 64 * MEBIBYTE


class Asked(NamedTuple):
    """Keys of one bucket, in the table's types."""

    bucket: Bucket
    key: BucketKey
    key_columns: Sequence[pa.Array]


def _in_turn(call: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
    return list(map(call, items))


def committed_lookup(
    asked: Sequence[Asked],
    read_records: ReadRecords,
    columns: Sequence[Column],
    mapper: Mapper = _in_turn,
) -> list[pa.RecordBatch]:
    """Look keys up as the committed batches left them, in each bucket.

    It shows all that was committed when it was called. What is committed while it runs, it shows or
    not. All buckets are looked up before the records are read, once for all of them. Deposed:
    another leader has come, and may have undone what is stored here.
    """
    stored = mapper(lambda one: one.bucket.stored(one.key_columns), asked)
    records = read_records()
    return mapper(lambda at: _committed(asked[at], stored[at], records, columns), range(len(asked)))


def _committed(
    wanted: Asked, stored: StoredAt, records: Mapping[str, LockRecord], columns: Sequence[Column]
) -> pa.RecordBatch:
    """Mask what is stored by records that were read after it."""
    bucket, key, key_columns = wanted
    work = unresolved(records, key)
    now = bucket.confirm()
    # What is stored here was undone since: then it is not in the records any more.
    work += [
        Unresolved(owner=undo.owner, columns=undo.column_ids, offset=undo_start(undo))
        for undo in bucket.headers(stored.offset, now)
        if undo.kind is SegmentKind.UNDO
    ]
    asked = stored.history.key_codec.encode(key_columns)
    rows = stored.rows
    # Of two masks of one owner, the one that goes further back has the last word.
    for part in sorted(work, key=lambda part: -part.offset):
        for update in _masks(bucket, stored, part, asked, columns):
            rows = _masked(rows, stored.history, update, asked)
    return finished(stored.history, key_columns, rows, columns)


def _masks(
    bucket: Bucket,
    stored: StoredAt,
    work: Unresolved,
    asked: pa.BinaryArray,
    columns: Sequence[Column],
) -> Iterator[Update]:
    """Yield what undoing the work would write, as far as it is about these keys and columns."""
    position = stored.history.position
    hidden = [c for c in columns if c.id in work.columns and c.id in position]
    ids = {column.id for column in hidden}
    ranges = [
        (header.base_offset, header.end_offset)
        for header in bucket.headers(work.offset, stored.offset)
        if header.owner == work.owner and not ids.isdisjoint(header.column_ids)
    ]
    backwards = (
        _only(segment, stored.history, ids, asked)
        for start, stop in reversed(ranges)
        for segment in bucket.read_log(start, stop)
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
