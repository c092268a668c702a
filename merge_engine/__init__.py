"""What a table is: schema, aggregate functions, merge, log, bucket. No network, no Spark."""

from foundation.errors import TallybookError
from merge_engine.aggregates import AggFunction, AggregateFunction
from merge_engine.bucket import Bucket, PutResult, UndoResult
from merge_engine.catalog import BucketId
from merge_engine.errors import (
    BatchTooLarge,
    Closed,
    Corrupt,
    CorruptSegment,
    CorruptSnapshot,
    CorruptTable,
    CorruptView,
    Deposed,
    InUse,
    InvalidInput,
    InvalidKey,
    InvalidValue,
    LogGap,
    MissingColumn,
    MissingSnapshot,
    OffsetOutOfRange,
    Overflow,
    Retryable,
    SchemaError,
    StorageFull,
    StorageUnavailable,
    UnknownColumn,
    UnknownFormat,
    UnknownOutcome,
    UnknownSchema,
    WrongType,
)
from merge_engine.options import BucketOptions
from merge_engine.schema import Column, Schema
from merge_engine.schema_builder import SchemaBuilder
from merge_engine.segment import AggMode, Operation, Segment, SegmentHeader, SegmentKind, Token
from merge_engine.snapshot import SnapshotStorage, Uploaded, restore_latest
from merge_engine.snapshot_manifest import Manifest
from merge_engine.storage import LocalStorage, ObjectStorage, RemoteStorage, open_storage
from merge_engine.stored import SchemaHistory
from merge_engine.table import Table, TablePutResult
from merge_engine.undo import UndoRange
from merge_engine.view import CheckpointState, read_checkpoint

__all__ = [
    "AggFunction",
    "AggMode",
    "AggregateFunction",
    "BatchTooLarge",
    "Bucket",
    "BucketId",
    "BucketOptions",
    "CheckpointState",
    "Closed",
    "Column",
    "Corrupt",
    "CorruptSegment",
    "CorruptSnapshot",
    "CorruptTable",
    "CorruptView",
    "Deposed",
    "InUse",
    "InvalidInput",
    "InvalidKey",
    "InvalidValue",
    "LocalStorage",
    "LogGap",
    "Manifest",
    "MissingColumn",
    "MissingSnapshot",
    "ObjectStorage",
    "OffsetOutOfRange",
    "Operation",
    "Overflow",
    "PutResult",
    "RemoteStorage",
    "Retryable",
    "Schema",
    "SchemaBuilder",
    "SchemaError",
    "SchemaHistory",
    "Segment",
    "SegmentHeader",
    "SegmentKind",
    "SnapshotStorage",
    "StorageFull",
    "StorageUnavailable",
    "Table",
    "TablePutResult",
    "TallybookError",
    "Token",
    "UndoRange",
    "UndoResult",
    "UnknownColumn",
    "UnknownFormat",
    "UnknownOutcome",
    "UnknownSchema",
    "Uploaded",
    "WrongType",
    "open_storage",
    "read_checkpoint",
    "restore_latest",
]
