"""Where the reads of a table stand, and what there is to read: for tables of both kinds alike.

A partition that a batch brings up is there before the batch is committed. So what is listed once a
cut stands has all buckets that the cut has rows in; what was listed before may lack some of them,
and a batch would be seen in part. The same holds for columns. Hence a read takes its cut first, and
the buckets come with it: there is no way to have them without.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pyarrow as pa

from foundation.errors import CutTooOld
from foundation.ids import BucketId
from merge_engine.bucket.changelog import ChangeBatch
from merge_engine.schema.schema import Schema
from recovery.reader.cut import Cut
from recovery.reader.isolation import Isolation
from recovery.reader.table_changes import Stretch, TableChanges
from recovery.reader.table_scan import OpenRows, Standpoint, TableScan, chosen_buckets

# A log is not cleaned all the time: the next cut is mostly young enough.
_MOST_CUTS = 5
Result = TypeVar("Result")
Wanted = Sequence[BucketId] | Mapping[BucketId, object] | None
"""The buckets that a read is to have; None: all."""


def at_own_cut(read: Callable[[], Result]) -> Result:
    """Read at a cut that the read takes itself; at another one, if the log was cleaned beyond it.

    Only a cut that the caller has given can be too old: of any other, nobody has seen anything yet.
    """
    for _ in range(_MOST_CUTS - 1):
        with suppress(CutTooOld):
            return read()
    return read()


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Where a read stands, and its buckets. `cut` None: each bucket as it is."""

    cut: Cut | None
    buckets: list[BucketId]


@dataclass(frozen=True, kw_only=True)
class Span:
    """The cuts between which changes are read, and of which buckets."""

    since: Cut
    until: Cut
    buckets: list[BucketId]


class Standing(ABC):
    """A table, as far as it can say where it stands."""

    @abstractmethod
    def cut(self) -> Cut:
        """Return where the table stands now."""

    @abstractmethod
    def _check_cut(self, cut: Cut) -> Cut:
        """Return a cut of this table; InvalidInput if it is of another one."""

    @abstractmethod
    def _earliest(self) -> Cut:
        """Return a cut that has nothing of what the logs have."""

    @abstractmethod
    def _buckets_at(self, cut: Cut | None) -> list[BucketId]:
        """Return all buckets, listed after this cut was taken; None: as they are now."""

    def _cut_of(
        self, isolation: str, at: Cut | str | None, take: Callable[[], Cut] | None = None
    ) -> Cut | None:
        """Return the cut of a read: the one that it is given, or one that is taken now.

        None: each bucket as it is. `take`: takes the cut, if `cut` does more than is needed.
        """
        committed = Isolation.of(isolation) is Isolation.COMMITTED
        if at is not None:
            return self._check_cut(Cut.of(at))
        return (take or self.cut)() if committed else None

    def _stand(self, isolation: str, at: Cut | str | None, wanted: Wanted = None) -> Stand:
        """Return where a read stands, and the buckets that it has there."""
        cut = self._cut_of(isolation, at)
        return Stand(cut=cut, buckets=chosen_buckets(self._buckets_at(cut), wanted))

    def _span(
        self, since: Cut | str | None, until: Cut | str | None, wanted: Wanted = None
    ) -> Span:
        """Return between which cuts changes are read: from the earliest, up to now."""
        last = self.cut() if until is None else self._check_cut(Cut.of(until))
        first = self._earliest() if since is None else self._check_cut(Cut.of(since))
        buckets = chosen_buckets(self._buckets_at(last), wanted)
        return Span(since=first, until=last, buckets=buckets)


def scan_at(
    stand: Stand,
    schema: pa.Schema,
    opening: Callable[[Cut | None], OpenRows],
    *,
    limit: int | None,
    stand_anew: Callable[[], Stand] | None,
) -> TableScan:
    """Return the rows of a table there. `stand_anew`: None if the caller has given the cut."""

    def anew() -> Standpoint:
        assert stand_anew is not None
        again = stand_anew()
        return Standpoint(again.cut, again.buckets, opening(again.cut))

    return TableScan(
        stand.buckets,
        schema,
        opening(stand.cut),
        cut=stand.cut,
        limit=limit,
        stand_anew=None if stand_anew is None else anew,
    )


def changes_of(
    span: Span,
    schema: Schema,
    read: Callable[[Cut, Cut, BucketId], Iterator[ChangeBatch]],
    *,
    begin_anew: Callable[[], Span] | None,
) -> TableChanges:
    """Return the changes of a span. `begin_anew`: None if the caller has said where it begins."""

    def stretch(of: Span) -> Stretch:
        return Stretch(of.since, of.until, of.buckets, partial(read, of.since, of.until))

    def anew() -> Stretch:
        assert begin_anew is not None
        return stretch(begin_anew())

    return TableChanges(stretch(span), schema, begin_anew=None if begin_anew is None else anew)
