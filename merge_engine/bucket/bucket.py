"""A bucket: a log, its view, and the calls that keep the two together.

Calls that change something run one at a time, from check to apply; look-ups run beside them and see
each row whole. A put is, in this order: the owner's token (seen before: the first result is
returned), merge, create the segment, apply to the view. It is committed when the segment is there;
all before leaves no trace, and all after is repeated from the log when the bucket is opened again.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from rocksdict import Cache

from foundation import forks
from foundation.errors import (
    Closed,
    UnknownSchema,
)
from foundation.failpoints import hit
from foundation.ids import Token
from merge_engine.bucket.database import LIBRARY
from merge_engine.bucket.fair_lock import FairLock
from merge_engine.bucket.follower import Follower
from merge_engine.bucket.log import wall_clock_ms
from merge_engine.bucket.log_and_view import Found, Plan, ReadSchemas
from merge_engine.bucket.log_start import CleanedOwners
from merge_engine.bucket.masked_rows import cut_segments, finished_rows
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.overlay import Overlay
from merge_engine.bucket.owner_work import OwnerWork
from merge_engine.bucket.pinned_rows import PinnedRows
from merge_engine.bucket.results import BucketResult, UndoResult
from merge_engine.bucket.roll_up import RollUp
from merge_engine.bucket.segment import AggMode, Segment, SegmentHeader, SegmentKind
from merge_engine.bucket.tokens import check_writer
from merge_engine.bucket.undo import UndoRange, to_the_end
from merge_engine.bucket.undo_steps import UndoSteps
from merge_engine.bucket.view_meta import AppliedParts, AppliedToken
from merge_engine.encoding.stored_rows import SchemaHistory, StoredRows, finished
from merge_engine.merging.batch import read_batch, read_keys
from merge_engine.merging.fold import Update, fold
from merge_engine.schema.schema import Column
from merge_engine.storage.objects import ObjectStorage
from merge_engine.working_set.memory import Memory

# Whoever needs all rows in RocksDB has them written beside others so many times, until so few are
# left that those may wait.
_ROUNDS = 4
_LITTLE = 20_000


class StoredAt(NamedTuple):
    """Stored rows, all with the changes below one offset and none from it on."""

    history: SchemaHistory
    rows: StoredRows
    offset: int


class Pinned(NamedTuple):
    """All rows of a bucket, with the changes below one offset and none from it on."""

    history: SchemaHistory
    offset: int
    rows: PinnedRows


class Bucket:
    """One bucket, led by this process from `open` to `close`."""

    def __init__(
        self,
        storage: ObjectStorage,
        view_path: Path,
        history: SchemaHistory,
        *,
        identity: str,
        options: BucketOptions | None = None,
        cache: Cache | None = None,
        memory: Memory | None = None,
        clock_ms: Callable[[], int] = wall_clock_ms,
        read_schemas: ReadSchemas | None = None,
    ) -> None:
        """Open the bucket: bring the view up to the end of the log, and take the lead.

        `read_schemas`: reads the table's definition again, when something is met that was written
        under a later schema than is known here.
        """
        self._lead(
            Follower(
                storage,
                view_path,
                history,
                identity=identity,
                options=options,
                cache=cache,
                memory=memory,
                clock_ms=clock_ms,
                read_schemas=read_schemas,
            )
        )

    @classmethod
    def led_from(cls, follower: Follower) -> "Bucket":
        """Take the lead of a bucket that was followed: only its last changes are replayed.

        The follower is used up by that; if it fails, it is closed.
        """
        bucket = cls.__new__(cls)
        bucket._lead(follower)
        return bucket

    def _lead(self, follower: Follower) -> None:
        self._options, self._lock = follower.options, follower.lock
        self._undoing: dict[str, FairLock] = {}
        self._closed = False
        self._process = os.getpid()
        self._inner = follower.lead()
        self._log, self._view = self._inner.log, self._inner.view
        self._roll_up = RollUp(
            self._log, follower.storage, self.exclusive, self.confirm, self._options
        )

    @property
    def term(self) -> int:
        """The offset of this leader's segment."""
        return self._inner.term

    @property
    def deposed(self) -> bool:
        """Whether another leader is known to have come."""
        return self._log.deposed

    @property
    def start_offset(self) -> int:
        """The first offset that the log still has."""
        return self._log.start

    @property
    def end_offset(self) -> int:
        """The offset that the next change will have."""
        return self._log.end

    def settled_end(self) -> int:
        """Return the log end, once any doubt about it has ended."""
        with self.exclusive():
            self._inner.catch_up()
            return self._log.end

    def estimated_rows(self) -> int:
        """Return about how many rows there are, see `View.estimated_rows`."""
        self.check_open()
        return self._view.estimated_rows()

    def stored_bytes(self) -> int:
        """Return how much of the disk the rows take, those that were written there."""
        self.check_open()
        return self._view.stored_bytes()

    @property
    def history(self) -> SchemaHistory:
        """The schemas that this bucket knows."""
        return self._inner.history

    @property
    def turns(self) -> int:
        """How often somebody has had the bucket to himself: it rises when others come, too."""
        return self._lock.turns

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other calls that change something out: for a check and a call that go together."""
        with self._lock:
            self.check_open()
            yield

    def evolve(self, history: SchemaHistory) -> None:
        """Go on under a newer schema; rows are upgraded when next written. An older one is late."""
        with self.exclusive():
            self._inner.evolve(history)

    def put(
        self,
        data: pa.RecordBatch | pa.Table,
        *,
        columns: Sequence[str] | None = None,
        mode: AggMode = AggMode.ACCUMULATE,
        operation_column: str | None = None,
        owner: str = "",
        token: Token | None = None,
        locked: bool = False,
    ) -> BucketResult:
        """Merge a batch: one atomic commit.

        With a token, calling again with the same one changes nothing and returns the first result,
        whatever the batch. `locked`: the owner holds a column lock, and the token has its epoch.
        Errors of InvalidInput and Retryable: nothing was changed. UnknownOutcome: call again.
        """
        rows = read_batch(
            data,
            self._inner.history.current,
            self._options,
            columns=columns,
            mode=mode,
            operation_column=operation_column,
        )
        update = fold(rows, self._inner.history.key_codec)
        with self.exclusive():
            return self.commit(self.plan(update, owner=owner, token=token, locked=locked))

    def plan(
        self, update: Update, *, owner: str = "", token: Token | None = None, locked: bool = False
    ) -> Plan | BucketResult:
        """Try the merge without writing anything; errors are those of `put`.

        A token that was applied before gives its result right away. Call it within `exclusive`,
        and `commit` in the same block or not at all.
        """
        found = self.find(update, owner=owner, token=token)
        if isinstance(found, BucketResult):
            return found
        return Plan.of(update, found, owner=owner, token=token, locked=locked)

    def find(self, update: Update, *, owner: str, token: Token | None) -> Found | BucketResult:
        """Return what an update is to be merged with, for `plan`; or the result, as `plan` does."""
        check_writer(owner, token)
        self._inner.catch_up()
        last = None if token is None else self._view.meta.token(owner)
        if last is not None and last.token == token:
            return BucketResult(
                base_offset=last.base_offset, end_offset=last.end_offset, repeated=True
            )
        self._view.make_room()
        return self._inner.find(update)

    def commit(self, plan: Plan | BucketResult) -> BucketResult:
        """Write what was planned."""
        hit("put.planned")
        return (
            plan if isinstance(plan, BucketResult) else self._inner.write(plan, SegmentKind.WRITE)
        )

    def put_part(
        self, update: Update, *, owner: str, token: Token, part: int, more: bool
    ) -> BucketResult:
        """Write one part of a lock holder's put; the token is applied with the last one.

        Several parts may be written as one, under the number of the last of them. Parts come in
        order, each once: who may write them, and what becomes of a put that is not
        finished, is for the caller to see to. Call it within `exclusive`.
        """
        plan = self.plan(update, owner=owner, token=token, locked=True)
        assert isinstance(plan, Plan), "the token was applied before"
        return self.commit(replace(plan, part=part, more=more))

    def try_part(self, update: Update, overlay: Overlay) -> None:
        """Merge on top of what the overlay has, into the overlay; errors are those of `put`.

        So the parts of a put are tried one after the other, and nothing is written.
        """
        with self.exclusive():
            self._inner.catch_up()
            self._inner.try_merge(update, overlay)

    def undo(
        self,
        debtor: str,
        column_ids: Collection[int],
        wanted: UndoRange,
        *,
        locked: bool = False,
        check: Callable[[], None] = lambda: None,
        go_on: Callable[[], bool] = to_the_end,
    ) -> UndoResult:
        """Bring the debtor's changes of these columns at the wanted offsets back, for good.

        Other owners' columns, rows and deletes stand, and so does what was written from
        `wanted.until` on. Doing it twice changes nothing more. A column that was dropped is left
        out. Where the log was cleaned beyond `wanted.from_offset`, it begins at the log's start. A
        long range is undone in several steps, and others write in between: `check` is called
        before each of them, and before anything is written.

        `locked`: it pays a column lock's debt, so that what it takes back was never committed, and
        is left out by committed reads. Without, it is a change to them like any other.

        When `go_on` says no, it ends early, but gets further with every call: call it again with
        the result's `rest`.
        """
        # One at a time: each step goes further back, and those of two must not be mixed.
        with self._undoing.setdefault(debtor, FairLock()):
            steps = UndoSteps(self._inner, self.exclusive, self._options, locked=locked)
            return steps.undo(debtor, column_ids, wanted, check=check, go_on=go_on)

    def lookup(
        self, keys: pa.RecordBatch | pa.Table, columns: Sequence[str] | None = None
    ) -> pa.RecordBatch:
        """Return the keys and their finished values, in the order asked; nulls where absent."""
        schema = self._inner.history.current
        return self.lookup_keys(read_keys(keys, schema), schema.values(columns))

    def lookup_keys(
        self,
        key_columns: Sequence[pa.Array],
        columns: Sequence[Column],
        *,
        found: str | None = None,
    ) -> pa.RecordBatch:
        """Look up keys that are in the table's types already; `found`: the name of a last
        column that says whether there is such a row."""
        self.check_open()
        if self._view.applied < self._log.end:
            # A put was interrupted, and nobody has come since; or one is just being applied, which
            # nobody was told of yet: then the rows are as they were before it.
            with self._lock.if_free() as free:
                if free:
                    self.check_open()
                    self._inner.catch_up()
        wanted = columns if found is None else None  # Whether there is a row is up to all columns.
        try:
            history, rows = self._view.read(key_columns, wanted)
        except UnknownSchema:  # The table was altered, and rows were written, since we looked.
            with self.exclusive():
                history, rows = self._view.read(key_columns, wanted)
        if found is None:
            return finished(history, key_columns, rows, columns)
        shown = rows.only(history.positions(columns))
        return finished(history, key_columns, shown, columns, found=(found, rows.there))

    def stored(
        self, key_columns: Sequence[pa.Array], columns: Sequence[Column] | None = None
    ) -> StoredAt:
        """Look up the states of keys that are in the table's types, all as of one offset.

        `columns`: of the rows, in this order; None: all.

        Beside the writers, as a look-up is; only if one of them came in between, it is done again
        while they wait.
        """
        self.check_open()
        offset = self._view.applied
        try:
            read = self._view.read(key_columns, columns)
        except UnknownSchema:  # The table was altered, and rows were written, since we looked.
            read = None
        if read is None or self._log.end != offset:
            with self.exclusive():
                self._inner.catch_up()
                offset = self._log.end
                read = self._view.read(key_columns, columns)
        return StoredAt(*read, offset)

    def scan(
        self, columns: Sequence[str] | None = None, *, batch_size: int = 50_000
    ) -> Iterator[pa.RecordBatch]:
        """Yield all rows, finished, in key order, as of the first batch."""
        history, _, rows = self.pin()
        with closing(rows):
            chosen = history.current.values(columns)
            for _, data in finished_rows(rows, history, chosen, batch_rows=batch_size):
                yield data

    def pin(self) -> Pinned:
        """Return all rows as they are now, whatever is written later; for the caller to close."""
        self._write_most()
        with self.exclusive():
            self._inner.catch_up()
            return Pinned(self._inner.history, self._view.applied, self._view.pin())

    def read_log(self, from_offset: int, to_offset: int | None = None) -> Iterator[Segment]:
        """Yield the changes in [from, to) with their states; the ends of the range cut segments."""
        with self.exclusive():
            self._inner.catch_up()
            stop = self._log.end if to_offset is None else min(to_offset, self._log.end)
        yield from cut_segments(self._log.segments(from_offset, stop), from_offset, stop)

    def read_segments(self, bases: Iterable[int]) -> Iterator[Segment]:
        """Yield the segments with these base offsets; OffsetOutOfRange if one was cleaned.

        They are of headers that were seen; safe for threads.
        """
        return self._log.read(bases)

    @property
    def works(self) -> Mapping[str, OwnerWork]:
        """What is known of the puts of all owners, without reading the log; safe for threads."""
        return self._view.meta.works

    @property
    def view_lag(self) -> int:
        """How many changes the view on disk lacks: whoever opens it replays them; thread-safe."""
        return max(0, self._log.end - self._view.written)

    @property
    def view_error(self) -> str | None:
        """Why the view on disk did not take changes the last time; None if it did; thread-safe."""
        return self._view.error

    @property
    def cleaned(self) -> CleanedOwners | None:
        """What is known of the changes before `start_offset`; None: nothing. Safe for threads."""
        return self._log.cleaned

    def headers(self, from_offset: int, to_offset: int | None = None) -> Iterator[SegmentHeader]:
        """Yield the headers of the segments that hold the offsets [from, to); safe for threads.

        They come from memory, if this leader wrote or replayed them. Unlike `read_log`, this leaves
        out what was cleaned, and does not wait for a put that is just being applied.
        """
        self.check_open()
        return self._log.headers(from_offset, to_offset)

    def confirm(self) -> int:
        """Return the end of the log; Deposed if another leader has come, known here or not.

        So this is all that there was when it was called. The store is asked while writers go on.
        """
        with self.exclusive():
            self._inner.catch_up()
            end = self._log.end
        self._log.confirm_at(end)
        return end

    def last_token(self, owner: str) -> AppliedToken | None:
        """Return the owner's last token here, and the offsets that it got."""
        with self.exclusive():
            self._inner.catch_up()
            return self._view.meta.token(owner)

    def parts_applied(self, owner: str) -> AppliedParts | None:
        """Return how far the owner's last put of several parts has got here."""
        with self.exclusive():
            self._inner.catch_up()
            return self._view.meta.parts(owner)

    def clean(self, before: int, *, older_than_ms: int | None = None) -> int:
        """Drop the log below `before`, as far as the view on disk has it; return the new start.

        What else needs the log (snapshots, leases, tiering) is for the caller to know.
        """
        self._write_most()
        with self.exclusive():
            self._inner.catch_up()
            durable = self._view.flush()
            return self._log.clean(min(before, durable), older_than_ms=older_than_ms)

    def roll_up(self, before: int) -> bool:
        """Roll up some of the log below `before` into larger objects; True if there may be more.

        It reads the same as before, for everybody. Others write meanwhile. What is likely to be
        read or undone soon is better left as it is: `before` should be stable, and in a snapshot or
        in the view on disk.
        """
        self.check_open()
        return self._roll_up.step(before)

    def flush(self) -> None:
        """Make the view durable, so that the next open has nothing to replay."""
        self._write_most()
        with self.exclusive():
            self._inner.catch_up()
            self._view.flush()

    def checkpoint(self, directory: Path) -> None:
        """Copy the view into a new directory while writers go on.

        It has all that was put before the call, and may have more: `read_checkpoint` says up to
        which offset. Closed if the bucket is closed meanwhile.
        """
        self._write_most()
        with self.exclusive():
            self._inner.catch_up()
            self._view.write_behind()
        self._view.checkpoint(directory)

    def _write_most(self) -> None:
        """Write what has changed to RocksDB while others go on, so that little is left to write.

        Others change rows meanwhile, but fewer each time, for each time takes less long.
        """
        for _ in range(_ROUNDS):
            with self.exclusive():
                self._inner.catch_up()
                writing = self._view.start_writing(in_a_hurry=True)
            if writing is None:
                return
            wait([writing])
            if self._view.dirty_rows <= _LITTLE:
                return

    def end(self, *, at_once: bool = False) -> None:
        """Let nobody in any more; what was under way has ended on return. The view stays open.

        `at_once`: do not wait for that. What is under way may still be written then, as by any
        leader that does not know of the next one: the log keeps the two apart.
        """
        if at_once:
            self._closed = True
            return
        with self._lock:
            self._closed = True

    def close(self) -> None:
        """Write the view and let go of the bucket. Closing twice is fine.

        In a forked child it does nothing: the bucket is the parent's.
        """
        if forks.is_inherited(self._process):
            return
        with self._lock:
            self._closed = True
            self._view.close()

    def check_open(self) -> None:
        """Raise Closed, or Deposed if another leader is known to have come."""
        forks.use(LIBRARY)
        if self._closed:
            raise Closed("the bucket is closed; open it again")
        self._log.check_leading()
