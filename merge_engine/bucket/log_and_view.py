"""A bucket's log and its view, kept together: what is merged is logged, and what is logged applied.

A change is committed when its segment is in the log. All before that leaves no trace; all after it
is repeated from the log, which is also how the view of a bucket is brought up when it is opened.
Nothing here is locked: `Bucket` sees to it that one call at a time changes something.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from rocksdict import Cache

from foundation.errors import Closed, CorruptView, LogGap, UnknownColumn
from foundation.failpoints import hit
from foundation.ids import Token
from merge_engine.bucket.fair_lock import FairLock
from merge_engine.bucket.log import Log
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.overlay import Overlay
from merge_engine.bucket.results import BucketResult
from merge_engine.bucket.segment import Segment, SegmentHeader, SegmentKind
from merge_engine.bucket.view import View
from merge_engine.bucket.view_meta import AppliedParts, AppliedToken
from merge_engine.encoding.stored_rows import SchemaHistory, StoredRows
from merge_engine.merging.fold import Update
from merge_engine.merging.merge import Merged, merge
from merge_engine.storage.objects import ObjectStorage
from merge_engine.storage.read_ahead import AT_ONCE, GENTLY
from merge_engine.working_set.block import NOTHING, PreparedRows, prepare_rows
from merge_engine.working_set.memory import Memory
from merge_engine.working_set.working_set import NOWHERE, Located

ReadSchemas = Callable[[], SchemaHistory]
"""Reads the table's definition again: something was met that a later schema has written."""
GoOn = Callable[[], bool]
"""Whether to go on with a long replay."""


class Found(NamedTuple):
    """Where the rows of an update are, and what they have of the columns that it writes."""

    located: Located
    stored: StoredRows


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A merge that was tried and fits: where the rows are that change, and how they do.

    `part` and `more`, of a put of several segments, and `locked`: see `SegmentHeader`.
    """

    update: Update
    owner: str
    token: Token | None
    located: Located
    merged: Merged
    part: int = 0
    more: bool = False
    locked: bool = False

    @classmethod
    def of(
        cls,
        update: Update,
        found: Found,
        *,
        owner: str,
        token: Token | None,
        locked: bool,
        merged: Merged | None = None,
    ) -> "Plan":
        """Merge an update with what was found; `merged`: that was done already."""
        merged = merged or merge(update, found.stored)
        return cls(
            update=update,
            owner=owner,
            token=token,
            located=found.located.only(merged.changed),
            merged=merged,
            locked=locked,
        )


class LogAndView:
    """The log, the view, and the schemas under which both are read."""

    def __init__(
        self,
        storage: ObjectStorage,
        view_path: Path,
        history: SchemaHistory,
        *,
        identity: str,
        options: BucketOptions,
        cache: Cache,
        memory: Memory,
        lock: FairLock,
        clock_ms: Callable[[], int],
        read_schemas: ReadSchemas | None,
        go_on: GoOn = lambda: True,
        gently: bool = False,
    ) -> None:
        """Bring the view up to the end of the log, as one who follows. Closed if `go_on` says no.

        `lock`: of the bucket; the caller has it. `gently`: leave the store to others meanwhile.
        """
        self._read_schemas = read_schemas
        self._go_on = go_on
        self.view = View(
            view_path,
            history,
            identity=identity,
            options=options,
            cache=cache,
            memory=memory,
            lock=lock,
        )
        try:
            self.log = Log(storage, clock_ms=clock_ms)
            self.log.reads_at_once = GENTLY if gently else AT_ONCE
            self._learn(self.view.meta.schema_version)
            self._replay_log()
            self.log.reads_at_once = AT_ONCE
        except BaseException:
            self.view.close()
            raise

    def follow(self) -> int:
        """Apply what others have appended since; return how many segments. Not for a leader."""
        count = self._follow_segments()
        if not count and self.log.has_gone_on():
            count = self._replay_log()
        return count

    def _follow_segments(self) -> int:
        count = self._replay_log()  # What a call has left that failed.
        for segment in self.log.newer():
            self._replay_following(segment)
            count += 1
        return count

    def lead(self) -> None:
        """Take the lead. An open that must fail has failed before: it would depose somebody."""
        self._go_on = lambda: True  # From here on, what is logged is applied.
        # What others have cleaned or rolled up since is for the log to find, once it has the lead:
        # to list a log takes long, and nobody leads meanwhile.
        self._follow_segments()
        self.log.lead(self._check_view)
        self.catch_up()

    @property
    def term(self) -> int:
        """The offset of this leader's segment."""
        assert self.log.term is not None
        return self.log.term

    @property
    def history(self) -> SchemaHistory:
        """The schemas that are known here."""
        return self.view.history

    def evolve(self, history: SchemaHistory) -> None:
        """Go on under a newer schema; an older one is late."""
        if history.current.version > self.history.current.version:
            self.view.evolve(history)

    def find(self, update: Update) -> Found:
        """Return the rows that an update is to be merged with."""
        positions = self._positions(update)
        located = self.view.load(update.encoded_keys, update.hashes)
        return Found(located, self.view.rows(located, positions))

    def try_merge(self, update: Update, overlay: Overlay) -> None:
        """Merge with what the overlay has on top of what is stored, into the overlay."""
        positions = self._positions(update)
        history = self.history
        row_keys = history.row_keys(update.encoded_keys)
        stored = self.view.read(update.keys).rows
        above = overlay.get(row_keys)
        tried = np.array([value is not None for value in above], bool)
        if tried.any():
            rows = history.decode([value or None for value in above if value is not None])
            stored = stored.with_rows(tried, rows)
        merged = merge(update, stored.only(positions))
        if not merged.changed.all():
            row_keys = list(compress(row_keys, merged.changed.tolist()))
            stored = stored.take(merged.changed)
        overlay.set(row_keys, history.encode(stored.replaced(positions, merged.after)))

    def _positions(self, update: Update) -> list[int]:
        """Return where the update's columns stand in the newest schema."""
        for column in update.columns:
            if column.id >= self.history.current.next_column_id:
                self._learn(self.history.current.version + 1)
                return self._positions(update)
            if column.id not in self.history.position:
                raise UnknownColumn(
                    f"column '{column.name}' was dropped meanwhile; nothing was written"
                )
        return [self.history.position[column.id] for column in update.columns]

    def write(self, plan: Plan, kind: SegmentKind, undo_from: int | None = None) -> BucketResult:
        """Log the changes, then apply them. Without any, a token is worth a segment, or an undo.

        That nothing changes is true for a leader only: another one may have changed the row since.
        """
        base, rows = self.log.end, plan.located.size
        if rows or plan.token is not None or undo_from is not None:
            # Prepared first: after the append nothing may fail that did not fail before it.
            prepared = prepare_rows(self._positions(plan.update), plan.merged.after)
            header = self.log.append(self._to_segment(plan, kind, undo_from))
            hit("put.logged")
            self.apply(header, plan.located, prepared)
            hit("put.applied")
        else:
            self.log.confirm()
        return BucketResult(base_offset=base, end_offset=base + rows)

    def apply(self, header: SegmentHeader, located: Located, rows: PreparedRows) -> None:
        # The owner first: it must be in the write to RocksDB that has the offset, and so the rows.
        if header.is_change:
            self.view.meta.note_change(header)
        if header.token is not None:
            self._remember(header, header.token)
        version = self.history.current.version if located.size else 0
        self.view.apply(located, rows, header.end_offset, version)

    def _remember(self, header: SegmentHeader, token: Token) -> None:
        """Remember that a token was applied, or how far a put of several parts has got."""
        base_offset = header.base_offset
        if header.part:
            begun = self.view.meta.parts(header.owner)
            if begun is not None and begun.token == token:
                base_offset = begun.base_offset
        if header.more:
            parts = AppliedParts(token, base_offset, header.part + 1)
            self.view.meta.remember_parts(header.owner, parts)
        else:
            applied = AppliedToken(token, base_offset, header.base_offset + header.rows)
            self.view.meta.remember(header.owner, applied)

    def _to_segment(self, plan: Plan, kind: SegmentKind, undo_from: int | None) -> Segment:
        update = plan.update
        header = SegmentHeader(
            kind=kind,
            base_offset=self.log.end,
            term=self.term,
            nonce="",
            timestamp_ms=0,
            rows=plan.located.size,
            schema_version=self.history.current.version,
            owner=plan.owner,
            token=plan.token,
            column_ids=tuple(column.id for column in update.columns),
            agg_mode=update.mode,
            undo_from=undo_from,
            part=plan.part,
            more=plan.more,
            locked=plan.locked,
        )
        if not plan.located.size and undo_from is None:
            return Segment(replace(header, column_ids=()), {}, {})
        key_ids = [column.id for column in self.history.current.key_columns]
        keys = update.keys
        if not plan.merged.changed.all():
            changed = pa.array(plan.merged.changed)
            keys = [array.filter(changed) for array in keys]
        changes = dict(zip(header.column_ids, plan.merged.changes, strict=True))
        return Segment(header, dict(zip(key_ids, keys, strict=True)), changes)

    def catch_up(self) -> None:
        """End any doubt about the log's end, and bring the view there."""
        self.log.settle()
        self._replay_log()

    def _replay_log(self) -> int:
        """Bring the view to the end of the log, as far as that is known here; return by how many
        segments."""
        self._check_view()
        count = 0
        for segment in self.log.segments(self.view.applied):
            self._replay_following(segment)
            count += 1
        return count

    def _replay_following(self, segment: Segment) -> None:
        if not self._go_on():
            raise Closed("nobody wants this bucket opened any more")
        if segment.header.base_offset != self.view.applied:
            raise LogGap(
                f"view {self.view.path} is at offset {self.view.applied}, and the next segment of "
                f"{self.log} begins at {segment.header.base_offset}; open the bucket again"
            )
        self.view.make_room()
        self._replay(segment)

    def _learn(self, version: int) -> None:
        """Know this schema version; UnknownSchema if the table's definition does not have it."""
        if version > self.history.current.version and self._read_schemas is not None:
            self.evolve(self._read_schemas())
        if version > self.history.current.version:
            self.history.check_knows(version)

    def _check_view(self) -> None:
        """Raise unless the log has all that the view does not."""
        applied, path = self.view.applied, self.view.path
        if applied > self.log.end:
            raise CorruptView(
                f"view {path} is at offset {applied}, but the log ends at {self.log.end}: "
                "segments are gone, restore them from a copy of the log; or, if the log is right, "
                "remove the directory to rebuild the view from it"
            )
        if applied < self.log.start:
            raise LogGap(
                f"view {path} is at offset {applied}, but the log starts at {self.log.start}; "
                "restore the view from a snapshot or from a copy of its directory"
            )

    def _replay(self, segment: Segment) -> None:
        """Apply a segment's after-states; what was merged once is not merged again.

        Only under a schema that has all its columns, unless they were dropped since.
        """
        self._learn(segment.header.schema_version)
        if not segment.changes:
            self.apply(segment.header, NOWHERE, NOTHING)
            return
        history = self.history
        keys = [segment.keys[column.id] for column in history.current.key_columns]
        written = [column for column in segment.changes if column in history.position]
        located = self.view.load(
            history.key_codec.encode(keys), blindly=len(written) == len(history.position)
        )
        changes = [segment.changes[column] for column in written]
        after = StoredRows(
            np.stack([change.touched_after for change in changes], axis=1)
            if changes
            else np.zeros((located.size, 0), bool),
            [change.after for change in changes],
        )
        positions = [history.position[column] for column in written]
        self.apply(segment.header, located, prepare_rows(positions, after))
