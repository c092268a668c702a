"""Aggregate tables that merge on write. `import tallybook as tb`: what users type is here.

cli         the command line, as an application
commands/   what the command line does, one module per group of commands
connecting  how to reach a cluster: by arguments, the environment, or a small file
errors      every error that is raised on purpose, as `tb.errors`
spark       registers the data source `tallybook` with a Spark session
tiering     copies of tables in a lake, as `tb.tiering`
"""

from foundation.errors import TallybookError
from foundation.ids import BucketId, Token
from merge_engine.aggregates import AggFunction
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.results import BucketResult, PutResult
from merge_engine.bucket.segment import AggMode
from merge_engine.schema.builder import SchemaBuilder
from merge_engine.schema.schema import Column, Schema
from recovery.description import TableDescription
from recovery.embedded.table import Table
from recovery.reader.cut import Cut
from recovery.reader.table_changes import TableChanges
from recovery.reader.table_scan import ScanSource, TableScan
from recovery.table import AnyTable
from recovery.writer.redo import RedoLog
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.cluster import Cluster
from server.client.remote_table import RemoteTable
from server.client.snapshot_lease import SnapshotLease
from server.launch.local_cluster import LocalCluster
from sink.aggregate_sink import AggregateSink
from sink.named_write import WriteResult, write
from tallybook import errors, spark, tiering
from tallybook.connecting import connect

__all__ = [
    "AggFunction",
    "AggMode",
    "AggregateSink",
    "AnyTable",
    "BucketId",
    "BucketOptions",
    "BucketResult",
    "Cluster",
    "Column",
    "Cut",
    "LocalCluster",
    "PutResult",
    "RedoLog",
    "RemoteTable",
    "Rows",
    "ScanSource",
    "Schema",
    "SchemaBuilder",
    "SnapshotLease",
    "Table",
    "TableChanges",
    "TableDescription",
    "TableScan",
    "TableWriter",
    "TallybookError",
    "Token",
    "WriteResult",
    "connect",
    "errors",
    "spark",
    "tiering",
    "write",
]
