"""The calls of a tablet server that read: look-ups, changelogs, what is known of logs."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from foundation.errors import BatchTooLarge
from foundation.parallel import Item, Result, map_all
from merge_engine.merging.batch import read_keys
from merge_engine.schema.state_columns import state_column
from recovery.leader.led_bucket import LedBucket
from recovery.reader.changes import (
    BucketChanges,
    headers_between,
    open_changes,
    open_changes_between,
)
from recovery.reader.committed_lookup import Asked, committed_lookup
from recovery.reader.cut_between import Piece, pieces_of
from recovery.reader.isolation import Isolation
from server.protocol.reads import (
    FOUND,
    ChangedPieces,
    ChangedPiecesAnswer,
    ChangelogBatch,
    LogEnds,
    LogEndsAnswer,
    Lookup,
    LookupAnswer,
    ReadChangelog,
    ReadChanges,
)
from server.tablet.metrics import Metrics
from server.tablet.requests import Requests, columns_of, schema_of


class Reading:
    """Answers readers of the buckets that are hosted here. Safe for threads."""

    def __init__(self, requests: Requests, metrics: Metrics, *, lookup_max_keys: int) -> None:
        self._requests = requests
        self._hosting = requests.hosting
        self._session = requests.session
        self._metrics = metrics
        self._lookup_max_keys = lookup_max_keys
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="tallybook-read")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def lookup(self, call: Lookup) -> LookupAnswer:
        """Return the values of the keys."""
        table = self._requests.table(call)
        keys = self._requests.keys(table, call.buckets)
        asked = sum(batch.num_rows for batch in call.keys.values())
        if asked > self._lookup_max_keys:
            raise BatchTooLarge(
                f"a look-up of {asked:,} keys; the limit is {self._lookup_max_keys:,} "
                "(--lookup-max-keys): split it"
            )
        schema = schema_of(call, table)
        columns = columns_of(schema, table, call.columns)
        columns += map(state_column, columns_of(schema, table, call.states))
        self._session.check()
        cut = self._requests.cut(call, table)
        of_buckets = [
            (self._hosting.get(key).bucket, key.bucket, read_keys(batch, schema))
            for key, batch in zip(keys, call.keys.values(), strict=True)
        ]
        flag = FOUND if call.found else None
        if cut is not None:
            asked_at = [Asked(bucket, cut.at(key), wanted) for bucket, key, wanted in of_buckets]
            found = committed_lookup(asked_at, columns, self._map, found=flag)
        else:
            found = self._map(
                lambda one: one[0].lookup_keys(one[2], columns, found=flag), of_buckets
            )
            self._session.check()  # Again: this process may have been paused in between.
        self._metrics.count("keys_looked_up", asked, table=table.name)
        # By place, not by name: a state may be called like a column.
        width = len(schema.key_columns)
        return LookupAnswer.of([batch.select(range(width, batch.num_columns)) for batch in found])

    def _map(self, call: Callable[[Item], Result], items: Sequence[Item], /) -> list[Result]:
        return map_all(self._pool, call, items)

    def changelog(self, call: ReadChangelog) -> tuple[pa.Schema, Iterator[Any]]:
        """Return batches of change records, each with where to go on as metadata."""
        table = self._requests.table(call)
        [key] = self._requests.keys(table, [call.bucket])
        led = self._hosting.get(key)
        start, stop = call.from_offset, call.to_offset
        self._session.check()
        found = open_changes(
            led.bucket,
            led.key,
            self._requests.records_of(table),
            start,
            stop,
            committed=call.isolation is Isolation.COMMITTED,
        )
        return found.schema, _messages(found)

    def changes(self, call: ReadChanges) -> tuple[pa.Schema, Iterator[Any]]:
        """Return batches of change records from one cut to another, each with where to go on."""
        table = self._requests.table(call)
        [key] = self._requests.keys(table, [call.bucket])
        since, until = (table.check_cut(cut).at(key.bucket) for cut in (call.since, call.until))
        bucket = self._hosting.get(key).bucket
        self._session.check()
        found = open_changes_between(bucket, since, until, after=call.after, locked=table.locked)
        return found.schema, _messages(found)

    def pieces(self, call: ChangedPieces) -> ChangedPiecesAnswer:
        """Return which batches are between two cuts, and how large they are."""
        table = self._requests.table(call)
        since, until = (table.check_cut(cut) for cut in (call.since, call.until))
        led = self._requests.led(call)
        self._session.check()

        def pieces(one: LedBucket) -> tuple[Piece, ...]:
            headers = headers_between(one.bucket, since.at(one.key), until.at(one.key))
            return pieces_of(headers, locked=table.locked)

        results = tuple(self._map(pieces, led))
        return ChangedPiecesAnswer(session=self._session.name, results=results)

    def ends(self, call: LogEnds) -> LogEndsAnswer:
        """Return where the logs end, and start."""
        led = self._requests.led(call)
        return LogEndsAnswer(
            session=self._session.name,
            starts=tuple(bucket.bucket.start_offset for bucket in led),
            rows=tuple(bucket.bucket.estimated_rows() for bucket in led),
            results=tuple(bucket.bucket.settled_end() for bucket in led),
        )


def _messages(changes: BucketChanges) -> Iterator[Any]:
    """Yield batches of records, each with where to go on after it; the last one is empty."""
    for batch, following in changes.records():
        yield batch, ChangelogBatch(next_offset=following).to_body()
    nothing = pa.RecordBatch.from_pylist([], schema=changes.schema)
    yield nothing, ChangelogBatch(next_offset=changes.end).to_body()
