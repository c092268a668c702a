"""The executors' route: tasks fold their rows, Spark brings those of a bucket together, tasks put.

Folded rows travel as bytes, in one row per source partition and bucket: (bucket, order, payload).
So Spark's types do not matter, and order-sensitive functions see the source partitions in their
order, whatever the shuffle does. Tasks return their outcome as rows: an error that Spark would
retry in vain, or report as text only, comes back with its class. What a task raises is for a retry
to cure.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from locks import BucketKey, CoordinationError, SessionLost
from merge_engine import AggMode, InvalidValue, PutResult, TallybookError
from merge_engine.batch import read_keys
from merge_engine.failpoints import hit
from merge_engine.hashing import bucket_of
from merge_engine.routing import route
from recovery.access import Answers, Grant, Rows
from server import wire
from server.client import Cluster, Recipe
from server.definitions import ClusterTable
from server.remote_table import RemoteTable
from server.writer_access import put
from sink.frames import renamed
from sink.quarantine import Quarantine
from sink.rows import RowReader

FOLDED = "bucket INT, position BIGINT, payload BINARY"
OUTCOME = "outcome STRING"
# What is for nobody's bucket carries counts, or an error, to whoever gathers the outcomes.
_NO_BUCKET = -1

# The connections of this Python worker, which its tasks share.
_clusters: dict[str, Cluster] = {}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the tasks of one batch need; pickled into each of them.

    `table` is the table as the driver knows it; names are those of the reader's schema, whatever
    they are by now. `partitions` are the keys of those that the writer has fenced; None if there
    are none.
    """

    recipe: Recipe
    table: ClusterTable
    grant: Grant
    reader: RowReader
    names: Mapping[str, str]
    partitions: frozenset[bytes] | None = None
    quarantine: Quarantine | None = None
    exclude: Mapping[bytes, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the tasks of a batch did. With missing partitions, some rows were not put.

    `staged`: the files of bad rows that are to be published.
    """

    rows: int
    refused: int
    staged: Sequence[str]
    refused_keys: Mapping[bytes, str]
    missing_partitions: frozenset[bytes]
    keys: int
    bytes: int
    answers: Answers[PutResult]


def put_from_executors(frame: Any, job: Job, partitions: int) -> Outcome:
    """Run the two stages and gather their outcomes; the first error of a task is raised here."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415

    folded = renamed(frame, job.names).mapInArrow(_folding(job), FOLDED)
    outcomes = folded.repartitionById(partitions, F.col("bucket")).mapInArrow(
        _putting(job), OUTCOME
    )
    return _gather([json.loads(row.outcome) for row in outcomes.collect()])


def _folding(job: Job) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def fold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext  # noqa: PLC0415

        context = TaskContext.get()
        part = 0 if context is None else context.partitionId()
        gathered = list(batches)
        if not gathered:
            return
        data = pa.Table.from_batches(gathered)
        try:
            read = job.reader.read(data, job.exclude)
        except TallybookError as exc:
            yield _folded({_NO_BUCKET: json.dumps(_failure(exc)).encode()}, part)
            return
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
        payloads = {
            int(numbers[at[0]]): _payload(table.take(pa.array(at)), read.rows) for at in parts
        }
        yield _folded({**payloads, _NO_BUCKET: json.dumps(told).encode()}, part)

    return fold


def _folded(payloads: Mapping[int, bytes], part: int) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "bucket": pa.array(list(payloads), pa.int32()),
            "position": pa.array([part] * len(payloads), pa.int64()),
            "payload": pa.array(list(payloads.values()), pa.binary()),
        }
    )


def _payload(table: pa.Table, rows: Rows) -> bytes:
    fields = {
        "columns": list(rows.columns or ()),
        "mode": int(rows.mode),
        "operation_column": rows.operation_column,
    }
    return bytes(wire.frame(fields, table.schema, table.combine_chunks().to_batches()))


def _putting(job: Job) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def put_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        folded = [row for batch in batches for row in batch.to_pylist()]
        told = [row["payload"].decode() for row in folded if row["bucket"] == _NO_BUCKET]
        yield from map(_outcome, told)
        # One put per bucket and batch, in the order of the source's partitions.
        parts = sorted(
            (row for row in folded if row["bucket"] != _NO_BUCKET),
            key=lambda row: (row["bucket"], row["position"]),
        )
        if parts:
            yield _outcome(json.dumps(_put(job, parts)))

    return put_all


def _put(job: Job, folded: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    read = [wire.unframe(pa.py_buffer(row["payload"])) for row in folded]
    tables = [pa.Table.from_batches(batches) for _, batches in read if batches]
    with_operations = [fields for fields, _ in read if "operation_column" in fields]
    operation = with_operations[0].get("operation_column", str) if with_operations else None
    if operation is not None:
        tables = [_with_operations(table, operation) for table in tables]
    fields = read[0][0]
    table = pa.concat_tables(tables)
    rows = Rows(
        data=table,
        columns=fields.texts("columns"),
        mode=AggMode(fields.get("mode", int)),
        operation_column=operation,
        schema=job.reader.schema,
    )
    missing = _missing_partitions(job, table)
    if missing:
        return {"missing_partitions": [key.hex() for key in missing]}
    hit("task.before_put")
    try:
        answers = _put_connected(job, rows)
    except InvalidValue as exc:
        return _failure(exc if job.quarantine else job.reader.with_sample(exc, table))
    except (TallybookError, CoordinationError) as exc:
        return _failure(exc)
    hit("task.put")
    return {
        "keys": table.num_rows,
        "bytes": table.nbytes,
        "sessions": sorted(answers.sessions),
        "results": [
            [*key, result.base_offset, result.end_offset, int(result.repeated)]
            for key, result in answers.results.items()
        ],
    }


def _missing_partitions(job: Job, table: pa.Table) -> set[bytes]:
    """Return the keys of partitions that only the driver may create, and has not created yet."""
    if job.partitions is None:
        return set()
    schema = job.reader.schema
    routes = route(schema, read_keys(table, schema), 1)
    return {target.partition_key for target in routes} - job.partitions


def _with_operations(table: pa.Table, name: str) -> pa.Table:
    """A part without deletes has no operation column: all its rows are upserts."""
    if name in table.column_names:
        return table
    return table.append_column(name, pa.array(np.zeros(table.num_rows, np.int8)))


def _put_connected(job: Job, rows: Rows) -> Answers[PutResult]:
    """Put over the worker's connection; if its session was lost since, over a new one."""
    try:
        return put(_table(job), job.grant, rows)
    except SessionLost:
        _clusters.pop(job.recipe.address).close()
        return put(_table(job), job.grant, rows)


def _table(job: Job) -> RemoteTable:
    address = job.recipe.address
    if address not in _clusters:
        _clusters[address] = job.recipe.connect()
    return RemoteTable(_clusters[address], job.table)


def _outcome(text: str) -> pa.RecordBatch:
    return pa.record_batch({"outcome": pa.array([text], pa.string())})


def _failure(error: Exception) -> dict[str, Any]:
    fields: dict[str, Any] = {"error": wire.error_name(type(error)), "message": str(error)}
    if isinstance(error, InvalidValue) and error.encoded_key is not None:
        fields["key"] = error.encoded_key.hex()
    return fields


def _gather(outcomes: Sequence[Mapping[str, Any]]) -> Outcome:
    for outcome in outcomes:
        if "error" in outcome:
            raise wire.error_of(outcome)
    results = {
        BucketKey(partition, number): PutResult(
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
    return Outcome(
        **counts,
        staged=[name for outcome in outcomes for name in outcome.get("staged", ())],
        refused_keys=refused_keys,
        missing_partitions=missing,
        answers=Answers(results, sessions),
    )
