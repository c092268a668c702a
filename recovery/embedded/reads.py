"""Reading an embedded table: rows and changes of its buckets, committed or latest."""

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from merge_engine.schema.schema import Column
from recovery.reader.bucket_scan import BucketScan
from recovery.reader.changes import BucketChanges


class EmbeddedRows:
    """The rows of one bucket, to iterate once."""

    def __init__(
        self, pin: Callable[[], BucketScan], columns: Sequence[Column], limit: int | None
    ) -> None:
        """`pin`: pins the rows, when they are first asked for."""
        self._pin = pin
        self._scan: BucketScan | None = None
        self._columns = columns
        self._limit = limit
        self.closed = False

    @property
    def offset(self) -> int:
        """Where they were pinned in the log."""
        return self._pinned().offset

    def open_early(self) -> None:
        """Pin the rows now: they are read later."""
        self._pinned()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches in key order."""
        found = self._pinned().batches(self._columns, limit=self._limit)
        return (batch.data for batch in found)

    def close(self) -> None:
        """Let go of the rows. Closing twice is fine."""
        self.closed = True
        if self._scan is not None:
            self._scan.close()

    def _pinned(self) -> BucketScan:
        if self._scan is None:
            self._scan = self._pin()
        return self._scan


class EmbeddedChangelog:
    """A bucket's change records, to iterate. `next_offset` is where a later one goes on."""

    def __init__(self, open_changes: Callable[[int], BucketChanges], from_offset: int) -> None:
        self._open_changes = open_changes
        self.next_offset = from_offset

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches; iterated again, it goes on after what came."""
        changes = self._open_changes(self.next_offset)
        for batch, following in changes.records():
            self.next_offset = following
            if batch.num_rows:
                yield batch
        self.next_offset = changes.end
