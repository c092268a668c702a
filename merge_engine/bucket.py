"""A bucket: a log, its view, and the calls that keep the two together.

Calls that change something run one at a time, from check to apply; look-ups run beside them and see
each row whole. A put is, in this order: the owner's token (seen before: the first result is
returned), merge, create the segment, apply to the view. It is committed when the segment is there;
all before leaves no trace, and all after is repeated from the log when the bucket is opened again.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from rocksdict import Cache

from foundation import forks
from merge_engine.batch import read_batch, read_keys
from merge_engine.errors import (
    Closed,
    CorruptView,
    LogGap,
    OffsetOutOfRange,
    UnknownColumn,
    UnknownSchema,
)
from merge_engine.failpoints import hit
from merge_engine.fair_lock import FairLock
from merge_engine.fold import Update, fold
from merge_engine.log import Log, wall_clock_ms
from merge_engine.merge import Merged, merge
from merge_engine.options import BucketOptions
from merge_engine.overlay import Overlay
from merge_engine.pinned import PinnedRows
from merge_engine.rows_at import cut_segments, finished_rows
from merge_engine.schema import Column
from merge_engine.segment import AggMode, Segment, SegmentHeader, SegmentKind, Token
from merge_engine.storage import ObjectStorage
from merge_engine.stored import SchemaHistory, StoredRows, finished
from merge_engine.tokens import check_writer
from merge_engine.undo import UndoRange, to_the_end, undo_updates, undone_already
from merge_engine.view import LIBRARY, AppliedParts, AppliedToken, View


@dataclass(frozen=True, kw_only=True)
class PutResult:
    """What a put or undo did: log offsets [base, end), one per changed key.

    `repeated`: this token had been applied before; the offsets are those of that time. `rows`: how
    many of the offsets are its own, if others wrote in between.
    """

    base_offset: int
    end_offset: int
    repeated: bool = False
    rows: int | None = None

    @property
    def changed(self) -> int:
        """How many keys changed; one that several parts of a put have changed counts for each."""
        return self.end_offset - self.base_offset if self.rows is None else self.rows


@dataclass(frozen=True, kw_only=True)
class UndoResult(PutResult):
    """What a call of undo did. `rest`: what is left to be undone by further calls; None: nothing.

    `rows` are those of this call, which add up.
    """

    rest: UndoRange | None = None

    def then(self, later: "UndoResult") -> "UndoResult":
        """Return what this call and a later one, for the rest, did together."""
        return replace(later, base_offset=self.base_offset, rows=self.changed + later.changed)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A merge that was tried and fits: the keys that change, and how.

    `part` and `more`: of a put of several segments, see `SegmentHeader`.
    """

    update: Update
    owner: str
    token: Token | None
    row_keys: list[bytes]
    merged: Merged
    part: int = 0
    more: bool = False


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
        clock_ms: Callable[[], int] = wall_clock_ms,
        read_schemas: Callable[[], SchemaHistory] | None = None,
    ) -> None:
        """Open the bucket: bring the view up to the end of the log, and take the lead.

        `read_schemas`: reads the table's definition again, when something is met that was written
        under a later schema than is known here.
        """
        self._options = options or BucketOptions()
        self._history = history
        self._read_schemas = read_schemas
        self._lock = FairLock()
        self._undoing: dict[str, FairLock] = {}
        self._closed = False
        self._process = os.getpid()
        cache = cache or self._options.to_cache()
        self._view = View(view_path, identity, self._options, cache)
        try:
            self._log = Log(storage, clock_ms=clock_ms)
            # Before it leads: an open that must fail deposes nobody, and leaves nothing in the log.
            self._learn(self._view.schema_version)
            self._replay_log()
            self._log.lead()
            self._catch_up()
        except BaseException:
            self._view.close()
            raise

    @property
    def term(self) -> int:
        """The offset of this leader's segment."""
        assert self._log.term is not None
        return self._log.term

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
            self._catch_up()
            return self._log.end

    @property
    def history(self) -> SchemaHistory:
        """The schemas that this bucket knows."""
        return self._history

    @property
    def turns(self) -> int:
        """How often somebody has had the bucket to himself: it rises when others come, too."""
        return self._lock.turns

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other calls that change something out: for a check and a call that go together."""
        with self._lock:
            self._check_open()
            yield

    def evolve(self, history: SchemaHistory) -> None:
        """Go on under a newer schema; rows are upgraded when next written. An older one is late."""
        with self.exclusive():
            if history.current.version > self._history.current.version:
                self._history = history

    def put(
        self,
        data: pa.RecordBatch | pa.Table,
        *,
        columns: Sequence[str] | None = None,
        mode: AggMode = AggMode.ACCUMULATE,
        operation_column: str | None = None,
        owner: str = "",
        token: Token | None = None,
    ) -> PutResult:
        """Merge a batch: one atomic commit.

        With a token, calling again with the same one changes nothing and returns the first result,
        whatever the batch. Errors of InvalidInput and Retryable: nothing was changed.
        UnknownOutcome: call again.
        """
        rows = read_batch(
            data,
            self._history.current,
            self._options,
            columns=columns,
            mode=mode,
            operation_column=operation_column,
        )
        update = fold(rows, self._history.key_codec)
        with self.exclusive():
            return self.commit(self.plan(update, owner=owner, token=token))

    def plan(
        self, update: Update, *, owner: str = "", token: Token | None = None
    ) -> Plan | PutResult:
        """Try the merge without writing anything; errors are those of `put`.

        A token that was applied before gives its result right away. Call it within `exclusive`,
        and `commit` in the same block or not at all.
        """
        check_writer(owner, token)
        self._catch_up()
        last = None if token is None else self._view.token(owner)
        if last is not None and last.token == token:
            return PutResult(
                base_offset=last.base_offset, end_offset=last.end_offset, repeated=True
            )
        self._view.make_room()
        row_keys, merged = self._plan(update)
        return Plan(update=update, owner=owner, token=token, row_keys=row_keys, merged=merged)

    def commit(self, plan: Plan | PutResult) -> PutResult:
        """Write what was planned."""
        hit("put.planned")
        return plan if isinstance(plan, PutResult) else self._write(plan, SegmentKind.WRITE)

    def put_part(
        self, update: Update, *, owner: str, token: Token, part: int, more: bool
    ) -> PutResult:
        """Write one part of a put of several segments; the token is applied with the last one.

        Several parts may be written as one, under the number of the last of them. Parts come in
        order, each once: who may write them, and what becomes of a put that is not
        finished, is for the caller to see to. Call it within `exclusive`.
        """
        plan = self.plan(update, owner=owner, token=token)
        assert isinstance(plan, Plan), "the token was applied before"
        return self.commit(replace(plan, part=part, more=more))

    def try_part(self, update: Update, overlay: Overlay) -> None:
        """Merge on top of what the overlay has, into the overlay; errors are those of `put`.

        So the parts of a put are tried one behind the other, and nothing is written.
        """
        with self.exclusive():
            self._catch_up()
            row_keys, merged = self._plan(update, overlay)
            values = self._history.encode(merged.after)
        overlay.set(row_keys, values)

    def undo(
        self,
        debtor: str,
        columns: Sequence[str],
        from_offset: int,
        check: Callable[[], None] = lambda: None,
        *,
        until: int | None = None,
        go_on: Callable[[], bool] = to_the_end,
    ) -> UndoResult:
        """Bring the debtor's changes of these columns since `from_offset` back, for good.

        Other owners' columns, rows and deletes stand. Doing it twice changes nothing more. Where
        the log was cleaned beyond `from_offset`, it begins at the log's start. A long range is
        undone in several steps, and others write in between: `check` is called before each of them,
        and before anything is written.

        When `go_on` says no, it ends early, but gets further with every call: call it again with
        the result's `rest`. `until`: what was written from there on stands; None: the log's end.
        """
        # One at a time: each step goes further back, and those of two must not be mixed.
        with self._undoing.setdefault(debtor, FairLock()):
            with self.exclusive():
                check()
                self._catch_up()
                base, chosen = self._log.end, self._history.current.values(columns)
                stop = base if until is None else until
                if not 0 <= from_offset <= base or stop > base:
                    raise OffsetOutOfRange(
                        f"cannot undo from offset {from_offset}: the log ends at {base}; "
                        "these offsets belong to another table or bucket"
                    )
            rows, start, stop = self._undo(
                debtor, chosen, from_offset, stop, check=check, go_on=go_on
            )
            with self.exclusive():
                check()
                self._catch_up()
                rest = UndoRange(from_offset, stop) if stop > start else None
                if rest is None:
                    if not rows:
                        self._log.confirm()
                    self._mark_undone(debtor, start, from_offset)
                end = self._log.end
                return UndoResult(base_offset=base, end_offset=end, rows=rows, rest=rest)

    def _undo(
        self,
        debtor: str,
        columns: Sequence[Column],
        from_offset: int,
        stop: int,
        *,
        check: Callable[[], None],
        go_on: Callable[[], bool],
    ) -> tuple[int, int, int]:
        """Undo as long as `go_on` says; return how many keys changed, and the range that is left.

        That begins where the log does, if it was cleaned, and is empty when all is undone.
        """
        rows = 0
        while True:
            start = max(from_offset, self._log.start)
            try:
                steps = self._undo_steps(debtor, columns, start, stop, check=check, go_on=go_on)
                for changed, left in steps:
                    rows, stop = rows + changed, left
                return rows, start, stop
            except OffsetOutOfRange:
                # A former leader that does not know of us yet may be cleaning. What it cleans
                # is stable, and what was undone here already stays so.
                if self._log.start <= start:
                    raise
            except UnknownColumn:  # Dropped between two steps, and its values with it.
                columns = tuple(c for c in columns if c.id in self._history.position)

    def _undo_steps(
        self,
        debtor: str,
        columns: Sequence[Column],
        start: int,
        stop: int,
        *,
        check: Callable[[], None],
        go_on: Callable[[], bool],
    ) -> Iterator[tuple[int, int]]:
        """Take the debtor's changes at the offsets [start, stop) back, as long as `go_on` says.

        Yields after each step how many keys it changed, and where what is left ends: at `start`
        when nothing is.
        """
        if not self._log.learn_headers(start, go_on):
            yield 0, stop
            return
        headers = [one for one in self._log.headers(start) if one.owner == debtor]
        done = undone_already(headers, columns, start)
        left = [one.base_offset for one in headers if one.base_offset not in done]
        bases = [base for base in left if base < stop]
        if not bases:
            yield 0, start
        updates = undo_updates(
            self._log.backwards(bases),
            columns,
            self._history.current,
            max_bytes=self._options.undo_max_bytes,
            max_rows=self._options.undo_max_rows,
            go_on=go_on,
        )
        for back_to, update in updates:
            changed = self._undo_step(debtor, update, back_to, check)
            yield changed, back_to if back_to > bases[0] else start
            if not go_on():
                return

    def _undo_step(
        self, debtor: str, update: Update, back_to: int, check: Callable[[], None]
    ) -> int:
        """Write one step of an undo, to this offset; return how many keys it changed."""
        with self.exclusive():
            check()
            self._catch_up()
            self._view.make_room()
            row_keys, merged = self._plan(update)
            plan = Plan(update=update, owner=debtor, token=None, row_keys=row_keys, merged=merged)
            hit("undo.planned")
            return self._write(plan, SegmentKind.UNDO, undo_from=back_to).changed

    def _mark_undone(self, debtor: str, start: int, from_offset: int) -> None:
        """Log an undo that had nothing to change, if there are changes that cancelled each other.

        Else readers of the log would take those for committed ones. Once is enough.
        """
        of_debtor = [h for h in self._log.headers(start, self._log.end) if h.owner == debtor]
        first = next((h.base_offset for h in of_debtor if h.undo_from is None), None)
        if first is None:
            return
        last = of_debtor[-1]
        if last.undo_from is not None and last.undo_from <= max(first, from_offset):
            return
        header = SegmentHeader(
            kind=SegmentKind.UNDO,
            base_offset=self._log.end,
            term=self.term,
            nonce="",
            timestamp_ms=0,
            schema_version=self._history.current.version,
            owner=debtor,
            undo_from=from_offset,
        )
        self._apply(self._log.append(Segment(header, {}, {})), [], [])

    def lookup(
        self, keys: pa.RecordBatch | pa.Table, columns: Sequence[str] | None = None
    ) -> pa.RecordBatch:
        """Return the keys and their finished values, in the order asked; nulls where absent."""
        schema = self._history.current
        return self.lookup_keys(read_keys(keys, schema), schema.values(columns))

    def lookup_keys(
        self, key_columns: Sequence[pa.Array], columns: Sequence[Column]
    ) -> pa.RecordBatch:
        """Look up keys that are in the table's types already."""
        self._check_open()
        if self._view.applied < self._log.end:  # A put was interrupted, or is just being applied.
            with self.exclusive():
                self._catch_up()
        history = self._history
        row_keys = history.row_keys(history.key_codec.encode(key_columns))
        try:
            rows = history.decode(self._view.get(row_keys))
        except UnknownSchema:  # The table was altered, and rows were written, since we looked.
            with self.exclusive():
                history = self._history
                rows = history.decode(self._view.get(row_keys))
        return finished(history, key_columns, rows, columns)

    def stored(self, key_columns: Sequence[pa.Array]) -> StoredAt:
        """Look up the states of keys that are in the table's types, all as of one offset.

        Beside the writers, as a look-up is; only if one of them came in between, it is done again
        while they wait.
        """
        self._check_open()
        offset = self._view.applied  # Before the schema: no row up to here is of a later one.
        history = self._history
        row_keys = history.row_keys(history.key_codec.encode(key_columns))
        values = self._view.get(row_keys)
        if self._log.end != offset:  # Then rows may be of a later schema, too.
            with self.exclusive():
                self._catch_up()
                history, offset = self._history, self._log.end
                values = self._view.get(row_keys)
        return StoredAt(history, history.decode(values), offset)

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
        with self.exclusive():
            self._catch_up()
            return Pinned(self._history, self._view.applied, self._view.pin())

    def read_log(self, from_offset: int, to_offset: int | None = None) -> Iterator[Segment]:
        """Yield the changes in [from, to) with their states; the ends of the range cut segments."""
        with self.exclusive():
            self._catch_up()
            stop = self._log.end if to_offset is None else min(to_offset, self._log.end)
        yield from cut_segments(self._log.segments(from_offset, stop), from_offset, stop)

    def headers(self, from_offset: int, to_offset: int | None = None) -> Iterator[SegmentHeader]:
        """Yield the headers of the segments that hold the offsets [from, to); safe for threads.

        They come from memory, if this leader wrote or replayed them. Unlike `read_log`, this leaves
        out what was cleaned, and does not wait for a put that is just being applied.
        """
        self._check_open()
        return self._log.headers(from_offset, to_offset)

    def confirm(self) -> int:
        """Return the end of the log; Deposed if another leader has come, known here or not.

        So this is all that there was when it was called. The store is asked while writers go on.
        """
        with self.exclusive():
            self._catch_up()
            end = self._log.end
        self._log.confirm_at(end)
        return end

    def last_token(self, owner: str) -> AppliedToken | None:
        """Return the owner's last token here, and the offsets that it got."""
        with self.exclusive():
            self._catch_up()
            return self._view.token(owner)

    def parts_applied(self, owner: str) -> AppliedParts | None:
        """Return how far the owner's last put of several parts has got here."""
        with self.exclusive():
            self._catch_up()
            return self._view.parts(owner)

    def clean(self, before: int, *, older_than_ms: int | None = None) -> int:
        """Drop the log below `before`, as far as the view on disk has it; return the new start.

        What else needs the log (snapshots, leases, tiering) is for the caller to know.
        """
        with self.exclusive():
            self._catch_up()
            durable = self._view.flush()
            return self._log.clean(min(before, durable), older_than_ms=older_than_ms)

    def flush(self) -> None:
        """Make the view durable, so that the next open has nothing to replay."""
        with self.exclusive():
            self._catch_up()
            self._view.flush()

    def checkpoint(self, directory: Path) -> None:
        """Copy the view into a new directory while writers go on.

        It has all that was put before the call, and may have more: `read_checkpoint` says up to
        which offset. Closed if the bucket is closed meanwhile.
        """
        with self.exclusive():
            self._catch_up()
            self._view.write_behind()
        self._view.checkpoint(directory)

    def close(self) -> None:
        """Write the view and let go of the bucket. Closing twice is fine.

        In a forked child it does nothing: the bucket is the parent's.
        """
        if forks.is_inherited(self._process):
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._view.close()

    def _check_open(self) -> None:
        forks.use(LIBRARY)
        if self._closed:
            raise Closed("the bucket is closed; open it again")
        self._log.check_leading()

    def _plan(self, update: Update, overlay: Overlay | None = None) -> tuple[list[bytes], Merged]:
        row_keys = self._history.row_keys(update.encoded_keys)
        values = self._view.get(row_keys)
        if overlay is not None:
            values = overlay.over(row_keys, values)
        stored = self._history.decode(values)
        for column in update.columns:
            if column.id >= self._history.current.next_column_id:
                self._learn(self._history.current.version + 1)
                return self._plan(update, overlay)
            if column.id not in self._history.position:
                raise UnknownColumn(
                    f"column '{column.name}' was dropped meanwhile; nothing was written"
                )
        positions = [self._history.position[column.id] for column in update.columns]
        merged = merge(update, stored, positions)
        if not merged.changed.all():
            row_keys = list(compress(row_keys, merged.changed.tolist()))
        return row_keys, merged

    def _write(self, plan: Plan, kind: SegmentKind, undo_from: int | None = None) -> PutResult:
        """Log the changes, then apply them. Without changes, only a token is worth a segment.

        That nothing changes is true for a leader only: another one may have changed the row since.
        """
        base, rows = self._log.end, len(plan.row_keys)
        if rows or plan.token is not None:
            # Encoded first: behind the append nothing may fail that did not fail before it.
            values = self._history.encode(plan.merged.after)
            header = self._log.append(self._to_segment(plan, kind, undo_from))
            hit("put.logged")
            self._apply(header, plan.row_keys, values)
            hit("put.applied")
        else:
            self._log.confirm()
        return PutResult(base_offset=base, end_offset=base + rows)

    def _apply(self, header: SegmentHeader, row_keys: list[bytes], values: list[bytes]) -> None:
        # The token first: it must be in the write to RocksDB that has the offset, and so the rows.
        if header.token is not None:
            self._remember(header, header.token)
        version = self._history.current.version if row_keys else 0
        bulk = header.more or header.part > 0
        self._view.apply(row_keys, values, header.end_offset, version, bulk=bulk)

    def _remember(self, header: SegmentHeader, token: Token) -> None:
        """Remember that a token was applied, or how far a put of several parts has got."""
        base_offset = header.base_offset
        if header.part:
            begun = self._view.parts(header.owner)
            if begun is not None and begun.token == token:
                base_offset = begun.base_offset
        if header.more:
            parts = AppliedParts(token, base_offset, header.part + 1)
            self._view.remember_parts(header.owner, parts)
        else:
            applied = AppliedToken(token, base_offset, header.base_offset + header.rows)
            self._view.remember(header.owner, applied)

    def _to_segment(self, plan: Plan, kind: SegmentKind, undo_from: int | None) -> Segment:
        update, changed = plan.update, pa.array(plan.merged.changed)
        header = SegmentHeader(
            kind=kind,
            base_offset=self._log.end,
            term=self.term,
            nonce="",
            timestamp_ms=0,
            rows=len(plan.row_keys),
            schema_version=self._history.current.version,
            owner=plan.owner,
            token=plan.token,
            column_ids=tuple(column.id for column in update.columns),
            agg_mode=update.mode,
            undo_from=undo_from,
            part=plan.part,
            more=plan.more,
        )
        if not plan.row_keys:
            return Segment(replace(header, column_ids=()), {}, {})
        key_ids = [column.id for column in self._history.current.key_columns]
        keys = [array.filter(changed) for array in update.keys]
        changes = dict(zip(header.column_ids, plan.merged.changes, strict=True))
        return Segment(header, dict(zip(key_ids, keys, strict=True)), changes)

    def _catch_up(self) -> None:
        """End any doubt about the log's end, and bring the view there."""
        self._log.settle()
        self._replay_log()

    def _replay_log(self) -> None:
        """Bring the view to the end of the log, as far as that is known here."""
        self._check_view()
        for segment in self._log.segments(self._view.applied):
            self._view.make_room()
            self._replay(segment)

    def _learn(self, version: int) -> None:
        """Know this schema version; UnknownSchema if the table's definition does not have it."""
        if version > self._history.current.version and self._read_schemas is not None:
            newer = self._read_schemas()
            if newer.current.version > self._history.current.version:
                self._history = newer
        if version > self._history.current.version:
            self._history.check_knows(version)

    def _check_view(self) -> None:
        """Raise unless the log has all that the view does not."""
        applied, path = self._view.applied, self._view.path
        if applied > self._log.end:
            raise CorruptView(
                f"view {path} is at offset {applied}, but the log ends at {self._log.end}: "
                "segments are gone, restore them from a copy of the log; or, if the log is right, "
                "remove the directory to rebuild the view from it"
            )
        if applied < self._log.start:
            raise LogGap(
                f"view {path} is at offset {applied}, but the log starts at {self._log.start}; "
                "restore the view from a snapshot or from a copy of its directory"
            )

    def _replay(self, segment: Segment) -> None:
        """Apply a segment's after-states; what was merged once is not merged again.

        Only under a schema that has all its columns, unless they were dropped since.
        """
        self._learn(segment.header.schema_version)
        history = self._history
        row_keys: list[bytes] = []
        values: list[bytes] = []
        if segment.changes:
            keys = [segment.keys[column.id] for column in history.current.key_columns]
            row_keys = history.row_keys(history.key_codec.encode(keys))
            values = history.encode(self._rows_after(segment, row_keys))
        self._apply(segment.header, row_keys, values)

    def _rows_after(self, segment: Segment, row_keys: list[bytes]) -> StoredRows:
        """Return whole rows; those columns that the segment does not have come from the view."""
        positions = self._history.position
        written = [column for column in segment.changes if column in positions]
        if len(written) == len(positions):
            stored = self._history.decode([None] * len(row_keys))
        else:
            stored = self._history.decode(self._view.get(row_keys))
        touched, states = stored.touched.copy(), list(stored.states)
        for column in written:
            change = segment.changes[column]
            touched[:, positions[column]] = change.touched_after
            states[positions[column]] = change.after
        return StoredRows(touched, states)
