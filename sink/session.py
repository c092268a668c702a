"""A sink from its first batch to its end: who it is, its connection, and its lock."""

import logging
import threading
from dataclasses import dataclass
from typing import Any

from foundation.errors import InvalidInput
from merge_engine.schema.schema import Schema
from recovery.writer.access import Grant
from recovery.writer.parts import PartSizes
from recovery.writer.redo import RedoLog
from recovery.writer.table_writer import TableWriter, WriterState
from server.client.cluster import PATIENCE_S, Cluster, Recipe
from server.client.remote_table import RemoteTable
from server.client.writer_access import RemoteAccess
from sink.columns import DefinitionWatch, StartedWith, UsedColumns
from sink.connect import in_worker, is_connect, query_among
from sink.options import SinkOptions
from sink.quarantine import Quarantine, check_place
from sink.queries import fingerprint_of, query_of
from sink.rows import InputColumns, RowReader
from sink.runs import Columns, make_way

logger = logging.getLogger(__name__)

# Who writes as which owner of which table (its uid), in which run of a query ("": in none). Two
# sinks of one query would each take the other's batch for a replay of its own.
_claims: dict[tuple[str, str, str], "Session"] = {}
_claiming = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a sink writes, and where."""

    recipe: Recipe
    table: str
    columns: tuple[str, ...]
    options: SinkOptions

    def input(self, schema: Schema) -> InputColumns:
        """Return which columns of the input go where; an error if the table does not have them."""
        return InputColumns(
            schema=schema,
            written=self.columns,
            renamed=self.options.renamed,
            operation=self.options.operation_column,
            ignore_extra=self.options.ignore_extra,
        )

    def check(self, before: StartedWith | None = None) -> InputColumns:
        """Look whether the cluster can be reached and the table has the columns; write nothing.

        A wrong address is told as soon as `tb.connect` tells it: somebody waits for that. `before`:
        whose names a sink uses that has started already.
        """
        with self.recipe.connect(patience_s=PATIENCE_S) as cluster:
            return self.input(StartedWith.of(cluster.table(self.table), before).schema)

    def check_quarantine(self) -> None:
        """Look whether bad rows can be set aside where they are to go, seen from this machine."""
        if self.options.bad_rows == "quarantine":
            check_place(str(self.options.quarantine_path))


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who writes: the owner, and in a streaming query the query and this run of it.

    A restart of the query has the same query id and another run id.
    """

    owner: str
    query_id: str | None
    run_id: str | None
    query_name: str = ""


def is_in_query(frame: Any) -> bool:
    """Whether this is a micro-batch of a streaming query, and not a frame of its own."""
    if is_connect(frame):
        return in_worker()
    try:
        return query_of(frame) is not None
    except InvalidInput:
        return True  # Of a query that is not known.


def planned_as(frame: Any, identity: Identity, batch: int) -> str:
    """Return what tells this micro-batch from another of its number; "" if nothing does."""
    if identity.query_id is None or is_connect(frame):
        return ""
    return fingerprint_of(frame, identity.query_id, batch)


def identify(frame: Any, options: SinkOptions, started_by: Any | None = None) -> Identity:
    """Return who writes in this thread; outside of a streaming query only an owner id says so.

    `started_by`: on Spark Connect, the session that started the query.
    """
    if is_connect(frame):
        return _on_connect(frame, options, started_by)
    query = query_of(frame)
    owner = options.owner_id or (query and query.query_id)
    if not owner:
        raise _nobody()
    if query is None:
        return Identity(owner=owner, query_id=None, run_id=None)
    return Identity(
        owner=owner, query_id=query.query_id, run_id=query.run_id, query_name=query.name
    )


def _on_connect(frame: Any, options: SinkOptions, started_by: Any | None) -> Identity:
    owner = options.owner_id
    if not owner:
        raise _nobody()
    if not in_worker():
        return Identity(owner=owner, query_id=None, run_id=None)
    session = started_by or frame.sparkSession
    query = query_among(list(session.streams.active), owner, handover=options.handover)
    return Identity(
        owner=owner,
        query_id=str(query.id),
        run_id=str(query.runId),
        query_name=query.name or "",
    )


def _nobody() -> InvalidInput:
    return InvalidInput(
        "outside of a streaming query there is no query id: give the sink an owner_id"
    )


class Session:
    """The connection and the lock of one sink, in one run of a query. Made by `open_session`.

    `input` and `reader` are of the schema that the sink started with, in whichever run of its
    query: `started_with`. They stay: of what they know, nothing changes but the names of columns,
    which are those of then. A column that is dropped ends the query, by `check_columns`.
    """

    def __init__(
        self,
        cluster: Cluster,
        target: Target,
        identity: Identity,
        before: StartedWith | None = None,
    ) -> None:
        options = self._options = target.options
        self.cluster = cluster
        self.identity = identity
        remote = cluster.table(target.table)
        self.started_with = StartedWith.of(remote, before)
        schema = self.started_with.schema
        self.input = target.input(schema)
        self.reader = RowReader(
            self.input,
            fold=options.local_aggregation,
            set_aside=options.bad_rows == "quarantine",
        )
        self._used = UsedColumns(remote.name, schema, target.columns)
        self._used.check(remote.schema)
        self._watch = DefinitionWatch()
        self.redo = None
        if options.recovery == "redo":
            self.redo = RedoLog.open(str(options.redo_location), **options.redo_settings)
        self.writer = TableWriter(
            RemoteAccess(cluster, remote),
            identity.owner,
            # By id: the columns that were checked here, whatever has their names by then.
            [column.id for column in self._used.written],
            ttl_ms=options.ttl_ms,
            query_id=identity.query_id,
            query_name=identity.query_name,
            handover=options.handover,
            deadline_s=options.deadline_s,
            redo=self.redo,
        )

    @property
    def table(self) -> RemoteTable:
        """The table, over the connection that the writer has now."""
        access = self.writer.access
        assert isinstance(access, RemoteAccess)
        return access.remote

    @property
    def columns(self) -> Columns:
        """What the lock is on, or will be."""
        ids = frozenset(column.id for column in self._used.written)
        uid = self.table.definition.table.uid
        return Columns(table=uid, owner=self.identity.owner, ids=ids)

    @property
    def sizes(self) -> PartSizes:
        """In which parts the servers take a large batch."""
        access = self.writer.access
        assert isinstance(access, RemoteAccess)
        return access.sizes

    @property
    def is_writing(self) -> bool:
        """Whether it has its lock, as far as is known here."""
        return self.writer.state in (WriterState.CLEAN, WriterState.DIRTY)

    def start(self) -> None:
        """Claim the owner for this run of the query, then acquire the lock and recover."""
        table = self.table
        if not table.definition.locked:
            logger.warning(
                "table %s has no column locks: others may write these columns too, and each event "
                "is counted at least once, not exactly once",
                table.name,
            )
        identity = self.identity
        self._claim((identity.run_id or "", self.columns.table, identity.owner))
        make_way(self.columns, identity.query_id, identity.run_id)
        self.writer.start()

    def check_usable(self, query_id: str | None) -> None:
        """Raise if another query uses this sink, or another incarnation of its owner writes."""
        if self.identity.query_id != query_id:
            raise InvalidInput(
                "one sink serves one query: make another AggregateSink for the second"
            )
        if self.writer.state is WriterState.FENCED:
            raise InvalidInput(
                f"the sink of `{self.writer.owner}` was fenced: another incarnation of this "
                "owner writes, or its lock was released by an operator; stop this query"
            )

    def follow_definition(self) -> None:
        """Take in what others altered, as far as it is known; an error if they dropped ours."""
        self._watch.refresh(self.table, self.writer.access.coordinator)
        self.check_columns()

    def check_columns(self) -> None:
        """Raise an error that says which of our columns was dropped, if one was."""
        self._used.check(self.table.schema)

    def fenced_partitions(self, grant: Grant) -> frozenset[bytes] | None:
        """Return the keys of the partitions that the grant is for; None if there are none."""
        if not self.table.schema.partition_by:
            return None
        access = self.writer.access
        fenced = {key.partition for key in grant.terms}
        ids = access.coordinator.partitions.ids(access.table)
        return frozenset(key for key, partition in ids.items() if partition in fenced)

    def quarantine(self, grant: Grant) -> Quarantine | None:
        """Return where bad rows of a batch go; None if they are not set aside."""
        if self._options.bad_rows != "quarantine":
            return None
        return Quarantine(
            path=str(self._options.quarantine_path),
            table=self.table.definition.table.uid,
            owner=grant.owner,
            batch=grant.token.batch,
            epoch=grant.writer.epoch,
        )

    def close(self) -> None:
        """Release the lock, or abandon it if a batch is uncommitted, and disconnect."""
        self.writer.close()
        self.writer.access.close()
        self.cluster.close()
        self.drop_claim()

    def _claim(self, claim: tuple[str, str, str]) -> None:
        """Be the sink that writes as this owner; InvalidInput if there is another.

        Outside of a query, one that has the same columns is succeeded, as by another process.
        """
        run_id, _, owner = claim
        with _claiming:
            other = _claims.setdefault(claim, self)
            if other is self:
                return
            if run_id:
                raise InvalidInput(
                    f"another sink of this query writes table {self.table.name} as `{owner}`: make "
                    "one sink for all batches of a query; a second one on the same table needs an "
                    "owner_id of its own"
                )
            if other.is_writing and other.columns != self.columns:
                raise InvalidInput(
                    f"another sink of this process writes other columns of table {self.table.name} "
                    f"as `{owner}`: give each an owner_id of its own, or close that one first"
                )
            _claims[claim] = self

    def drop_claim(self) -> None:
        """Let another sink of this run write as this owner."""
        with _claiming:
            for claim in [claim for claim, holder in _claims.items() if holder is self]:
                del _claims[claim]


def open_session(target: Target, identity: Identity, before: StartedWith | None = None) -> Session:
    """Connect and start; what fails leaves neither a connection nor a claim.

    `before`: the names of the former run of the same sink.
    """
    target.check_quarantine()
    cluster = target.recipe.connect()
    session: Session | None = None
    try:
        session = Session(cluster, target, identity, before)
        session.start()
    except BaseException:
        if session is not None:
            session.drop_claim()
        cluster.close()
        raise
    return session
