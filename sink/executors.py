"""The executors' route: tasks fold their rows, Spark brings those of a bucket together, tasks put.

Folded rows travel as bytes, in one row per bucket and piece of a source partition: (bucket,
position, piece, payload). So Spark's types do not matter, and order-sensitive functions see the
source partitions in their order, whatever the shuffle does. A piece is as much as memory holds
well; what is more than that, Spark sorts by bucket and spills. Tasks return their outcome as text:
an error that Spark would retry in vain, or report as text only, comes back with its class. What a
task raises is for a retry to cure.
"""

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from foundation.errors import InvalidValue, SessionLost, TallybookError
from foundation.failpoints import hit
from foundation.ids import BucketId
from merge_engine.bucket.options import MEBIBYTE
from merge_engine.bucket.results import BucketResult
from merge_engine.merging.batch import read_keys
from merge_engine.merging.hashing import bucket_of
from merge_engine.merging.needed_partitions import (
    EmptyBuckets,
    rows_of_partitions,
    written_partitions,
)
from recovery.writer.access import Answers, Grant, GrantedRows
from recovery.writer.parts import PartSizes
from recovery.writer.promise_objects import Contents
from recovery.writer.redo import RedoLog
from server.client.cluster import Cluster, Recipe
from server.client.remote_table import RemoteTable
from server.client.uploads import Uploaded
from server.client.writer_access import RemoteAccess
from server.protocol import wire
from server.protocol.definitions import ClusterTable
from sink.frames import renamed
from sink.quarantine import Quarantine
from sink.rows import RowReader
from sink.task_python import packages_required, use_this_python
from sink.worker_connections import connected, disconnect, is_new_epoch

FOLDED = "bucket INT, position BIGINT, piece INT, payload BINARY"
# What is for nobody's bucket carries counts, or an error, to whoever gathers the outcomes.
_NO_BUCKET = -1
# A task folds so much at a time.
_PIECE_ROWS = 250_000
_PIECE_BYTES = 32 * MEBIBYTE
# Up to so many rows are kept to show one of them in an error.
_SAMPLED_ROWS = 100_000


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the tasks of one batch need; pickled into each of them.

    With a redo log, tasks try their rows and write them down; the driver puts them afterwards. With
    `try_only` they put nothing: rows of partitions that are not there yet meet nothing but each
    other, and the driver creates these if all rows fit.

    `table` is the table as the driver knows it; names are those of the reader's schema, whatever
    they are by now. `partitions` are the keys of those that the writer has fenced; None if there
    are none.
    """

    recipe: Recipe
    table: ClusterTable
    grant: Grant
    reader: RowReader
    names: Mapping[str, str]
    sizes: PartSizes
    partitions: frozenset[bytes] | None = None
    quarantine: Quarantine | None = None
    redo: RedoLog | None = None
    exclude: Mapping[bytes, str] = field(default_factory=dict)
    try_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the tasks of a batch did. With missing partitions, some rows were not put.

    `staged`: the files of bad rows that are to be published. `promised` and `uploads`: of tasks
    that have tried their rows, where these are.
    """

    rows: int
    refused: int
    staged: Sequence[str]
    refused_keys: Mapping[bytes, str]
    missing_partitions: frozenset[bytes]
    keys: int
    bytes: int
    answers: Answers[BucketResult]
    promised: Contents
    uploads: Sequence[Uploaded]


def put_from_executors(frame: Any, job: Job, partitions: int) -> Outcome:
    """Run the two stages and gather their outcomes; the first error of a task is raised here."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    use_this_python(frame.sparkSession)
    folded = renamed(frame, job.names).mapInArrow(_folding(job), FOLDED)
    # Before Spark 4.1 by hash: each bucket still in one task, though some tasks have more of them.
    spread = getattr(folded, "repartitionById", folded.repartition)
    by_bucket = spread(partitions, F.col("bucket"))
    ordered = by_bucket.sortWithinPartitions("bucket", "position", "piece")
    # Not by Arrow, which would bring thousands of payloads at a time: row by row, as they are read.
    with packages_required():
        outcomes = ordered.rdd.mapPartitions(_putting(job)).collect()
    return _gather([json.loads(outcome) for outcome in outcomes])


def _folding(job: Job) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def fold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext  # noqa: PLC0415

        context = TaskContext.get()
        part = 0 if context is None else context.partitionId()
        for piece, data in enumerate(_gathered(batches)):
            try:
                payloads = _fold_piece(job, data, f"{part}-{piece}" if piece else str(part))
            except TallybookError as exc:
                failure = json.dumps(_failure(exc)).encode()
                yield _folded({_NO_BUCKET: failure}, part, piece)
                return
            yield _folded(payloads, part, piece)

    return fold


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows in pieces that are worth folding, and not too large for it."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= _PIECE_ROWS or size >= _PIECE_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def _fold_piece(job: Job, data: pa.Table, part: str) -> dict[int, bytes]:
    """Return the folded rows by bucket, and what is to be told about them."""
    read = job.reader.read(data, job.exclude)
    staged = []
    if len(read.refused) and job.quarantine is not None:
        staged = [job.quarantine.stage(read.refused, part)]
    table = read.rows.data
    assert isinstance(table, pa.Table)
    keys = read_keys(table, job.reader.schema)
    numbers = bucket_of(keys, job.table.buckets).astype(np.int64)
    order = np.argsort(numbers, kind="stable")
    bounds = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    parts = np.split(order, bounds[1:]) if len(order) else []
    told = {
        "rows": len(data),
        "refused": len(read.refused),
        "staged": staged,
        "refused_keys": {key.hex(): why for key, why in read.refused_keys.items()},
    }
    payloads = {int(numbers[at[0]]): _payload(table.take(pa.array(at))) for at in parts}
    return {**payloads, _NO_BUCKET: json.dumps(told).encode()}


def _folded(payloads: Mapping[int, bytes], part: int, piece: int) -> pa.RecordBatch:
    count = len(payloads)
    return pa.record_batch(
        {
            "bucket": pa.array(list(payloads), pa.int32()),
            "position": pa.array([part] * count, pa.int64()),
            "piece": pa.array([piece] * count, pa.int32()),
            "payload": pa.array(list(payloads.values()), pa.binary()),
        }
    )


def _payload(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return bytes(sink.getvalue())


def _putting(job: Job) -> Callable[[Iterator[Any]], Iterator[str]]:
    def put_all(rows: Iterator[Any]) -> Iterator[str]:
        folded = iter(rows)
        first = None
        for row in folded:  # What is told comes before all buckets.
            if row.bucket != _NO_BUCKET:
                first = row
                break
            yield bytes(row.payload).decode()
        if first is not None:
            yield json.dumps(_put(job, chain([first], folded)))

    return put_all


class _Unfolded:
    """The rows of a task, payload by payload, and what was seen of them."""

    def __init__(self, job: Job, folded: Iterator[Any]) -> None:
        self._job = job
        self._folded = folded
        self._how = job.reader.to_rows(())
        self._empty = EmptyBuckets(job.reader.schema)
        self.missing: set[bytes] = set()
        self.rows = 0
        self.bytes = 0
        self.sample: list[pa.Table] = []

    def tables(self) -> Iterator[pa.Table]:
        """Yield the tables, once; if a partition is missing, nothing more, and an error."""
        for row in self._folded:
            with pa.ipc.open_stream(pa.py_buffer(row.payload)) as reader:
                table = reader.read_all()
            missing = self._missing_partitions(table)
            if missing and self._job.try_only:
                table = self._without_new(table, missing)
            else:
                self.missing |= missing
            if self.missing:  # Nothing is put; but all that are missing are told at once.
                continue
            self.rows += table.num_rows
            self.bytes += table.nbytes
            if self.rows <= _SAMPLED_ROWS:
                self.sample.append(table)
            yield table
        self._empty.finish()
        if self.missing:
            raise _Missing

    def _missing_partitions(self, table: pa.Table) -> set[bytes]:
        """Return the keys of partitions that only the driver may create, and has not yet."""
        if self._job.partitions is None:
            return set()
        written = written_partitions(table, self._job.reader.schema, self._how.operation_column)
        return written - self._job.partitions

    def _without_new(self, table: pa.Table, new: Container[bytes]) -> pa.Table:
        """Try the rows of partitions that are not there, and return the others."""
        schema, how = self._job.reader.schema, self._how
        self._empty.add(
            rows_of_partitions(table, schema, lambda key: key in new),
            columns=how.columns,
            mode=how.mode,
            operation_column=how.operation_column,
        )
        return rows_of_partitions(table, schema, lambda key: key not in new)


class _Missing(Exception):
    """Rows of partitions that are not there: nothing of the task is put."""


def _put(job: Job, folded: Iterator[Any]) -> dict[str, Any]:
    unfolded = _Unfolded(job, folded)
    hit("task.before_put")
    try:
        put_or_tried = _put_connected(job, unfolded)
    except _Missing:
        return {"missing_partitions": [key.hex() for key in sorted(unfolded.missing)]}
    except InvalidValue as exc:
        if job.quarantine is None and unfolded.sample:
            return _failure(job.reader.with_sample(exc, pa.concat_tables(unfolded.sample)))
        return _failure(exc)
    except TallybookError as exc:
        return _failure(exc)
    hit("task.put")
    return {"keys": unfolded.rows, "bytes": unfolded.bytes, **put_or_tried}


def ready_connection(job: Job) -> Cluster:
    """Return the worker's connection, or a new one if its session was lost since.

    Under an epoch that the worker has not heard of it looks first who is there.
    """
    try:
        connected(job.recipe).coordinator.store.sync()
    except SessionLost:
        disconnect(job.recipe)
    cluster = connected(job.recipe)
    grant = job.grant
    if is_new_epoch(job.recipe, grant.owner, grant.writer.epoch):
        cluster.calls.directory.refresh()
    return cluster


def _put_connected(job: Job, unfolded: _Unfolded) -> dict[str, Any]:
    """Put over a connection that is made ready before the first row is read: rows come only once.

    Returns what is to be told.
    """
    cluster = ready_connection(job)
    access = RemoteAccess(cluster, RemoteTable(cluster, job.table), sizes=job.sizes)
    granted = GrantedRows(job.grant, job.reader.to_rows(unfolded.tables))
    if job.try_only:
        access.try_rows(granted)
        return {}
    if job.redo is not None:
        return _try(job, job.redo, access, granted)
    answers = access.put(granted)
    return {
        "sessions": sorted(answers.sessions),
        "results": [
            [*key, result.base_offset, result.end_offset, int(result.repeated)]
            for key, result in answers.results.items()
        ],
    }


def _try(job: Job, redo: RedoLog, access: RemoteAccess, granted: GrantedRows) -> dict[str, Any]:
    """Try the rows, and leave them where the driver finds them: on the servers, and in the log."""
    grant = granted.grant
    promise = redo.begin(job.table.table.uid, grant.owner, grant.token)
    large = access.try_in_parts(granted, promise)
    if large is None:
        return {}
    with ExitStack() as unless_written:
        unless_written.enter_context(closing(large))
        promised = promise.spill()
        unless_written.pop_all()
    return {"promised": promised.to_json(), "uploads": large.hand_over()}


def _failure(error: Exception) -> dict[str, Any]:
    return {**wire.to_fields(error), "message": str(error)}


def _gather(outcomes: Sequence[Mapping[str, Any]]) -> Outcome:
    errors = [wire.error_of(outcome) for outcome in outcomes if "error" in outcome]
    refused = [error for error in errors if isinstance(error, InvalidValue)]
    if errors:
        raise (
            InvalidValue.together(refused)
            if len(refused) == len(errors)
            else next(error for error in errors if not isinstance(error, InvalidValue))
        )
    results = {
        BucketId(partition, number): BucketResult(
            base_offset=base, end_offset=end, repeated=bool(repeated)
        )
        for outcome in outcomes
        for partition, number, base, end, repeated in outcome.get("results", ())
    }
    sessions = frozenset(name for outcome in outcomes for name in outcome.get("sessions", ()))
    counts = {
        name: sum(outcome.get(name, 0) for outcome in outcomes)
        for name in ("rows", "refused", "keys", "bytes")
    }
    refused_keys = {
        bytes.fromhex(key): why
        for outcome in outcomes
        for key, why in outcome.get("refused_keys", {}).items()
    }
    missing = frozenset(
        bytes.fromhex(key) for outcome in outcomes for key in outcome.get("missing_partitions", ())
    )
    promised = Contents()
    for outcome in outcomes:
        if "promised" in outcome:
            promised += Contents.from_json(outcome["promised"])
    return Outcome(
        **counts,
        promised=promised,
        uploads=[Uploaded(*one) for outcome in outcomes for one in outcome.get("uploads", ())],
        staged=[name for outcome in outcomes for name in outcome.get("staged", ())],
        refused_keys=refused_keys,
        missing_partitions=missing,
        answers=Answers(results, sessions),
    )
