"""The Spark sink: a `foreachBatch` function that writes each micro-batch exactly once.

sink = AggregateSink("127.0.0.1:2181", "customers", columns=["orders", "revenue"])
events.writeStream.foreachBatch(sink).option("checkpointLocation", "chk/customers").start()
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from foundation import forks
from foundation.deadlines import deadline_in, remaining
from foundation.errors import (
    Fenced,
    InvalidInput,
    InvalidValue,
    TallybookError,
    Unavailable,
    UnknownColumn,
)
from locks.column_locks.acquisition import NAMED_WRITE
from recovery.writer.access import Grant
from recovery.writer.rows import Rows
from recovery.writer.table_writer import TableWriter
from server.client.cluster import Recipe
from sink.columns import StartedWith
from sink.connect import (
    CannotTravel,
    ending,
    in_worker,
    is_connect,
    is_remote,
    starting_session,
)
from sink.failures import failed_batch, went_well
from sink.frames import TooLarge, collected, known_bytes
from sink.listener import root_streams, when_run_ends
from sink.lost_hosts import say_if_slow
from sink.micro_batch import KeysRefused, MicroBatch
from sink.options import SinkOptions, checked_settings
from sink.partitions import PartitionsMissing, never_settles, partitions_named, partitions_of
from sink.progress import BatchProgress, SinkStatus
from sink.quarantine import Quarantine
from sink.routing import RecentBatches, is_too_large
from sink.runs import Run, begin, close_at_end, closed, forget
from sink.session import (
    Identity,
    Session,
    Target,
    identify,
    is_in_query,
    open_session,
    planned_as,
)
from sink.tasks_work import TasksWork
from sink.termination import termination
from sink.watching import Ask, BatchWatch

logger = logging.getLogger(__name__)

_MOST_REFUSED_KEYS = 100_000
_MOST_READS = 4
_ONE_ROUTE = (
    "on Spark Connect batches go by the driver's route only: leave out route='executors', or use a "
    "classic Spark session (spark-submit, or SparkSession.builder.master(...))"
)


class AggregateSink:
    """Writes columns of a table, as the owner named by `owner_id` or by the query.

    Options are those of `SinkOptions`; `options` takes them under their configuration names. That
    the table is there, and has these columns, is looked at when the sink is made. The lock is
    acquired with the first batch and released when the query ends.

    Pickled, as Spark Connect does it, a sink with an `owner_id` is what it was made of. Connection
    and lock are for where it is called.
    """

    def __init__(
        self,
        address: str | Recipe,
        table: str,
        *,
        columns: Sequence[str],
        options: Mapping[str, str] | None = None,
        connection: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`connection`: arguments of `tb.connect`, such as a token; none with a `Recipe`."""
        if isinstance(columns, str):
            raise InvalidInput(f"columns is a list of column names, not {columns!r}")
        self._options = SinkOptions(**checked_settings(settings)).with_texts(options or {})
        self._check_owner()
        target = Target(
            recipe=address if isinstance(address, Recipe) else _recipe(address, connection),
            table=table,
            columns=tuple(columns),
            options=self._options,
        )
        self._set_up(target)
        if self._options.check:
            self._target.check()
            if not is_remote():  # Else it is written elsewhere.
                self._target.check_quarantine()
        termination.prepare()

    def _set_up(self, target: Target) -> None:
        self._target, self._options = target, target.options
        self._started_with: StartedWith | None = None
        self._started_by = starting_session()
        self._process = os.getpid()
        self._calls = threading.Lock()
        self._closing = threading.Lock()
        self._session: Session | None = None
        self._last_writer: TableWriter | None = None
        self._recent = RecentBatches(self._options.driver_max_rows)
        self._undone_keys = 0
        self._said_if_slow = False
        self._status = SinkStatus()
        self._watch: BatchWatch | None = None

    def __repr__(self) -> str:
        owner = self._options.owner_id or "its query"
        columns = ", ".join(self._target.columns)
        return f"AggregateSink({self._target.table}: {columns}, owned by {owner})"

    def __getstate__(self) -> Target:
        if not self._options.owner_id:
            raise CannotTravel(
                "Spark Connect runs a sink in another process, which does not learn the id of its "
                "query in time: give the sink an owner_id, such as owner_id='orders', and the "
                "query the same name, .queryName('orders')"
            )
        if self._options.route == "executors":
            raise CannotTravel(_ONE_ROUTE)
        return self._target

    def __setstate__(self, target: Target) -> None:
        self._set_up(target)

    def status(self) -> dict[str, Any]:
        """Return what the sink has done: the last batch and the totals.

        `current`: how far the batch is that is under way, if it takes more than some seconds.
        """
        status = self._status.to_dict(self._last_writer)
        watch = self._watch
        current = None if watch is None or watch.ended else watch.told or None
        return {**status, "current": current}

    def close(self) -> None:
        """Release the lock, or abandon it if a batch is uncommitted.

        A query that ends does so by itself, a moment later. Closing twice is fine: whoever comes
        second returns when the first has done it.

        In a process that was forked from the query's it does nothing: the lock is the query's.
        """
        self._close(lambda _: True)
        atexit.unregister(self._close_at_exit)
        closed(self._close_at_exit)

    def _close(self, is_meant: Callable[[Session], bool]) -> None:
        if forks.is_inherited(self._process):
            return
        deadline = deadline_in(self._options.deadline_s)
        with self._held(self._closing, deadline):
            with self._held(self._calls, deadline):
                session = self._session
                if session is None or not is_meant(session):
                    return
                self._session = None
            session.close()

    @contextmanager
    def _held(self, lock: threading.Lock, deadline: float) -> Iterator[None]:
        """Hold a lock that a batch, or another who closes, may have; an error after a while."""
        if not lock.acquire(timeout=remaining(deadline)):
            raise Unavailable(
                f"the sink of table {self._target.table} is not closed: a batch has been under way "
                f"for more than {self._options.deadline_s:g} s. Its lock is released when the "
                "batch is over and close() is called again, or when it expires"
            )
        try:
            yield
        finally:
            lock.release()

    def _close_at_exit(self) -> None:
        try:
            self.close()
        except TallybookError as exc:
            logger.warning("%s", exc)

    def check(self, frame: Any) -> None:
        """Raise if the columns of this frame, a stream's too, are not those that the sink needs.

        Else that would be found with the first batch.
        """
        self._target.check(self._started_with).check(frame.columns)

    def __call__(self, frame: Any, batch_id: int, *, fingerprint: str = "") -> None:
        """Write a micro-batch; Spark calls this.

        `fingerprint`: what tells this batch from another that comes under its number, where Spark
        does not say when it planned it: on Spark Connect, or if the caller has its own numbers.
        """
        try:
            with ending.batch(), termination.batch():
                self._call(frame, batch_id, fingerprint)
        except TallybookError as exc:
            if not is_in_query(frame):
                raise
            raise failed_batch(exc, batch_id, self._target.table)  # noqa: B904
        went_well()

    def _call(self, frame: Any, batch_id: int, fingerprint: str) -> None:
        with self._calls:
            began = time.perf_counter()
            session = self._ready(frame)
            writer = session.writer
            fingerprint = fingerprint or planned_as(frame, session.identity, batch_id)
            batch = MicroBatch(frame, batch_id, BatchProgress(batch=batch_id), fingerprint)
            progress = batch.progress
            if writer.is_replay(batch_id, fingerprint=fingerprint):
                progress.skipped = True
            else:
                with BatchWatch(batch_id, self._ask(session)) as batch.watch:
                    self._watch = batch.watch
                    self._write(session, batch)
                self._recent.add(progress.rows)
            progress.finish(writer, time.perf_counter() - began, self._undone_keys)
            self._undone_keys = writer.progress.undone_keys
            self._status.add(progress)
            logger.info("batch %d: %s", batch_id, progress)

    def _ready(self, frame: Any) -> Session:
        """Return the session; with the first batch, find out who we are and start one."""
        identity = self._identify(frame)
        if self._session is not None:
            self._session.check_usable(identity.query_id)
            if self._session.identity == identity:
                return self._session
            # The next run of the query is there before Spark has told that the last one is over.
            last, self._session = self._session, None
            last.close()
            forget(last.identity.run_id)
        session = self._session = open_session(self._target, identity, self._started_with)
        self._started_with = session.started_with
        self._last_writer = session.writer
        self._undone_keys = 0
        atexit.unregister(self._close_at_exit)
        atexit.register(self._close_at_exit)
        if in_worker():
            ending.prepare(self.close)
            return session
        close_at_end(self._close_at_exit)
        if identity.query_id and identity.run_id:
            self._end_with(session, identity.query_id, identity.run_id)
        return session

    def _check_owner(self) -> None:
        if (self._options.owner_id or "").startswith(NAMED_WRITE):
            raise InvalidInput(
                f"owner ids that begin with '{NAMED_WRITE}' are those of tb.write: choose another"
            )

    def _identify(self, frame: Any) -> Identity:
        if self._session is not None and is_connect(frame):
            return self._session.identity  # Its process is there for one run of a query.
        return identify(frame, self._options, self._started_by)

    def _end_with(self, session: Session, query_id: str, run_id: str) -> None:
        """Release the lock when this run of the query has ended, or the process does."""
        streams = root_streams()
        run = Run(
            query_id=query_id,
            run_id=run_id,
            columns=session.columns,
            end=lambda: self._close(lambda now: now is session),
            streams=streams,
        )
        begin(run)
        when_run_ends(streams, run_id, run.end)

    @staticmethod
    def _ask(session: Session) -> Ask:
        return lambda token: session.table.put_progress(session.writer.owner, token)

    # --- A batch --------------------------------------------------------------------------------

    def _write(self, session: Session, batch: MicroBatch) -> None:
        session.follow_definition()
        session.input.check(batch.frame.columns)
        by_driver = self._goes_by_driver(batch.frame)
        while True:
            try:
                if by_driver:
                    by_driver = self._by_driver(session, batch)
                if not by_driver:
                    self._by_executors(session, batch)
                break
            except InvalidValue as exc:
                # Servers refused keys: set their rows aside, and write the rest.
                known = batch.refused
                if self._options.bad_rows != "quarantine" or len(known) >= _MOST_REFUSED_KEYS:
                    raise
                new = {key: why for key, why in exc.all_refused().items() if key not in known}
                if not new:
                    raise
                known |= new
            except KeysRefused as exc:
                batch.refused.update(exc.keys)
            except Fenced:
                if batch.aside is not None:
                    self._leave(session, batch.aside)
                raise
            except UnknownColumn:
                # Altered while the batch was under way: the sink can say what it means for it.
                session.table.refresh()
                session.check_columns()
                raise

    def _by_driver(self, session: Session, batch: MicroBatch) -> bool:
        """Collect and write the batch; False if it is too large for that."""
        writer, progress = session.writer, batch.progress
        with progress.timed("collect"):
            data = self._collect(batch.frame, session.input.names())
        if data is None:
            return False
        with progress.timed("fold"):
            read = session.reader.read(data, batch.refused)
        rows, bad = read.rows, read.refused
        progress.route = "driver"
        progress.rows, progress.refused = data.num_rows, bad.num_rows
        progress.keys = _rows_in(rows)
        progress.bytes = _bytes_in(rows)

        def before(grant: Grant) -> None:
            batch.put_under(grant)
            # A writer that has lost its session has looked at the table anew.
            session.check_columns()
            batch.aside = session.quarantine(grant)
            if batch.aside is not None:
                self._set_aside(bad, batch.aside)

        try:
            writer.write(batch.number, rows, before, fingerprint=batch.fingerprint)
        except InvalidValue as exc:
            if self._options.bad_rows == "quarantine":
                raise
            raise session.reader.with_sample(exc, data) from exc
        return True

    def _by_executors(self, session: Session, batch: MicroBatch) -> None:
        """Write the batch from tasks; again, if they meet partitions that were not there before."""
        batch.progress.route = "executors"
        if not self._said_if_slow:
            self._said_if_slow = True
            say_if_slow(batch.frame.sparkSession.sparkContext)
        schema = session.input.schema
        partitions = partitions_of(batch.frame, session.input)
        for read in range(1, _MOST_READS + 1):
            try:
                work = TasksWork(session, batch, partitions)
                session.writer.run(batch.number, work)
                return
            except PartitionsMissing as exc:
                if read == _MOST_READS:
                    raise never_settles(batch.number, read, exc.keys, schema) from exc
                logger.info("batch %d is written again: %s", batch.number, exc)
                partitions = partitions_named(exc.keys, schema)

    def _goes_by_driver(self, frame: Any) -> bool:
        if is_connect(frame):
            if self._options.route == "executors":
                raise InvalidInput(_ONE_ROUTE)
            return True
        if self._options.route == "executors":
            return False
        most = self._options.driver_max_bytes
        if self._may_be_large() and is_too_large(known_bytes(frame), most):
            return False
        if self._options.route == "driver":
            return True
        return self._recent.go_by_driver(frame.sparkSession.sparkContext)

    def _may_be_large(self) -> bool:
        """Whether it is worth the milliseconds to ask Spark: not while small ones come and go."""
        last = self._status.last
        return last is None or last.route == "executors"

    def _collect(self, frame: Any, names: Mapping[str, str]) -> pa.Table | None:
        """Return the batch; None if it is more than the driver takes, or Spark lets it have."""
        try:
            return collected(frame, names, self._options.driver_max_bytes)
        except TooLarge as exc:
            if is_connect(frame):
                raise InvalidInput(
                    f"the batch has {exc}, which is what `driver_max_bytes` or Spark's "
                    "`spark.driver.maxResultSize` allow, and on Spark Connect it cannot go by the "
                    "executors: let Spark make smaller batches (maxFilesPerTrigger, "
                    "maxOffsetsPerTrigger), allow more, or use a classic session"
                ) from exc
            logger.info("the batch is too large for the driver: it goes by the executors")
            return None

    @staticmethod
    def _leave(session: Session, place: Quarantine) -> None:
        """Remove the bad rows of a batch that another incarnation sets aside itself.

        If the batch is committed, that one has done so, or has found the batch committed, or
        promised, by us: then it does nothing, and our files are all there is.
        """
        access = session.writer.access
        try:
            record = access.coordinator.locks.record(access.table, place.owner)
            ours = record is None or record.batch >= place.batch
            if not ours or place.is_superseded():
                place.clear()
        except (TallybookError, OSError) as exc:
            logger.warning("bad rows of batch %d may be set aside twice: %s", place.batch, exc)

    @staticmethod
    def _set_aside(bad: pa.Table, place: Quarantine) -> None:
        """Publish the bad rows of a batch that the driver has collected."""
        place.clear()
        if bad.num_rows:
            [path] = place.publish([place.stage(bad)])
            logger.warning("set %d bad rows of batch %d aside: %s", len(bad), place.batch, path)


def _recipe(address: str, connection: Mapping[str, Any] | None) -> Recipe:
    return Recipe.of(address, **(connection or {}))


def _rows_in(rows: Rows) -> int:
    return len(rows.data) if isinstance(rows.data, pa.Table) else 0


def _bytes_in(rows: Rows) -> int:
    return int(rows.data.nbytes) if isinstance(rows.data, pa.Table) else 0
