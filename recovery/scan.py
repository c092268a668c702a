"""Scans of one bucket: all of its rows at one offset of its log, in key order.

A committed scan stands at the last stable offset (see `isolation`), which lies before the rows that
are pinned; what was changed since is masked. So the changelog from the scan's offset on adds up to
the table. All that a scan needs of the log is read when it is opened: cleaning cannot hurt it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from locks.offsets import BucketKey
from merge_engine.bucket import Bucket
from merge_engine.errors import InvalidInput, LogGap, OffsetOutOfRange
from merge_engine.log import Log
from merge_engine.masks import RUN_BYTES, Mask, load_mask
from merge_engine.pinned import PinnedRows
from merge_engine.rows_at import cut_segments, finished_rows
from merge_engine.schema import Column
from merge_engine.scratch import Scratch
from merge_engine.stored import SchemaHistory
from merge_engine.view import pin_checkpoint, read_checkpoint
from recovery.isolation import ReadRecords, last_stable_offset


@dataclass(frozen=True)
class ScannedBatch:
    """Rows as a reader sees them, at least one, and the encoded key of the last one."""

    data: pa.RecordBatch
    last_key: bytes


@dataclass(frozen=True)
class BucketScan:
    """The rows of a bucket at `offset`, until `close`. Safe for threads.

    The changes of the log from `offset` on, committed ones for a committed scan, add up to the
    table.
    """

    offset: int
    history: SchemaHistory
    _rows: PinnedRows
    _mask: Mask | None = None

    def batches(
        self,
        columns: Sequence[Column],
        *,
        after: bytes | None = None,
        limit: int | None = None,
        batch_rows: int = 50_000,
    ) -> Iterator[ScannedBatch]:
        """Yield the key and these columns of the rows behind the key `after` (None: of all rows).

        In key order, `limit` rows at most. To go on behind any key that was seen gives every row
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
    key: BucketKey,
    read_records: ReadRecords,
    *,
    committed: bool,
    scratch: Scratch | None = None,
    mask_run_bytes: int = RUN_BYTES,
) -> BucketScan:
    """Pin the bucket's rows: as the committed batches left them, or as they are.

    A committed scan has all that was committed when it was called, unless there is work before it
    that may yet be undone. Deposed: another leader has come, and knows more. What is to be masked
    and does not fit into memory goes to `scratch`; StorageFull if that has no room.
    """
    history, pinned, rows = bucket.pin()
    try:
        if not committed:
            return BucketScan(pinned, history, rows)
        stable = last_stable_offset(bucket, key, read_records, pinned)
        mask = load_mask(
            bucket.read_log(stable, pinned), history, scratch=scratch, run_bytes=mask_run_bytes
        )
        return BucketScan(stable, history, rows, mask)
    except BaseException:
        rows.close()
        raise


def open_snapshot_scan(
    directory: Path,
    *,
    log: Log,
    stable: int,
    history: SchemaHistory,
    committed: bool,
    mask_run_bytes: int = RUN_BYTES,
) -> BucketScan:
    """Do the same over a checkpoint of a bucket's view, which stays as it is; no leader is asked.

    `stable` is the last stable offset that was found for the checkpoint, and `history` has all
    schemas that were written under till then. The log must still have what is between the two.
    """
    applied = read_checkpoint(directory).applied
    if not committed:
        return BucketScan(applied, history, pin_checkpoint(directory))
    if stable > applied:
        raise OffsetOutOfRange(
            f"{directory} is at offset {applied}, before the stable offset {stable} that is said "
            "to be its own; take another snapshot"
        )
    if log.end < applied:
        log.refresh()
    if log.end < applied:
        raise LogGap(
            f"{directory} is at offset {applied}, but the log ends at {log.end}; this is another "
            "bucket's log, or segments are gone: restore them from a copy"
        )
    segments = cut_segments(log.segments(stable, applied), stable, applied)
    mask = load_mask(segments, history, run_bytes=mask_run_bytes)
    return BucketScan(stable, history, pin_checkpoint(directory), mask)
