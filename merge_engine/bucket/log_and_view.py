"""A bucket's log and its view, kept together: what is merged is logged, and what is logged applied.

A change is committed when its segment is in the log. All before that leaves no trace; all after it
is repeated from the log, which is also how the view of a bucket is brought up when it is opened.
Nothing here is locked: `Bucket` sees to it that one call at a time changes something.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path

import pyarrow as pa
from rocksdict import Cache

from foundation.errors import CorruptView, LogGap, UnknownColumn
from foundation.failpoints import hit
from foundation.ids import Token
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

ReadSchemas = Callable[[], SchemaHistory]
"""Reads the table's definition again: something was met that a later schema has written."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A merge that was tried and fits: the keys that change, and how.

    `part` and `more`, of a put of several segments, and `locked`: see `SegmentHeader`.
    """

    update: Update
    owner: str
    token: Token | None
    row_keys: list[bytes]
    merged: Merged
    part: int = 0
    more: bool = False
    locked: bool = False


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
        clock_ms: Callable[[], int],
        read_schemas: ReadSchemas | None,
    ) -> None:
        """Bring the view up to the end of the log, and take the lead."""
        self.history = history
        self._read_schemas = read_schemas
        self.view = View(view_path, identity, options, cache)
        try:
            self.log = Log(storage, clock_ms=clock_ms)
            # Before it leads: an open that must fail deposes nobody, and leaves nothing in the log.
            self._learn(self.view.meta.schema_version)
            self._replay_log()
            self.log.lead()
            self.catch_up()
        except BaseException:
            self.view.close()
            raise

    @property
    def term(self) -> int:
        """The offset of this leader's segment."""
        assert self.log.term is not None
        return self.log.term

    def merge(self, update: Update, overlay: Overlay | None = None) -> tuple[list[bytes], Merged]:
        """Merge with what is stored, or with what the overlay has on top; nothing is written.

        Returns the keys of the rows that change, and how.
        """
        row_keys = self.history.row_keys(update.encoded_keys)
        values = self.view.get(row_keys)
        if overlay is not None:
            values = overlay.over(row_keys, values)
        stored = self.history.decode(values)
        for column in update.columns:
            if column.id >= self.history.current.next_column_id:
                self._learn(self.history.current.version + 1)
                return self.merge(update, overlay)
            if column.id not in self.history.position:
                raise UnknownColumn(
                    f"column '{column.name}' was dropped meanwhile; nothing was written"
                )
        positions = [self.history.position[column.id] for column in update.columns]
        merged = merge(update, stored, positions)
        if not merged.changed.all():
            row_keys = list(compress(row_keys, merged.changed.tolist()))
        return row_keys, merged

    def write(self, plan: Plan, kind: SegmentKind, undo_from: int | None = None) -> BucketResult:
        """Log the changes, then apply them. Without any, a token is worth a segment, or an undo.

        That nothing changes is true for a leader only: another one may have changed the row since.
        """
        base, rows = self.log.end, len(plan.row_keys)
        if rows or plan.token is not None or undo_from is not None:
            # Encoded first: after the append nothing may fail that did not fail before it.
            values = self.history.encode(plan.merged.after)
            header = self.log.append(self._to_segment(plan, kind, undo_from))
            hit("put.logged")
            self.apply(header, plan.row_keys, values)
            hit("put.applied")
        else:
            self.log.confirm()
        return BucketResult(base_offset=base, end_offset=base + rows)

    def apply(self, header: SegmentHeader, row_keys: list[bytes], values: list[bytes]) -> None:
        # The owner first: it must be in the write to RocksDB that has the offset, and so the rows.
        if header.is_change:
            self.view.meta.note_change(header)
        if header.token is not None:
            self._remember(header, header.token)
        version = self.history.current.version if row_keys else 0
        bulk = header.more or header.part > 0
        self.view.apply(row_keys, values, header.end_offset, version, bulk=bulk)

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
        update, changed = plan.update, pa.array(plan.merged.changed)
        header = SegmentHeader(
            kind=kind,
            base_offset=self.log.end,
            term=self.term,
            nonce="",
            timestamp_ms=0,
            rows=len(plan.row_keys),
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
        if not plan.row_keys and undo_from is None:
            return Segment(replace(header, column_ids=()), {}, {})
        key_ids = [column.id for column in self.history.current.key_columns]
        keys = [array.filter(changed) for array in update.keys]
        changes = dict(zip(header.column_ids, plan.merged.changes, strict=True))
        return Segment(header, dict(zip(key_ids, keys, strict=True)), changes)

    def catch_up(self) -> None:
        """End any doubt about the log's end, and bring the view there."""
        self.log.settle()
        self._replay_log()

    def _replay_log(self) -> None:
        """Bring the view to the end of the log, as far as that is known here."""
        self._check_view()
        for segment in self.log.segments(self.view.applied):
            self.view.make_room()
            self._replay(segment)

    def _learn(self, version: int) -> None:
        """Know this schema version; UnknownSchema if the table's definition does not have it."""
        if version > self.history.current.version and self._read_schemas is not None:
            newer = self._read_schemas()
            if newer.current.version > self.history.current.version:
                self.history = newer
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
        history = self.history
        row_keys: list[bytes] = []
        values: list[bytes] = []
        if segment.changes:
            keys = [segment.keys[column.id] for column in history.current.key_columns]
            row_keys = history.row_keys(history.key_codec.encode(keys))
            values = history.encode(self._rows_after(segment, row_keys))
        self.apply(segment.header, row_keys, values)

    def _rows_after(self, segment: Segment, row_keys: list[bytes]) -> StoredRows:
        """Return whole rows; those columns that the segment does not have come from the view."""
        positions = self.history.position
        written = [column for column in segment.changes if column in positions]
        if len(written) == len(positions):
            stored = self.history.decode([None] * len(row_keys))
        else:
            stored = self.history.decode(self.view.get(row_keys))
        touched, states = stored.touched.copy(), list(stored.states)
        for column in written:
            change = segment.changes[column]
            touched[:, positions[column]] = change.touched_after
            states[positions[column]] = change.after
        return StoredRows(touched, states)
