"""The lock record of an owner, as a value."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from foundation.errors import CorruptRecord
from foundation.ids import Token
from locks.encoding.offsets import Offsets

STAMP_BYTES = 16
FORMER_QUERY_BYTES = 8
MOST_FORMER_QUERIES = 400
"""How many of an owner's former queries are known: a new one each night, for more than a year."""
MOST_FINGERPRINT_BYTES = 200


@dataclass(frozen=True)
class Prepared:
    """Redo: a folded batch that will be applied, whoever has to do it, and where it lies.

    `fingerprint`: of what was planned as this batch; "" if that is not known.
    """

    token: Token
    location: str
    fingerprint: str = ""


class DebtKind(IntEnum):
    """How a debt is paid."""

    UNDO = 0
    REDO = 1


@dataclass(frozen=True, kw_only=True)
class Debt:
    """What an owner had not committed, for its successor to pay before it writes.

    `undo`: bring the owner's changes of these columns since the offsets back. `redo`: apply the
    prepared batch, which counts as committed.
    """

    kind: DebtKind
    owner: str
    columns: tuple[int, ...]
    offsets: Offsets = field(default_factory=Offsets)
    prepared: Prepared | None = None


@dataclass(frozen=True, kw_only=True)
class LockRecord:
    """All that is known of an owner of a table; immutable, `dataclasses.replace` makes the next.

    `batch` is the last committed one (-1: none), by the owner's count, and `fingerprint` tells it
    from any other that comes under its number ("": not known). `query_id` is the streaming
    query that counts them ("": whoever writes counts by itself), and `query_start` what its batch 0
    is by the owner's count: another query under the same owner numbers on; `query_name` is what
    people call it ("": nothing, or not known). `former_queries` (`hash_of_query`, the last of them)
    have counted before, and never do again. `held_ms` and `idle_ms` are for people, too: how
    long the lock had been held, and how long ago the last batch was committed, when the record was
    written. So the time of the node tells both moments by the store's clock, and no commit has to
    ask for it. `offsets` are the log ends at the last commit, or at `ready`; only a ready lock has
    them. `committed` tells at which
    epoch this owner last committed each column. `stamp` is new with every change: by it a write of
    unknown outcome is recognised.
    """

    stamp: bytes = bytes(STAMP_BYTES)
    held: bool = False
    ready: bool = False
    abandoned: bool = False
    epoch: int = 0
    ttl_ms: int = 0
    batch: int = -1
    fingerprint: str = ""
    query_id: str = ""
    query_start: int = 0
    query_name: str = ""
    former_queries: tuple[bytes, ...] = ()
    held_ms: int = 0
    idle_ms: int = 0
    columns: tuple[int, ...] = ()
    committed: Mapping[int, int] = field(default_factory=dict)
    offsets: Offsets = field(default_factory=Offsets)
    prepared: Prepared | None = None
    debts: tuple[Debt, ...] = ()

    @property
    def blank(self) -> bool:
        """Whether the owner was forgotten, and has not come back: as if it had never been."""
        return self.epoch == 0

    @property
    def pinned(self) -> frozenset[int]:
        """What the lock keeps others from: its columns and, until paid, its debts' columns."""
        if not self.held:
            return frozenset()
        return frozenset(self.columns).union(*(debt.columns for debt in self.debts))

    @property
    def query(self) -> str:
        """Which query counts the batches, for people: NAME (ID), or its id; "" if none does."""
        if self.query_name and self.query_id:
            return f"{self.query_name} ({self.query_id})"
        return self.query_id

    @property
    def last_columns(self) -> frozenset[int]:
        """The columns of the last committed batch: those that were committed at the last epoch."""
        last = max(self.committed.values(), default=0)
        return frozenset(column for column, epoch in self.committed.items() if epoch == last)

    def aged(self, elapsed_ms: int) -> "LockRecord":
        """Return the record as it has to be written so long after it was written last."""
        elapsed_ms = max(0, elapsed_ms)
        return replace(self, held_ms=self.held_ms + elapsed_ms, idle_ms=self.idle_ms + elapsed_ms)

    def given_up(self) -> "LockRecord":
        """Return the record of an owner that holds nothing; what it has committed stays."""
        return replace(self, abandoned=False, **GIVEN_UP)


GIVEN_UP: Mapping[str, Any] = {
    "held": False,
    "ready": False,
    "offsets": Offsets(),
    "prepared": None,
    "debts": (),
}
"""What a record says when its owner holds nothing."""


def hash_of_query(query_id: str) -> bytes:
    """Return what a record keeps of the id of a former query."""
    return hashlib.sha256(query_id.encode()).digest()[:FORMER_QUERY_BYTES]


def new_stamp() -> bytes:
    """Return what tells one change of a record from any other."""
    return os.urandom(STAMP_BYTES)


def check_record(record: LockRecord) -> None:
    """Raise CorruptRecord if the record contradicts itself; asked before a write, after a read."""
    wrong = None
    if not record.held and (record.ready or record.abandoned or record.debts):
        wrong = "it is not held, and yet ready, abandoned or in debt"
    elif record.held and not record.columns:
        wrong = "it is held, without a column"
    elif record.ready and record.debts:
        wrong = "it is ready before its debts are paid"
    elif not record.ready and (record.prepared is not None or record.offsets):
        wrong = "it has offsets or a prepared batch and is not ready"
    elif record.prepared is not None and record.prepared.token.batch <= record.batch:
        wrong = "its prepared batch is committed already"
    elif any((debt.kind is DebtKind.REDO) != (debt.prepared is not None) for debt in record.debts):
        wrong = "it has a redo debt without a prepared batch, or an undo debt with one"
    if wrong is not None:
        raise CorruptRecord(f"a lock record that contradicts itself: {wrong}")
