"""The calls of a tablet server that read: changelogs, changes, what is known of logs."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from foundation.parallel import Mapper
from recovery.leader.led_bucket import LedBucket
from recovery.reader.changes import (
    BucketChanges,
    headers_between,
    open_changes,
    open_changes_between,
)
from recovery.reader.cut_between import Piece, pieces_of
from recovery.reader.isolation import Isolation
from server.protocol.reads import (
    ChangedPieces,
    ChangedPiecesAnswer,
    ChangelogBatch,
    LogEnds,
    LogEndsAnswer,
    ReadChangelog,
    ReadChanges,
)
from server.tablet.requests import Requests


class Reading:
    """Answers readers of the buckets that are hosted here. Safe for threads."""

    def __init__(self, requests: Requests, mapper: Mapper) -> None:
        """`mapper`: works on several buckets at a time."""
        self._requests = requests
        self._hosting = requests.hosting
        self._session = requests.session
        self._map = mapper

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
        return found.arrow_schema, _messages(found)

    def changes(self, call: ReadChanges) -> tuple[pa.Schema, Iterator[Any]]:
        """Return batches of change records from one cut to another, each with where to go on."""
        table = self._requests.table(call)
        [key] = self._requests.keys(table, [call.bucket])
        since, until = (table.check_cut(cut).at(key.bucket) for cut in (call.since, call.until))
        bucket = self._hosting.get(key).bucket
        self._session.check()
        found = open_changes_between(bucket, since, until, after=call.after)
        return found.arrow_schema, _messages(found)

    def pieces(self, call: ChangedPieces) -> ChangedPiecesAnswer:
        """Return which batches are between two cuts, and how large they are."""
        table = self._requests.table(call)
        since, until = (table.check_cut(cut) for cut in (call.since, call.until))
        led = self._requests.led(call)
        self._session.check()

        def pieces(one: LedBucket) -> tuple[Piece, ...]:
            headers = headers_between(one.bucket, since.at(one.key), until.at(one.key))
            return pieces_of(headers)

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
    version = changes.schema.version
    for batch, following in changes.records():
        yield batch, ChangelogBatch(next_offset=following, schema_version=version).to_body()
    nothing = pa.RecordBatch.from_pylist([], schema=changes.arrow_schema)
    yield nothing, ChangelogBatch(next_offset=changes.end, schema_version=version).to_body()
