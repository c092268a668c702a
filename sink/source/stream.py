"""A table's changes as a stream of Spark's: each micro-batch goes from one cut to the next.

An offset is a cut, as text. Spark does not write down where batch 0 starts, and asks for it again
when it repeats that batch; so the start says nothing, and the end of batch 0 says what it has: all
rows (`full`), or the changes since a cut. What Spark repeats is planned by its offsets alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from foundation.errors import CutTooOld, InvalidInput
from foundation.ids import BucketId
from recovery.reader.cut import Cut
from recovery.reader.cut_between import Piece, cut_between
from server.client.changelog import earliest_cut, estimated_rows, pieces_between
from server.protocol.definitions import ClusterTable
from sink.rolling_lease import RollingLease
from sink.source.grouping import grouped
from sink.source.options import CHANGES, EARLIEST, FULL, LATEST, UPSERTS, ReaderOptions
from sink.source.schemas import caster
from sink.source.tasks import ReadChanges, ReadFirst, ReadUpserts, TableTask, Wanted, restricted

_CUT, _SINCE, _ALL_ROWS = "cut", "since", "full"
# Buckets with little to read go together, up to so many changed keys a task.
_KEYS_A_TASK = 20_000

Pieces = Mapping[BucketId, Sequence[Piece]]


class ChangeStream(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """What Spark asks about a stream. One object plans all of a query; each task has a copy."""

    def __init__(
        self, options: ReaderOptions, table: ClusterTable, names: Sequence[str], schema: Any
    ) -> None:
        """`table`: as it was when the query began. `names`: of what is wanted."""
        self._options = options
        self._schema = schema
        values = {column.name for column in table.schema.value_columns}
        columns = tuple(name for name in names if name in values)
        self._wanted = Wanted(recipe=options.recipe, table=table, columns=columns)
        self._target: Cut | None = None
        self._lease: RollingLease | None = None

    # --- Offsets --------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the start of batch 0, which says nothing."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return how much a micro-batch has at most, unless Spark says so."""
        most = self._options.max_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Have the query end where the table stands now."""
        self._hold()
        self._target = self._now()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return where the next micro-batch ends; its start, if there is nothing new."""
        self._hold()
        until = self._target or self._now()
        if _CUT in start:
            since = self._checked(start)
            self._advance(since)
            if since.has_same_work(until):
                return start
            return {_CUT: str(self._limited(since, until, limit))}
        begin = self._options.start
        if begin == FULL:
            return {_CUT: str(until), _ALL_ROWS: True}
        if begin == LATEST:
            return {_CUT: str(until), _SINCE: str(until)}
        remote = self._wanted.remote
        since = earliest_cut(remote.caller) if begin == EARLIEST else Cut.of(begin or "")
        remote.definition.check_cut(since)
        return {_CUT: str(self._limited(since, until, limit)), _SINCE: str(since)}

    def _checked(self, offset: Mapping[str, Any]) -> Cut:
        """Return the cut of an offset in a checkpoint; InvalidInput if it is of another table."""
        cut = Cut.of(offset[_CUT])
        if cut.table != self._wanted.table.uid:
            raise InvalidInput(
                "the checkpoint of this stream is of another table that was called "
                f"{self._wanted.table.name}, too: it was dropped, and created anew. Start the "
                "stream with a new checkpoint"
            )
        return cut

    def _now(self) -> Cut:
        return self._wanted.remote.cut()

    def _limited(self, since: Cut, until: Cut, limit: ReadLimit) -> Cut:
        if not since.is_before(until):
            raise InvalidInput(
                f"the stream stands at {since!r}, which table {self._wanted.table.name} has not "
                f"reached: it is at {until!r}. Was ZooKeeper, or the checkpoint, restored from a "
                "copy? Start the stream with a new checkpoint"
            )
        if not isinstance(limit, ReadMaxRows):
            return until
        # An update is two records.
        most = limit.max_rows if self._options.mode == UPSERTS else max(1, limit.max_rows // 2)
        return cut_between(since, until, self._pieces(since, until), most)

    # --- Tasks ----------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return what a micro-batch has to read, a task each."""
        self._hold()
        until = self._checked(end)
        tasks: Sequence[TableTask]
        if _CUT in start:
            tasks = self._plan_changes(self._checked(start), until)
        elif _ALL_ROWS in end:
            tasks = self._plan_rows(until)
        else:
            tasks = self._plan_changes(Cut.of(end[_SINCE]), until)
        return [InputPartition(task) for task in tasks]

    def _plan_rows(self, cut: Cut) -> list[ReadFirst]:
        upserts = self._options.mode == UPSERTS
        remote = self._wanted.remote
        buckets = remote.caller.bucket_ids(cut)
        return [
            ReadFirst(wanted=self._wanted, cut=cut.only(some), buckets=some, as_upserts=upserts)
            for some in grouped(buckets, estimated_rows(remote.caller, buckets))
        ]

    def _plan_changes(self, since: Cut, until: Cut) -> list[ReadChanges]:
        kind = ReadChanges if self._options.mode == CHANGES else ReadUpserts
        return [
            restricted(kind(wanted=self._wanted, buckets=some, since=since, until=until))
            for some in _shares(self._pieces(since, until))
        ]

    def _pieces(self, since: Cut, until: Cut) -> Pieces:
        with self._saying_what_to_do():
            return pieces_between(self._wanted.remote.caller, since, until)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield what a task has to read."""
        with self._saying_what_to_do():
            yield from map(caster(self._schema), partition.value.batches())

    @contextmanager
    def _saying_what_to_do(self) -> Iterator[None]:
        """Say how to go on, if the log has not what the stream needs."""
        try:
            yield
        except CutTooOld as exc:
            raise CutTooOld(
                f"changes of table {self._wanted.table.name} that this stream has not read are "
                f"gone from the log, which servers keep for --log-ttl ({exc}). Start it with a "
                'new checkpoint, and .option("start", "full") to have all rows; .option("lease", '
                '"a name") keeps the log for as long as the stream needs it'
            ) from exc

    # --- The log that is still needed -----------------------------------------------------------

    def commit(self, end: dict[str, Any]) -> None:
        """Let go of the log before this offset; Spark does not ask for it any more.

        Of the last micro-batch Spark does not say so, but asks what comes after it.
        """
        self._advance(self._checked(end))

    def _advance(self, position: Cut) -> None:
        if self._lease is not None:
            self._lease.advance(position)

    def _hold(self) -> None:
        """Hold the log before anything is planned: where the stream stands is held from then on."""
        name = self._options.lease
        if name is not None and self._lease is None:
            self._lease = RollingLease(self._wanted.remote, name, self._options.lease_duration_ms)

    def stop(self) -> None:
        """Leave the lease to expire: the stream may come back."""
        if self._lease is not None:
            self._lease.stop()


def _shares(pieces: Pieces) -> list[tuple[BucketId, ...]]:
    """Return the buckets of each task: those that have changed, small ones together."""
    shares: list[tuple[BucketId, ...]] = []
    keys = _KEYS_A_TASK
    for bucket, of_bucket in pieces.items():
        if not of_bucket:
            continue
        if keys >= _KEYS_A_TASK:
            shares.append(())
            keys = 0
        shares[-1] = (*shares[-1], bucket)
        keys += sum(piece.keys for piece in of_bucket)
    return shares
