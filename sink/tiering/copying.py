"""A table's copy in a lake, and what is done to it: rounds, compaction, clean-up.

Whatever is done ends with one commit of the lake, or has changed nothing. So a job that is killed
anywhere leaves the copy as it was, or with the round; the next finds out from the lake alone.
"""

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from foundation.errors import (
    CorruptLake,
    CutTooOld,
    LakeRefused,
    MissingObject,
    TallybookError,
)
from foundation.failpoints import hit
from foundation.ids import BucketId
from locks.catalog.copies import LakeCopy
from locks.coordinator import Coordinator
from merge_engine.schema.schema import Schema
from recovery.reader.cut import Cut
from recovery.reader.cut_between import Piece
from server.client.asking import Result, ask
from server.client.changelog import pieces_between
from server.client.cluster import Recipe
from server.client.remote_table import RemoteTable
from sink.lake.fields import LakeFields, clashes, dropped_columns, lake_fields
from sink.lake.log import taken
from sink.lake.opening import Lake, open_lake
from sink.lake.state import Change, LakeFile, LakeState, Layout, Mark
from sink.rolling_lease import RollingLease
from sink.source.grouping import balanced
from sink.source.tasks import Wanted
from sink.tiering.cleaning import clean
from sink.tiering.compaction import choose_groups
from sink.tiering.loading import check_fields, load_copy
from sink.tiering.options import TieringOptions
from sink.tiering.progress import Lag, Round, RoundKind
from sink.tiering.running import Tell, run_tasks
from sink.tiering.tasks import (
    ApplyChanges,
    CopyBuckets,
    FilesDone,
    LakeTask,
    MergeFiles,
    StepWork,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

# A row of a file, in which keys are searched, takes this part of the time that a key takes that has
# changed: it is read from the log, looked up and written.
_SEARCHED_ROWS = 20
# So many rows may be compacted per round, however few have changed.
_COMPACTED_ROWS = 100_000
_CLEAN_AGAIN_S = 600.0

_Pieces = Mapping[BucketId, Sequence[Piece]]


@dataclass(frozen=True)
class _Step:
    """What brings the copy to a cut. Made by `TableCopy._step`, which looks at the table then."""

    cut: Cut
    work: StepWork


class TableCopy:
    """A table, and its copy in a lake as this job last saw it."""

    def __init__(
        self,
        spark: "SparkSession",
        table: RemoteTable,
        recipe: Recipe,
        options: TieringOptions,
        tell: Tell = lambda _: None,
    ) -> None:
        """`recipe`: how tasks connect. `tell`: is told how far they are."""
        self._spark = spark
        self._table = table
        self._recipe = recipe
        self._options = options
        self._tell = tell
        self.lake: Lake = open_lake(options.place, options.format, options.retention_s)
        self._begin_again = options.begin_again
        self._attempted = False
        self._clean_again_s = 0.0
        self.state: LakeState | None = None

    @property
    def name(self) -> str:
        """What leases and jobs of Spark are called: the same for each run of the same copy."""
        named = f"{self._table.definition.uid} {self.lake.place.location}"
        return f"tiering-{uuid.uuid5(uuid.NAMESPACE_URL, named)}"

    def load(self) -> None:
        """Look at the lake: see `load_copy`."""
        self._clean_again_s = 0.0
        definition, again = self._table.definition, self._begin_again
        self.state = load_copy(self.lake, definition, self._options, begin_again=again)

    def explained(self, exc: TallybookError) -> TallybookError:
        """Return why a step has failed: LakeTaken if another job has committed since it began.

        That one removes what it has replaced, within the retention: what is missing, or does not
        fit, is no damage then.
        """
        if self.state is None or not isinstance(exc, CorruptLake | MissingObject):
            return exc
        try:
            now = self.lake.log.load()
        except TallybookError:
            return exc
        if now is None or now.altered is not None or now.version <= self.state.version:
            return exc
        return taken(self.lake.place.location, now.version)

    # --- Rounds ---------------------------------------------------------------------------------

    def round(self, lease: RollingLease) -> Round:
        """Bring the copy to where the table is now, by one commit; `lease` holds what it takes."""
        began = time.monotonic()
        self._table.refresh()
        why = self._why_anew(self._table.schema)
        done = None
        if why is None:
            try:
                until, pieces = self._changes()
                step = self._step(until)
                why = self._why_anew(step.work.schema)
                if why is None:
                    done = self._apply_changes(step, pieces)
            except CutTooOld as exc:
                why = f"changes that are not in it are gone from the log ({exc})"
        if done is None:
            if self.state is not None:
                logger.warning(
                    "the copy of table %s at %s is made anew: %s",
                    *(self._table.name, self.lake.place.location, why),
                )
            done = self._copy(lease)
        assert self.state is not None
        try:
            lease.advance(self.state.mark.cut)
        except TallybookError as exc:  # The round is done. More than is needed is held, or as much.
            logger.warning("the lease of %s was not moved on: %s", self._table.name, exc)
        return replace(done, seconds=time.monotonic() - began)

    def _why_anew(self, schema: Schema) -> str | None:
        """Return why all rows have to be copied under this schema; None if changes will do."""
        if self.state is None:
            return "there is none yet"
        if self._begin_again:
            return "that was asked for"
        mark = self.state.mark
        if self._options.states and not mark.states:
            return "it has no states yet"
        if dropped := dropped_columns(mark.schema, schema):
            # No change says so, and rows that it does not have look like rows of nulls.
            return f"'{dropped[0]}' was dropped, and with it the rows that had nothing else"
        return clashes(mark.columns, self._fields(schema))

    def _copy(self, lease: RollingLease) -> Round:
        if self.state is not None or self._attempted:
            lease.take()  # What it had may be gone, or is older than the copy.
        self._attempted = True
        step = self._step(lease.begins_at)
        hit("tier.leased")
        held = self._table.borrow_lease(lease.lease_id).snapshots if lease.holds else {}
        # As many changes as a log has, a bucket has no more rows.
        sizes = {bucket: snapshot.applied for bucket, snapshot in held.items()}
        tasks = [
            CopyBuckets(work=step.work, buckets=some, cut=step.cut.only(some), lease=lease.lease_id)
            for some in balanced(sorted(held), sizes, self._at_once)
        ]
        done = self._run(tasks, "all rows")
        before = () if self.state is None else tuple(self.state.files.values())
        done = replace(done, removed=before)
        self._commit(step, done, "COPY", columns=step.work.fields.ids)
        self._begin_again = False
        return self._report(RoundKind.COPY, done)

    def _changes(self) -> tuple[Cut, _Pieces]:
        """Return a cut that is taken now, and what has changed until then."""
        assert self.state is not None
        mark, until = self.state.mark, self._table.cut()
        if not mark.cut.is_before(until):
            raise LakeRefused(
                f"the copy at {self.lake.place.location} is at {mark.cut!r}, which table "
                f"{self._table.name} has not reached: it is at {until!r}. Was ZooKeeper restored "
                "from a copy? Have the copy of the table made anew (begin_again)"
            )
        return until, pieces_between(self._table.caller, mark.cut, until)

    def _apply_changes(self, step: _Step, pieces: _Pieces) -> Round:
        assert self.state is not None
        mark = self.state.mark
        fields, before = step.work.fields, lake_fields(mark.schema, states=mark.states)
        gone = [file for file in self.state.files.values() if file.bucket not in pieces]
        changed = {bucket: found for bucket, found in pieces.items() if found}
        if not changed and not gone and fields.ids == before.ids:
            return self._report(RoundKind.NOTHING, FilesDone())
        tasks = self._plan(step, changed, mark.cut)
        hit("tier.planned")
        done = self._run(tasks, "changes")
        lost = sum(file.live for file in gone)
        done = replace(done, removed=(*done.removed, *gone), deletes=done.deletes + lost)
        # Names of before are remembered: there are files that have them.
        self._commit(step, done, "ROUND", columns={**mark.columns, **fields.ids})
        return self._report(RoundKind.CHANGES, done)

    def _plan(self, step: _Step, changed: _Pieces, since: Cut) -> list[LakeTask]:
        assert self.state is not None
        sizes = {bucket: sum(piece.keys for piece in pieces) for bucket, pieces in changed.items()}
        for file in self.state.of_buckets(changed):
            sizes[file.bucket] += file.rows // _SEARCHED_ROWS
        return [
            ApplyChanges(
                work=step.work,
                buckets=some,
                since=since.only(some),
                until=step.cut.only(some),
                files=self.state.of_buckets(some),
                rewrite=self.state.mark.layout is Layout.REWRITE,
            )
            for some in balanced(list(changed), sizes, self._at_once)
        ]

    # --- Looking after it -----------------------------------------------------------------------

    def compact(self, changed_rows: int) -> int:
        """Write files anew that are small or worn, by one commit; return how many rows these had.

        No more than twice the rows that have changed, or some; the rest has its turn.
        """
        assert self.state is not None
        mark = self.state.mark
        groups = choose_groups(self.state.files.values(), max(2 * changed_rows, _COMPACTED_ROWS))
        if not groups:
            return 0
        # Under the schema of the last round: what was altered since is for the next.
        step, count = self._step(mark.cut, mark.schema), min(len(groups), self._at_once)
        tasks = [MergeFiles(work=step.work, groups=tuple(groups[n::count])) for n in range(count)]
        done = self._run(tasks, "compaction")
        self._commit(step, done, "OPTIMIZE", columns=mark.columns, changes_rows=False)
        return done.upserts

    def clean(self) -> int:
        """Delete what nobody needs who reads within the retention; return how many objects.

        Only if there can be anything: to look for it means to list all objects. What others have
        left, who may not run any more, is looked for now and then.
        """
        assert self.state is not None
        keep_since_ms = self._now_ms() - self._retention_ms
        self.lake.log.tidy(self.state, keep_since_ms)
        expired = any(at < keep_since_ms for at in self.state.removed.values())
        if not expired and time.monotonic() < self._clean_again_s:
            return 0
        count = clean(self.lake, self.state, keep_since_ms)
        self.state = self.state.forget(keep_since_ms)
        self._clean_again_s = time.monotonic() + _CLEAN_AGAIN_S
        return count

    def lag(self) -> Lag:
        """Return how far the copy is behind the table now."""
        assert self.state is not None
        return Lag.between(self.state.mark.cut, self._table.cut(), self._now_ms())

    def tell(self, ago_s: float) -> None:
        """Let the cluster know how far the copy is: it had all that was committed `ago_s` ago."""
        assert self.state is not None
        place = urlsplit(self.lake.place.location)
        told = LakeCopy(
            # A user, or a signature, in a URL is nobody else's business.
            location=place._replace(netloc=place.netloc.rpartition("@")[2], query="").geturl(),
            format=self._options.format,
            had_all_ms=self._now_ms() - int(1000 * ago_s),
            batches=self.state.mark.cut.batches,
        )
        self._ask(lambda there: there.copies.tell(self._table.table_id, self.name, told))

    def forget(self) -> None:
        """Let the cluster know that nobody keeps the copy up to date any more."""
        self._ask(lambda there: there.copies.forget(self._table.table_id, self.name))

    def shown(self, done: Round) -> Round:
        """Return a round with what the copy is by now."""
        assert self.state is not None
        state = self.state
        return replace(done, version=state.version, files=len(state.files), table_rows=state.rows)

    # --- Parts ----------------------------------------------------------------------------------

    @property
    def _retention_ms(self) -> int:
        return int(1000 * self._options.retention_s)

    @property
    def _at_once(self) -> int:
        return int(self._spark.sparkContext.defaultParallelism)

    def _run(self, tasks: Sequence[LakeTask], what: str) -> FilesDone:
        about = f"tiering of {self._table.name}: {what}"
        return run_tasks(self._spark, tasks, self.name, about, self._tell)

    def _fields(self, schema: Schema) -> LakeFields:
        return lake_fields(schema, states=self._options.states)

    def _step(self, cut: Cut, schema: Schema | None = None) -> _Step:
        """Return the step that brings the copy to a cut, which has been taken.

        The table is looked at here, and once: what is in the cut was written under this schema or
        an earlier one, and tasks and commit are to have the same names. `schema`: that of the copy
        instead, for a step that changes no row.
        """
        self._table.refresh()
        definition = self._table.definition
        schema = schema or definition.schema
        fields = self._fields(schema)
        check_fields(self.lake, fields)
        wanted = Wanted(
            recipe=self._recipe,
            table=definition,
            columns=tuple(column.name for column in fields.values),
            states=tuple(column.name.removesuffix("_state") for column in fields.states),
        )
        work = StepWork(
            wanted=wanted,
            schema=schema,
            states=self._options.states,
            place=self.lake.place,
            step=0 if self.state is None else self.state.next_step,
        )
        return _Step(cut, work)

    def _commit(
        self,
        step: _Step,
        done: FilesDone,
        operation: str,
        *,
        columns: Mapping[str, str],
        changes_rows: bool = True,
    ) -> None:
        now_ms, work = self._now_ms(), step.work
        before = None if self.state is None else self.state.mark
        mark = Mark(
            lake=str(uuid.uuid4()) if before is None else before.lake,
            created_ms=now_ms if before is None else before.created_ms,
            table=work.wanted.table.uid,
            name=work.wanted.table.name,
            schema=work.schema,
            states=work.states,
            layout=self._options.chosen_layout() if before is None else before.layout,
            columns=columns,
            cut=step.cut,
            round=0 if before is None else before.round + changes_rows,
            step=work.step,
            version=0,
        )
        change = Change(
            mark=mark,
            added=done.added,
            removed=done.removed,
            time_ms=now_ms,
            operation=operation,
            changes_rows=changes_rows,
        )
        hit("tier.gathered")
        self.state = self.lake.log.commit(self.state, change, work.fields.arrow)
        hit("tier.committed")

    def _report(self, kind: RoundKind, done: FilesDone) -> Round:
        assert self.state is not None
        found = Round(
            kind=kind,
            number=self.state.mark.round,
            version=self.state.version,
            cut=self.state.mark.cut,
            rows=done.upserts,
            deleted=done.deletes,
            bytes=sum(file.size for file in _new(done)),
        )
        return self.shown(found)

    def _now_ms(self) -> int:
        return self._ask(lambda there: there.store.now_ms())

    def _ask(self, question: Callable[[Coordinator], Result]) -> Result:
        cluster = self._table.caller.cluster
        return ask(lambda: cluster.coordinator, question)


def _new(done: FilesDone) -> Sequence[LakeFile]:
    """Return the files that were written, not those that were marked."""
    before = {file.name for file in done.removed}
    return [file for file in done.added if file.name not in before]
