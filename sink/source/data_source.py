"""The data source `tallybook`: what `spark.read` and `spark.readStream` call.

Spark makes these objects in processes of its own, several times for one query: one asks for the
schema, one plans, and each task has a copy that reads. What they share is in the options, in the
tasks that were planned and, in a stream, in the offsets.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition

from foundation.errors import InvalidInput
from recovery.reader.isolation import Isolation
from server.client.cluster import PATIENCE_S
from server.client.remote_table import RemoteTable
from sink.source.lake_read import ReadCopy, plan_version, version_schema
from sink.source.options import ReaderOptions, VersionOptions
from sink.source.planning import RowsPlan, plan_rows
from sink.source.pruning import allowed_values
from sink.source.schemas import caster, change_fields, chosen_fields, row_fields, to_spark
from sink.source.stream import ChangeStream
from sink.source.tasks import TableTask
from sink.worker_connections import connected

# Spark imports this where it offers filters, and only there. It refuses a reader that takes filters
# while they are switched off (`spark.sql.python.filterPushdown.enabled`), as they are by default.
_OFFERS_FILTERS = "pyspark.sql.worker.data_source_pushdown_filters"

_HOW_TO_WRITE = (
    "the format `tallybook` only reads: a stream is written by "
    'stream.writeStream.foreachBatch(AggregateSink("host:2181", "table", columns=[...])), a frame '
    "by calling such a sink, one with an owner_id: sink(frame, 0)"
)


class TallybookSource(DataSource):  # type: ignore[misc]
    """Rows of a table, or the stream of its changes if the option `start` says where it begins."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._version = VersionOptions.of(options)
        if self._version is None:
            self._given = ReaderOptions.of(options)

    @classmethod
    def name(cls) -> str:
        """Return what `format` is given."""
        return "tallybook"

    def schema(self) -> Any:
        """Return the columns of the table, or of its changes; a batch may take its cut here.

        Spark asks once, when a frame is loaded or a view is created, and keeps this object as it is
        then for all that is planned of it: where filters are offered, that is every query anew. It
        does not ask where the user has given a schema. With a copy in a lake, which may get ahead
        of a cut that is taken now, each plan takes its own.
        """
        if self._version is not None:
            return to_spark(version_fields(self._version))
        # The first that Spark asks, for somebody who waits: a wrong address is told soon.
        table = self._table(PATIENCE_S)
        given = self._given
        stands = given.at is not None or given.lake is not None or given.start is not None
        if given.isolation is Isolation.COMMITTED and not stands:
            self._given = replace(given, at=table.cut())
            table.refresh()  # What the cut has may be of a column that was added just before it.
        return to_spark(self._fields(table))

    def reader(self, schema: Any) -> DataSourceReader:
        """Return what plans a batch, and reads it."""
        if self._version is not None:
            return CopyRows(self._version, schema)
        if self._given.start is not None:
            raise InvalidInput("`start` is for streams: leave it, or use spark.readStream")
        takes_filters = self._given.push_filters and _OFFERS_FILTERS in sys.modules
        return (FilteredRows if takes_filters else TableRows)(self._given, schema)

    def streamReader(self, schema: Any) -> ChangeStream:  # noqa: N802
        """Return what plans the micro-batches of a stream, and reads them."""
        if self._version is not None:
            raise InvalidInput("a version of a copy does not change: use spark.read")
        if self._given.start is None:
            raise InvalidInput(
                'where does the stream start? Say .option("start", "full"): all rows, then what '
                'changes; "earliest": all changes that the log has; "latest": what changes from '
                "now on; or a cut, str(table.cut())"
            )
        table = self._table()
        return ChangeStream(self._given, table.definition, self._check(table, schema), schema)

    def writer(self, schema: Any, overwrite: bool) -> NoReturn:  # noqa: ARG002
        """Say how tables are written: not by a data source."""
        raise InvalidInput(_HOW_TO_WRITE)

    def streamWriter(self, schema: Any, overwrite: bool) -> NoReturn:  # noqa: N802, ARG002
        """Say how tables are written: not by a data source."""
        raise InvalidInput(_HOW_TO_WRITE)

    def _table(self, patience_s: float | None = None) -> RemoteTable:
        return connected(self._given.recipe, patience_s).table(self._given.table)

    def _fields(self, table: RemoteTable) -> pa.Schema:
        given = self._given
        if given.start is None:
            return row_fields(table.schema, given.columns)
        return change_fields(table.schema, given.columns, given.mode)

    def _check(self, table: RemoteTable, schema: Any) -> Sequence[str]:
        """Return the names of what is wanted, by a schema that may be the user's own."""
        names: list[str] = chosen_fields(self._fields(table), schema).names
        return names


class TableRows(DataSourceReader):  # type: ignore[misc]
    """Reads the rows of a table at one cut: the frame's, or one of now if it has none.

    Spark may keep what was planned for whatever else is done with the frame, or with a view. Who
    wants later rows loads another.
    """

    def __init__(self, options: ReaderOptions, schema: Any) -> None:
        self._options = options
        self._schema = schema
        self._filters: Sequence[Filter] = ()

    def partitions(self) -> list[InputPartition]:
        """Return what there is to read, a task each."""
        table = connected(self._options.recipe).table(self._options.table)
        fields = chosen_fields(row_fields(table.schema, None), self._schema)
        plan = RowsPlan.of(self._options, fields.names, allowed_values(self._filters))
        return [InputPartition(task) for task in plan_rows(table, self._options.recipe, plan)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield what a task has to read."""
        return read_task(partition.value, self._schema)


class CopyRows(DataSourceReader):  # type: ignore[misc]
    """Reads a version of a copy in a lake, as it was."""

    def __init__(self, options: VersionOptions, schema: Any) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Return what there is to read, a task each."""
        given = self._options
        fields = chosen_fields(version_fields(replace(given, columns=None)), self._schema)
        return [
            InputPartition(one) for one in plan_version(given.lake, given.version, fields.names)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield what a task has to read."""
        return read_task(partition.value, self._schema)


def version_fields(options: VersionOptions) -> pa.Schema:
    """Return the columns of a version of a copy, or those that are wanted."""
    schema = version_schema(options.lake, options.version, options.table)
    return row_fields(schema, options.columns)


class FilteredRows(TableRows):
    """The same where Spark offers filters: they choose buckets and keys, and Spark has them too.

    Only for frames that say so, by the option `pushFilters`, and that are used with one filter:
    Spark 4.3 plans a frame once for all that is done with it, and what was planned last, by any
    filter, is what all others read, too. Rows that do not pass that filter would be missing there.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Keep the filters in mind, and give all of them back."""
        self._filters = list(filters)
        return self._filters


def read_task(
    task: TableTask | ReadCopy | None, schema: Any, timezone: str = "UTC"
) -> Iterator[Any]:
    """Yield the batches of a task, exactly as Spark's schema has them; None has none."""
    return iter(()) if task is None else map(caster(schema, timezone), task.batches())
