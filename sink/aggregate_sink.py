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
from sink.executors import Job, put_from_executors, renamed
from sink.listener import when_run_ends
from sink.options import SinkOptions, checked_settings
from sink.progress import BatchProgress, SinkStatus
from sink.quarantine import clear, set_aside
from sink.rows import InputColumns, RowReader

logger = logging.getLogger(__name__)

_MOST_REFUSED_KEYS = 1_000

# Who writes as which owner, in which run of a query: two sinks of one query would each take the
# other's batch for a replay of its own.
_claims: dict[tuple[str, int, str], "AggregateSink"] = {}
_claiming = threading.Lock()


class _KeysRefused(InvalidInput):
    """A task set keys aside whose rows other tasks may have put. Write the batch without them."""

    def __init__(self, keys: Mapping[bytes, str]) -> None:
        super().__init__(f"{len(keys)} keys are refused")
        self.keys = keys


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
        if isinstance(columns, str):
            raise InvalidInput(f"columns is a list of column names, not {columns!r}")
        self._columns = tuple(columns)
        self._options = SinkOptions(**checked_settings(settings)).with_texts(options or {})
        self._connection = dict(connection or {})
        self._calls = threading.Lock()
        self._cluster: Cluster | None = None
        self._writer: TableWriter | None = None
        self._last_writer: TableWriter | None = None
        self._query_id: str | None = None
        self._reader: RowReader | None = None
        self._input: InputColumns | None = None
        self._last_rows = 0
        self._undone_keys = 0
        self._status = SinkStatus()

    def __getstate__(self) -> Any:
        raise InvalidInput(
            "Spark Connect would send this sink to another process, without its lock: use a "
            "classic Spark session (spark-submit, or SparkSession.builder.master(...))"
        )

    def status(self) -> dict[str, Any]:
        """Return what the sink has done: the last batch and the totals."""
        return self._status.to_dict(self._last_writer)

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
        self._drop_claims()
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
                if writer.batch >= 0 and batch_id > writer.batch + 1:
                    logger.warning("batch %d comes after batch %d", batch_id, writer.batch)
                self._write(writer, frame, batch_id, progress)
            progress.finish(writer, time.perf_counter() - began, self._undone_keys)
            self._undone_keys = writer.progress.undone_keys
            self._status.add(progress)
            logger.info("batch %d: %s", batch_id, progress)

    def _write(
        self, writer: TableWriter, frame: Any, batch_id: int, progress: BatchProgress
    ) -> None:
        assert self._input is not None
        self._input.check(frame.columns)
        refused: dict[bytes, str] = {}
        by_driver = self._goes_by_driver()
        while True:
            try:
                if by_driver:
                    by_driver = self._by_driver(writer, frame, batch_id, progress, refused)
                if not by_driver:
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
            except _KeysRefused as exc:
                refused.update(exc.keys)
        self._last_rows = progress.rows

    def _by_driver(
        self,
        writer: TableWriter,
        frame: Any,
        batch_id: int,
        progress: BatchProgress,
        refused: Mapping[bytes, str],
    ) -> bool:
        """Collect and write the batch; False if it is too large for that."""
        assert self._reader is not None
        with progress.timed("collect"):
            data = self._collect(frame)
        if data is None:
            return False
        with progress.timed("fold"):
            read = self._reader.read(data, refused)
        rows, bad = read.rows, read.refused
        progress.route = "driver"
        progress.rows, progress.refused = data.num_rows, bad.num_rows
        progress.keys = _rows_in(rows)
        progress.bytes = _bytes_in(rows)

        def put(grant: Grant) -> Answers[PutResult]:
            self._quarantine(bad, writer.owner, batch_id)
            return writer.access.put(grant, rows)

        try:
            writer.run(batch_id, put, rows)
        except InvalidValue as exc:
            if self._options.bad_rows == "quarantine":
                raise
            raise self._reader.with_sample(exc, data) from exc
        return True

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
            if aside:
                clear(str(self._options.quarantine_path), writer.owner, batch_id)
            outcome = put_from_executors(frame, job, partitions)
            progress.rows, progress.refused = outcome.rows, outcome.refused
            progress.keys, progress.bytes = outcome.keys, outcome.bytes
            if outcome.refused_keys:
                raise _KeysRefused(outcome.refused_keys)
            return outcome.answers

        writer.run(batch_id, put, self._partitions_of(frame, remote))

    def _partitions_of(self, frame: Any, remote: RemoteTable) -> Rows | None:
        """Return rows that name the partitions of the batch: only the driver creates them."""
        names = {column.name for column in remote.schema.partition_columns}
        if not names:
            return None
        columns = {n: of for n, of in self._input_of(remote).names().items() if n in names}
        distinct = renamed(frame, columns).distinct().dropna().toArrow()
        # The other key columns do not matter for a partition; any value of their type does.
        for column in remote.schema.key_columns:
            if column.name not in names:
                distinct = distinct.append_column(column.name, _any_value(column.type, distinct))
        return Rows(data=distinct)

    def _goes_by_driver(self) -> bool:
        if self._options.route != "auto" or self._options.recovery == "redo":
            return self._options.route != "executors"
        return self._last_rows <= self._options.driver_max_rows

    def _collect(self, frame: Any) -> pa.Table | None:
        """Return the batch; None if Spark does not let the driver have that much."""
        assert self._input is not None
        try:
            table: pa.Table = renamed(frame, self._input.names()).toArrow()
        except Exception as exc:
            may_change = self._options.route == "auto" and self._options.recovery != "redo"
            if may_change and "spark.driver.maxResultSize" in str(exc):
                logger.info("the batch is too large to collect: it goes by the executors")
                return None
            raise
        return table

    def _quarantine(self, bad: pa.Table, owner: str, batch_id: int) -> None:
        if self._options.bad_rows != "quarantine":
            return
        place = str(self._options.quarantine_path)
        clear(place, owner, batch_id)
        if bad.num_rows:
            path = set_aside(bad, place, owner, batch_id)
            logger.warning("set %d bad rows of batch %d aside: %s", bad.num_rows, batch_id, path)

    # --- The first batch ------------------------------------------------------------------------

    def _ready(self, frame: Any) -> TableWriter:
        """Return the writer, started; the first time, connect and find out who we are."""
        if type(frame).__module__.startswith("pyspark.sql.connect"):
            self.__getstate__()
        context = frame.sparkSession.sparkContext
        query_id = context.getLocalProperty("sql.streaming.queryId")
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
        # Of a streaming query's thread: its run, which a restart of the query does not share.
        run_id = context.getLocalProperty("spark.jobGroup.id") if query_id else None
        self._cluster = connect(self._address, **self._connection)
        try:
            writer = self._start(self._cluster, owner, query_id, run_id)
        except Exception:
            self._drop_claims()
            self._cluster.close()
            self._cluster = None
            raise
        self._writer = self._last_writer = writer
        self._undone_keys = 0
        atexit.register(self.close)
        if run_id:
            when_run_ends(run_id, self.close)
        return writer

    def _start(
        self, cluster: Cluster, owner: str, query_id: str | None, run_id: str | None
    ) -> TableWriter:
        remote = cluster.table(self._table_name)
        self._input = self._input_of(remote)
        self._reader = self._reader_of(remote)
        if not remote.definition.locked:
            logger.warning(
                "table %s has no column locks: others may write these columns too, and each event "
                "is counted at least once, not exactly once",
                self._table_name,
            )
        if run_id:
            self._claim((run_id, remote.table_id, owner))
        redo = None
        if self._options.recovery == "redo":
            redo = RedoLog(open_storage(str(self._options.redo_location)))
        return TableWriter(
            RemoteAccess(cluster, remote),
            owner,
            self._columns,
            ttl_ms=self._options.ttl_ms,
            query_id=query_id or "",
            handover=self._options.handover,
            deadline_s=self._options.deadline_s,
            redo=redo,
        ).start()

    def _claim(self, claim: tuple[str, int, str]) -> None:
        with _claiming:
            if _claims.setdefault(claim, self) is not self:
                raise InvalidInput(
                    f"another sink of this query writes table {self._table_name} as "
                    f"`{claim[2]}`: make one sink for all batches of a query; a second one on the "
                    "same table needs an owner_id of its own"
                )

    def _drop_claims(self) -> None:
        with _claiming:
            for claim in [claim for claim, sink in _claims.items() if sink is self]:
                del _claims[claim]

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


def _any_value(data_type: pa.DataType, table: pa.Table) -> pa.Array:
    """Return valid values of a key's type, one per row: zero bytes are one of every type."""
    width = 4 if _has_offsets(data_type) else -(-data_type.bit_width // 8)
    zeros = pa.py_buffer(bytes(width * (table.num_rows + 1)))
    buffers = [None, zeros, pa.py_buffer(b"")] if _has_offsets(data_type) else [None, zeros]
    return pa.Array.from_buffers(data_type, table.num_rows, buffers)


def _has_offsets(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(data_type) or pa.types.is_binary(data_type))


def _rows_in(rows: Rows) -> int:
    return len(rows.data)


def _bytes_in(rows: Rows) -> int:
    return int(rows.data.nbytes) if isinstance(rows.data, pa.Table) else 0
