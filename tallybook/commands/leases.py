"""`tallybook leases` and `snapshots`: what is kept for readers, and what may be dropped."""

from typing import Annotated, Any

import typer

from foundation.errors import InvalidInput
from foundation.suggestions import did_you_mean
from tallybook.commands.output import (
    confirm,
    counted,
    print_json,
    print_line,
    print_table,
    size,
    span,
    utc,
)
from tallybook.commands.reaching import Json, TableName, Yes, cluster_command, connected
from tallybook.connecting import Reach


def add_commands(app: typer.Typer) -> None:
    """Add `leases`, with its commands, and `snapshots` to the application."""
    leases = typer.Typer(
        no_args_is_help=True,
        help="List the leases on a table's snapshots, or drop one that nobody needs any more.",
    )
    cluster_command(leases, "list")(list_leases)
    cluster_command(leases, "drop")(drop)
    app.add_typer(leases, name="leases")
    cluster_command(app, "snapshots", deadline_s=60.0)(snapshots)


def list_leases(reach: Reach, table: TableName, json: Json = False) -> None:
    """List who keeps snapshots of a table, and the log since them, and until when."""
    with connected(reach) as cluster:
        coordinator = cluster.coordinator
        found = coordinator.leases.all(cluster.table(table).table_id)
        now_ms = coordinator.store.now_ms()
    documents: list[dict[str, Any]] = [
        {
            "lease": lease.lease_id,
            "snapshots": len(lease.snapshots),
            "live": lease.live,
            "expires_ms": lease.expires_ms,
            "expires_in_s": (lease.expires_ms - now_ms) / 1000,
        }
        for lease in found
    ]
    if json:
        print_json(documents)
    elif not documents:
        print_line(f"nobody has a lease on snapshots of table {table}")
    else:
        print_table(
            ("LEASE", "BUCKETS", "STATE", "EXPIRES"),
            [
                (
                    one["lease"],
                    str(one["snapshots"]),
                    "live" if one["live"] else "expired",
                    utc(one["expires_ms"]),
                )
                for one in documents
            ],
        )


def drop(
    reach: Reach,
    *,
    table: TableName,
    lease: Annotated[
        str, typer.Argument(metavar="LEASE", help="as `leases list` shows it", show_default=False)
    ],
    yes: Yes = False,
) -> None:
    """Drop a lease: who reads by it is told so, and servers may delete what it kept."""
    with connected(reach) as cluster:
        leases, table_id = cluster.coordinator.leases, cluster.table(table).table_id
        known = {one.lease_id: one for one in leases.all(table_id)}
        if lease not in known:
            there = ", ".join(f"`{name}`" for name in known) or "none"
            raise InvalidInput(
                f"table {table} has no lease `{lease}`; there are: {there}"
                f"{did_you_mean(lease, known)}"
            )
        state = "which is live and may be in use" if known[lease].live else "which has expired"
        confirm(f"Drop lease `{lease}` on table {table}, {state}?", yes=yes)
        leases.drop(table_id, lease)
        print_line(f"lease `{lease}` on table {table} is dropped")


def snapshots(
    reach: Reach,
    *,
    table: TableName,
    take: Annotated[bool, typer.Option("--take", help="have one taken of each bucket now")] = False,
    json: Json = False,
) -> None:
    """List the snapshots of a table, bucket by bucket, the oldest first."""
    with connected(reach) as cluster:
        found = cluster.table(table)
        if take:
            found.snapshot()
        lists = found.snapshots()
        now_ms = cluster.coordinator.store.now_ms()
    documents: list[dict[str, Any]] = [
        {
            "bucket": str(bucket),
            "snapshot": one.snapshot_id,
            "term": one.term,
            "applied": one.applied,
            "stable": one.stable,
            "bytes": one.bytes,
            "created_ms": one.created_ms,
            "age_s": (now_ms - one.created_ms) / 1000,
        }
        for bucket, listed in sorted(lists.items())
        for one in listed
    ]
    if json:
        print_json(documents)
        return
    if documents:
        print_table(
            ("BUCKET", "SNAPSHOT", "TERM", "APPLIED", "STABLE", "SIZE", "TAKEN"),
            [
                (
                    *(str(one[name]) for name in ("bucket", "snapshot", "term")),
                    *(str(one[name]) for name in ("applied", "stable")),
                    size(one["bytes"]),
                    f"{utc(one['created_ms'])} ({span(one['age_s'])} ago)",
                )
                for one in documents
            ],
        )
    elif not lists:
        print_line(f"table {table} has no partition yet, and so no bucket")
    without = [str(bucket) for bucket, listed in sorted(lists.items()) if not listed]
    if without:
        print_line(f"no snapshot yet of {counted(len(without), 'bucket')}: {', '.join(without)}")
