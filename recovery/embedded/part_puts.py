"""A put of any size to buckets of this process: part after part, as they are cut.

Which part of a bucket is its last is known when all are cut, and by then the others are written. So
the last one is always one without rows, which says that the put is complete.
"""

import uuid
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from foundation.errors import TornPut
from foundation.ids import BucketId
from merge_engine.bucket.overlay import Overlay
from merge_engine.bucket.results import BucketResult
from merge_engine.merging.fold import Update
from recovery.leader.led_bucket import LedBucket, Overtaken, Put
from recovery.writer.access import Answers, Grant
from recovery.writer.parts import Part

Result = TypeVar("Result")
Fold = Callable[[pa.RecordBatch], Update]


class AskOne(Protocol):
    """Asks whoever leads a bucket."""

    def __call__(
        self, key: BucketId, call: Callable[[LedBucket], Result], /
    ) -> Answers[Result]: ...


class PartPut:
    """A put, as its parts come."""

    def __init__(self, grant: Grant, ask: AskOne, *, resumable: bool) -> None:
        self._grant = grant
        self._ask = ask
        self._put = Put(
            writer=grant.writer,
            owner=grant.owner,
            token=grant.token,
            put_id=uuid.uuid4().hex,
            resumable=resumable,
        )
        self._parts: dict[BucketId, int] = {}
        self._results: dict[BucketId, BucketResult] = {}
        self._sessions: set[str] = set()
        self._schema: pa.Schema | None = None

    def add(self, part: Part, update: Update) -> None:
        """Write a part, unless its bucket has the whole put from an earlier attempt."""
        self._schema = part.rows.schema
        self._parts[part.key] = part.number + 1
        if part.key not in self._results:
            self._write(part.key, update, part.number, more=True)

    def finish(self, fold: Fold) -> Answers[BucketResult]:
        """Say in each bucket that this was all, by a part of no rows."""
        if self._schema is not None:
            nothing = fold(pa.RecordBatch.from_pylist([], schema=self._schema))
            for key, number in self._parts.items():
                if key not in self._results:
                    self._write(key, nothing, number, more=False)
        return Answers(self._results, frozenset(self._sessions))

    def _write(self, key: BucketId, update: Update, number: int, *, more: bool) -> None:
        term = self._grant.terms[key]

        def put(led: LedBucket) -> BucketResult | None:
            try:
                return led.put_part(self._put, term, update, part=number, more=more)
            except Overtaken as exc:
                raise TornPut(f"{exc}, and who sent that is gone, or still at it") from exc

        answers = self._ask(key, put)
        self._sessions |= answers.sessions
        result = answers.results[key]
        if result is not None:
            self._results[key] = result


def try_parts(grant: Grant, parts: Iterable[Part], fold: Fold, ask: AskOne) -> None:
    """See whether each part can be merged on top of those before it; nothing is written."""
    with TemporaryDirectory() as directory, closing(Overlay(Path(directory))) as overlay:
        # One for all buckets: no two of them have the same key.
        for part in parts:
            update, term = fold(part.rows), grant.terms[part.key]

            def try_one(led: LedBucket, update: Update = update, term: int = term) -> Any:
                led.try_part(grant.writer, term, update, overlay)

            ask(part.key, try_one)
