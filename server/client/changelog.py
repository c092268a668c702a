"""The changelogs of buckets, as a client reads them."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from foundation.errors import PartitionGone, ServerFailed, ServerUnavailable
from foundation.ids import BucketId, LeadKey
from locks.encoding.offsets import Offsets
from merge_engine.bucket.changelog import ChangeBatch
from recovery.reader.cut import Cut
from recovery.reader.cut_between import Piece
from server.client.connections import Broken
from server.client.table_caller import TableCaller, together
from server.protocol.reads import (
    ChangedPieces,
    ChangelogBatch,
    LogEnds,
    LogEndsAnswer,
    ReadChangelog,
    ReadChanges,
    StreamCall,
)

_Told = tuple[pa.RecordBatch, ChangelogBatch]
Result = TypeVar("Result")


class Changelog:
    """A bucket's change records, to iterate. `next_offset` is where a later one goes on."""

    def __init__(self, caller: TableCaller, call: ReadChangelog | ReadChanges) -> None:
        """`call`: the one that begins it."""
        self._caller = caller
        self._calls = caller.calls
        self._key = LeadKey(call.table_id, call.bucket)
        self._call = call
        self.next_offset = call.from_offset if isinstance(call, ReadChangelog) else call.after

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches, each under the newest schema that its server has."""
        return (batch for batch, _ in self._messages() if batch.num_rows)

    def with_version(self) -> Iterator[ChangeBatch]:
        """Yield batches, each with the version of the schema under which it is shown.

        The last one is empty, and says under which there are no more.
        """
        return (ChangeBatch(batch, self._version_of(told)) for batch, told in self._messages())

    def _version_of(self, told: ChangelogBatch) -> int:
        if told.schema_version is not None:
            return told.schema_version
        self._caller.refresh()
        table = self._caller.table
        if len(table.history.schemas) > 1:
            raise ServerFailed(
                f"the leader of bucket {self._key} is of an earlier release, which does not say "
                f"which columns it shows of table {table.name}, which was altered: upgrade servers "
                "before their clients"
            )
        return table.schema.version

    def _messages(self) -> Iterator[_Told]:
        """Yield batches; a connection that breaks is taken up again where it broke.

        So is a stream that lasts longer than a call may: a server that hangs is noticed by that.
        """
        reached, deadline = self.next_offset, self._calls.deadline()
        while True:
            try:
                yield from self._stream()
                return
            except Broken as exc:
                if self.next_offset > reached:
                    reached, deadline = self.next_offset, self._calls.deadline()
                elif time.monotonic() > deadline:
                    raise ServerUnavailable(
                        f"the changelog of bucket {self._key} does not get beyond offset "
                        f"{reached}: {exc}"
                    ) from exc
                self._calls.directory.refresh([self._key])

    def _stream(self) -> Iterator[_Told]:
        def begin(address: str, keys: Sequence[LeadKey], left_s: float) -> Mapping[LeadKey, Any]:
            stream = self._calls.connections.stream(address, self._rest(), left_s)
            return {key: (next(stream, None), stream) for key in keys}

        begun = self._calls.scatter(
            [self._key],
            self._caller.table.buckets,
            begin,
            check_moved=self._caller.check_buckets,
        )
        first, stream = begun[self._key]
        while first is not None:
            batch, told = first
            self.next_offset = told.next_offset
            if batch is not None:
                yield batch, told
            first = next(stream, None)

    def _rest(self) -> StreamCall[ChangelogBatch]:
        """Return the call for what has not come yet."""
        if isinstance(self._call, ReadChangelog):
            return replace(self._call, from_offset=self.next_offset)
        return replace(self._call, after=self.next_offset)


def ask_all(
    caller: TableCaller, cut: Cut | None, ask: Callable[[Sequence[BucketId]], Result]
) -> Result:
    """Ask all buckets, and again those that there are if a partition was dropped meanwhile.

    `cut`: what they are asked about; see `TableCaller.bucket_ids`.
    """
    while True:  # Each time, somebody has dropped a partition.
        with suppress(PartitionGone):
            return ask(caller.bucket_ids(cut))


def log_ends(
    caller: TableCaller, buckets: Sequence[BucketId]
) -> list[tuple[Sequence[BucketId], LogEndsAnswer]]:
    """Ask where the logs of buckets start and end; PartitionGone if one of them is no more."""
    call = LogEnds(
        table_id=caller.table.table_id,
        schema_version=caller.table.schema.version,
        buckets=tuple(buckets),
    )
    return caller.ask(call)


def end_offsets(caller: TableCaller) -> dict[BucketId, int]:
    """Return where the log of each bucket ends."""
    shares = ask_all(caller, None, partial(log_ends, caller))
    return dict(together(shares).results)


def estimated_rows(caller: TableCaller, buckets: Sequence[BucketId]) -> dict[BucketId, int]:
    """Return about how many rows buckets have, as far as it is told.

    Nothing, if a partition was dropped just now.
    """
    try:
        answers = log_ends(caller, buckets)
    except PartitionGone:
        return {}
    return {
        bucket: rows
        for share, answer in answers
        for bucket, rows in zip(share, answer.rows or (), strict=False)
    }


def earliest_cut(caller: TableCaller) -> Cut:
    """Return a cut that has nothing of what the logs have."""
    starts = {
        bucket: start
        for buckets, answer in ask_all(caller, None, partial(log_ends, caller))
        for bucket, start in zip(buckets, answer.starts, strict=True)
    }
    return Cut(table=caller.table.uid, epoch=None, time_ms=0, ends=Offsets(starts))


def bucket_changes(
    caller: TableCaller, since: Cut, until: Cut, bucket: BucketId
) -> Iterator[ChangeBatch]:
    """Yield a bucket's change records from one cut to another, each batch with its version.

    Those of a batch are all about the same columns of one owner. The last batch is empty.
    """
    call = ReadChanges(
        table_id=caller.table.table_id,
        schema_version=caller.table.schema.version,
        bucket=bucket,
        since=since.only([bucket]),
        until=until.only([bucket]),
    )
    return Changelog(caller, call).with_version()


def pieces_between(
    caller: TableCaller, since: Cut, until: Cut
) -> dict[BucketId, tuple[Piece, ...]]:
    """Return which batches are between two cuts, and how large they are, of each bucket there is.

    The buckets are listed here, once both cuts stand: none is left out that the later one has.
    """

    def ask(buckets: Sequence[BucketId]) -> dict[BucketId, tuple[Piece, ...]]:
        call = ChangedPieces(
            table_id=caller.table.table_id,
            schema_version=caller.table.schema.version,
            buckets=tuple(buckets),
            since=since,
            until=until,
        )
        return dict(caller.call(call).results)

    return ask_all(caller, until, ask)
