"""Puts of rows that fit into one call per server: each server gets those of its buckets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from foundation.errors import InvalidValue
from foundation.ids import BucketId, Token
from merge_engine.bucket.results import BucketResult, PutResult
from merge_engine.bucket.segment import AggMode
from merge_engine.bucket.tokens import check_writer
from merge_engine.merging.batch import known_mode, read_keys
from merge_engine.merging.local_aggregation import fold_locally, is_worth_folding
from merge_engine.merging.needed_partitions import without_vain_deletes
from merge_engine.merging.routing import Route, route
from merge_engine.schema.schema import Schema
from recovery.leader.led_bucket import needs_writer
from recovery.writer.access import Answers, GrantedRows
from recovery.writer.rows import Rows
from server.client.outgoing import as_one_table, to_messages
from server.client.table_caller import TableCaller, together
from server.protocol.puts import Put, PutAnswer

NOTHING: Answers[BucketResult] = Answers({}, frozenset())


class _Routed(NamedTuple):
    """Rows by bucket, as they are sent."""

    schema: pa.Schema
    batches: Mapping[BucketId, Sequence[pa.RecordBatch]]


def put_unlocked(caller: TableCaller, rows: Rows, owner: str, token: Token | None) -> PutResult:
    """Put rows into a table without column locks; a leader that moved is waited for."""
    check_writer(owner, token)
    schema = rows.schema or caller.schema
    rows, count = _read(rows, schema)
    if count and caller.table.locked:
        raise needs_writer()
    call = replace(_to_call(caller, rows, schema, owner), token=token)
    _create_partitions(caller, call, rows, schema)
    routed = _route(caller, rows, schema, caller.find_or_create)
    call = replace(
        call,
        buckets=dict.fromkeys(routed.batches),
        holds_end=token is None,  # It cannot be sent again.
    )
    answers = _send(caller, call, routed, patient=True)
    return PutResult(rows=count, buckets=answers.results)


def put_granted(
    caller: TableCaller, granted: GrantedRows, *, try_only: bool = False
) -> Answers[BucketResult]:
    """Put rows for the holder of a column lock; a leader that moved is not waited for.

    `try_only`: write nothing, but raise what a put would raise now.
    """
    grant, rows = granted.grant, granted.rows
    schema = rows.schema or caller.schema
    rows, _ = _read(rows, schema)
    routed = _route(caller, rows, schema, lambda target: caller.find_fenced(target, grant))
    call = replace(
        _to_call(caller, rows, schema, grant.owner),
        token=grant.token,
        writer=grant.writer,
        buckets={bucket: grant.terms[bucket] for bucket in routed.batches},
        try_only=try_only,
        seals=granted.whole and not try_only,
    )
    return _send(caller, call, routed, patient=False)


def _create_partitions(caller: TableCaller, call: Put, rows: Rows, schema: Schema) -> None:
    """Create the partitions that rows are written to, once all rows are tried.

    What is refused leaves no partition, unless others write meanwhile what the rows do not fit.
    """
    if not schema.partition_by:
        return
    there = dict(caller.read_partitions())
    needed = rows.find_partitions(schema, there)
    if needed.missing:
        of_others = rows.of_partitions(schema, there)
        routed = _route(caller, of_others, schema, caller.find_or_create)
        tried = replace(call, buckets=dict.fromkeys(routed.batches), try_only=True)
        _send(caller, tried, routed, patient=True)
    for key in sorted(needed.missing):
        caller.create_partition(key)


def _read(rows: Rows, schema: Schema) -> tuple[Rows, int]:
    """Return the rows in one table, and how many were given.

    Where keys come several times they are folded here: it is done once, not in every bucket, and
    what is routed, sent and read again is less.
    """
    pieces = list(rows.pieces(schema))
    if not pieces:
        return rows, 0
    data = as_one_table(pa.concat_tables(pieces))
    if rows.mode is not AggMode.ACCUMULATE or not is_worth_folding(data, schema):
        return replace(rows, data=data), data.num_rows
    folded = fold_locally(
        data, schema, columns=rows.columns, operation_column=rows.operation_column
    )
    states = Rows(
        data=folded.data,
        columns=folded.columns,
        mode=AggMode.MERGE_STATE,
        operation_column=folded.operation_column,
        schema=rows.schema,
    )
    return states, data.num_rows


def _route(
    caller: TableCaller, rows: Rows, schema: Schema, find: Callable[[Route], BucketId]
) -> _Routed:
    pieces = list(rows.pieces(schema))
    if not pieces:
        return _Routed(pa.schema([]), {})
    [arrow] = pieces
    if schema.partition_by:  # One may have been dropped and made anew, under another id.
        there = caller.read_partitions()
        arrow = without_vain_deletes(arrow, schema, rows.operation_column, there)
    routes = route(schema, read_keys(arrow, schema), caller.table.buckets)
    whole = len(routes) == 1
    batches = {find(target): to_messages(arrow, target, whole=whole) for target in routes}
    return _Routed(arrow.schema, batches)


def _to_call(caller: TableCaller, rows: Rows, schema: Schema, owner: str) -> Put:
    return Put(
        table_id=caller.table.table_id,
        schema_version=schema.version,
        buckets={},
        columns=None if rows.columns is None else tuple(rows.columns),
        mode=known_mode(rows.mode),
        operation_column=rows.operation_column,
        owner=owner,
        takes_refusal=True,
    )


def _send(
    caller: TableCaller, call: Put, routed: _Routed, *, patient: bool
) -> Answers[BucketResult]:
    if not routed.batches:  # Nobody to judge an empty batch but ourselves.
        return NOTHING

    def send(address: str, buckets: Sequence[BucketId], timeout_s: float) -> PutAnswer:
        batches = [
            (Put.place(at), batch)
            for at, bucket in enumerate(buckets)
            for batch in routed.batches[bucket]
        ]
        size = sum(batch.nbytes for _, batch in batches)
        share = replace(call.only(buckets), announced_bytes=size)
        return caller.calls.connections.put(
            address, share, routed.schema, batches, timeout_s, holds_end=call.holds_end
        )

    shares = caller.ask(
        call,
        send=send,
        repeatable=call.token is not None,
        patient=patient,
        changes=True,
    )
    refused = [answer.refusal for _, answer in shares if answer.refusal is not None]
    if refused:
        raise InvalidValue.together(refused)
    sealed = [bucket for buckets, answer in shares if answer.sealed for bucket in buckets]
    return replace(together(shares), sealed=frozenset(sealed))
