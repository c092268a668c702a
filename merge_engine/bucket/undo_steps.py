"""Undo of a bucket's changes, in steps between which others write.

Which images bring keys back is for `undo.undo_updates` to find; here they are written, step by
step, from the end of the range to its beginning. See `Bucket.undo` for what is promised.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager

from foundation.errors import OffsetOutOfRange, UnknownColumn
from foundation.failpoints import hit
from merge_engine.bucket.log_and_view import LogAndView, Plan
from merge_engine.bucket.options import BucketOptions
from merge_engine.bucket.results import UndoResult
from merge_engine.bucket.segment import SegmentKind
from merge_engine.bucket.undo import UndoRange, undo_updates, undone_already
from merge_engine.merging.fold import Update
from merge_engine.schema.schema import Column

Exclusive = Callable[[], AbstractContextManager[None]]
"""Keeps other calls that change something out, for a block."""


class UndoSteps:
    """Undoes changes of one owner at a time. The caller sees to that."""

    def __init__(
        self, inner: LogAndView, exclusive: Exclusive, options: BucketOptions, *, locked: bool
    ) -> None:
        self._inner = inner
        self._exclusive = exclusive
        self._options = options
        self._locked = locked

    def undo(
        self,
        debtor: str,
        column_ids: Collection[int],
        wanted: UndoRange,
        *,
        check: Callable[[], None],
        go_on: Callable[[], bool],
    ) -> UndoResult:
        """Undo as long as `go_on` says; see `Bucket.undo`."""
        with self._exclusive():
            check()
            self._inner.catch_up()
            base = self._inner.log.end
            columns = [c for c in self._inner.history.current.value_columns if c.id in column_ids]
            stop = base if wanted.until is None else wanted.until
            if not 0 <= wanted.from_offset <= base or stop > base:
                raise OffsetOutOfRange(
                    f"cannot undo from offset {wanted.from_offset}: the log ends at {base}; "
                    "these offsets belong to another table or bucket"
                )
            if not columns:  # All of them were dropped since, and their values with them.
                return UndoResult(base_offset=base, end_offset=base, rows=0)
        rows, start, stop = self._undo(
            debtor, columns, wanted.from_offset, stop, check=check, go_on=go_on
        )
        with self._exclusive():
            check()
            self._inner.catch_up()
            rest = UndoRange(wanted.from_offset, stop) if stop > start else None
            if rest is None and not rows:
                self._inner.log.confirm()
            end = self._inner.log.end
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
            start = max(from_offset, self._inner.log.start)
            try:
                steps = self._undo_steps(debtor, columns, start, stop, check=check, go_on=go_on)
                for changed, left in steps:
                    rows, stop = rows + changed, left
                return rows, start, stop
            except OffsetOutOfRange:
                # A former leader that does not know of us yet may be cleaning. What it cleans
                # is stable, and what was undone here already stays so.
                if self._inner.log.start <= start:
                    raise
            except UnknownColumn:  # Dropped between two steps, and its values with it.
                columns = tuple(c for c in columns if c.id in self._inner.history.position)

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
        if not self._inner.log.learn_headers(start, go_on):
            yield 0, stop
            return
        headers = [one for one in self._inner.log.headers(start) if one.owner == debtor]
        done = undone_already(headers, columns, start)
        left = [one.base_offset for one in headers if one.base_offset not in done]
        bases = [base for base in left if base < stop]
        if not bases:
            yield 0, start
        updates = undo_updates(
            self._inner.log.read(reversed(bases)),
            columns,
            self._inner.history.current,
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
        """Write one step of an undo, to this offset; return how many keys it changed.

        It is logged if it changed none, too: changes that cancelled each other are undone by that,
        and readers of the log would take them for committed ones.
        """
        with self._exclusive():
            check()
            self._inner.catch_up()
            self._inner.view.make_room()
            found = self._inner.find(update)
            plan = Plan.of(update, found, owner=debtor, token=None, locked=self._locked)
            hit("undo.planned")
            return self._inner.write(plan, SegmentKind.UNDO, undo_from=back_to).changed
