"""Batches that tests put by a function of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recovery.writer.access import Answers, Grant, Tried
from recovery.writer.redo import PromiseWriter
from recovery.writer.rows import Rows


@dataclass(frozen=True)
class PutBy:
    """A batch that is put by calling this; a `BatchWork` for writers without a redo log.

    With one, the rows are tried and put by `access`, whatever the function does.
    """

    call: Callable[[Grant], Answers[Any]]
    partitions: Rows | None = None
    try_rows: Callable[[Grant, PromiseWriter], Tried] | None = None
    fingerprint: str = ""

    def before(self, grant: Grant) -> None:
        """Nothing comes before."""

    def try_without(self, grant: Grant, missing: frozenset[bytes]) -> None:
        """What it puts is its own affair."""

    def put(self, grant: Grant) -> Answers[Any]:
        """Call it."""
        return self.call(grant)

    def try_put(self, grant: Grant, promise: PromiseWriter) -> Tried:
        """Try the rows."""
        assert self.try_rows is not None
        return self.try_rows(grant, promise)
