"""An embedded table behind a real Flight server: what is written and read goes over the network.

Everything else (closing, cleaning, looking into buckets) is the embedded table's own, so that the
table machine runs over this as it does without it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import pyarrow as pa

from locks import BucketKey, Coordinator, LeadKey, LockRecord, Server
from locks import Table as KnownTable
from merge_engine import BucketId, BucketOptions, Deposed, PutResult, Table, TablePutResult
from merge_engine.catalog import UNPARTITIONED
from merge_engine.log import wall_clock_ms
from merge_engine.scratch import Scratch
from recovery.errors import NotLeader
from recovery.led_bucket import LedBucket
from server.calls import Calls
from server.connections import Access, Connections
from server.definitions import ClusterTable, define
from server.errors import ServerFailed
from server.hosting import Hosting
from server.limits import Admission, Limits, ScannerLimits
from server.metrics import Metrics
from server.remote_table import RemoteTable
from server.requests import Requests
from server.scanners import Scanners
from server.service import TabletService
from server.staging import Staging
from tests.property.models import same
from tests.property.table_model import Crash

Result = TypeVar("Result")
TABLE_ID = 7


class ImpatientCalls(Calls):
    """There is one server: whoever does not lead never will."""

    def scatter(self, *arguments: Any, **settings: Any) -> Any:
        return super().scatter(*arguments, **{**settings, "patient": False})


class ThroughFlight:
    """A `Table` as far as the table machine is concerned."""

    def __init__(self, table: Table, *, undo_s: float = 1.0) -> None:
        self._table = table
        self._numbers = {UNPARTITIONED: 0}
        self._scanners = Scanners(ScannerLimits())
        self._staging = Staging(Scratch(), ttl_s=60.0)
        self._service = TabletService(
            "grpc://127.0.0.1:0",
            Requests(cast(Hosting, self), self),
            Admission(Limits()),
            Metrics(),
            scanners=self._scanners,
            staging=self._staging,
            lookup_max_keys=1_000,
            actions={},
            undo_s=undo_s,
        )
        self.calls = ImpatientCalls(
            lambda: self.coordinator, Connections(Access()), deadline_s=60.0, attempt_s=60.0
        )

    # --- The table's calls, over the network ----------------------------------------------------

    def put(self, data: Any, **arguments: Any) -> TablePutResult:
        result = self._call(lambda remote: remote.put(data, **arguments))
        return TablePutResult(rows=result.rows, buckets=self._results(result.buckets))

    def delete(self, keys: Any, **arguments: Any) -> TablePutResult:
        result = self._call(lambda remote: remote.delete(keys, **arguments))
        return TablePutResult(rows=result.rows, buckets=self._results(result.buckets))

    def lookup(self, keys: Any, columns: Any = None) -> pa.Table:
        latest = self._call(lambda remote: remote.lookup(keys, columns))
        committed = self._call(lambda remote: remote.lookup(keys, columns, isolation="committed"))
        # There are no locks, so everything is committed.
        assert same(committed.to_pylist()) == same(latest.to_pylist())
        return latest

    def changelog(self, bucket_id: BucketId, from_offset: int = 0) -> Iterator[pa.RecordBatch]:
        key = self._key(bucket_id)
        changes = self._call(lambda remote: remote.changelog(key, from_offset, isolation="latest"))
        yield from changes
        assert changes.next_offset == self._table.bucket(bucket_id).end_offset

    def scan(self, columns: Any = None) -> Iterator[pa.RecordBatch]:
        yield from self._call(lambda remote: remote.scan(columns))

    def undo(self, debtor: str, columns: Any, offsets: Mapping[BucketId, int]) -> Any:
        by_key = {self._key(bucket_id): offset for bucket_id, offset in offsets.items()}
        results = self._call(lambda remote: remote.undo(debtor, columns, by_key))
        return self._results(results)

    def end_offsets(self) -> dict[BucketId, int]:
        ends = self._call(RemoteTable.end_offsets)
        return {self._bucket_id(key): end for key, end in ends.items()}

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

    def _results(self, results: Mapping[BucketKey, PutResult]) -> dict[BucketId, PutResult]:
        return {self._bucket_id(key): result for key, result in results.items()}

    def _key(self, bucket_id: BucketId) -> BucketKey:
        number = self._numbers.setdefault(bucket_id.partition, len(self._numbers))
        return BucketKey(number, bucket_id.number)

    def _bucket_id(self, key: BucketKey) -> BucketId:
        [name] = [name for name, number in self._numbers.items() if number == key.partition]
        return BucketId(name, key.number)

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
        known = replace(known, former=tuple(former))
        return ClusterTable(
            KnownTable(name="modelled", table_id=TABLE_ID, version=0, definition=known)
        )

    def get(self, key: LeadKey) -> LedBucket:
        bucket_id = self._bucket_id(key.key)
        return LedBucket(self._table.bucket(bucket_id), key.key, locked=False)

    # --- What the client asks of the coordinator ------------------------------------------------

    @property
    def coordinator(self) -> Coordinator:
        return cast(Coordinator, self)

    def list_servers(self) -> list[Server]:
        return [Server(name="session", address=f"127.0.0.1:{self._service.port}")]

    def leader_of(self, _: LeadKey) -> str:
        return "session"

    def create_partition(self, _: object, key: bytes) -> int:
        with self._table._lock:
            partitions = self._catalog.partitions
            if key not in partitions:
                self._catalog.create_partition(key)
            return self._key(BucketId(partitions[key], 0)).partition

    def records(self, _: object) -> dict[str, LockRecord]:
        return {}


def _partitions(self: ThroughFlight, _: object = None) -> Any:
    """The coordinator's with an argument, the table's without."""
    if _ is None:
        return self._table.partitions()
    return {
        key: self._key(BucketId(name, 0)).partition
        for key, name in self._catalog.partitions.items()
    }


ThroughFlight.partitions = _partitions  # type: ignore[attr-defined]
