"""The buckets of a table that this process has open, and the threads that work on them."""

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from foundation.allocator import keep_freed_memory
from foundation.errors import Closed, InvalidInput
from foundation.ids import BucketId
from foundation.open_files import raise_limit
from foundation.parallel import WAITING_THREADS, map_all
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.options import BucketOptions
from merge_engine.embedded.catalog import Catalog
from merge_engine.encoding.stored_rows import SchemaHistory

Item = TypeVar("Item")
Result = TypeVar("Result")


class OpenBuckets:
    """Opens a bucket on first use and keeps it open. Safe for use from several threads.

    Two buckets can be opened, and so recovered, at the same time.
    """

    def __init__(self, catalog: Catalog, view_directory: Path, options: BucketOptions) -> None:
        keep_freed_memory()
        raise_limit()
        self._catalog = catalog
        self._view_directory = view_directory
        self._options = options
        self._cache = options.to_cache()
        self._memory = options.to_memory()
        self._lock = threading.Lock()
        self._opening: dict[BucketId, threading.Lock] = {}
        self._buckets: dict[BucketId, Bucket] = {}
        self._closed = False
        workers = min(catalog.buckets, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tallybook-bucket")
        # A put has its buckets to itself while others wait for them. Those must not wait on the
        # very threads that the put needs to finish, so it has threads of its own: one for each
        # bucket if possible, for most of what they do is to wait until a segment is durable.
        waiting = min(catalog.buckets, WAITING_THREADS)
        self._put_pool = ThreadPoolExecutor(waiting, thread_name_prefix="tallybook-put")

    def get(self, bucket_id: BucketId) -> Bucket:
        """Return the bucket, opened and recovered, and under the current schema or a newer one."""
        with self._lock:
            self._check_open()
            opening = self._opening.setdefault(bucket_id, threading.Lock())
        with opening:
            bucket = self._buckets.get(bucket_id)
            if bucket is None:
                bucket = self._open(bucket_id)
                with self._lock:
                    self._buckets[bucket_id] = bucket
                    closed = self._closed
                if closed:
                    bucket.close()
                    self._check_open()
        # Whoever asks may have read a schema that has not reached the bucket yet.
        if bucket.history is not self._catalog.history:
            bucket.evolve(self._catalog.history)
        return bucket

    def _open(self, bucket_id: BucketId) -> Bucket:
        partition, number = bucket_id
        if partition not in self._catalog.partitions.values():
            raise InvalidInput(f"there is no partition with number {partition!r}")
        if not 0 <= number < self._catalog.buckets:
            raise InvalidInput(f"there is no bucket {number}; there are {self._catalog.buckets}")
        return Bucket(
            self._catalog.log_storage(bucket_id),
            self._view_directory / self._catalog.path(bucket_id),
            self._catalog.history,
            identity=f"{self._catalog.table_id}/{self._catalog.path(bucket_id)}",
            options=self._options,
            cache=self._cache,
            memory=self._memory,
            read_schemas=self._catalog.read_schemas,
        )

    def map(self, call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Call for every item, in parallel if there are several; the first error, in order, wins.

        All calls have ended on return, so nothing goes on that the caller does not know of.
        """
        return self._map(self._pool, call, items)

    def map_exclusive(self, call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The same for calls on buckets that the caller has to itself: they wait for no bucket."""
        return self._map(self._put_pool, call, items)

    def _map(
        self, pool: ThreadPoolExecutor, call: Callable[[Item], Result], items: Sequence[Item]
    ) -> list[Result]:
        self._check_open()
        try:
            return map_all(pool, call, items)
        except RuntimeError:  # The pool was shut down since.
            self._check_open()
            raise

    def evolve(self, history: SchemaHistory) -> None:
        """Let the open buckets go on under a newer schema."""
        with self._lock:
            buckets = list(self._buckets.values())
        for bucket in buckets:
            bucket.evolve(history)

    def delete(self, bucket_ids: Sequence[BucketId]) -> None:
        """Close these buckets and delete their logs and views."""
        for bucket_id in bucket_ids:
            with self._lock:
                bucket = self._buckets.pop(bucket_id, None)
            if bucket is not None:
                bucket.close()
            storage = self._catalog.log_storage(bucket_id)
            storage.delete(storage.names())
            path = self._view_directory / self._catalog.path(bucket_id)
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Close all buckets. Closing twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            buckets = list(self._buckets.values())
        self._pool.shutdown()
        self._put_pool.shutdown()
        with ExitStack() as stack:  # One that fails keeps none of the others open.
            for bucket in buckets:
                stack.callback(bucket.close)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the table is closed; open it again")
