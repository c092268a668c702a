"""An embedded table behind a real Flight server: what is written and read goes over the network.

Everything else (closing, cleaning, looking into buckets) is the embedded table's own, so that the
table machine runs over this as it does without it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import pyarrow as pa

from foundation.errors import Deposed, NotLeader, ServerFailed
from foundation.ids import BucketId, LeadKey
from locks.catalog.definitions import CatalogTable
from locks.cluster.servers import Members, Server
from locks.column_locks.records import LockRecord
from locks.coordinator import Coordinator
from merge_engine.bucket.log import wall_clock_ms
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.results import PutResult
from merge_engine.storage.scratch import Scratch
from recovery.embedded.table import Table
from recovery.leader.led_bucket import LedBucket
from server.client.connections import Connections, ServerCredentials
from server.client.leader_calls import LeaderCalls
from server.client.remote_table import RemoteTable
from server.protocol.definitions import UID, ClusterTable, define
from server.tablet.hosting import Hosting
from server.tablet.limits import Admission, Limits, ScannerLimits
from server.tablet.metrics import Metrics
from server.tablet.requests import Requests
from server.tablet.scanners import Scanners
from server.tablet.service import TabletService
from server.tablet.staging import Staging
from tests.property.models import same
from tests.property.table_model import Crash

Result = TypeVar("Result")
TABLE_ID = 7


class ImpatientCalls(LeaderCalls):
    """There is one server: whoever does not lead never will."""

    def scatter(self, *arguments: Any, **settings: Any) -> Any:
        return super().scatter(*arguments, **{**settings, "patient": False})


class ThroughFlight:
    """A `Table` as far as the table machine is concerned."""

    asks_afar = False

    def __init__(self, table: Table, *, undo_s: float = 1.0) -> None:
        self._table = table
        self._scanners = Scanners(ScannerLimits())
        self._staging = Staging(Scratch(), ttl_s=60.0, is_needed=lambda _: True)
        self._service = TabletService(
            "grpc://127.0.0.1:0",
            Requests(cast(Hosting, self), self),
            Admission(Limits()),
            Metrics(),
            scanners=self._scanners,
            staging=self._staging,
            lookup_max_keys=1_000,
            actions={},
            call_s=undo_s,
        )
        self.calls = ImpatientCalls(
            lambda: self.coordinator,
            Connections(ServerCredentials()),
            deadline_s=60.0,
            attempt_s=60.0,
        )

    # --- The table's calls, over the network ----------------------------------------------------

    def put(self, data: Any, **arguments: Any) -> PutResult:
        return self._call(lambda remote: remote.put(data, **arguments))

    def delete(self, keys: Any, **arguments: Any) -> PutResult:
        return self._call(lambda remote: remote.delete(keys, **arguments))

    def lookup(self, keys: Any, columns: Any = None) -> pa.Table:
        latest = self._call(lambda remote: remote.lookup(keys, columns))
        committed = self._call(lambda remote: remote.lookup(keys, columns, isolation="committed"))
        # There are no locks, so everything is committed.
        assert same(committed.to_pylist()) == same(latest.to_pylist())
        return latest

    def changelog(self, bucket_id: BucketId, from_offset: int = 0) -> Iterator[pa.RecordBatch]:
        found = [
            list(self._changes(bucket_id, from_offset, isolation))
            for isolation in ("latest", "committed")
        ]
        latest, committed = (same([batch.to_pylist() for batch in batches]) for batches in found)
        # There are no locks, so everything is committed, and what is undone has been.
        assert committed == latest
        yield from found[0]

    def _changes(
        self, bucket_id: BucketId, from_offset: int, isolation: str
    ) -> Iterator[pa.RecordBatch]:
        changes = self._call(
            lambda remote: remote.changelog(bucket_id, from_offset, isolation=isolation)
        )
        yield from changes
        assert changes.next_offset == self._table.bucket(bucket_id).end_offset

    def scan(self, columns: Any = None) -> Iterator[pa.RecordBatch]:
        yield from self._call(lambda remote: remote.scan(columns))

    def undo(self, debtor: str, columns: Any, offsets: Mapping[BucketId, int]) -> Any:
        return self._call(lambda remote: remote.undo(debtor, columns, offsets))

    def end_offsets(self) -> dict[BucketId, int]:
        return self._call(RemoteTable.end_offsets)

    def close(self) -> None:
        self.calls.close()
        self._service.shutdown()
        self._scanners.shutdown()
        self._staging.shutdown()
        self._table.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def _call(self, call: Callable[[RemoteTable], Result]) -> Result:
        """Call, and raise what the embedded table would have raised."""
        try:
            return call(RemoteTable(self, self.table(TABLE_ID)))
        except ServerFailed as exc:
            if Crash.__name__ in str(exc):
                raise Crash from exc
            raise
        except NotLeader as exc:
            if "another leader has taken this bucket" in str(exc):
                raise Deposed(str(exc)) from exc
            raise

    # --- What the service asks of its server ----------------------------------------------------

    name = "session"

    def check(self) -> None:
        """It is always connected."""

    def check_connected(self) -> None:
        """Nor does its connection."""

    def now_ms(self) -> int:
        """Return the time, by this machine's clock."""
        return wall_clock_ms()

    def look_again(self) -> None:
        """It never moves."""

    @property
    def options(self) -> BucketOptions:
        return self._table._options

    def table(self, _: int) -> ClusterTable:
        history = self._catalog.history
        *former, _ = (schema.to_json() for schema in history.schemas.values())
        known = define(self._table.schema, self._catalog.buckets, column_locks=False, options={})
        options = {**known.options, UID: self._catalog.table_id}
        known = replace(known, former=tuple(former), options=options)
        return ClusterTable(
            CatalogTable(name="modelled", table_id=TABLE_ID, version=0, definition=known)
        )

    def get(self, key: LeadKey) -> LedBucket:
        return LedBucket(self._table.bucket(key.bucket), key.bucket, locked=False)

    def get_all(self, keys: Sequence[LeadKey]) -> list[LedBucket]:
        return [self.get(key) for key in keys]

    @property
    def coordinator(self) -> Coordinator:
        return cast(Coordinator, _OneServer(self))


class _OneServer:
    """What the client asks of the coordinator, where one server leads all: a stand-in for rooms."""

    def __init__(self, server: ThroughFlight) -> None:
        self._server = server
        self.servers = self.leaders = self.partitions = self.locks = self.store = self

    def now_ms(self) -> int:
        return self._server.now_ms()

    def all(self) -> list[Server]:
        return [Server(name="session", address=f"127.0.0.1:{self._server._service.port}")]

    def members(self) -> Members:
        return Members(live=self.all())

    def holders(self, keys: Sequence[LeadKey]) -> dict[LeadKey, str]:
        return dict.fromkeys(keys, "session")

    def ids(self, _: object) -> dict[bytes, int]:
        return dict(self._server._catalog.partitions)

    def create(self, _: object, key: bytes) -> int:
        with self._server._table._lock:
            partitions: dict[bytes, int] = self._server._catalog.partitions
            if key not in partitions:
                self._server._catalog.create_partition(key)
            return partitions[key]

    def records(self, _: object) -> dict[str, LockRecord]:
        return {}
