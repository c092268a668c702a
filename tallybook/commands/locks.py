"""`tallybook locks`: who holds which columns, and what an operator does about it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from foundation.errors import UnknownTable
from locks.catalog.definitions import CatalogTable
from locks.column_locks.locks import LockInfo
from locks.column_locks.records import Debt, DebtKind
from server.client.cluster import Cluster
from server.page.overview import buckets_of, state_of, uncommitted_of
from tallybook.commands.output import confirm, print_json, print_line, print_table, span, utc
from tallybook.commands.reaching import Json, TableName, Yes, cluster_command, connected, telling
from tallybook.commands.releasing import find_owner
from tallybook.commands.releasing import forget as forget_owner
from tallybook.commands.releasing import release as release_lock
from tallybook.connecting import Reach

OwnerName = Annotated[
    str,
    typer.Argument(metavar="OWNER", help="as `tallybook locks list` shows it", show_default=False),
]
# A lock may be on hundreds of columns: `locks show` and --json have them all.
_COLUMNS_LISTED = 5
_HEAD = (
    "TABLE",
    "OWNER",
    "QUERY",
    "COLUMNS",
    "STATE",
    "HELD SINCE",
    "LAST BATCH",
    "LAST SIGN",
    "EXPIRES",
)


def add_commands(app: typer.Typer) -> None:
    """Add `locks` and its commands to the application."""
    locks = typer.Typer(
        no_args_is_help=True,
        help="List who has which columns of which table, show one lock, release it in its owner's "
        "place, or forget an owner.",
    )
    cluster_command(locks, "list")(list_locks)
    cluster_command(locks, "show")(show)
    # Servers may be gone, and their buckets' next leaders not yet there.
    cluster_command(locks, "release", deadline_s=30.0)(release)
    cluster_command(locks, "forget")(forget)
    app.add_typer(locks, name="locks")


def list_locks(
    reach: Reach,
    *,
    table: Annotated[
        str | None, typer.Argument(metavar="TABLE", help="of this table only", show_default=False)
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="with former owners, which hold nothing")
    ] = False,
    json: Json = False,
) -> None:
    """List who holds which columns, of a table or of all of them.

    A lock is `ready`, or `recovering`: its owner pays what it or another has left. It is `expired`,
    or `abandoned`, when its owner has not renewed it, or gave it up; `with debts` if it has left
    work that is not committed, for the next one to undo or to finish. A query is NAME (ID). The
    last sign of an owner is when it last wrote its record: with every batch, and while it renews.
    Times are ZooKeeper's.
    """
    with connected(reach) as cluster:
        now_ms = cluster.coordinator.store.now_ms()
        locks = [one for one in _locks_of(cluster, table) if every or one[1].record.held]
        # Servers know what is not committed; they are asked only if somebody may have left some.
        servers = cluster.status() if any(_left(lock) for _, lock in locks) else []
        found = [lock_document(where, lock, now_ms, servers) for where, lock in locks]
    if json:
        print_json(found)
    elif found:
        print_table(_HEAD, [_cells(one, columns=_COLUMNS_LISTED) for one in found])
    else:
        where = "any table" if table is None else f"table {table}"
        former = "" if every else "; --all lists former owners"
        print_line(f"nobody holds columns of {where}{former}")


def show(reach: Reach, table: TableName, owner: OwnerName, json: Json = False) -> None:
    """Show all that is known of an owner: what it holds, has committed, and has yet to pay."""
    with connected(reach) as cluster:
        coordinator = cluster.coordinator
        where = coordinator.tables.get(table)
        lock = find_owner(coordinator, where, owner)
        servers = cluster.status() if _left(lock) else []
        document = lock_document(where, lock, coordinator.store.now_ms(), servers)
    if json:
        print_json(document)
        return
    cells = dict(zip(_HEAD, _cells(document), strict=True))
    rows = [(name.lower(), value) for name, value in cells.items()]
    rows += [("epoch", str(document["epoch"])), ("ttl", span(document["ttl_ms"] / 1000))]
    rows += [("promised batch", str(document["promised_batch"]))] * document["promised"]
    rows += [("debt", debt) for debt in document["debts"]]
    print_table(("LOCK", ""), rows)


def release(
    reach: Reach,
    *,
    table: TableName,
    owner: OwnerName,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="even if the lock is live; a job that still runs is stopped for good by that",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Free the columns that an owner holds.

    What it has not committed is undone, or rolled forward if it was promised; what it has committed
    stays, and so does its count of batches: the same job may come back and go on after it. A lock
    that is live is refused, for its job may be running.
    """
    with telling("recovery"), connected(reach) as cluster:
        released = release_lock(cluster, table, owner, force=force, deadline_s=reach.deadline_s)
    if json:
        print_json(vars(released))
    else:
        print_line(str(released))


def forget(reach: Reach, table: TableName, owner: OwnerName, yes: Yes = False) -> None:
    """Forget an owner that holds nothing, and with it the number of its last committed batch.

    As if it had never been. Whatever it is sent from then on counts, also what it has counted
    before.
    """
    with connected(reach) as cluster:
        coordinator = cluster.coordinator
        where = coordinator.tables.get(table)
        lock = find_owner(coordinator, where, owner)
        if not lock.record.held:  # Else it is refused anyway.
            confirm(f"Forget what `{owner}` has committed of table {where.name}?", yes=yes)
        print_line(forget_owner(cluster, table, owner))


def _locks_of(cluster: Cluster, table: str | None) -> Iterator[tuple[CatalogTable, LockInfo]]:
    """Yield the owners of one table, or of all; one of all may be dropped meanwhile."""
    coordinator = cluster.coordinator
    for name in coordinator.tables.names() if table is None else [table]:
        try:
            found = coordinator.tables.get(name)
            locks = coordinator.locks.all(found)
        except UnknownTable:
            if table is None:
                continue
            raise
        for lock in locks:
            yield found, lock


def _left(lock: LockInfo) -> bool:
    return lock.record.held and not lock.live


def lock_document(
    table: CatalogTable, lock: LockInfo, now_ms: int, servers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return all that is known of an owner, as JSON has it; `servers`: what they say, if asked."""
    record, names = lock.record, table.definition.column_names
    uncommitted = uncommitted_of(lock, buckets_of(table.table_id, servers))
    return {
        "table": table.name,
        "owner": lock.owner,
        "query_name": record.query_name or None,
        "query_id": record.query_id or None,
        "columns": names(record.columns).split(", "),
        "state": state_in_words(lock, uncommitted=bool(uncommitted)),
        "held": record.held,
        "live": lock.live,
        "held_since_ms": lock.held_since_ms,
        "changed_s": max(0.0, (now_ms - lock.written_ms) / 1000),
        "expires_ms": lock.expires_ms if record.held else None,
        "expires_in_s": (lock.expires_ms - now_ms) / 1000 if record.held else None,
        "epoch": record.epoch,
        "ttl_ms": record.ttl_ms,
        "batch": record.batch if record.batch >= 0 else None,
        "batch_age_s": _since(now_ms, lock.committed_ms),
        "promised_batch": None if record.prepared is None else record.prepared.token.batch,
        "promised": record.prepared is not None,
        "debts": [_debt(table, debt) for debt in record.debts],
    }


def _since(now_ms: int, moment_ms: int | None) -> float | None:
    return None if moment_ms is None else max(0.0, (now_ms - moment_ms) / 1000)


def state_in_words(lock: LockInfo, *, uncommitted: bool) -> str:
    """Return the state of a lock; of one that nobody renews, whether there is something to pay."""
    state = state_of(lock, uncommitted=uncommitted)
    return state.replace("expired", "abandoned") if lock.record.abandoned else state


def _cells(lock: dict[str, Any], columns: int | None = None) -> tuple[str, ...]:
    """Return the cells of a lock; at most so many of its columns by name."""
    batch, query = "-", lock["query_id"] or "-"
    if lock["batch"] is not None:
        batch = f"{lock['batch']}, {span(lock['batch_age_s'])} ago"
    if lock["query_name"]:
        query = f"{lock['query_name']} ({query})"
    return (
        lock["table"],
        lock["owner"],
        query,
        listed(lock["columns"], columns),
        lock["state"],
        "-" if lock["held_since_ms"] is None else utc(lock["held_since_ms"]),
        batch,
        f"{span(lock['changed_s'])} ago",
        _expiry(lock),
    )


def listed(names: Sequence[str], most: int | None) -> str:
    """Return names between commas, of many the first and how many more there are."""
    if most is None or len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def _expiry(lock: dict[str, Any]) -> str:
    if lock["expires_ms"] is None:
        return "-"
    seconds = lock["expires_in_s"]
    when = utc(lock["expires_ms"])
    return f"{when} (in {span(seconds)})" if seconds > 0 else f"{when} ({span(-seconds)} ago)"


def _debt(table: CatalogTable, debt: Debt) -> str:
    what = "undo"
    if debt.kind is DebtKind.REDO and debt.prepared is not None:
        what = f"redo of batch {debt.prepared.token.batch}"
    return f"{what} of {debt.owner} ({table.definition.column_names(debt.columns)})"
