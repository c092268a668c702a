"""What all calls to a table of a cluster need: where its buckets are, and who is asked."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from locks import BucketKey, Coordinator, LeadKey
from merge_engine import (
    ObjectStorage,
    Schema,
    SchemaHistory,
    Token,
)
from merge_engine.routing import Route
from recovery.writer import TableWriter
from server import wire
from server.calls import Calls
from server.connections import Broken
from server.definitions import ClusterTable
from server.errors import PartitionGone


class Access(Protocol):
    """What a table needs of its cluster."""

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, over this client's session."""

    @property
    def calls(self) -> Calls:
        """The calls to servers."""

    def storage(self) -> ObjectStorage:
        """The object store that has the cluster's logs and snapshots."""

    def writer(
        self, table: Any, *, owner_id: str, columns: Sequence[str], **settings: Any
    ) -> TableWriter:
        """Return a writer of these columns."""

    def close(self) -> None:
        """End the connection."""


class TableCalls:
    """A table of a cluster, as far as calls to its buckets need to know it. Safe for threads."""

    def __init__(self, access: Access, table: ClusterTable) -> None:
        self._access = access
        self._table = table
        self._partitions: dict[bytes, int] = {}
        if not table.schema.partition_by:
            self._partitions = {b"": 0}

    @property
    def name(self) -> str:
        """The table's name."""
        return self._table.name

    @property
    def table_id(self) -> int:
        """The id of this table; another one of the same name has another."""
        return self._table.table_id

    @property
    def schema(self) -> Schema:
        """The schema as this client last saw it."""
        return self._table.schema

    @property
    def buckets(self) -> int:
        """How many buckets each partition has."""
        return self._table.buckets

    @property
    def definition(self) -> ClusterTable:
        """The table as the coordinator defines it, as this client last saw it."""
        return self._table

    def refresh(self) -> None:
        """Look again at the definition: others may have altered it."""
        self._table = ClusterTable(self._access.coordinator.table_by_id(self.table_id))

    def _knowing(self, version: int) -> SchemaHistory:
        """Return all schemas up to this version at least; UnknownSchema if there is none such."""
        if version > self.schema.version:
            self.refresh()
        self._table.history.check_knows(version)
        return self._table.history

    def bucket_keys(self) -> list[BucketKey]:
        """Return all buckets of all partitions, as they are now."""
        partitions = self._read_partitions()
        return [
            BucketKey(partitions[key], number)
            for key in sorted(partitions)
            for number in range(self.buckets)
        ]

    def partition_ids(self) -> frozenset[int]:
        """Return the ids of the partitions, as they are now; 0 is that of a table without."""
        return frozenset(self._read_partitions().values())

    def _read_partitions(self) -> dict[bytes, int]:
        if self.schema.partition_by:
            self._partitions = self._access.coordinator.partitions(self._table.table)
        return self._partitions

    def call(
        self,
        action: str,
        fields: Mapping[str, Any],
        rows: Mapping[BucketKey, Sequence[int]],
        *,
        answer: str,
        patient: bool = True,
        check_partitions: bool = False,
        seen: Callable[[wire.Fields], None] = lambda _: None,
    ) -> tuple[dict[BucketKey, Any], frozenset[str]]:
        """Call an action for many buckets, once per server.

        Returns what `answer` says of each bucket, and the sessions of the servers that answered.
        `check_partitions`: PartitionGone for a bucket that nobody leads because it is no more.
        `seen`: gets every answer.
        """
        table = self._table
        sessions: set[str] = set()

        def send(address: str, keys: Sequence[LeadKey], timeout_s: float) -> dict[LeadKey, Any]:
            buckets = [[*key.key, *rows[key.key]] for key in keys]
            body = self._request(table, fields, buckets)
            reply = wire.decode(
                self._access.calls.connections.action(address, action, body, timeout_s)
            )
            sessions.add(reply.get("session", str))
            seen(reply)
            return dict(zip(keys, reply.get(answer, list), strict=True))

        keys = [LeadKey(self.table_id, key) for key in rows]
        results = self._access.calls.scatter(
            keys,
            table.buckets,
            send,
            patient=patient,
            check_moved=self._check_partitions if check_partitions else None,
        )
        return {key.key: result for key, result in results.items()}, frozenset(sessions)

    def put_progress(self, owner: str, token: Token) -> dict[str, int]:
        """Return how much of a large batch has arrived at the servers, and how much is written."""
        calls = self._access.calls
        body = wire.encode({"table": self.table_id, "owner": owner, "token": list(token)})
        total = {"rows": 0, "bytes": 0, "rows_done": 0}
        for server in self._access.coordinator.list_servers():
            try:
                answer = calls.connections.action(
                    server.address, "put_progress", body, calls.attempt_s
                )
            except Broken:  # It is not needed for the batch, or the batch finds out.
                continue
            fields = wire.decode(answer)
            for name in total:
                total[name] += fields.get(name, int)
        return total

    def _request(
        self, table: ClusterTable, fields: Mapping[str, Any], buckets: list[list[int]]
    ) -> bytes:
        return wire.encode(self._fields(table, fields, buckets))

    def _fields(
        self, table: ClusterTable, fields: Mapping[str, Any], buckets: list[list[int]]
    ) -> dict[str, Any]:
        return {
            "table": table.table_id,
            "schema_version": table.schema.version,
            "buckets": buckets,
            **fields,
        }

    def _check_partitions(self, keys: Sequence[LeadKey]) -> None:
        """Raise PartitionGone if buckets have no leader because they are no more."""
        if self.schema.partition_by:
            there = set(self._read_partitions().values())
            gone = sorted({key.key.partition for key in keys} - there)
            if gone:
                raise PartitionGone(
                    f"the partitions with ids {gone} of table {self.name} were dropped meanwhile"
                )

    def _find_lead_key(self, target: Route) -> LeadKey | None:
        if target.partition_key not in self._partitions:
            self._read_partitions()
        partition = self._partitions.get(target.partition_key)
        if partition is None:
            return None
        return LeadKey(self.table_id, BucketKey(partition, target.bucket))
