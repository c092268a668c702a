"""The boundary between the writer and the buckets: a few calls, each to many buckets at once.

The Flight client and an embedded table both implement it, so one writer serves Spark, plain Python
and the property tests.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import pyarrow as pa

from foundation.ids import BucketId, Token
from locks.catalog.definitions import CatalogTable
from locks.coordinator import Coordinator
from merge_engine.bucket.results import BucketResult, UndoResult
from merge_engine.bucket.undo import UndoRange
from merge_engine.schema.schema import Schema
from recovery.leader.fenced_writers import Writer
from recovery.writer.redo import Promise, PromiseWriter
from recovery.writer.rows import Pieces, Rows

Result = TypeVar("Result")
Terms = Mapping[BucketId, int]


@dataclass(frozen=True)
class Answers(Generic[Result]):
    """What each bucket's leader answered, and the sessions of the servers that did.

    `sealed`: the buckets that have closed the batch together with what was put there.
    """

    results: Mapping[BucketId, Result]
    sessions: frozenset[str]
    sealed: frozenset[BucketId] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Grant:
    """What a fenced and ready writer may do, for whoever puts on its behalf: can be pickled.

    `writer` is the lock's holder, `owner` whose columns are written: its own or, when a debt is
    paid, the debtor's. `token` is (epoch, batch) of the incarnation that first wrote the batch.
    """

    writer: Writer
    owner: str
    token: Token
    terms: Terms


@dataclass(frozen=True)
class GrantedRows:
    """Rows, and the grant that they are put under: from the writer down to the wire.

    `whole`: they are all rows of their batch, so that a bucket that has its part may close it.
    """

    grant: Grant
    rows: Rows
    whole: bool = False

    def of(self, data: pa.Table | Pieces) -> "GrantedRows":
        """Return other data that are read, and put, like these rows."""
        return replace(self, rows=replace(self.rows, data=data))


@dataclass(frozen=True, kw_only=True)
class DebtUndo:
    """What a writer undoes that it owes: the debtor's changes of columns, in each bucket a range.

    `terms`: of the leaders that have fenced it.
    """

    writer: Writer
    terms: Terms
    debtor: str
    columns: tuple[int, ...]
    ranges: Mapping[BucketId, UndoRange]


class Tried(Protocol):
    """A batch that fits everywhere, and was written down to be promised."""

    def put(self) -> Answers[BucketResult]:
        """Put it; once it is promised."""

    def close(self) -> None:
        """Let go of what is kept of it. Closing twice is fine."""


class TableAccess(Protocol):
    """The buckets of a table, for its writer. A leader that moved is a NotLeader at once."""

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator, over this process's session."""

    @property
    def table(self) -> CatalogTable:
        """The table as the coordinator knows it."""

    @property
    def schema(self) -> Schema:
        """The schema, as it was when the table was last looked at."""

    def refresh(self) -> None:
        """Look at the table's definition again: others may have altered it."""

    def bucket_ids(self) -> list[BucketId]:
        """Return all buckets of all partitions, as they are now."""

    def partitions(self) -> Mapping[bytes, int]:
        """Return the ids of all partitions by key, as they are now."""

    def create_partition(self, key: bytes) -> int:
        """Return the id of the partition of this key, which is created if there is none."""

    def try_rows(self, granted: GrantedRows) -> None:
        """Raise what a put of these rows would raise now; write nothing."""

    def fence(
        self, writer: Writer, columns: Iterable[int], keys: Sequence[BucketId]
    ) -> Answers[int]:
        """Fence the writer at each bucket; the answers are terms."""

    def undo(self, wanted: DebtUndo) -> Answers[UndoResult]:
        """Go on for about a second to bring the debtor's changes back, in each bucket its range.

        Call it again for the rests of the results, until there are none.
        """

    def end_recovery(self, writer: Writer, terms: Terms) -> Answers[int]:
        """End the recovery of this epoch; the answers are the log ends."""

    def put(self, granted: GrantedRows) -> Answers[BucketResult]:
        """Put the rows: few are one commit per bucket, more are several."""

    def try_put(self, granted: GrantedRows, promise: PromiseWriter) -> Tried:
        """See whether the rows can be merged everywhere, and write them down on the way."""

    def keep(self, granted: GrantedRows, promise: Promise) -> Answers[BucketResult]:
        """Put what is left of a promise, or go on with it; the rows say how to read it."""

    def seal(self, writer: Writer, terms: Terms, batch: int) -> Answers[int]:
        """Close a batch to late puts; the answers are the log ends."""

    def shrink_parts(self) -> bool:
        """Send smaller parts from now on; False if each is one row already."""

    def reconnect(self) -> "TableAccess":
        """Return the same access over a new session, when this one's is lost."""

    def close(self) -> None:
        """End the session."""
