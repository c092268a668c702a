"""The locks of a table as they were read together, with what the store's clock says of them.

To read all records is not one read. A takeover moves a debt from one record to another in one
transaction: who reads the first before and the second after it sees the debt in neither. So the
epoch counter is read before and behind them, and all is read again if somebody acquired meanwhile.
"""

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from locks.deadlines import deadline_in
from locks.errors import Unavailable
from locks.framing import read_counter
from locks.paths import epoch_path, owner_path, owners_path
from locks.record_codec import decode_node
from locks.records import LockRecord
from locks.store import CoordinationStore, Node
from locks.tables import Table, dropped


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
    """All lock records of a table within one epoch: nobody acquired while they were read."""

    epoch: int
    epoch_version: int
    owners: Mapping[str, HeldRecord]

    @property
    def records(self) -> dict[str, LockRecord]:
        """The records by owner."""
        return {owner: held.record for owner, held in self.owners.items()}


def read_held(store: CoordinationStore, table: Table, deadline_s: float) -> Held:
    """Read all lock records of a table, as they are now (sync, read); UnknownTable if dropped.

    Unavailable if somebody acquired during every attempt within the deadline.
    """
    deadline = deadline_in(deadline_s)
    store.sync()
    counter = _read_epoch(store, table)
    while True:
        owners = _read_owners(store, table)
        before, counter = counter, _read_epoch(store, table)
        if counter.version == before.version:
            epoch = read_counter(epoch_path(table.table_id), counter.data)
            return Held(epoch=epoch, epoch_version=counter.version, owners=owners)
        if time.monotonic() > deadline:
            raise Unavailable(
                f"locks of table {table.name} were acquired again and again for {deadline_s:g} s "
                "while they were read; try again"
            )


def _read_epoch(store: CoordinationStore, table: Table) -> Node:
    node = store.read(epoch_path(table.table_id))
    if node is None:
        raise dropped(table)
    return node


def _read_owners(store: CoordinationStore, table: Table) -> dict[str, HeldRecord]:
    names = store.children(owners_path(table.table_id))
    paths = [owner_path(table.table_id, owner) for owner in names]
    owners = {}
    for owner, path, node in zip(names, paths, store.read_many(paths), strict=True):
        if node is not None:
            record = decode_node(path, node)
            expires_ms = node.modified_ms + record.ttl_ms
            owners[owner] = HeldRecord(record=record, version=node.version, expires_ms=expires_ms)
    return owners


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
