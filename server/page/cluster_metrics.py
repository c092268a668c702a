"""The state of a whole cluster for Prometheus: what no server can say of itself alone.

Made of an overview. The counters of servers are not in it: each server has its own `/metrics`.
"""

from collections.abc import Mapping
from typing import Any

from server.tablet.metrics import Labels, Metrics

CLUSTER = "cluster_"


def cluster_metrics(seen: Mapping[str, Any]) -> Metrics:
    """Return the gauges of an overview; of one with an `error`, that the cluster is not reached."""
    metrics = Metrics()
    reached = not seen.get("error")
    found: dict[str, dict[Labels, float]] = {"reachable": {(): float(reached)}}
    if reached:
        _add_servers(found, seen)
        for table in seen["tables"]:
            _add_table(found, table)
    for name, values in found.items():
        metrics.gauge(CLUSTER + name, lambda values=values: values)  # type: ignore[misc]
    return metrics


def _add_servers(found: dict[str, dict[Labels, float]], seen: Mapping[str, Any]) -> None:
    servers = seen["servers"]
    found["servers"] = {(): sum("error" not in one for one in servers)}
    found["servers_silent"] = {(): sum("error" in one for one in servers)}
    found["problems"] = {
        (("server", one["address"]),): len(one.get("problems", ())) for one in servers
    }


def _add_table(found: dict[str, dict[Labels, float]], table: Mapping[str, Any]) -> None:
    def add(name: str, value: float, **labels: str) -> None:
        marked = {"table": table["name"], **labels}
        found.setdefault(name, {})[tuple(sorted(marked.items()))] = value

    snapshots = table["snapshots"]
    add("buckets", len(table["buckets"]))
    add("buckets_without_leader", sum(one["server"] is None for one in table["buckets"]))
    add("rows", table["rows"])
    add("bytes", table["bytes"])
    add("leases", len(table["leases"]))
    add("buckets_without_snapshot", len(table["buckets"]) - snapshots["buckets"])
    if snapshots["oldest_s"] is not None:
        add("snapshot_age_seconds", snapshots["oldest_s"])
    for lock in table["locks"]:
        owner = lock["owner"]
        add("lock_batch", lock["batch"], owner=owner)
        add("uncommitted_changes", lock["uncommitted_changes"], owner=owner)
        add("uncommitted_age_seconds", lock["uncommitted_s"], owner=owner)
        if lock["expires_in_s"] is not None:
            add("lock_expires_seconds", lock["expires_in_s"], owner=owner)
    for copy in table["copies"]:
        add("lake_lag_seconds", copy["lag_s"], copy=copy["location"])
        add("lake_lag_batches", copy["lag_batches"], copy=copy["location"])
