"""The calls of a tablet server that scan: rows of a bucket as one Flight stream.

A ticket begins a scan, or goes on with a scanner after a key: see `Scan`, and its messages. What
breaks off before the last of them can be taken up.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from foundation.errors import BadRequest, UnknownColumn
from foundation.ids import LeadKey
from merge_engine.schema.schema import Column
from merge_engine.storage.scratch import Scratch
from recovery.reader.bucket_scan import BucketScan, ScannedBatch, open_scan
from recovery.reader.standing import at_own_cut
from server.protocol.calls import Nothing
from server.protocol.definitions import ClusterTable
from server.protocol.reads import CloseScanners, Scan, ScanBatch, ScanBegun, ScanDone
from server.tablet.metrics import Metrics
from server.tablet.requests import Requests, columns_of, schema_of
from server.tablet.scanners import Scanner, Scanners

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

    def stream(self, call: Scan) -> tuple[pa.Schema, Iterator[Any]]:
        """Return batches of rows in key order, each with its message as metadata."""
        table = self._requests.table(call)
        [key] = self._requests.keys(table, [call.bucket])
        batch_rows = _MOST_BATCH_ROWS if call.batch_rows is None else call.batch_rows
        if (call.limit is not None and call.limit < 0) or batch_rows < 1:
            raise BadRequest(f"a scan of {call.limit} rows in batches of {batch_rows}")
        schema = schema_of(call, table)
        columns = columns_of(schema, table, call.columns)
        named = [*schema.key_columns, *columns]
        arrow = pa.schema([(column.name, column.type) for column in named])
        if call.scanner is None:
            # All else was looked at before: a request that is refused leaves no scanner open.
            _check_readable(columns, table)
            scanner = self._open(call, table, key)
        else:
            scanner = self._scanners.get(call.scanner)
            if scanner.key != key:
                raise BadRequest(f"scanner {call.scanner} is of bucket {scanner.key}, not {key}")
        found = scanner.batches(
            columns,
            after=call.after,
            limit=call.limit,
            batch_rows=min(batch_rows, _MOST_BATCH_ROWS),
        )
        return arrow, self._messages(table, scanner, arrow, found)

    def close(self, call: CloseScanners) -> Nothing:
        """End scanners; those that are no more have ended already."""
        for scanner_id in call.scanners:
            self._scanners.close(scanner_id)
        return Nothing()

    def _open(self, call: Scan, table: ClusterTable, key: LeadKey) -> Scanner:
        self._requests.session.check()

        def pin() -> BucketScan:
            cut = self._requests.cut(call, table)
            led = self._requests.hosting.get(key)
            at = None if cut is None else cut.at(key.bucket)
            confirming = self._requests.confirming
            return open_scan(
                led.bucket,
                at,
                confirm=lambda: confirming.confirm(key, led),
                scratch=self._scratch,
            )

        given = call.cut is not None
        return self._scanners.open(key, pin if given else lambda: at_own_cut(pin))

    def _messages(
        self,
        table: ClusterTable,
        scanner: Scanner,
        schema: pa.Schema,
        found: Iterator[ScannedBatch],
    ) -> Iterator[Any]:
        nothing = pa.RecordBatch.from_pylist([], schema=schema)
        about = ScanBegun(scanner=scanner.scanner_id, offset=scanner.offset)
        yield nothing, about.to_body()
        for batch in found:
            data = pa.RecordBatch.from_arrays(batch.data.columns, schema=schema)
            self._metrics.count("rows_scanned", data.num_rows, table=table.name)
            yield data, ScanBatch(last_key=batch.last_key).to_body()
        yield nothing, ScanDone().to_body()


def _check_readable(columns: Sequence[Column], table: ClusterTable) -> None:
    for column in columns:
        if column.id not in table.history.position:
            raise UnknownColumn(
                f"column '{column.name}' is of the key, or was dropped meanwhile; read again"
            )
