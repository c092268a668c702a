"""The calls of writers with a column lock, besides their puts: fence, undo, end recovery, seal."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from foundation.ids import BucketId
from merge_engine.bucket.results import UndoResult
from merge_engine.bucket.undo import UndoRange
from recovery.leader.fenced_writers import Writer
from server.protocol.calls import BucketsAnswer, BucketsCall
from server.protocol.messages import (
    NUMBER,
    NUMBERS,
    TERM,
    TEXT,
    WRITER,
    Row,
    by_bucket,
    listed,
    or_none,
    or_not_there,
)


@dataclass(frozen=True, kw_only=True)
class FenceAnswer(BucketsAnswer[int]):
    """The terms of the leaders, and the limits of this server."""

    results: Annotated[tuple[int, ...], NUMBERS.called("terms")]
    put_max_rows: Annotated[int, NUMBER]
    put_max_bytes: Annotated[int, NUMBER]


@dataclass(frozen=True, kw_only=True)
class Fence(BucketsCall[FenceAnswer]):
    """Refuse earlier epochs of a writer from here on, and take its word for these columns."""

    name = "fence"
    answer = FenceAnswer
    writer: Annotated[Writer, WRITER]
    columns: Annotated[tuple[int, ...], NUMBERS]


class UndoStep(NamedTuple):
    """What to undo in a bucket, for the holder of a column lock at this term."""

    term: int | None
    wanted: UndoRange


class Undone(NamedTuple):
    """What a call did of an undo in a bucket; `until`: what is left ends there, if anything is."""

    base_offset: int
    end_offset: int
    changed: int
    until: int | None

    @classmethod
    def of(cls, result: UndoResult) -> "Undone":
        """Return what a server says of a result."""
        until = None if result.rest is None else result.rest.until
        return cls(result.base_offset, result.end_offset, result.changed, until)

    def result(self, wanted: UndoRange) -> UndoResult:
        """Return the result, for who knows what was wanted."""
        rest = None if self.until is None else UndoRange(wanted.from_offset, self.until)
        return UndoResult(
            base_offset=self.base_offset, end_offset=self.end_offset, rows=self.changed, rest=rest
        )


_UNDO_STEP = Row[UndoStep](
    3,
    lambda step: (
        or_not_there(step.term),
        step.wanted.from_offset,
        or_not_there(step.wanted.until),
    ),
    lambda row: UndoStep(or_none(row[0]), UndoRange(row[1], or_none(row[2]))),
)
_UNDONE = Row[Undone](
    4,
    lambda undone: (*undone[:3], or_not_there(undone.until)),
    lambda row: Undone(row[0], row[1], row[2], or_none(row[3])),
)


@dataclass(frozen=True, kw_only=True)
class UndoAnswer(BucketsAnswer[Undone]):
    """What was done of an undo, and what is left."""

    results: Annotated[tuple[Undone, ...], listed(_UNDONE)]


@dataclass(frozen=True, kw_only=True)
class Undo(BucketsCall[UndoAnswer]):
    """Go on for about a second to bring a debtor's changes of these columns back."""

    name = "undo"
    answer = UndoAnswer
    buckets: Annotated[Mapping[BucketId, UndoStep], by_bucket(_UNDO_STEP)]
    writer: Annotated[Writer | None, WRITER] = None
    debtor: Annotated[str, TEXT]
    columns: Annotated[tuple[int, ...], NUMBERS]


@dataclass(frozen=True, kw_only=True)
class EndsAnswer(BucketsAnswer[int]):
    """Where the logs end."""

    results: Annotated[tuple[int, ...], NUMBERS.called("ends")]


@dataclass(frozen=True, kw_only=True)
class EndRecovery(BucketsCall[EndsAnswer]):
    """End the recovery of a writer's epoch, at the leaders of these terms."""

    name = "end_recovery"
    answer = EndsAnswer
    buckets: Annotated[Mapping[BucketId, int], by_bucket(TERM)]
    writer: Annotated[Writer, WRITER]


@dataclass(frozen=True, kw_only=True)
class Seal(BucketsCall[EndsAnswer]):
    """Close a batch to late puts, at the leaders of these terms."""

    name = "seal"
    answer = EndsAnswer
    buckets: Annotated[Mapping[BucketId, int], by_bucket(TERM)]
    writer: Annotated[Writer, WRITER]
    batch: Annotated[int, NUMBER]
