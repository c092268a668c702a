"""What puts and undos did: in one bucket, and in a table."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from foundation.ids import BucketId
from merge_engine.bucket.undo import UndoRange


@dataclass(frozen=True, kw_only=True)
class BucketResult:
    """What a put or undo did: log offsets [base, end), one per changed key.

    `repeated`: this token had been applied before; the offsets are those of that time. `rows`: how
    many of the offsets are its own, if others wrote in between.
    """

    base_offset: int
    end_offset: int
    repeated: bool = False
    rows: int | None = None

    @property
    def changed(self) -> int:
        """How many keys changed; one that several parts of a put have changed counts for each."""
        return self.end_offset - self.base_offset if self.rows is None else self.rows


@dataclass(frozen=True, kw_only=True)
class UndoResult(BucketResult):
    """What a call of undo did. `rest`: what is left to be undone by further calls; None: nothing.

    `rows` are those of this call, which add up.
    """

    rest: UndoRange | None = None

    def then(self, later: "UndoResult") -> "UndoResult":
        """Return what this call and a later one, for the rest, did together."""
        return replace(later, base_offset=self.base_offset, rows=self.changed + later.changed)


@dataclass(frozen=True, kw_only=True)
class PutResult:
    """What a put did: rows in, keys changed, and the result of each bucket that it reached."""

    rows: int
    buckets: Mapping[BucketId, BucketResult]

    @property
    def changed(self) -> int:
        """How many keys changed."""
        return sum(result.changed for result in self.buckets.values())
