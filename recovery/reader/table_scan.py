"""Scans of a table: bucket after bucket, all at one cut, or each as it is."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from itertools import islice
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from foundation.arguments import buckets_of
from foundation.errors import CutTooOld, InvalidInput, PartitionGone, UnknownOrExpiredScannerError
from foundation.ids import BucketId
from foundation.parallel import map_all
from recovery.reader.cut import Cut

_AT_ONCE = 4
# So many buckets are opened before they are read: the sooner after the cut, the less is to be
# masked. They count against the limits of their servers, and expire if they are not read.
_AHEAD = 32
_MOST_ATTEMPTS = 5


class ScanSource(Enum):
    """Where a scan reads: the leaders' rows, a KV snapshot, or the log."""

    LIVE_KV = "live_kv"
    SNAPSHOT = "snapshot"
    LOG = "log"


class RowStream(Protocol):
    """The rows of one bucket, to iterate once."""

    @property
    def offset(self) -> int:
        """Where they were pinned in the log."""

    @property
    def closed(self) -> bool:
        """Whether nothing is held for them any more."""

    def open_early(self) -> None:
        """Pin the rows now, if that can be done at once: they are read later."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches."""

    def close(self) -> None:
        """Let go of whatever is held for them."""


OpenRows = Callable[[BucketId, int | None], RowStream]
"""Opens a bucket; the number is the most rows that are wanted of it."""


class Standpoint(NamedTuple):
    """Where a scan stands, the buckets that it has there, and how their rows are opened."""

    cut: Cut | None
    buckets: Sequence[BucketId]
    open_rows: OpenRows


class TableScan:
    """Rows of a table, to iterate, or to take whole by `to_arrow`; any number of times.

    `cut`: where the rows of all buckets stand, the same each time; `table.changes` goes on from
    there. None: they are as they are, and `offsets` has each bucket that was begun, with the log
    offset from which on the changelog adds up to the table. A cut that nobody has given, nor seen,
    makes way for another one, if the log is cleaned beyond it before the first row has come.

    Arrow's own interface makes it the input of other libraries: `pa.table(scan)`,
    `polars.DataFrame(scan)`, `duckdb.sql("from scan")`.
    """

    def __init__(
        self,
        buckets: Sequence[BucketId],
        schema: pa.Schema,
        open_rows: OpenRows,
        *,
        cut: Cut | None = None,
        limit: int | None = None,
        stand_anew: Callable[[], Standpoint] | None = None,
    ) -> None:
        """`stand_anew`: takes another cut; None: the caller has given this one."""
        if limit is not None and (not isinstance(limit, int) or limit < 0):
            raise InvalidInput(f"a limit is a number of rows, not {limit!r}")
        self._buckets = list(buckets)
        self._schema = schema
        self._open_rows = open_rows
        self._limit = limit
        self._open: list[_Streams] = []
        self._cut = cut
        self._stand_anew = stand_anew
        self._stood = 1
        self.offsets: dict[BucketId, int] = {}

    @property
    def cut(self) -> Cut | None:
        """Where the rows stand. Whoever has asked for it gets the rows that are there."""
        self._stand_anew = None
        return self._cut

    @property
    def schema(self) -> pa.Schema:
        """The columns of the batches."""
        return self._schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches, bucket after bucket, in key order within each.

        Without a cut, UnknownOrExpiredScannerError: a bucket's rows cannot be had to their end any
        more as they were, because its leader moved or they were not read for long. Begin again.
        """
        while True:
            try:
                for batch in self._batches():
                    self._stand_anew = None
                    yield batch
                return
            except CutTooOld:
                if not self._has_another_cut():
                    raise

    def _has_another_cut(self) -> bool:
        """Stand at another cut, if that may be: the log was cleaned beyond this one."""
        if self._stand_anew is None or self._stood == _MOST_ATTEMPTS:
            return False
        self._stood += 1
        self._cut, buckets, self._open_rows = self._stand_anew()
        self._buckets = list(buckets)
        return True

    def _batches(self) -> Iterator[pa.RecordBatch]:
        left = self._limit
        with self._streams() as streams:
            while left != 0 and (following := streams.next(left)) is not None:
                bucket, rows = following
                self._note(bucket, rows)
                for batch in rows:
                    # Not the offset before, if its leader moved before the first row came.
                    self._note(bucket, rows)
                    left = None if left is None else left - batch.num_rows
                    yield batch.rename_columns(self._schema.names)
                self._note(bucket, rows)
                rows.close()

    def __repr__(self) -> str:
        return f"<TableScan of {', '.join(self._schema.names)}; buckets: {len(self._buckets)}>"

    def to_arrow(self) -> pa.Table:
        """Return all rows, or as many as the limit says; a bucket that moves is read again."""
        while True:
            try:
                with self._streams() as streams:
                    limit = self._limit
                    found = self._all(streams) if limit is None else self._some(streams, limit)
                break
            except CutTooOld:
                if not self._has_another_cut():
                    raise
        self._stand_anew = None
        batches = [batch for bucket in self._buckets for batch in found.get(bucket, ())]
        named = [batch.rename_columns(self._schema.names) for batch in batches]
        return pa.Table.from_batches(named, self._schema)

    def _all(self, streams: "_Streams") -> dict[BucketId, list[pa.RecordBatch]]:
        """Return the batches of all buckets, a few of them at a time."""
        found: dict[BucketId, list[pa.RecordBatch]] = {}
        failed = threading.Event()

        def read(_: int) -> None:
            while not failed.is_set() and (following := streams.next(None)) is not None:
                bucket, rows = following
                try:
                    found[bucket] = self._whole(bucket, rows)
                except BaseException:
                    failed.set()
                    raise

        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tallybook-scan") as pool:
            map_all(pool, read, range(min(_AT_ONCE, len(self._buckets))))
        return found

    def _some(self, streams: "_Streams", left: int) -> dict[BucketId, list[pa.RecordBatch]]:
        """Return the batches of as many rows as are wanted, bucket after bucket."""
        found: dict[BucketId, list[pa.RecordBatch]] = {}
        while left and (following := streams.next(left)) is not None:
            bucket, rows = following
            found[bucket] = self._whole(bucket, rows, left)
            left -= sum(batch.num_rows for batch in found[bucket])
        return found

    def to_pandas(self, **arguments: Any) -> Any:
        """Return all rows as a pandas data frame; the arguments are those of Arrow's `to_pandas`.

        What Arrow needs no more is freed on the way.
        """
        return self.to_arrow().to_pandas(split_blocks=True, self_destruct=True, **arguments)

    def to_reader(self) -> pa.RecordBatchReader:
        """Return a reader of the batches, for whoever takes them one by one."""
        return pa.RecordBatchReader.from_batches(self._schema, iter(self))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    def __arrow_c_schema__(self) -> object:
        return self._schema.__arrow_c_schema__()

    def close(self) -> None:
        """Let go of the buckets that are being read. Closing twice is fine."""
        for streams in list(self._open):
            streams.close()

    @contextmanager
    def _streams(self) -> Iterator["_Streams"]:
        ahead = _AHEAD if self._cut is not None and self._limit is None else 0
        streams = _Streams(self._buckets, self._open_rows, ahead)
        self._open.append(streams)
        try:
            yield streams
        finally:
            streams.close()
            self._open.remove(streams)

    def _note(self, bucket: BucketId, rows: RowStream) -> None:
        if self._cut is None:
            self.offsets[bucket] = rows.offset

    def _whole(
        self, bucket: BucketId, rows: RowStream, limit: int | None = None
    ) -> list[pa.RecordBatch]:
        """Nobody has seen a row before all are here, so a scan that was lost is begun again."""
        attempts = 0
        while True:
            try:
                found = list(rows)
                self._note(bucket, rows)
                return found
            except UnknownOrExpiredScannerError:
                attempts += 1
                if attempts == _MOST_ATTEMPTS:
                    raise
            finally:
                rows.close()
            rows = self._open_rows(bucket, limit)

    def __enter__(self) -> "TableScan":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Streams:
    """The streams of buckets, in their order; those of the next ones are open. Safe for threads."""

    def __init__(self, buckets: Sequence[BucketId], open_rows: OpenRows, ahead: int) -> None:
        """`ahead`: so many are opened before they are asked for."""
        self._left = iter(buckets)
        self._open_rows = open_rows
        self._ahead = ahead
        self._lock = threading.Lock()
        self._waiting: deque[tuple[BucketId, RowStream]] = deque()
        self._given: list[RowStream] = []

    def next(self, limit: int | None) -> tuple[BucketId, RowStream] | None:
        """Return the next one, of which at most so many rows are wanted; None after the last."""
        with self._lock:
            count = max(1, self._ahead) if not self._waiting else 0
            new = [(one, self._open_rows(one, limit)) for one in islice(self._left, count)]
            self._waiting.extend(new)
            if not self._waiting:
                return None
            if self._ahead and len(new) > 1:
                with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="tallybook-ahead") as pool:
                    map_all(pool, lambda one: one[1].open_early(), new)
            following = self._waiting.popleft()
            self._given = [rows for rows in self._given if not rows.closed]
            self._given.append(following[1])
            return following

    def close(self) -> None:
        """Let go of all of them, and open no more."""
        with self._lock:
            self._left = iter(())
            for rows in (*self._given, *(rows for _, rows in self._waiting)):
                rows.close()
            self._waiting.clear()


def chosen_buckets(
    known: Sequence[BucketId], wanted: Sequence[BucketId] | Mapping[BucketId, object] | None
) -> list[BucketId]:
    """Return the buckets to scan: those asked for, if they exist; all, if nobody asked.

    PartitionGone for those of a partition that is not there: it was, or nobody would know its id.
    """
    if wanted is None:
        return list(known)
    buckets = buckets_of(wanted)
    missing = sorted(set(buckets) - set(known))
    if missing:
        there = {bucket.partition for bucket in known}
        gone = sorted({bucket.partition for bucket in missing} - there)
        if gone:
            raise PartitionGone(
                f"the table has no buckets {missing}: the partitions with ids {gone} were dropped "
                "meanwhile"
            )
        raise InvalidInput(f"the table has no buckets {missing}")
    return buckets
