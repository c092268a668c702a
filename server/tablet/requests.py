"""What all calls of a tablet server say: for which buckets, and under which schema."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from foundation.errors import BadRequest, UnknownColumn
from foundation.ids import BucketId, LeadKey
from locks.coordinator import Coordinator
from merge_engine.schema.schema import Column, Schema
from recovery.leader.led_bucket import LedBucket
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from server.protocol.calls import BucketsCall, TableCall
from server.protocol.definitions import ClusterTable
from server.protocol.reads import Lookup, LookupStream, Scan
from server.tablet.confirming import Confirming
from server.tablet.hosting import Hosting
from server.tablet.kept_cuts import KeptCuts


class Session(Protocol):
    """This server's place in the cluster, for as long as it lasts."""

    @property
    def name(self) -> str:
        """The name of the session node; NotLeader where `check_connected` raises it."""

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, over this session."""

    def check(self) -> None:
        """Raise NotLeader unless the session is certainly alive: else others may lead by now."""

    def check_connected(self) -> None:
        """Raise NotLeader unless, besides, the connection to ZooKeeper is up: for who writes."""

    def now_ms(self) -> int:
        """Return ZooKeeper's time, which all servers share."""

    def look_again(self) -> None:
        """Say that leads may have changed."""


class Requests:
    """Reads what a request says against what this server knows. Safe for threads."""

    def __init__(
        self,
        hosting: Hosting,
        session: Session,
        *,
        store_waits_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.hosting = hosting
        self.session = session
        self.confirming = Confirming(session, store_waits_s)
        self.cuts = KeptCuts(
            lambda table: session.coordinator.locks.read(table.table)  # Over the session of then.
        )

    def table(self, call: TableCall[Any]) -> ClusterTable:
        """Return the table, under a schema at least as new as the caller's."""
        table = self.hosting.table(call.table_id)
        if call.schema_version > table.schema.version:
            newer = ClusterTable(self.session.coordinator.tables.get_by_id(call.table_id))
            self.hosting.set_table(newer)
            table = self.hosting.table(call.table_id)
        return table

    def keys(self, table: ClusterTable, buckets: Iterable[BucketId]) -> list[LeadKey]:
        """Return buckets of a table among those of all; BadRequest for one that cannot be."""
        keys = [LeadKey(table.table_id, bucket) for bucket in buckets]
        for key in keys:
            if key.bucket.partition < 0 or not 0 <= key.bucket.number < table.buckets:
                raise BadRequest(f"bucket {key} is none of a table with {table.buckets} buckets")
        return keys

    def led(self, call: BucketsCall[Any]) -> list[LedBucket]:
        """Return the buckets of a call, as they are led here."""
        return self.hosting.get_all(self.keys(self.table(call), call.buckets))

    def cut(self, call: Lookup | LookupStream | Scan, table: ClusterTable) -> Cut | None:
        """Return where a call's rows stand: at its cut, or at one of now; None: as they are."""
        if call.isolation is Isolation.LATEST:
            return None
        if call.cut is not None:
            return table.check_cut(call.cut)
        return self.cuts.take(table)

    def records_of(self, table: ClusterTable) -> Callable[[], Any]:
        if not table.locked:
            return dict
        return lambda: self.session.coordinator.locks.records(table.table)


def schema_of(call: TableCall[Any], table: ClusterTable) -> Schema:
    """Return the schema that the caller works with: names are its, ids are everybody's."""
    if call.schema_version not in table.history.schemas:
        raise BadRequest(f"table {table.name} has no schema version {call.schema_version}")
    return table.history.schema(call.schema_version)


def columns_of(schema: Schema, table: ClusterTable, ids: Iterable[int]) -> list[Column]:
    """Return the columns of these ids."""
    columns = []
    for number in ids:
        column = schema.column_by_id(number)
        if column is None:
            raise UnknownColumn(f"table {table.name} has no column with id {number}")
        columns.append(column)
    return columns
