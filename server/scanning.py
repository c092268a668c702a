"""The calls of a tablet server that scan: rows of a bucket as one Flight stream.

A ticket begins a scan, or goes on with a scanner behind a key. The stream's first message has no
rows but says which scanner it is and at which log offset its rows stand; every batch says its last
key; a last message without rows says that this was all. What breaks off before can be taken up.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from locks import LeadKey
from merge_engine import Column, UnknownColumn
from merge_engine.scratch import Scratch
from recovery.scan import BucketScan, ScannedBatch, open_scan
from server import wire
from server.definitions import ClusterTable
from server.errors import BadRequest
from server.metrics import Metrics
from server.requests import Requests, column_of, is_committed, schema_of
from server.scanners import Scanner, Scanners

_MOST_BATCH_ROWS = 50_000


class Scanning:
    """Answers scans of the buckets that are hosted here. Safe for threads."""

    def __init__(
        self, requests: Requests, scanners: Scanners, metrics: Metrics, scratch: Scratch
    ) -> None:
        """`scratch`: for masks that do not fit into memory."""
        self._scratch = scratch
        self._requests = requests
        self._scanners = scanners
        self._metrics = metrics

    def stream(self, fields: wire.Fields) -> tuple[pa.Schema, Iterator[Any]]:
        """Return batches of rows in key order, each with its last key as metadata."""
        table = self._requests.table(fields)
        keys, _ = self._requests.keys(fields, 2)
        if len(keys) != 1:
            raise BadRequest(f"a scan of {len(keys)} buckets; they are scanned one by one")
        limit, after = fields.optional("limit", int), fields.octets("after")
        batch_rows = fields.optional("batch_rows", int)
        batch_rows = _MOST_BATCH_ROWS if batch_rows is None else batch_rows
        if (limit is not None and limit < 0) or batch_rows < 1:
            raise BadRequest(f"a scan of {limit} rows in batches of {batch_rows}")
        schema = schema_of(fields, table)
        columns = [column_of(schema, table, number) for number in fields.integers("columns")]
        named = [*schema.key_columns, *columns]
        arrow = pa.schema([(column.name, column.type) for column in named])
        scanner_id = fields.optional("scanner", str)
        if scanner_id is None:
            # All else was looked at before: a request that is refused leaves no scanner behind.
            _check_readable(columns, table)
            scanner = self._open(fields, table, keys[0])
        else:
            scanner = self._scanners.get(scanner_id)
            if scanner.key != keys[0]:
                raise BadRequest(f"scanner {scanner_id} is of bucket {scanner.key}, not {keys[0]}")
        found = scanner.batches(
            columns, after=after, limit=limit, batch_rows=min(batch_rows, _MOST_BATCH_ROWS)
        )
        return arrow, self._messages(table, scanner, arrow, found)

    def close(self, body: pa.Buffer) -> dict[str, Any]:
        """End scanners; those that are no more have ended already."""
        for scanner_id in wire.decode(body).texts("scanners") or ():
            self._scanners.close(scanner_id)
        return {}

    def _open(self, fields: wire.Fields, table: ClusterTable, key: LeadKey) -> Scanner:
        committed = is_committed(fields)
        self._requests.session.check()

        def pin() -> BucketScan:
            led = self._requests.hosting.get(key)
            read = self._requests.records_of(table)
            return open_scan(led.bucket, led.key, read, committed=committed, scratch=self._scratch)

        return self._scanners.open(key, pin)

    def _messages(
        self,
        table: ClusterTable,
        scanner: Scanner,
        schema: pa.Schema,
        found: Iterator[ScannedBatch],
    ) -> Iterator[Any]:
        nothing = pa.RecordBatch.from_pylist([], schema=schema)
        about = {"scanner": scanner.scanner_id, "offset": scanner.offset}
        yield nothing, wire.encode(about)
        for batch in found:
            data = pa.RecordBatch.from_arrays(batch.data.columns, schema=schema)
            self._metrics.count("rows_scanned", data.num_rows, table=table.name)
            yield data, wire.encode({"last_key": batch.last_key.hex()})
        yield nothing, wire.encode({"done": True})


def _check_readable(columns: Sequence[Column], table: ClusterTable) -> None:
    for column in columns:
        if column.id not in table.history.position:
            raise UnknownColumn(
                f"column '{column.name}' is of the key, or was dropped meanwhile; read again"
            )
