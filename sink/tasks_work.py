"""A micro-batch that goes by the executors, as its writer runs it."""

from dataclasses import dataclass

from merge_engine.bucket.results import BucketResult
from recovery.writer.access import Answers, Grant, GrantedRows, Tried
from recovery.writer.redo import PromiseWriter
from recovery.writer.rows import Rows
from server.client.uploads import LargePut
from sink.executors import Job, Outcome, put_from_executors
from sink.micro_batch import KeysRefused, MicroBatch
from sink.partitions import PartitionsMissing
from sink.session import Session


@dataclass(frozen=True)
class TasksWork:
    """A batch that Spark's tasks put, or try; a `BatchWork`."""

    session: Session
    batch: MicroBatch
    partitions: Rows | None

    @property
    def fingerprint(self) -> str:
        """What tells this micro-batch from another of its number."""
        return self.batch.fingerprint

    def before(self, _: Grant) -> None:
        """A writer that has lost its session has looked at the table anew."""
        self.session.check_columns()

    def try_without(self, grant: Grant, missing: frozenset[bytes]) -> None:  # noqa: ARG002
        """Let tasks try the batch: those of missing partitions know it by the grant."""
        self._run(grant, try_only=True)

    def put(self, grant: Grant) -> Answers[BucketResult]:
        """Let tasks put the batch."""
        return self._run(grant).answers

    def try_put(self, grant: Grant, promise: PromiseWriter) -> Tried:
        """Let tasks try the batch, and write it down; then it is the driver's to put it."""
        session = self.session
        outcome = self._run(grant)
        promise.take(outcome.promised)
        promise.in_parts = True
        how = session.reader.to_rows(lambda: iter(()))
        large = LargePut(
            session.table.caller,
            GrantedRows(grant, how),
            resumable=True,
            chunk_bytes=session.sizes.chunk_bytes,
        )
        large.take_over(outcome.uploads)
        return large

    def _run(self, grant: Grant, *, try_only: bool = False) -> Outcome:
        """Let tasks put the batch or, with a redo log, try it; bad rows are set aside then.

        `try_only`: all that they do is to raise what that would raise now.
        """
        session, batch = self.session, self.batch
        table, progress = session.table, batch.progress
        batch.put_under(grant)
        cores = batch.frame.sparkSession.sparkContext.defaultParallelism
        place = batch.aside = session.quarantine(grant)
        if place is not None:
            place.clear()
        job = Job(
            recipe=session.cluster.recipe,
            table=table.definition,
            grant=grant,
            reader=session.reader,
            names=session.input.names(),
            sizes=session.sizes,
            partitions=session.fenced_partitions(grant),
            quarantine=place,
            redo=session.redo,
            exclude=dict(batch.refused),
            try_only=try_only,
        )
        outcome = put_from_executors(batch.frame, job, max(1, min(table.buckets, 2 * cores)))
        progress.rows, progress.refused = outcome.rows, outcome.refused
        progress.keys, progress.bytes = outcome.keys, outcome.bytes
        if outcome.refused_keys:
            raise KeysRefused(outcome.refused_keys)
        if outcome.missing_partitions:
            raise PartitionsMissing(outcome.missing_partitions)
        if place is not None and not try_only:
            place.publish(outcome.staged)
        return outcome
