"""An embedded table, as its writers reach it."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from foundation.errors import Closed, Deposed, InUse, InvalidInput, NotLeader
from foundation.ids import BucketId
from locks.catalog.definitions import CatalogTable
from merge_engine.bucket.bucket import Bucket
from merge_engine.embedded.catalog import Catalog
from merge_engine.embedded.open_buckets import OpenBuckets
from merge_engine.encoding.stored_rows import SchemaHistory
from recovery.embedded.access import Leading
from recovery.embedded.local_locks import LocalLocks
from recovery.leader.led_bucket import LedBucket


class EmbeddedPlace:
    """The buckets of an embedded table with their leader's memory; a `Place`. Safe for threads."""

    def __init__(
        self,
        catalog: Catalog,
        buckets: OpenBuckets,
        locks: LocalLocks,
        create_partition: Callable[[bytes], int],
    ) -> None:
        self._catalog = catalog
        self._buckets = buckets
        self._locks = locks
        self._lock = threading.Lock()
        self._led: dict[BucketId, LedBucket] = {}
        self.create_partition = create_partition

    @property
    def table(self) -> CatalogTable:
        return self._locks.table

    @property
    def history(self) -> SchemaHistory:
        return self._catalog.history

    def refresh(self) -> None:
        """Open all buckets, before a lock is acquired: who cannot lead them disturbs nobody."""
        self._open(self._catalog.bucket_ids())

    def partitions(self) -> Mapping[bytes, int]:
        return dict(self._catalog.partitions)

    def leading(self, keys: Sequence[BucketId]) -> Iterator[Leading]:
        """Yield this process, which leads them all."""
        there = set(self._catalog.partitions.values())
        gone = sorted(key for key in keys if key.partition not in there)
        if gone:
            raise NotLeader(f"buckets {gone} were dropped with their partition; start over")
        buckets = self._open(keys)
        with self._lock:
            led = {key: self._led_bucket(key, bucket) for key, bucket in buckets.items()}
        yield Leading(session=self._locks.session, coordinator=self._locks.coordinator, buckets=led)

    @contextmanager
    def asking(self) -> Iterator[None]:
        try:
            yield
        except Closed as exc:
            raise NotLeader(f"the bucket was closed; start over ({exc})") from exc
        except Deposed as exc:
            raise _in_use(exc) from exc

    def _open(self, keys: Sequence[BucketId]) -> dict[BucketId, Bucket]:
        try:
            return dict(zip(keys, self._buckets.map(self._buckets.get, keys), strict=True))
        except Closed:
            raise
        except InvalidInput as exc:
            raise NotLeader(f"a bucket was dropped with its partition; start over ({exc})") from exc
        except Deposed as exc:
            raise _in_use(exc) from exc

    def _led_bucket(self, key: BucketId, bucket: Bucket) -> LedBucket:
        led = self._led.get(key)
        if led is None or led.bucket is not bucket:
            led = self._led[key] = LedBucket(bucket, key)
        return led


def _in_use(exc: Deposed) -> InUse:
    """The bucket is another process's by now, for good: to start over would not help."""
    return InUse(
        f"another process has opened this table since, and leads its buckets ({exc}); what this "
        "writer had not committed is undone by the next one. Close the table here, or there"
    )
