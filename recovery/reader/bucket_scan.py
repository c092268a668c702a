"""Scans of one bucket: all of its rows at a cut, or as they are, in key order.

The rows are pinned after the cut was taken, and what came after it is masked: so any reader at the
same cut sees the same rows, whenever it comes. All that a scan needs of the log is read when it is
opened: cleaning cannot hurt it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from foundation.errors import InvalidInput, LogGap
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.log import Log
from merge_engine.bucket.log_start import CleanedOwners
from merge_engine.bucket.masked_rows import finished_rows
from merge_engine.bucket.masks import RUN_BYTES, Mask, load_mask
from merge_engine.bucket.owner_work import OwnerWork
from merge_engine.bucket.pinned_rows import PinnedRows
from merge_engine.bucket.segment import Segment, SegmentHeader
from merge_engine.bucket.view import pin_checkpoint
from merge_engine.bucket.view_meta import read_checkpoint
from merge_engine.encoding.stored_rows import SchemaHistory
from merge_engine.schema.schema import Column
from merge_engine.storage.objects import ObjectStorage
from merge_engine.storage.scratch import Scratch
from recovery.reader.cut import BucketCut
from recovery.reader.later import Sieve, later_headers, read_later


@dataclass(frozen=True)
class ScannedBatch:
    """Rows as a reader sees them, at least one, and the encoded key of the last one."""

    data: pa.RecordBatch
    last_key: bytes


@dataclass(frozen=True)
class BucketScan:
    """The rows of a bucket, until `close`. Safe for threads.

    `offset`: where they were pinned. Without a mask, the changes of the log from there on add up to
    the table.
    """

    history: SchemaHistory
    _rows: PinnedRows
    offset: int
    _mask: Mask | None = None

    def batches(
        self,
        columns: Sequence[Column],
        *,
        after: bytes | None = None,
        limit: int | None = None,
        batch_rows: int = 50_000,
    ) -> Iterator[ScannedBatch]:
        """Yield the key and these columns of the rows after the key `after` (None: of all rows).

        In key order, `limit` rows at most. To go on after any key that was seen gives every row
        once; may be called any number of times. Closed, from the next batch on, once it is closed.
        """
        if batch_rows < 1 or (limit is not None and limit < 0):
            raise InvalidInput(f"a scan of {limit} rows in batches of {batch_rows}")
        return self._batches(columns, after, limit, batch_rows)

    def _batches(
        self, columns: Sequence[Column], after: bytes | None, limit: int | None, batch_rows: int
    ) -> Iterator[ScannedBatch]:
        if limit == 0:
            return
        found = finished_rows(
            self._rows,
            self.history,
            columns,
            mask=self._mask,
            after=after,
            batch_rows=batch_rows if limit is None else min(batch_rows, limit),
        )
        left = limit
        for keys, data in found:
            count = len(keys) if left is None else min(left, len(keys))
            yield ScannedBatch(data.slice(0, count), keys[count - 1].as_py())
            if left is not None:
                left -= count
                if left == 0:
                    return

    def close(self) -> None:
        """Let go of the rows, after the batch that is just being read. Closing twice is fine."""
        self._rows.close()


def open_scan(
    bucket: Bucket,
    cut: BucketCut | None,
    *,
    confirm: Callable[[], object] | None = None,
    scratch: Scratch | None = None,
    mask_run_bytes: int = RUN_BYTES,
) -> BucketScan:
    """Pin the bucket's rows: as the cut has them or, without one, as they are.

    `confirm`: raises unless the bucket is led here; without it, its log is asked.
    Deposed: another leader has come, and knows more. CutTooOld: the log that it takes was cleaned.
    What is to be masked and does not fit into memory goes to `scratch`; StorageFull if that has no
    room.
    """
    history, pinned, rows = bucket.pin()
    try:
        if cut is None:
            return BucketScan(history, rows, pinned)
        (confirm or bucket.confirm)()
        later = later_headers(bucket, cut, pinned)
        mask = load_mask(
            read_later(bucket, cut, later), history, scratch=scratch, run_bytes=mask_run_bytes
        )
        return BucketScan(history, rows, pinned, mask)
    except BaseException:
        rows.close()
        raise


def open_snapshot_scan(
    directory: Path,
    cut: BucketCut | None,
    *,
    storage: ObjectStorage,
    history: SchemaHistory,
    scratch: Scratch | None = None,
    mask_run_bytes: int = RUN_BYTES,
) -> BucketScan:
    """Do the same over a checkpoint of a bucket's view, which stays as it is; no leader is asked.

    What was changed since the checkpoint and is in the cut is taken from the log, in `storage`,
    which is looked at now, after the cut was taken: so it has all of that. UnknownSchema: it has
    what was written under a later schema than `history` knows. OffsetOutOfRange: the log no longer
    has all that came after the checkpoint.
    """
    state = read_checkpoint(directory)
    applied = state.applied
    if cut is None:
        return BucketScan(history, pin_checkpoint(directory), applied)
    log = Log(storage)
    if log.end < applied:
        raise LogGap(
            f"{directory} is at offset {applied}, but the log ends at {log.end}; this is another "
            "bucket's log, or segments are gone: restore them from a copy"
        )
    copy = _Copy(log, state.works)
    sieve = Sieve(cut)
    later = [one for one in later_headers(copy, cut, applied) if sieve.is_later(one)]
    since = (
        one
        for one in log.segments(applied)
        if one.header.is_change and not sieve.is_later(one.header)
    )
    mask = load_mask(
        read_later(copy, cut, later),
        history,
        since=since,
        scratch=scratch,
        run_bytes=mask_run_bytes,
    )
    return BucketScan(history, pin_checkpoint(directory), applied, mask)


class _Copy(NamedTuple):
    """A checkpoint and its log, as a `LogSource`: it knows of the puts before the checkpoint."""

    log: Log
    works: Mapping[str, OwnerWork]

    @property
    def start_offset(self) -> int:
        return self.log.start

    @property
    def cleaned(self) -> CleanedOwners | None:
        return self.log.cleaned

    def headers(self, from_offset: int, to_offset: int | None = None) -> Iterator[SegmentHeader]:
        return self.log.headers(from_offset, to_offset)

    def read_segments(self, bases: Iterable[int]) -> Iterator[Segment]:
        return self.log.read(bases)
