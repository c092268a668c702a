"""The Spark sink: a `foreachBatch` function that writes each micro-batch exactly once.

sink = AggregateSink("127.0.0.1:2181", "customers", columns=["orders", "revenue"])
events.writeStream.foreachBatch(sink).option("checkpointLocation", "chk/customers").start()
"""

import atexit
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from merge_engine import InvalidInput, InvalidValue, PutResult, open_storage
from recovery.access import Answers, Grant, Rows
from recovery.redo import RedoLog
from recovery.writer import TableWriter, WriterState
from server.client import Cluster, connect
from server.remote_table import RemoteTable
from server.writer_access import RemoteAccess
from sink.executors import Job, put_from_executors
from sink.listener import when_query_ends
from sink.options import SinkOptions
from sink.progress import BatchProgress, SinkStatus
from sink.quarantine import set_aside
from sink.rows import InputColumns, RowReader

logger = logging.getLogger(__name__)

_MOST_REFUSED_KEYS = 1_000


class AggregateSink:
    """Writes columns of a table, as the owner named by `owner_id` or by the query.

    Options are those of `SinkOptions`; `options` takes them under their configuration names. The
    lock is acquired with the first batch and released when the query ends.
    """

    def __init__(
        self,
        address: str,
        table: str,
        *,
        columns: Sequence[str],
        options: Mapping[str, str] | None = None,
        connection: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`connection`: arguments of `tb.connect`, such as a token."""
        self._address = address
        self._table_name = table
        self._columns = tuple(columns)
        self._options = SinkOptions(**settings).with_texts(options or {})
        self._connection = dict(connection or {})
        self._calls = threading.Lock()
        self._cluster: Cluster | None = None
        self._writer: TableWriter | None = None
        self._query_id: str | None = None
        self._reader: RowReader | None = None
        self._input: InputColumns | None = None
        self._last_rows = 0
        self._status = SinkStatus()

    def __getstate__(self) -> Any:
        raise InvalidInput(
            "Spark Connect would send this sink to another process, without its lock: use a "
            "classic Spark session (spark-submit, or SparkSession.builder.master(...))"
        )

    def status(self) -> dict[str, Any]:
        """Return what the sink has done: the last batch and the totals."""
        return self._status.to_dict(self._writer)

    def close(self) -> None:
        """Release the lock, or abandon it if a batch is uncommitted. Closing twice is fine."""
        with self._calls:
            writer, self._writer = self._writer, None
            cluster, self._cluster = self._cluster, None
        if writer is not None:
            writer.close()
            writer.access.close()
        if cluster is not None:
            cluster.close()
        atexit.unregister(self.close)

    # --- A batch --------------------------------------------------------------------------------

    def __call__(self, frame: Any, batch_id: int) -> None:
        """Write a micro-batch; Spark calls this."""
        with self._calls:
            began = time.perf_counter()
            writer = self._ready(frame)
            progress = BatchProgress(batch=batch_id)
            if batch_id == writer.batch:
                progress.skipped = True
            else:
                self._write(writer, frame, batch_id, progress)
            progress.finish(writer, time.perf_counter() - began)
            self._status.add(progress)
            logger.info("batch %d: %s", batch_id, progress)

    def _write(
        self, writer: TableWriter, frame: Any, batch_id: int, progress: BatchProgress
    ) -> None:
        assert self._input is not None
        self._input.check(frame.columns)
        refused: dict[bytes, str] = {}
        while True:
            try:
                if self._goes_by_driver():
                    self._by_driver(writer, frame, batch_id, progress, refused)
                else:
                    self._by_executors(writer, frame, batch_id, progress, refused)
                break
            except InvalidValue as exc:
                # A server refused a key: set its rows aside, and write the rest.
                key = exc.encoded_key
                if self._options.bad_rows != "quarantine" or len(refused) >= _MOST_REFUSED_KEYS:
                    raise
                if key is None or key in refused:
                    raise
                refused[key] = str(exc)
        self._last_rows = progress.rows

    def _by_driver(
        self,
        writer: TableWriter,
        frame: Any,
        batch_id: int,
        progress: BatchProgress,
        refused: Mapping[bytes, str],
    ) -> None:
        assert self._reader is not None
        with progress.timed("collect"):
            data = self._collect(frame)
        with progress.timed("fold"):
            rows, bad = self._reader.read(data, refused)
        self._quarantine(bad, batch_id)
        progress.route = "driver"
        progress.rows, progress.refused = data.num_rows, bad.num_rows
        progress.keys = _rows_in(rows)
        progress.bytes = _bytes_in(rows)
        writer.write(batch_id, rows)

    def _by_executors(
        self,
        writer: TableWriter,
        frame: Any,
        batch_id: int,
        progress: BatchProgress,
        refused: Mapping[bytes, str],
    ) -> None:
        assert self._reader is not None
        assert self._input is not None
        assert self._cluster is not None
        remote = self._remote(writer)
        cores = frame.sparkSession.sparkContext.defaultParallelism
        partitions = max(1, min(remote.buckets, 2 * cores))
        aside = self._options.bad_rows == "quarantine"
        progress.route = "executors"

        def put(grant: Grant) -> Answers[PutResult]:
            job = Job(
                recipe=self._cluster_recipe(),
                table_id=remote.table_id,
                schema=remote.schema,
                grant=grant,
                reader=self._reader_of(remote),
                buckets=remote.buckets,
                names=self._input_of(remote).names(),
                quarantine=(str(self._options.quarantine_path), writer.owner) if aside else None,
                exclude=dict(refused),
            )
            outcome = put_from_executors(frame, job, partitions)
            progress.rows = outcome.rows
            return outcome.answers

        writer.run(batch_id, put, self._partitions_of(frame, remote))

    def _partitions_of(self, frame: Any, remote: RemoteTable) -> Rows | None:
        """Return rows that name the partitions of the batch: only the driver creates them."""
        names = {column.name for column in remote.schema.partition_columns}
        if not names:
            return None
        columns = {n: of for n, of in self._input_of(remote).names().items() if n in names}
        distinct = _renamed(frame, columns).distinct().dropna().toArrow()
        # The other key columns do not matter for a partition; any value of their type does.
        for column in remote.schema.key_columns:
            if column.name not in names:
                distinct = distinct.append_column(column.name, _any_value(column.type, distinct))
        return Rows(data=distinct)

    def _goes_by_driver(self) -> bool:
        if self._options.route != "auto" or self._options.recovery == "redo":
            return self._options.route != "executors"
        return self._last_rows <= self._options.driver_max_rows

    def _collect(self, frame: Any) -> pa.Table:
        assert self._input is not None
        table: pa.Table = _renamed(frame, self._input.names()).toArrow()
        return table

    def _quarantine(self, bad: pa.Table, batch_id: int) -> None:
        if bad.num_rows:
            assert self._writer is not None
            path = set_aside(bad, str(self._options.quarantine_path), self._writer.owner, batch_id)
            logger.warning("set %d bad rows of batch %d aside: %s", bad.num_rows, batch_id, path)

    # --- The first batch ------------------------------------------------------------------------

    def _ready(self, frame: Any) -> TableWriter:
        """Return the writer, started; the first time, connect and find out who we are."""
        if type(frame).__module__.startswith("pyspark.sql.connect"):
            self.__getstate__()
        query_id = frame.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        if self._writer is not None and self._query_id != query_id:
            raise InvalidInput(
                "one sink serves one query: make another AggregateSink for the second"
            )
        if self._writer is not None and self._writer.state is not WriterState.FENCED:
            return self._writer
        if self._writer is not None:
            raise InvalidInput(
                f"the sink of `{self._writer.owner}` was fenced: another incarnation of this "
                "owner writes; stop this query"
            )
        owner = self._options.owner_id or query_id
        if not owner:
            raise InvalidInput(
                "outside of a streaming query there is no query id: give the sink an owner_id"
            )
        self._query_id = query_id
        self._cluster = connect(self._address, **self._connection)
        remote = self._cluster.table(self._table_name)
        self._input = self._input_of(remote)
        self._reader = self._reader_of(remote)
        redo = None
        if self._options.recovery == "redo":
            redo = RedoLog(open_storage(str(self._options.redo_location)))
        writer = TableWriter(
            RemoteAccess(self._cluster, remote),
            owner,
            self._columns,
            ttl_ms=self._options.ttl_ms,
            query_id=query_id or "",
            handover=self._options.handover,
            deadline_s=self._options.deadline_s,
            redo=redo,
        )
        writer.start()
        self._writer = writer
        atexit.register(self.close)
        if query_id:
            when_query_ends(query_id, self.close)
        return writer

    def _input_of(self, remote: RemoteTable) -> InputColumns:
        return InputColumns(
            schema=remote.schema,
            written=self._columns,
            renamed=self._options.renamed,
            operation=self._options.operation_column,
            ignore_extra=self._options.ignore_extra,
        )

    def _reader_of(self, remote: RemoteTable) -> RowReader:
        return RowReader(
            self._input_of(remote),
            fold=self._options.local_aggregation,
            set_aside=self._options.bad_rows == "quarantine",
        )

    def _remote(self, writer: TableWriter) -> RemoteTable:
        access = writer.access
        assert isinstance(access, RemoteAccess)
        return access.remote

    def _cluster_recipe(self) -> Any:
        assert self._cluster is not None
        return self._cluster.recipe


def _renamed(frame: Any, names: Mapping[str, str]) -> Any:
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    return frame.select([F.col(f"`{of_input}`").alias(name) for name, of_input in names.items()])


def _any_value(data_type: pa.DataType, table: pa.Table) -> pa.Array:
    zero = {pa.types.is_string: "", pa.types.is_binary: b""}
    value = next((value for test, value in zero.items() if test(data_type)), 0)
    return pa.array([value] * table.num_rows).cast(data_type)


def _rows_in(rows: Rows) -> int:
    return len(rows.data)


def _bytes_in(rows: Rows) -> int:
    return int(rows.data.nbytes) if isinstance(rows.data, pa.Table) else 0
