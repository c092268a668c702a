"""A batch as its writer runs it: what is done before a put, the put itself, and trying it first."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from merge_engine.bucket.results import BucketResult
from recovery.writer.access import Answers, Grant, GrantedRows, TableAccess, Tried
from recovery.writer.redo import PromiseWriter
from recovery.writer.rows import Rows


class BatchWork(Protocol):
    """One batch, in the hands of whoever has its rows.

    The writer calls it again, under another grant, when a leader moved. A put reaches each bucket
    at most once; a task that puts again with the same grant changes nothing.
    """

    @property
    def fingerprint(self) -> str:
        """What tells this batch from another that comes under its number; "" if nothing does."""

    @property
    def partitions(self) -> Rows | None:
        """Rows that name all partitions that the batch needs, perhaps by their keys only.

        None if it needs none anew.
        """

    def try_without(self, grant: Grant, missing: frozenset[bytes]) -> None:
        """Raise what a put would raise now, before the partitions of these keys are created.

        Of their own rows it raises what an empty bucket would, unless `partitions` had these.
        """

    def before(self, grant: Grant) -> None:
        """Do what comes before anything is promised or put: an error leaves nothing of it."""

    def put(self, grant: Grant) -> Answers[BucketResult]:
        """Put all rows."""

    def try_put(self, grant: Grant, promise: PromiseWriter) -> Tried:
        """See whether all rows can be put, and write them down to be promised."""


def nothing_before(_: Grant) -> None:
    """Do nothing before a put."""


@dataclass(frozen=True)
class RowsWork:
    """A batch whose rows this process has; a `BatchWork`. `access`: as the writer has it then."""

    access: Callable[[], TableAccess]
    rows: Rows
    before: Callable[[Grant], None] = nothing_before
    fingerprint: str = ""

    @property
    def partitions(self) -> Rows:
        """All rows."""
        return self.rows

    def try_without(self, grant: Grant, missing: frozenset[bytes]) -> None:
        """Try the rows of the partitions that there are."""
        access = self.access()
        there = access.partitions().keys() - missing
        rows = self.rows.of_partitions(self.rows.schema or access.schema, there)
        access.try_rows(GrantedRows(grant, rows))

    def put(self, grant: Grant) -> Answers[BucketResult]:
        """Put all rows."""
        return self.access().put(GrantedRows(grant, self.rows, whole=True))

    def try_put(self, grant: Grant, promise: PromiseWriter) -> Tried:
        """See whether they can be put."""
        return self.access().try_put(GrantedRows(grant, self.rows), promise)
