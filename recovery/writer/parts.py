"""Large batches, cut into parts: rows of one bucket each, of a size that one segment takes well.

A part is merged and written while its bucket is held, and others have their turn between two of
them. So it is small enough for nobody to wait long; a server writes several of them as one where
nobody waits. The rows of a bucket stay in their order, from part to part.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa

from foundation.ids import BucketId
from merge_engine.bucket.options import MEBIBYTE
from merge_engine.merging.batch import read_keys
from merge_engine.merging.routing import Route, route
from merge_engine.schema.schema import Schema

_SMALLER = 8
FindBucket = Callable[[Route], BucketId]
"""Tells which bucket a route leads to; NotFenced for one of a partition that is not fenced."""


@dataclass(frozen=True, kw_only=True)
class PartSizes:
    """How large parts are, about, and how many bytes of rows wait to become one in all.

    `chunk_bytes`: how much of them goes to a server in one call. `call_rows`: how many rows do that
    need not be cut, since they are few.
    """

    rows: int = 2_500
    bytes: int = MEBIBYTE
    waiting_bytes: int = 64 * MEBIBYTE
    chunk_bytes: int = 16 * MEBIBYTE
    call_rows: int = 100_000

    def within(self, put_max_rows: int, put_max_bytes: int) -> "PartSizes":
        """Return sizes that a server with these limits takes; half of the bytes are for headers."""
        return PartSizes(
            rows=max(min(self.rows, put_max_rows), 1),
            bytes=max(min(self.bytes, put_max_bytes // 4), 1),
            waiting_bytes=self.waiting_bytes,
            chunk_bytes=max(min(self.chunk_bytes, put_max_bytes // 2), 1),
            call_rows=max(min(self.call_rows, put_max_rows), 1),
        )

    def smaller(self) -> "PartSizes | None":
        """Return sizes for rows that meet more than Arrow holds; None if a part is one row."""
        if self.call_rows > 1:
            return replace(self, call_rows=1)
        if self.rows > 1:
            return replace(self, rows=max(self.rows // _SMALLER, 1))
        return None


class Part(NamedTuple):
    """Rows of one bucket; `number` counts the parts of that bucket from 0 on."""

    key: BucketId
    number: int
    rows: pa.RecordBatch


@dataclass
class _Waiting:
    """Rows of one bucket that are not enough for a part yet."""

    tables: list[pa.Table]
    rows: int = 0
    bytes: int = 0
    parts: int = 0


class PartCutter:
    """Takes tables of one schema in the order of the batch, and gives parts."""

    def __init__(
        self, schema: Schema, buckets: int, find: FindBucket, sizes: PartSizes | None = None
    ) -> None:
        self._schema = schema
        self._buckets = buckets
        self._find = find
        self._sizes = sizes or PartSizes()
        self._waiting: dict[BucketId, _Waiting] = {}

    def add(self, table: pa.Table) -> Iterator[Part]:
        """Yield the parts that are complete with these rows."""
        routes = route(self._schema, read_keys(table, self._schema), self._buckets)
        for target in routes:
            rows = table if len(routes) == 1 else table.take(pa.array(target.positions))
            yield from self.add_of(self._find(target), rows)
        while sum(one.bytes for one in self._waiting.values()) > self._sizes.waiting_bytes:
            fullest = max(self._waiting, key=lambda key: self._waiting[key].bytes)
            yield from self._give(fullest, 1)

    def add_of(self, key: BucketId, rows: pa.Table) -> Iterator[Part]:
        """Do the same with rows of one bucket."""
        waiting = self._waiting.setdefault(key, _Waiting([]))
        waiting.tables.append(rows)
        waiting.rows += rows.num_rows
        waiting.bytes += rows.nbytes
        if waiting.rows >= self._sizes.rows or waiting.bytes >= self._sizes.bytes:
            yield from self._give(key, self._enough(waiting))

    def rest(self) -> Iterator[Part]:
        """Yield what is left; then nothing is waiting."""
        for key in list(self._waiting):
            yield from self._give(key, 1)

    def _enough(self, waiting: _Waiting) -> int:
        """Return how many rows are worth a part: fewer, if they are large."""
        size = max(waiting.bytes // max(waiting.rows, 1), 1)
        return max(min(self._sizes.rows, self._sizes.bytes // size), 1)

    def _give(self, key: BucketId, least: int) -> Iterator[Part]:
        """Yield parts while so many rows are left."""
        waiting = self._waiting[key]
        if not waiting.rows:
            return
        table = pa.concat_tables(waiting.tables).combine_chunks()
        size, at = self._enough(waiting), 0
        while table.num_rows - at >= max(least, 1):
            [rows] = table.slice(at, size).to_batches() or [None]
            yield Part(key, waiting.parts, rows)
            waiting.parts += 1
            at += rows.num_rows
        rest = table.slice(at)
        waiting.tables = [rest] if rest.num_rows else []
        waiting.rows, waiting.bytes = rest.num_rows, rest.nbytes
