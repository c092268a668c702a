"""What a table is: schema, aggregate functions, merge, log, bucket. No network, no Spark."""

from merge_engine.aggregates import AggFunction, AggregateFunction
from merge_engine.bucket import Bucket, PutResult
from merge_engine.catalog import BucketId
from merge_engine.errors import (
    BatchTooLarge,
    Closed,
    Corrupt,
    CorruptSegment,
    CorruptView,
    Deposed,
    InUse,
    InvalidInput,
    InvalidKey,
    InvalidValue,
    LogGap,
    MissingColumn,
    OffsetOutOfRange,
    Overflow,
    Retryable,
    SchemaError,
    StorageFull,
    StorageUnavailable,
    TallybookError,
    UnknownColumn,
    UnknownFormat,
    UnknownOutcome,
    WrongType,
)
from merge_engine.options import BucketOptions
from merge_engine.schema import Column, Schema
from merge_engine.schema_builder import SchemaBuilder
from merge_engine.segment import AggMode, Operation, Segment, SegmentHeader, SegmentKind, Token
from merge_engine.storage import LocalStorage, ObjectStorage, RemoteStorage, open_storage
from merge_engine.stored import SchemaHistory
from merge_engine.table import Table, TablePutResult

__all__ = [
    "AggFunction",
    "AggMode",
    "AggregateFunction",
    "BatchTooLarge",
    "Bucket",
    "BucketId",
    "BucketOptions",
    "Closed",
    "Column",
    "Corrupt",
    "CorruptSegment",
    "CorruptView",
    "Deposed",
    "InUse",
    "InvalidInput",
    "InvalidKey",
    "InvalidValue",
    "LocalStorage",
    "LogGap",
    "MissingColumn",
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
    "StorageFull",
    "StorageUnavailable",
    "Table",
    "TablePutResult",
    "TallybookError",
    "Token",
    "UnknownColumn",
    "UnknownFormat",
    "UnknownOutcome",
    "WrongType",
    "open_storage",
]
