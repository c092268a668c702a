"""What there is in the cluster now, as JSON has it: for a page, and for programs.

It holds no rows and no secrets. Snapshots are listed in a node per bucket, so these are read less
often than the rest.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from foundation.ids import BucketId
from foundation.parallel import at_once
from locks.catalog.copies import LakeCopy
from locks.catalog.definitions import CatalogTable
from locks.column_locks.locks import LockInfo
from locks.snapshots.list_records import ListedSnapshot
from merge_engine.schema.schema import Schema
from server.client.cluster import Cluster
from server.protocol.definitions import ClusterTable

SNAPSHOTS_S = 30.0

# Of owners that hold nothing any more, so many are told of, for so long after their last sign.
_FORMER_TOLD, _FORMER_MS = 50, 24 * 3_600_000

NO_SERVER = "no server leads it"


class Overview:
    """Looks at a cluster. For one thread at a time."""

    def __init__(
        self,
        cluster: Cluster,
        ask_servers: Callable[[Sequence[str]], Sequence[Mapping[str, Any]]] | None = None,
    ) -> None:
        """`ask_servers`: for their status, by their addresses; else until all have answered."""
        self._cluster = cluster
        self._ask_servers = ask_servers or (lambda these: at_once(cluster.status_of, these))
        self._snapshots: dict[int, tuple[float, dict[str, ListedSnapshot]]] = {}
        self._open: dict[tuple[int, str], tuple[tuple[int, int], int]] = {}

    def look(self) -> dict[str, Any]:
        """Return all there is. TallybookError if the cluster cannot be asked."""
        coordinator = self._cluster.coordinator
        servers = self._ask_servers(self._cluster.server_addresses())
        now_ms = coordinator.store.now_ms()
        existing = coordinator.tables.all()
        tables = [self._table(table, servers, now_ms) for table in existing]
        self._forget_all_but({table.table_id for table in existing})
        return {
            "cluster": self._cluster.address,
            "at_ms": now_ms,
            "servers": [_server(server) for server in servers],
            "tables": sorted(tables, key=lambda table: str(table["name"])),
        }

    def _table(
        self, table: CatalogTable, servers: Sequence[Mapping[str, Any]], now_ms: int
    ) -> dict[str, Any]:
        coordinator = self._cluster.coordinator
        known = ClusterTable(table)
        remote = self._cluster.table_by_id(table.table_id)
        ids = remote.bucket_ids()
        buckets = buckets_of(table.table_id, servers)
        led = [one for one in buckets.values() if one["server"] is not None]
        everybody = coordinator.locks.all(table)
        locks = _told_locks(everybody, now_ms)
        committed = {lock.owner: lock.record.batch for lock in everybody}
        return {
            "name": table.name,
            "id": table.table_id,
            "schema": _schema(known.schema),
            "buckets": [
                buckets.get(name, {"bucket": name, "server": None, "why": NO_SERVER})
                for name in map(str, ids)
            ],
            "rows": sum(one["rows"] for one in led),
            "bytes": sum(one["bytes"] for one in led),
            "view_lag": sum(one["view_lag"] for one in led),
            "locks": [
                self._with_age(table.table_id, _lock(table, lock, buckets, now_ms), now_ms)
                for lock in locks
            ],
            "former_owners": len(everybody) - len(locks),
            "copies": [
                _copy(name, copy, committed, now_ms)
                for name, copy in coordinator.copies.all(table.table_id).items()
            ],
            "leases": [
                {
                    "lease": lease.lease_id,
                    "snapshots": len(lease.snapshots),
                    "expires_in_s": _seconds(lease.expires_ms - now_ms),
                    "live": lease.live,
                }
                for lease in coordinator.leases.all(table.table_id)
            ],
            "snapshots": self._snapshots_of(table.table_id, buckets, ids, now_ms),
        }

    def _forget_all_but(self, existing: Collection[int]) -> None:
        """Let go of what was remembered of tables that were dropped."""
        self._snapshots = {key: one for key, one in self._snapshots.items() if key in existing}
        self._open = {key: one for key, one in self._open.items() if key[0] in existing}

    def _with_age(self, table_id: int, lock: dict[str, Any], now_ms: int) -> dict[str, Any]:
        """Return a lock with how long its work has been uncommitted: since it was first seen so.

        Its record may be much older: the job may have had nothing to do before.
        """
        key, batch = (table_id, lock["owner"]), (lock["epoch"], lock["batch"])
        if not lock["uncommitted_changes"]:
            self._open.pop(key, None)
            return {**lock, "uncommitted_s": 0.0}
        before, since_ms = self._open.get(key, (batch, now_ms))
        if before != batch:
            since_ms = now_ms
        self._open[key] = batch, since_ms
        return {**lock, "uncommitted_s": _seconds(max(0, now_ms - since_ms))}

    def _snapshots_of(
        self,
        table_id: int,
        buckets: Mapping[str, Mapping[str, Any]],
        ids: Sequence[BucketId],
        now_ms: int,
    ) -> Mapping[str, Any]:
        """Return how many buckets have a snapshot, and how old the oldest is that lacks something.

        `lag`: how many changes the latest ones do not have, which their servers keep in the log.
        Where nothing was written since, no new one is taken: such a one is as good as new.
        """
        read_at, latest = self._snapshots.get(table_id, (0.0, {}))
        if not latest or time.monotonic() - read_at > SNAPSHOTS_S:
            lists = self._cluster.coordinator.snapshots.read_many(table_id, ids)
            latest = {
                str(key): found.latest for key, found in lists.items() if found.latest is not None
            }
            self._snapshots[table_id] = time.monotonic(), latest
        lags = {
            name: _written(bucket) - (latest[name].applied if name in latest else 0)
            for name, bucket in buckets.items()
        }
        ages_s = [
            _seconds(now_ms - snapshot.created_ms)
            for name, snapshot in latest.items()
            if lags.get(name, 0) > 0
        ]
        return {
            "buckets": len(latest),
            "bytes": sum(snapshot.bytes for snapshot in latest.values()),
            "lag": sum(lag for lag in lags.values() if lag > 0),
            "oldest_s": max(ages_s, default=0.0) if latest else None,
        }


def _written(bucket: Mapping[str, Any]) -> int:
    """Return up to where a bucket was written; a new leader writes something, too."""
    works = bucket.get("work", {}).values()
    return int(max(works, default=bucket.get("offset", 0)))


def _server(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a server; its counters are for `trends`."""
    if "error" in status:
        return {"address": status["address"], "error": status["error"]}
    return {
        "address": status["address"],
        "pid": status["pid"],
        "uptime_s": status["uptime_s"],
        "buckets": len(status["buckets"]),
        "unopened": len(status["unopened"]),
        "problems": status["problems"],
        "problems_before": status["problems_before"],
        "metrics": status["metrics"],
    }


def buckets_of(table_id: int, servers: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the buckets of a table that a server says something of, by their names."""
    found: dict[str, dict[str, Any]] = {}
    for server in servers:
        for one in server.get("unopened", ()):
            if one["table_id"] == table_id:
                found.setdefault(
                    one["bucket"], {"bucket": one["bucket"], "server": None, "why": one["why"]}
                )
    for server in servers:
        for one in server.get("buckets", ()):
            if one["table_id"] == table_id:
                found[one["bucket"]] = {
                    "bucket": one["bucket"],
                    "server": server["address"],
                    "rows": one["rows"],
                    "bytes": one["bytes"],
                    "offset": one["end_offset"],
                    "work": one["work"],
                    # A server of an earlier version does not tell.
                    "view_lag": one.get("view_lag", 0),
                    "view_error": one.get("view_error"),
                }
    return found


def _schema(schema: Schema) -> list[dict[str, Any]]:
    """Return the columns, in the words of `tallybook describe`."""
    return [
        {"name": name, "type": data_type, "function": role, "key": column.function is None}
        for column, (name, data_type, role) in zip(schema.columns, schema.rows(), strict=True)
    ]


def _lock(
    table: CatalogTable, lock: LockInfo, buckets: Mapping[str, Mapping[str, Any]], now_ms: int
) -> dict[str, Any]:
    record = lock.record
    uncommitted = uncommitted_of(lock, buckets)
    return {
        "owner": lock.owner,
        "query": record.query_id,
        "query_name": record.query_name,
        "columns": table.definition.column_names(record.columns),
        "state": state_of(lock, uncommitted=bool(uncommitted)),
        "epoch": record.epoch,
        "batch": record.batch,
        "changed_s": _seconds(now_ms - lock.written_ms),
        "expires_in_s": _seconds(lock.expires_ms - now_ms) if record.held else None,
        "debts": len(record.debts),
        "debtors": sorted({debt.owner for debt in record.debts}),
        "prepared": record.prepared is not None,
        "uncommitted_buckets": len(uncommitted),
        "uncommitted_changes": sum(uncommitted.values()),
    }


def _told_locks(locks: Sequence[LockInfo], now_ms: int) -> list[LockInfo]:
    """Return the locks that are held, and the latest of those that were released lately."""
    former = sorted(
        (lock for lock in locks if not lock.record.held and now_ms - lock.written_ms < _FORMER_MS),
        key=lambda lock: -lock.written_ms,
    )
    told = {lock.owner for lock in former[:_FORMER_TOLD]}
    return [lock for lock in locks if lock.record.held or lock.owner in told]


def _copy(name: str, copy: LakeCopy, committed: Mapping[str, int], now_ms: int) -> dict[str, Any]:
    batches, seconds = copy.lag(committed, now_ms)
    return {
        "name": name,
        "location": copy.location,
        "format": copy.format,
        "lag_batches": batches,
        "lag_s": round(seconds, 1),
        "told_s": _seconds(now_ms - copy.had_all_ms),
    }


def uncommitted_of(lock: LockInfo, buckets: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Return how many changes of an owner its last commit does not have, of each bucket with any.

    `buckets`: as `buckets_of` returns them; what no server tells of is not counted.
    """
    return {
        name: work - offset
        for bucket, offset in lock.record.offsets.items()
        if (name := str(bucket)) in buckets
        and (work := buckets[name].get("work", {}).get(lock.owner, 0)) > offset
    }


def state_of(lock: LockInfo, *, uncommitted: bool = False) -> str:
    """Return the state of a lock in a word or two; `uncommitted`: servers know of such changes."""
    record = lock.record
    if not record.held:
        return "released"
    if not lock.live:
        owes = bool(record.debts) or record.prepared is not None or uncommitted
        return "expired with debts" if owes else "expired"
    return "ready" if record.ready else "recovering"


def _seconds(milliseconds: int) -> float:
    return round(milliseconds / 1000, 1)
