"""`tallybook status`: the servers of a cluster and their buckets, and what is wrong with them."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer

from server.page.overview import Overview
from tallybook.commands.output import counted, print_json, print_line, print_table, span
from tallybook.commands.reaching import ADDRESS, Json, cluster_command, connected
from tallybook.connecting import Reach

_HEAD = ("SERVER", "PID", "UP", "TABLE", "BUCKET", "TERM", "LOG", "OWNERS")
# A bucket is due for a snapshot at its server's interval; this is far beyond the default one.
_OLD_SNAPSHOT_S = 24 * 3600.0
_SHOWN = 20


def add_commands(app: typer.Typer) -> None:
    """Add `status` to the application."""
    cluster_command(app, "status", argument=ADDRESS)(status)


def status(
    reach: Reach,
    *,
    json: Json = False,
    snapshot_age: Annotated[
        float,
        typer.Option(metavar="S", help="a latest snapshot that is older is a problem; in seconds"),
    ] = _OLD_SNAPSHOT_S,
) -> None:
    """List the servers of a cluster, the buckets that they lead, and what is wrong.

    A bucket is PARTITION/NUMBER, beside its table's name. ROWS of large buckets are an estimate: a
    row may count each time that it was written, until RocksDB compacts. VIEW LAG is how many
    changes of the log the views on the servers' disks do not have yet, SNAPSHOT LAG how many the
    latest snapshots do not. Exit code 1 if something is wrong: no server, one that does not answer
    or complains, a bucket without a leader, a view that cannot be written, a lock that nobody
    renews.
    """
    with connected(reach) as cluster:
        servers = cluster.status()
        seen = Overview(cluster, lambda _: servers).look()
    problems = problems_of(seen, snapshot_age_s=snapshot_age)
    if json:
        print_json({**_document(seen, servers), "problems": problems})
    else:
        print_table(_HEAD, status_rows(servers))
        print()
        if seen["tables"]:
            print_table(_TABLES, [_table_cells(table) for table in seen["tables"]])
        else:
            print_line("there are no tables yet; `tallybook create` makes one")
        for problem in problems:
            print_line(f"! {problem}", "red")
    if problems:
        raise typer.Exit(1)


_TABLES = (
    "TABLE",
    "ROWS, ABOUT",
    "BUCKETS",
    "LED",
    "VIEW LAG",
    "SNAPSHOTS",
    "SNAPSHOT LAG",
    "LEASES",
)


def _table_cells(table: Mapping[str, Any]) -> tuple[str, ...]:
    led = [one for one in table["buckets"] if one["server"] is not None]
    snapshots = table["snapshots"]
    lag = f"{snapshots['lag']:,}"
    if snapshots["oldest_s"]:
        lag += f", since {span(snapshots['oldest_s'])}"
    return (
        table["name"],
        f"{table['rows']:,}",
        str(len(table["buckets"])),
        str(len(led)),
        f"{table['view_lag']:,}",
        f"{snapshots['buckets']} of {len(table['buckets'])}",
        lag,
        str(sum(lease["live"] for lease in table["leases"])),
    )


def problems_of(seen: Mapping[str, Any], *, snapshot_age_s: float) -> list[str]:
    """Return what is wrong, a line each: servers, buckets, snapshots, locks."""
    problems = []
    if not seen["servers"]:
        problems.append(
            "no server runs: start one with `tallybook serve`, and this ZooKeeper and chroot"
        )
    for server in seen["servers"]:
        if "error" in server:
            problems.append(f"server {server['address']} does not answer: {server['error']}")
        for what, why in server.get("problems", {}).items():
            problems.append(f"server {server['address']}: {what}: {why}")
    for table in seen["tables"]:
        problems += _leaderless(table)
        problems += _stuck_views(table)
        problems += _old_snapshots(table, snapshot_age_s)
        problems += _locks(table)
    return problems


def _leaderless(table: Mapping[str, Any]) -> list[str]:
    """Return the buckets without a leader by their reasons: there may be a thousand of them."""
    by_reason: dict[str, list[str]] = {}
    for bucket in table["buckets"]:
        if bucket["server"] is None:
            by_reason.setdefault(bucket["why"], []).append(bucket["bucket"])
    return [
        f"table {table['name']}: {_listed(names)} without a leader: {why}"
        for why, names in by_reason.items()
    ]


def _stuck_views(table: Mapping[str, Any]) -> list[str]:
    """Return the views that did not take what changed. Nothing is lost: the log has it."""
    return [
        f"table {table['name']}: the view of bucket {one['bucket']} at server {one['server']} is "
        f"{counted(one['view_lag'], 'change')} behind its log: {one['view_error']}"
        for one in table["buckets"]
        if one.get("view_error")
    ]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    noun = "bucket" if len(names) == 1 else "buckets"
    return f"{noun} {', '.join(names[:_SHOWN])}" + (f" and {more} more" if more > 0 else "")


def _old_snapshots(table: Mapping[str, Any], most_s: float) -> list[str]:
    age_s = table["snapshots"]["oldest_s"]
    if age_s is None or age_s <= most_s:
        return []
    return [
        f"table {table['name']}: the latest snapshot of a bucket is {span(age_s)} old; its "
        "server's log says why no other was taken"
    ]


def _locks(table: Mapping[str, Any]) -> list[str]:
    return [
        f"table {table['name']}: the lock of `{lock['owner']}` on {lock['columns']} is "
        f"{lock['state']}; its job comes back, or `tallybook locks release "
        f"{shlex.quote(table['name'])} {shlex.quote(lock['owner'])}`"
        for lock in table["locks"]
        if lock["state"].startswith("expired")
    ]


def _document(seen: Mapping[str, Any], servers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "cluster": seen["cluster"],
        "servers": [{k: v for k, v in one.items() if k != "metrics"} for one in servers],
        "tables": [{k: v for k, v in one.items() if k != "schema"} for one in seen["tables"]],
    }


def status_rows(servers: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row per server, with its buckets below it."""
    rows: list[tuple[str, ...]] = []
    for server in servers:
        if "error" in server:
            rows.append((server["address"], *["-"] * 6, f"({server['error']})"))
            continue
        who = (server["address"], str(server["pid"]), span(server["uptime_s"]))
        found = [*map(_bucket_cells, server["buckets"]), *map(_unopened_cells, server["unopened"])]
        for cells in found or [("-",) * 5]:
            rows.append((*who, *cells))
            who = ("", "", "")
    return rows


def _unopened_cells(bucket: Mapping[str, Any]) -> tuple[str, ...]:
    return (bucket["table"], bucket["bucket"], "-", "-", "(cannot be opened: see below)")


def _bucket_cells(bucket: Mapping[str, Any]) -> tuple[str, ...]:
    log = f"{bucket['start_offset']}..{bucket['end_offset']}"
    owners = ", ".join(map(str, bucket["owners"])) or "-"
    return (bucket["table"], bucket["bucket"], str(bucket["term"]), log, owners)
