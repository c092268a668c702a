"""What an operator does about column locks: release one, forget an owner.

An operator's release is: acquire as that owner, recover, ready, release. It fences the owner's job,
if one still runs, pays what is owed (undoes what was not committed, or rolls a promised batch
forward), and leaves the owner's count of batches as it is: the same job may come back and go on.
"""

from dataclasses import dataclass

from foundation.errors import (
    Fenced,
    InvalidInput,
    LockHeld,
    ServerUnavailable,
)
from foundation.suggestions import did_you_mean
from locks.catalog.definitions import CatalogTable
from locks.column_locks.locks import LockInfo
from locks.column_locks.records import LockRecord
from locks.coordinator import Coordinator
from recovery.writer.table_writer import TableWriter
from server.client.cluster import Cluster
from server.client.writer_access import RemoteAccess
from tallybook.commands.output import utc

# An operator's process that is killed must not keep the columns for long; one that lives renews.
RELEASE_TTL_MS = 30_000


@dataclass(frozen=True, kw_only=True)
class Released:
    """What a release has done: `held` is False if there was nothing to release.

    `query_name` and `query_id`: of the query that counts the owner's batches, if one does.
    """

    table: str
    owner: str
    query_name: str | None
    query_id: str | None
    columns: str
    held: bool
    undone_keys: int
    batch: int

    def __str__(self) -> str:
        count = "it has committed nothing yet"
        if self.batch >= 0:
            count = f"its last committed batch is {self.batch}, and it may go on after it"
        query = LockRecord(query_name=self.query_name or "", query_id=self.query_id or "").query
        query = f" for query {query}" if query else ""
        if not self.held:
            return f"`{self.owner}`{query} holds nothing of table {self.table}; {count}"
        return (
            f"columns {self.columns} of table {self.table}, which `{self.owner}` held{query}, are "
            f"free; {self.undone_keys} keys were undone; {count}"
        )


def release(
    cluster: Cluster, table_name: str, owner: str, *, force: bool, deadline_s: float
) -> Released:
    """Release an owner's lock; LockHeld if it is live, unless forced.

    Forced, the owner's job is stopped for good if it still runs: everything that it does is refused
    from here on. If this fails half-way, the lock is left abandoned: call it again.
    """
    coordinator = cluster.coordinator
    table = coordinator.tables.get(table_name)
    lock = find_owner(coordinator, table, owner)
    columns = table.definition.column_names(lock.record.columns)
    undone = 0
    if lock.record.held:
        _check_releasable(coordinator, table, lock, columns, force=force)
        undone = _recover(cluster, table, lock, deadline_s)
    record = coordinator.locks.record(table, owner)
    if record is not None and record.held:
        raise LockHeld(
            f"all that `{owner}` owed is paid, but its lock on columns {columns} of table "
            f"{table.name} is not released (epoch {record.epoch}); try again"
        )
    return Released(
        table=table.name,
        owner=owner,
        query_name=lock.record.query_name or None,
        query_id=lock.record.query_id or None,
        columns=columns,
        held=lock.record.held,
        undone_keys=undone,
        batch=-1 if record is None else record.batch,
    )


def _check_releasable(
    coordinator: Coordinator, table: CatalogTable, lock: LockInfo, columns: str, *, force: bool
) -> None:
    query = f", for query {lock.record.query}," if lock.record.query else ""
    if lock.live and not force:
        raise LockHeld(
            f"`{lock.owner}`{query} holds columns {columns} of table {table.name} (epoch "
            f"{lock.record.epoch}) until {utc(lock.expires_ms)}, and its job may be running: to "
            "release its lock would stop that job for good. Stop it yourself and its lock is "
            "released; or, if it is gone, say --force"
        )
    if not coordinator.servers.all():  # Before its job is fenced, if it has one.
        raise ServerUnavailable(
            f"no tablet server runs, and what `{lock.owner}` has not committed is undone there; "
            "start one. Nothing was changed"
        )


def _recover(cluster: Cluster, table: CatalogTable, lock: LockInfo, deadline_s: float) -> int:
    """Be that owner for a moment: pay what it owes, and release. Returns how many keys changed."""
    writer = TableWriter(
        RemoteAccess(cluster, cluster.table_by_id(table.table_id)),
        lock.owner,
        lock.record.columns,  # By id: one may be called otherwise by now, or be dropped.
        ttl_ms=RELEASE_TTL_MS,
        deadline_s=deadline_s,
        only_epoch=lock.record.epoch,
    )
    try:
        writer.start()
        return writer.progress.undone_keys
    except Fenced as exc:
        raise LockHeld(
            f"`{lock.owner}` came back, or somebody else released its lock on table {table.name}, "
            f"at the same time ({exc}); list the locks, and decide again"
        ) from exc
    finally:
        writer.close()  # If it was interrupted, the lock is abandoned, for the next to pay.


def forget(cluster: Cluster, table_name: str, owner: str) -> str:
    """Forget an owner that holds nothing, and with it its count of batches; LockHeld if it does."""
    coordinator = cluster.coordinator
    table = coordinator.tables.get(table_name)
    record = find_owner(coordinator, table, owner).record
    coordinator.locks.forget(table, owner)
    query = f", of query {record.query}" if record.query else ""
    count = "" if record.batch < 0 else f", whose last committed batch was {record.batch}"
    return f"table {table.name} has forgotten `{owner}`{query}{count}"


def find_owner(coordinator: Coordinator, table: CatalogTable, owner: str) -> LockInfo:
    """Return an owner of a table; InvalidInput says which there are."""
    locks = {lock.owner: lock for lock in coordinator.locks.all(table)}
    if owner in locks:
        return locks[owner]
    names = ", ".join(f"`{known}`" for known in locks)
    others = f"its owners are: {names}" if names else "nobody has, or ever had, a lock on it"
    raise InvalidInput(
        f"table {table.name} has no owner `{owner}`; {others}{did_you_mean(owner, locks)}"
    )
