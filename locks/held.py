"""The locks of a table as they were read together, with what the store's clock says of them."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from locks.records import LockRecord
from locks.tables import Table


@dataclass(frozen=True, kw_only=True)
class HeldRecord:
    """A lock record, its node's version, and when its TTL ends by the store's clock."""

    record: LockRecord
    version: int
    expires_ms: int

    def is_live(self, now_ms: int) -> bool:
        """Whether the lock keeps others out."""
        return self.record.held and not self.record.abandoned and now_ms < self.expires_ms


@dataclass(frozen=True, kw_only=True)
class Held:
    """All lock records of a table and its epoch counter, read before them."""

    epoch: int
    epoch_version: int
    owners: Mapping[str, HeldRecord]

    @property
    def records(self) -> dict[str, LockRecord]:
        """The records by owner."""
        return {owner: held.record for owner, held in self.owners.items()}


def describe(table: Table, owner: str, held: HeldRecord, now_ms: int) -> str:
    """Return who holds what until when, and the way out.

    An expired lock is in the way of nobody but of an operator, who wants to forget or drop it.
    """
    record, name = held.record, table.definition.column_names
    debts = "".join(
        f", with a debt of `{debt.owner}` on {name(debt.columns)} to pay" for debt in record.debts
    )
    detail = f"epoch {record.epoch}{debts}; times in UTC"
    what = f"columns {name(record.columns)} of table {table.name} ({detail})"
    release = f"`tallybook locks release {shlex.quote(table.name)} {shlex.quote(owner)}`"
    if held.is_live(now_ms):
        until = _clock(held.expires_ms, now_ms)
        return f"{what} are held by `{owner}` until {until}; wait, or {release}"
    since = "was abandoned" if record.abandoned else f"expired at {_clock(held.expires_ms, now_ms)}"
    return f"{what} are held by `{owner}`, whose lock {since}; {release}"


def _clock(moment_ms: int, now_ms: int) -> str:
    """Return the time of day in UTC, with the day if it is not today."""
    moment, now = (datetime.fromtimestamp(ms / 1000, UTC) for ms in (moment_ms, now_ms))
    return moment.strftime("%H:%M:%S" if moment.date() == now.date() else "%Y-%m-%d %H:%M:%S")
