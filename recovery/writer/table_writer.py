"""The exactly-once writer: acquire, fence, recover, ready, (put, seal, commit)*, release.

The steps and their words are those of `incarnation` in `docs/spec/protocol.py`. What fails
falls in three kinds. A leader that moved, a server that died, an answer that never came: the writer
starts over under a new epoch, which undoes what it had not committed, and runs the batch again,
unless its commit turns out to have happened. A newer epoch of this owner: it stops for good. And
bad input: what the batch had written is undone, and the error is the caller's.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from enum import Enum
from typing import TypeVar

from foundation.arguments import names_of, seconds_of, text_of, whole_of
from foundation.deadlines import within
from foundation.errors import (
    ColumnTooLarge,
    Fenced,
    HandoverNeeded,
    InvalidInput,
    PartitionGone,
    Retryable,
    RewoundBatch,
    SessionLost,
    StartOver,
    TallybookError,
    UnknownOutcome,
)
from foundation.failpoints import hit
from foundation.ids import BucketId, Token
from locks.column_locks.column_lock import ColumnLock
from locks.column_locks.locks import DEFAULT_TTL_MS
from locks.column_locks.records import new_stamp
from merge_engine.bucket.results import BucketResult
from merge_engine.embedded.derived_calls import Data
from merge_engine.schema.schema import Schema
from recovery.leader.fenced_writers import Writer
from recovery.writer.access import Answers, Grant, TableAccess, Tried
from recovery.writer.batch_work import BatchWork, RowsWork, nothing_before
from recovery.writer.debts import DebtPayer, Promises, drop_promises
from recovery.writer.progress import Progress, timed
from recovery.writer.redo import RedoLog
from recovery.writer.renewal import Renewal
from recovery.writer.replays import check_fingerprint, check_same
from recovery.writer.rows import Rows

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

CURABLE = (StartOver, Retryable, UnknownOutcome, PartitionGone)
"""What a fresh start can cure, within the deadline."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_RENEWALS_PER_TTL = 3


class WriterState(Enum):
    """Where a writer is: only a clean one has nothing uncommitted."""

    NEW = "new"
    CLEAN = "clean"
    DIRTY = "dirty"
    FENCED = "fenced"
    CLOSED = "closed"


class TableWriter:
    """Writes an owner's columns of a table, batch by batch, each exactly once.

    Safe for use by one thread at a time; the lock is renewed in the background from `start` to
    `close`. Without a redo log a batch that was not committed is undone; with one, it is prepared
    first, and then rolled forward by whoever comes next.

    Columns go by name, or by id. Names are those that the table had when the writer started: it
    goes on with the same columns, and reads the same names in its rows, whatever they are called
    by now. Batches are numbered by the caller. The last committed one is a replay when it comes
    again, if it has the same columns and, where both are known, the same fingerprint: what tells
    it from any other batch of its number, such as when it was planned. `query_id`: of a streaming
    query, whose batches start at 0 with every new query; `next_batch` is for callers that have no
    count.
    `query_name`: what people call it, for those who list locks.
    `only_epoch`: of an operator, who releases the lock of this epoch and no later one: Fenced if
    there is one. It goes on with the owner's columns and count as they are, whoever had them last.
    """

    def __init__(
        self,
        access: TableAccess,
        owner: str,
        columns: Sequence[str | int],
        *,
        ttl_ms: int = DEFAULT_TTL_MS,
        query_id: str | None = None,
        handover: bool = False,
        deadline_s: float = 120.0,
        redo: RedoLog | None = None,
        only_epoch: int | None = None,
        pause: Callable[[float], None] = time.sleep,
        query_name: str = "",
    ) -> None:
        self._access = access
        self._owner = text_of(owner, "an owner")
        self._columns = _given_columns(columns)
        # What they are from the first acquisition on, and the schema whose names the caller uses.
        self._ids: tuple[str | int, ...] = ()
        self._schema: Schema | None = None
        self._ttl_ms = whole_of(ttl_ms, "ttl_ms")
        seconds_of(ttl_ms / 1000, "the TTL")
        self._query_id = query_id
        self._query_name = query_name
        self._handover = handover
        self._deadline_s = seconds_of(deadline_s, "deadline_s")
        if redo is not None and not isinstance(redo, RedoLog):
            raise InvalidInput(f"redo is a RedoLog, not {redo!r}")
        self._redo = redo
        self._only_epoch = only_epoch
        self._pause = pause
        self._given_access = access
        # Of the acquisition that is under way: one of unknown outcome is recognised by it.
        self._stamp = new_stamp()
        self._lock: ColumnLock | None = None
        self._terms: dict[BucketId, int] = {}
        # What this epoch has promised and not committed: by location, its other objects.
        self._promised: Promises = {}
        self._state = WriterState.NEW
        self._renewal: Renewal | None = None
        self.progress = Progress()

    # --- Life -----------------------------------------------------------------------------------

    @property
    def state(self) -> WriterState:
        """Where the writer is in its life."""
        return self._state

    @property
    def owner(self) -> str:
        """The owner id."""
        return self._owner

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are written, by the names that the caller uses."""
        schema = self._schema or self._access.schema
        names = {column.id: column.name for column in schema.value_columns}
        return tuple(c if isinstance(c, str) else names.get(c, f"#{c}") for c in self._columns)

    @property
    def batch(self) -> int:
        """The last committed batch, by the caller's count; -1 if there is none."""
        return max(self._held().batch - self._start(), -1)

    def is_replay(self, batch: int, *, fingerprint: str = "") -> bool:
        """Whether this is the last committed batch, sent again; its errors are those of a write."""
        self._check_count()
        if batch != self.batch:
            return False
        self._check_same(batch, fingerprint)
        return True

    def next_batch(self) -> int:
        """Return the number after the last committed one, for a caller that has no count.

        Who uses it cannot tell a batch that was committed before a crash from one that was not.
        """
        return self.batch + 1

    @property
    def offsets(self) -> Mapping[BucketId, int]:
        """The log ends at the last commit, or when the writer got ready."""
        return self._held().record.offsets

    @property
    def epoch(self) -> int:
        """The epoch of this incarnation; rises when the writer starts over."""
        return self._held().epoch

    @property
    def access(self) -> TableAccess:
        """The buckets, as this writer reaches them now."""
        return self._access

    def __repr__(self) -> str:
        columns = "all columns" if self._columns is None else ", ".join(map(str, self._columns))
        return f"<TableWriter of {self._owner}: {columns}; {self._state.name.lower()}>"

    def start(self) -> "TableWriter":
        """Acquire the columns and recover; returns when the lock is ready.

        If that fails, a lock that it got is abandoned: what it owes is for the next to pay. Refused
        before that, it may be started again.
        """
        if self._state is not WriterState.NEW:
            raise InvalidInput(f"the writer of `{self._owner}` was started already")
        # From the beginning: recovery may take longer than the TTL.
        self._renewal = Renewal(self.renew, self._ttl_ms / 1000 / _RENEWALS_PER_TTL)
        try:
            self._until_cured(self._begin)
        except BaseException as exc:
            self._stop_renewal()  # Else an interrupted start would keep its lock for ever.
            if isinstance(exc, Exception) and self._lock is not None:
                self.close()
            raise
        return self

    def close(self) -> None:
        """Release the lock if nothing is uncommitted; else abandon it, for the next to pay."""
        self._stop_renewal()
        state, self._state = self._state, WriterState.CLOSED
        if self._lock is not None and state not in (WriterState.FENCED, WriterState.CLOSED):
            try:
                if state is WriterState.CLEAN:
                    self._lock.release()
                else:
                    self._lock.abandon()
            except TallybookError as exc:
                logger.warning("the lock of %s is left to expire: %s", self._owner, exc)
        if self._access is not self._given_access:  # Of a session that was opened here.
            self._access.close()
            self._access = self._given_access

    def _stop_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.stop()
            self._renewal = None

    def __enter__(self) -> "TableWriter":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- Batches --------------------------------------------------------------------------------

    def write(
        self,
        batch: int,
        rows: Rows | Data,
        before: Callable[[Grant], None] = nothing_before,
        *,
        fingerprint: str = "",
    ) -> bool:
        """Put the rows as one batch and commit it; False if an earlier call has committed it.

        `rows`: what `Table.put` takes, or `Rows`, which also say how they are to be read.
        `before` is called with every grant before anything of the batch is promised or put.
        RewoundBatch if this number was committed with another fingerprint, or other columns.
        """
        self._check_usable()
        named = self._named(rows)
        return self.run(batch, RowsWork(lambda: self._access, named, before, fingerprint))

    def run(self, batch: int, work: BatchWork) -> bool:
        """Commit a batch; False if an earlier call has done so. RewoundBatch as for `write`.

        The work is put or, with a redo log, tried, promised and then put. See `BatchWork`.
        """
        self._check_usable()
        self._check_count()
        batch = whole_of(batch, "the number of a batch")
        check_fingerprint(work.fingerprint)
        batch, callers = self._start() + batch, batch
        tried = False

        def attempt() -> bool:
            nonlocal tried
            if self._state is WriterState.DIRTY:
                self._start_over()
            if batch == self._held().batch:
                # By an attempt of this call whose commit went unanswered, or was rolled forward.
                if tried:
                    self._count(callers, {})
                else:
                    self._check_same(callers, work.fingerprint)
                    self.progress.skipped += 1
                return tried
            tried = True
            results = self._run_once(batch, work)
            self._count(callers, results)
            return True

        try:
            return self._until_cured(attempt)
        except (Fenced, *CURABLE):
            raise
        except Exception as exc:
            self._clean_up(exc)
            raise

    def _run_once(self, batch: int, work: BatchWork) -> Mapping[BucketId, BucketResult]:
        lock = self._held()
        if batch < lock.batch:
            raise RewoundBatch(
                f"batch {batch - self._start()} of `{self._owner}` comes after batch {self.batch} "
                "was committed: its source was rewound. Start from the checkpoint that belongs to "
                "this table, or under a new owner id with handover=True"
            )
        self._state = WriterState.DIRTY
        seconds = self.progress.seconds = {}
        if work.partitions is not None:
            with timed(seconds, "partitions"):
                self._create_partitions(batch, work, self._named(work.partitions))
        grant = self._grant(batch)
        with timed(seconds, "before"):
            work.before(grant)
        with timed(seconds, "put"):
            answers = self._put(grant, work)
        hit("writer.put")
        with timed(seconds, "seal"):
            ends = self._seal(grant, answers)
        hit("writer.sealed")
        with timed(seconds, "commit"):
            lock.commit(batch, ends.results, ends.sessions, fingerprint=work.fingerprint)
        hit("writer.committed")
        self._state = WriterState.CLEAN
        kept, self._promised = self._promised, {}
        self._drop_promises(kept)
        return answers.results

    def _seal(self, grant: Grant, put: Answers[BucketResult]) -> Answers[int]:
        """Close the batch, where its put has not done so; return the log ends, and who says so."""
        ends = {key: put.results[key].end_offset for key in put.sealed}
        left = {key: term for key, term in self._terms.items() if key not in ends}
        if not left:
            return Answers(ends, put.sessions)
        sealed = self._access.seal(grant.writer, left, grant.token.batch)
        return Answers({**ends, **sealed.results}, put.sessions | sealed.sessions)

    def _put(self, grant: Grant, work: BatchWork) -> Answers[BucketResult]:
        """Put the batch; where there is a redo log, once it is tried and promised."""
        if self._redo is None:
            hit("writer.before_put")
            return work.put(grant)
        with closing(self._promise(self._redo, grant, work)) as tried:
            hit("writer.before_put")
            return tried.put()

    def _promise(self, redo: RedoLog, grant: Grant, work: BatchWork) -> Tried:
        """Promise the batch: it fits everywhere, its rows are durable, and the lock says so."""
        table, token = self._access.table.uid, grant.token
        promise = redo.begin(table, self._owner, token)
        with ExitStack() as unless_promised:
            tried = work.try_put(grant, promise)
            unless_promised.callback(tried.close)
            promise.finish()
            hit("writer.redo_written")
            location = redo.location_of(table, self._owner, token)
            self._held().prepare(token.batch, location, fingerprint=work.fingerprint)
            self._promised = {location: promise.objects}
            hit("writer.prepared")
            unless_promised.pop_all()
        return tried

    def _create_partitions(self, batch: int, work: BatchWork, rows: Rows) -> None:
        """Create what the batch needs, once it is tried: what is refused leaves no partition."""
        schema, there = rows.schema or self._access.schema, self._access.partitions()
        if not schema.partition_by:
            return
        needed = rows.find_partitions(schema, there)
        self._fence_new_buckets([there[key] for key in sorted(needed.keys - needed.missing)])
        if needed.missing:
            work.try_without(self._grant(batch), needed.missing)
            created = [self._access.create_partition(key) for key in sorted(needed.missing)]
            self._fence_new_buckets(created)

    def _fence_new_buckets(self, partitions: Sequence[int]) -> None:
        """Buckets that appear in a batch: nothing of theirs is owed, and their baseline is 0."""
        numbers = range(self._access.table.definition.buckets)
        keys = [BucketId(partition, number) for partition in partitions for number in numbers]
        new = [key for key in keys if key not in self._terms]
        if not new:
            return
        writer = self._writer()
        fenced = self._access.fence(writer, self._held().columns, new)
        self._access.end_recovery(writer, fenced.results)
        self._terms.update(fenced.results)

    def _count(self, batch: int, results: Mapping[BucketId, BucketResult]) -> None:
        self.progress.batch = batch
        self.progress.keys_changed += sum(result.changed for result in results.values())

    # --- Starting, and starting over ------------------------------------------------------------

    def _begin(self) -> None:
        """From acquire to ready; also the way back after anything that left work uncommitted."""
        known = self._lock
        self._access.refresh()
        if self._schema is None:
            self._schema = self._access.schema
            self._ids = tuple(map(self._column_id, self._columns))
        self._lock = lock = self._access.coordinator.locks.acquire(
            self._access.table,
            self._owner,
            self._ids,
            ttl_ms=self._ttl_ms,
            query_id=self._query_id,
            handover=self._handover,
            only_epoch=self._only_epoch if known is None else known.epoch,
            stamp=self._stamp,
            query_name=self._query_name,
        )
        self._stamp = new_stamp()
        self._handover = False  # It has happened.
        self._state = WriterState.DIRTY
        self.progress.starts += 1
        hit("writer.acquired")
        writer = self._writer()
        # Listed after the lock is ours: from here on nobody else creates buckets for our columns.
        fenced = self._access.fence(writer, lock.record.pinned, self._access.bucket_ids())
        self._terms = dict(fenced.results)
        hit("writer.fenced")
        payer = DebtPayer(
            access=self._access,
            writer=writer,
            terms=self._terms,
            redo=self._redo,
            progress=self.progress,
        )
        paid: dict[str, Sequence[str]] = {}
        for debt in lock.debts:
            paid.update(payer.pay(debt))
            hit("writer.paid")
        ended = self._access.end_recovery(writer, self._terms)
        hit("writer.recovered")
        lock.ready(ended.results, ended.sessions | fenced.sessions)
        hit("writer.ready")
        self._state = WriterState.CLEAN
        self._promised = {}
        self._drop_promises(paid, before_epoch=lock.epoch)

    def _drop_promises(self, kept: Promises, before_epoch: int | None = None) -> None:
        drop_promises(self._redo, self._access.table.uid, self._owner, kept, before_epoch)

    def _start_over(self) -> None:
        logger.info("%s starts over, after epoch %d", self._owner, self._held().epoch)
        self._begin()

    def _clean_up(self, failure: Exception) -> None:
        """After a batch that failed for good: take back what it wrote, now rather than later."""
        if self._state is not WriterState.DIRTY:
            return
        try:
            self._until_cured(self._start_over)
        except Fenced as exc:
            raise exc from failure
        except TallybookError as exc:
            logger.warning("what `%s` has not committed is undone later: %s", self._owner, exc)

    def _until_cured(self, attempt: Callable[[], Result]) -> Result:
        """Attempt until it succeeds, starting over in between, or until the deadline.

        That begins with the first failure: how long a batch takes that nothing happens to is
        nobody's concern here. Nor is how long an undo takes that makes progress.

        Every failure of a writer comes by here. Whatever it is, a writer that no longer holds its
        lock raises Fenced: its successor may have removed what it needed.
        """
        deadline, pause_s = float("inf"), _FIRST_PAUSE_S
        lost = False
        while True:
            try:
                if lost:
                    with within(deadline - self._now()):
                        self._access, lost = self._access.reconnect(), False
                return attempt()
            except Fenced:
                self._state = WriterState.FENCED
                raise
            except Exception as exc:
                deadline = min(deadline, self._now() + self._deadline_s)
                if not self._is_curable(exc) or self._now() + pause_s > deadline:
                    self._check_held(exc)
                    raise
                logger.info("%s tries again: %s", self._owner, exc)
                lost = lost or isinstance(exc, SessionLost)
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _is_curable(self, failure: Exception) -> bool:
        """Whether to start over; with smaller parts, if what is stored of a part is too large."""
        if isinstance(failure, ColumnTooLarge):
            return self._access.shrink_parts()
        return isinstance(failure, CURABLE)

    def _check_held(self, failure: Exception) -> None:
        """Raise Fenced if the lock is known to be another's by now; the failure is its cause."""
        try:
            if self._lock is not None:
                self._lock.check()
        except Fenced as exc:
            self._state = WriterState.FENCED
            raise exc from failure
        except TallybookError as exc:  # Nobody can say.
            logger.info("whether `%s` still holds its lock is not known: %s", self._owner, exc)

    # --- Names and numbers ----------------------------------------------------------------------

    def _column_id(self, column: str | int) -> str | int:
        """Return the id of a value column; what is none, the coordinator refuses by its name."""
        ids = self._access.table.definition.columns
        return column if isinstance(column, int) else ids.get(column, column)

    def _named(self, given: Rows | Data) -> Rows:
        rows = given if isinstance(given, Rows) else Rows(data=given)
        return rows if rows.schema is not None else replace(rows, schema=self._schema)

    def _start(self) -> int:
        """Return what the caller's batch 0 is by the owner's count."""
        return 0 if self._query_id is None else self._held().record.query_start

    def _check_count(self) -> None:
        """A writer that is no query must not count on where a query did, which may come back."""
        query = self._held().record.query_id
        if self._query_id is None and query:
            raise HandoverNeeded(
                f"the batches of `{self._owner}` are counted by query {query}: write under another "
                "owner id, or pass handover=True if that query has ended for good"
            )

    def _check_same(self, batch: int, fingerprint: str) -> None:
        """Raise RewoundBatch if what was committed under this number is another batch."""
        names = {column.id: column.name for column in self._access.schema.value_columns}
        check_same(self._owner, batch, fingerprint, self._held().record, names)

    # --- Small things ---------------------------------------------------------------------------

    def _now(self) -> float:
        """Return the seconds of a clock that stands still while an undo makes progress."""
        return time.monotonic() - self.progress.undoing_s

    def renew(self) -> None:
        """Start the lock's TTL anew."""
        self._held().renew()

    def _held(self) -> ColumnLock:
        if self._lock is None:
            raise InvalidInput(f"the writer of `{self._owner}` was not started")
        return self._lock

    def _writer(self) -> Writer:
        return Writer(self._owner, self._held().epoch)

    def _grant(self, batch: int) -> Grant:
        writer = self._writer()
        return Grant(
            writer=writer,
            owner=self._owner,
            token=Token(writer.epoch, batch),
            terms=dict(self._terms),
        )

    def _check_usable(self) -> None:
        if self._state in (WriterState.FENCED, WriterState.CLOSED, WriterState.NEW):
            raise InvalidInput(f"the writer of `{self._owner}` is {self._state.value}")


def _given_columns(columns: Sequence[str | int]) -> tuple[str | int, ...]:
    """Return them as they are named: by their ids, if they are numbers."""
    if isinstance(columns, Sequence) and columns and all(type(one) is int for one in columns):
        return tuple(columns)
    return names_of(columns)
