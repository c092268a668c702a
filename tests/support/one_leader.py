"""All buckets of a table that a coordinator knows, led by this process."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from foundation.errors import NotLeader, SessionLost
from foundation.ids import BucketId, LeadKey
from locks.catalog.definitions import CatalogTable
from locks.cluster.servers import Server
from locks.coordinator import Coordinator
from merge_engine.bucket.bucket import Bucket
from merge_engine.bucket.options import BucketOptions
from merge_engine.storage.objects import ObjectStorage
from recovery.embedded.access import Leading
from recovery.leader.led_bucket import LedBucket
from tests.support.catalog_access import Connect, history_of


class OneLeader:
    """Leads all buckets of a table, in a session of its own. Safe for threads.

    Buckets are opened on first use, unless another process leads them. When the session is lost
    they are closed, and led anew in another one, at other terms: the writers start over, as with
    any leader that moved.
    """

    def __init__(
        self,
        connect: Connect,
        name: str,
        logs: ObjectStorage,
        views: Path,
        *,
        options: BucketOptions | None = None,
    ) -> None:
        self._connect = connect
        self._name = name
        self._logs = logs
        self._views = views
        self._options = options or BucketOptions()
        self._cache = self._options.to_cache()
        self._memory = self._options.to_memory()
        self._lock = threading.Lock()
        self._joined: tuple[Server, Coordinator] | None = None
        self._table: CatalogTable | None = None
        self._buckets: dict[BucketId, LedBucket] = {}

    def leading(self, keys: Sequence[BucketId]) -> Iterator[Leading]:
        """Yield this one leader, for all of the buckets."""
        with self._lock:
            server, coordinator = self._join()
            try:
                self._look_at_the_table(coordinator)
                self._open(server, coordinator, [key for key in keys if key not in self._buckets])
            except SessionLost as exc:
                self._leave()
                raise NotLeader(f"the leader has lost its session; ask again ({exc})") from exc
            buckets = {key: self._buckets[key] for key in keys}
        yield Leading(session=server.name, coordinator=coordinator, buckets=buckets)

    def close(self) -> None:
        """Close the buckets and end the session. Closing twice is fine."""
        with self._lock:
            self._leave()

    def _join(self) -> tuple[Server, Coordinator]:
        if self._joined is None:
            coordinator = Coordinator(self._connect())
            self._joined = coordinator.servers.register("embedded"), coordinator
        return self._joined

    def _leave(self) -> None:
        buckets, self._buckets = self._buckets, {}
        for led in buckets.values():
            led.bucket.close()
        joined, self._joined = self._joined, None
        if joined is not None:
            joined[1].store.close()

    def _look_at_the_table(self, coordinator: Coordinator) -> None:
        known = self._table
        by_name, by_id = coordinator.tables.get, coordinator.tables.get_by_id
        table = by_name(self._name) if known is None else by_id(known.table_id)
        if table != known:
            self._table = table
            for led in self._buckets.values():
                led.bucket.evolve(history_of(table))

    def _open(self, server: Server, coordinator: Coordinator, keys: Sequence[BucketId]) -> None:
        if not keys:
            return
        table = self._table
        assert table is not None
        leads = {key: LeadKey(table.table_id, key) for key in keys}
        taken = coordinator.leaders.take(server, list(leads.values()))
        for key, lead in leads.items():
            path = f"{key}"
            if lead not in taken:
                raise NotLeader(f"another process leads bucket {path} of table {table.name}")
            bucket = Bucket(
                self._logs.child(path),
                self._views / path,
                history_of(table),
                identity=f"{table.name}-{table.table_id}/{path}",
                options=self._options,
                cache=self._cache,
                memory=self._memory,
                read_schemas=lambda: history_of(coordinator.tables.get_by_id(table.table_id)),
            )
            self._buckets[key] = LedBucket(bucket, key)
