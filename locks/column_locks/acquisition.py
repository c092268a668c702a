"""The rules of acquiring a lock, as a function of what is recorded: no clock, no network.

A lock is refused while a live lock of another owner pins one of its columns, or has yet to pay a
debt of this very owner. Expired ones are taken over, with all that they had not committed: it
becomes the new holder's debts in the same transaction, so that exactly one party pays.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from locks.column_locks.records import (
    MOST_FORMER_QUERIES,
    Debt,
    DebtKind,
    LockRecord,
    hash_of_query,
)
from locks.encoding.offsets import Offsets

NAMED_WRITE = "write:"
"""What the owner ids of single writes begin with: each is one batch, or a few, under a name.

They come and go beside the jobs that write a column over time, and have no history that somebody
could count again: so nobody has to say that a column is handed over after one of them.
"""


@dataclass(frozen=True, kw_only=True)
class Acquisition:
    """What a transaction has to write: the new record, and those of the owners taken over."""

    record: LockRecord
    taken_over: Mapping[str, LockRecord]


def rivals_of(
    owner: str, columns: frozenset[int], records: Mapping[str, LockRecord]
) -> dict[str, LockRecord]:
    """Return the held locks of others that are in the way, live or expired."""
    return {
        other: record
        for other, record in records.items()
        if other != owner and record.held and in_the_way(record, owner, columns)
    }


def in_the_way(record: LockRecord, owner: str, columns: frozenset[int]) -> bool:
    """A lock on one of the columns, or one that has yet to pay a debt of this very owner."""
    return bool(record.pinned & columns) or any(debt.owner == owner for debt in record.debts)


def unpaid(owner: str, record: LockRecord) -> tuple[Debt, ...]:
    """Return what a held lock leaves to its successor.

    It has debts to pay or, once it is ready, a tail of its own; never both: it writes only then.
    """
    if not record.held:
        return ()
    if not record.ready:
        return record.debts
    if record.prepared is not None:
        return (
            Debt(
                kind=DebtKind.REDO,
                owner=owner,
                columns=record.columns,
                offsets=record.offsets,
                prepared=record.prepared,
            ),
        )
    return (Debt(kind=DebtKind.UNDO, owner=owner, columns=record.columns, offsets=record.offsets),)


def decided(record: LockRecord) -> LockRecord:
    """A prepared batch counts as committed when its owner is succeeded."""
    if not record.held or not record.ready or record.prepared is None:
        return record
    return replace(
        record,
        batch=record.prepared.token.batch,
        fingerprint=record.prepared.fingerprint,
        committed={**record.committed, **dict.fromkeys(record.columns, record.epoch)},
    )


def is_other_query(record: LockRecord, query_id: str | None) -> bool:
    """Whether another query than this one counted what is committed; None asks as no query."""
    return query_id is not None and record.batch >= 0 and record.query_id != query_id


def is_former_query(record: LockRecord, query_id: str | None) -> bool:
    """Whether the owner's count was handed over from this query, to another or to none."""
    return query_id is not None and hash_of_query(query_id) in record.former_queries


def _former_queries(record: LockRecord) -> tuple[bytes, ...]:
    """Return the former queries of an owner whose count is handed over: its last one is one now.

    Unless that has committed nothing: then nothing of it can count twice.
    """
    if not record.query_id or record.batch < record.query_start:
        return record.former_queries
    return (*record.former_queries, hash_of_query(record.query_id))[-MOST_FORMER_QUERIES:]


def counted_by(
    record: LockRecord, query_id: str | None, *, handover: bool, query_name: str = ""
) -> LockRecord:
    """Return the record of an owner whose batches this query counts from here on.

    Another query than before begins after what is committed, and the one before is a former one
    from then on: it never counts again (`is_former_query`). Whoever is no query (None) leaves the
    count to the query that it belongs to, or takes it over, and then its own numbers count.
    """
    former = _former_queries(record)
    if query_id is None:
        return (
            replace(record, query_id="", query_name="", query_start=0, former_queries=former)
            if handover
            else record
        )
    named = replace(record, query_name=query_name)
    if query_id == record.query_id:
        return named
    return replace(named, query_id=query_id, query_start=record.batch + 1, former_queries=former)


def plan_acquisition(
    owner: str,
    columns: Iterable[int],
    records: Mapping[str, LockRecord],
    *,
    epoch: int,
    ttl_ms: int,
    query_id: str | None,
    stamp: bytes,
    handover: bool = False,
    query_name: str = "",
) -> Acquisition:
    """Return what to write when no live lock is in the way: `records` are all of the table."""
    wanted = frozenset(columns)
    own = records.get(owner, LockRecord())
    rivals = rivals_of(owner, wanted, records)
    debts = unpaid(owner, own)
    for rival, record in rivals.items():
        debts += unpaid(rival, record)
    record = replace(
        counted_by(decided(own), query_id, handover=handover, query_name=query_name),
        stamp=stamp,
        held=True,
        ready=False,
        abandoned=False,
        epoch=epoch,
        ttl_ms=ttl_ms,
        columns=tuple(sorted(wanted)),
        offsets=Offsets(),
        debts=debts,
        prepared=None,
        held_ms=0,
    )
    taken_over = {rival: decided(theirs).given_up() for rival, theirs in rivals.items()}
    return Acquisition(record=record, taken_over=taken_over)


def last_committers(columns: Iterable[int], records: Mapping[str, LockRecord]) -> dict[int, str]:
    """Return, per column that anybody has committed, who did so last (at the highest epoch).

    Single writes are not counted.
    """
    last: dict[int, tuple[int, str]] = {}
    for owner, record in records.items():
        if owner.startswith(NAMED_WRITE):
            continue
        for column, epoch in decided(record).committed.items():
            last[column] = max(last.get(column, (-1, "")), (epoch, owner))
    return {column: last[column][1] for column in columns if column in last}
