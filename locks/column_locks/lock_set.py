"""The locks of a table as they were read together, with what the store's clock says of them.

To read all records is not one read. A takeover moves a debt from one record to another in one
transaction: who reads the first before and the second after it sees the debt in neither. So the
epoch counter is read before and after them, and all is read again if somebody acquired meanwhile.
"""

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from foundation.deadlines import deadline_in
from foundation.errors import Unavailable
from locks.catalog.definitions import EMBEDDED, CatalogTable, dropped
from locks.column_locks.record_codec import decode_node
from locks.column_locks.records import LockRecord
from locks.encoding.framing import read_counter
from locks.store.base import CoordinationStore, Node
from locks.store.paths import epoch_path, owner_path, owners_path


@dataclass(frozen=True, kw_only=True)
class LockEntry:
    """A lock record, its node's version, and when it was written, by the store's clock."""

    record: LockRecord
    version: int
    modified_ms: int

    @property
    def expires_ms(self) -> int:
        """When its TTL ends, by the store's clock."""
        return self.modified_ms + self.record.ttl_ms

    def is_live(self, now_ms: int) -> bool:
        """Whether the lock keeps others out."""
        return self.record.held and not self.record.abandoned and now_ms < self.expires_ms


@dataclass(frozen=True, kw_only=True)
class LockSet:
    """All lock records of a table within one epoch: nobody acquired while they were read.

    Or that of one owner alone, who needs no others (`read_lock`). `modified_ms`: when the last of
    them was written, by the store's clock.
    """

    epoch: int
    epoch_version: int
    modified_ms: int
    owners: Mapping[str, LockEntry]

    @property
    def records(self) -> dict[str, LockRecord]:
        """The records by owner."""
        return {owner: held.record for owner, held in self.owners.items()}


def read_locks(store: CoordinationStore, table: CatalogTable, deadline_s: float) -> LockSet:
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
            return LockSet(
                epoch=epoch,
                epoch_version=counter.version,
                modified_ms=max(
                    (one.modified_ms for one in owners.values()), default=counter.modified_ms
                ),
                owners=owners,
            )
        if time.monotonic() > deadline:
            raise Unavailable(
                f"locks of table {table.name} were acquired again and again for {deadline_s:g} s "
                "while they were read; try again"
            )


def read_lock(store: CoordinationStore, table: CatalogTable, owner: str) -> LockSet:
    """Read the lock record of one owner, and the epoch counter (sync, read).

    The two are not one read. It is for whoever writes only if both are still as they were read.
    """
    store.sync()
    counter_path, path = epoch_path(table.table_id), owner_path(table.table_id, owner)
    counter, node = store.read_many([counter_path, path])
    if counter is None:
        raise dropped(table)
    return LockSet(
        epoch=read_counter(counter_path, counter.data),
        epoch_version=counter.version,
        modified_ms=(counter if node is None else node).modified_ms,
        owners={} if node is None else {owner: _entry(path, node)},
    )


def _read_epoch(store: CoordinationStore, table: CatalogTable) -> Node:
    node = store.read(epoch_path(table.table_id))
    if node is None:
        raise dropped(table)
    return node


def _read_owners(store: CoordinationStore, table: CatalogTable) -> dict[str, LockEntry]:
    names = store.children(owners_path(table.table_id))
    paths = [owner_path(table.table_id, owner) for owner in names]
    return {
        owner: _entry(path, node)
        for owner, path, node in zip(names, paths, store.read_many(paths), strict=True)
        if node is not None
    }


def _entry(path: str, node: Node) -> LockEntry:
    return LockEntry(
        record=decode_node(path, node), version=node.version, modified_ms=node.modified_ms
    )


def describe(table: CatalogTable, owner: str, held: LockEntry, now_ms: int) -> str:
    """Return who holds what until when, and the way out.

    An expired lock is in the way of nobody but of an operator, who wants to forget or drop it. The
    command is that of `tallybook locks release`; an embedded table, which it does not reach, is
    settled by a writer of that owner.
    """
    record, name = held.record, table.definition.column_names
    debts = "".join(
        f", with a debt of `{debt.owner}` on {name(debt.columns)} to pay" for debt in record.debts
    )
    detail = f"epoch {record.epoch}{debts}; times in UTC"
    what = f"columns {name(record.columns)} of table {table.name} ({detail})"
    query = f" for query {record.query}" if record.query else ""
    release = f"tallybook locks release {shlex.quote(table.name)} {shlex.quote(owner)}"
    force = f"{release} --force"
    if EMBEDDED in table.definition.options:
        release = force = f"table.writer(owner_id={owner!r}, ...).start().close()"
    if held.is_live(now_ms):
        until = _clock(held.expires_ms, now_ms)
        return (
            f"{what} are held by `{owner}`{query} until {until}, and longer if its job renews the "
            f"lock; wait or, if that job is gone, `{force}`"
        )
    since = "was abandoned" if record.abandoned else f"expired at {_clock(held.expires_ms, now_ms)}"
    return (
        f"{what} are held by `{owner}`{query}, whose lock {since}; `{release}` settles what it "
        "left uncommitted, and frees them"
    )


def _clock(moment_ms: int, now_ms: int) -> str:
    """Return the time of day in UTC, with the day if it is not today."""
    moment, now = (datetime.fromtimestamp(ms / 1000, UTC) for ms in (moment_ms, now_ms))
    return moment.strftime("%H:%M:%S" if moment.date() == now.date() else "%Y-%m-%d %H:%M:%S")
