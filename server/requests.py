"""What all calls of a tablet server say: for which buckets, and under which schema."""

from collections.abc import Callable
from typing import Any, Protocol

import pyarrow as pa

from locks import BucketKey, Coordinator, LeadKey
from merge_engine import Column, Schema, UnknownColumn
from recovery.led_bucket import LedBucket
from server import wire
from server.definitions import ClusterTable
from server.errors import BadRequest
from server.hosting import Hosting

COMMITTED, LATEST = "committed", "latest"


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

    def __init__(self, hosting: Hosting, session: Session) -> None:
        self.hosting = hosting
        self.session = session

    def table(self, fields: wire.Fields) -> ClusterTable:
        """Return the table, under a schema at least as new as the caller's."""
        table_id, version = fields.get("table", int), fields.get("schema_version", int)
        table = self.hosting.table(table_id)
        if version > table.schema.version:
            newer = ClusterTable(self.session.coordinator.table_by_id(table_id))
            self.hosting.set_table(newer)
            table = self.hosting.table(table_id)
        return table

    def keys(self, fields: wire.Fields, width: int) -> tuple[list[LeadKey], list[int]]:
        """Return the buckets of a request and, if it has them, the terms."""
        table_id = fields.get("table", int)
        rows = fields.rows("buckets", width)
        keys = [LeadKey(table_id, BucketKey(row[0], row[1])) for row in rows]
        if len(set(keys)) != len(keys):
            raise BadRequest("a request that names a bucket twice")
        buckets = self.hosting.table(table_id).buckets
        for key in keys:
            if key.key.partition < 0 or not 0 <= key.key.number < buckets:
                raise BadRequest(f"bucket {key} is none of a table with {buckets} buckets")
        return keys, [row[2] for row in rows] if width > 2 else []

    def led(
        self, body: pa.Buffer, width: int
    ) -> tuple[wire.Fields, list[LedBucket], list[list[int]]]:
        """Return an action's fields, its buckets, and the further numbers of each."""
        fields = wire.decode(body)
        self.table(fields)
        keys, _ = self.keys(fields, width)
        numbers = [row[2:] for row in fields.rows("buckets", width)]
        return fields, [self.hosting.get(key) for key in keys], numbers

    def records_of(self, table: ClusterTable) -> Callable[[], Any]:
        if not table.locked:
            return dict
        return lambda: self.session.coordinator.records(table.table)


def schema_of(fields: wire.Fields, table: ClusterTable) -> Schema:
    """Return the schema that the caller works with: names are its, ids are everybody's."""
    version = fields.get("schema_version", int)
    if version not in table.history.schemas:
        raise BadRequest(f"table {table.name} has no schema version {version}")
    return table.history.schema(version)


def column_of(schema: Schema, table: ClusterTable, number: int) -> Column:
    column = schema.column_by_id(number)
    if column is None:
        raise UnknownColumn(f"table {table.name} has no column with id {number}")
    return column


def is_committed(fields: wire.Fields) -> bool:
    isolation = fields.get("isolation", str)
    if isolation not in (COMMITTED, LATEST):
        raise BadRequest(f"no isolation is called {isolation!r}; use {COMMITTED!r} or {LATEST!r}")
    return isolation == COMMITTED
